"""Pieces of models around attention, under the names that flash_attn gives them."""

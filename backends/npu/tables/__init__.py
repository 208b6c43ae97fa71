"""Tiles and how they are chosen."""

"""Tables of tiles, and the look-ups in them."""

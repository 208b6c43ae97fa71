"""The laboratory: measurements, reports, the demo, gates, tile search, cost models, first run.

It imports the library, and the library never imports it: a user's call runs nothing of this folder.
"""

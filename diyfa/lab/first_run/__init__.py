"""`diyfa first-run`: from a new device to checked, tuned and measured kernels."""

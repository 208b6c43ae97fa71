"""`diyfa first-run`: check, tune and measure the kernels on a new device."""

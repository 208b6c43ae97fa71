"""Ready at once: which calls kernels are compiled for beforehand, and how."""

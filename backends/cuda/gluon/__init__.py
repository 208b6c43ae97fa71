"""Parts of Gluon kernels that belong to no one architecture."""

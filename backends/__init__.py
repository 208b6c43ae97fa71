"""The accelerator backends, one folder each; loaded by name from `diyfa.registry`."""

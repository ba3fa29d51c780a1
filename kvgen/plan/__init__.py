"""Plans of kernels: data that operations make, and that codegen, launchers and people read. No user models, no text."""

"""From specs to generated files: templates rendered, files put together, kernels compiled in place."""

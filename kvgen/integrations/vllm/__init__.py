"""Attention of vLLM's engine over its own KV cache, by kvgen's kernels; importing this package imports nothing else."""

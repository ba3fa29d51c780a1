"""Attention of vLLM's V1 engine by kvgen's kernels, over the pages that vLLM allocates."""

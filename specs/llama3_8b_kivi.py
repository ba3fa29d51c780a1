"""Llama 3.1 8B as KIVI quantizes it: int4 keys per channel over 32 tokens, int4 values per token and 32 channels."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.kivi(dtype="f16", kv_heads=8, head_dim=128),
    ops=[ops.Seal(), ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

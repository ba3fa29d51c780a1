"""Qwen3 30B-A3B in Modular MAX's scaled fp8: an f32 scale per token and head, in a pool of their own."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.max_paged_scaled(dtype="bf16", kv_heads=4, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_90a"],
)

"""Qwen3 32B in Modular MAX's nvfp4: e2m1 codes, an e4m3 scale per 16 channels."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=64,
    cache=presets.max_nvfp4(dtype="bf16", kv_heads=8, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode(split="balanced")],
    arch=["sm_90a", "sm_100f"],
)

"""Llama 3 70B in vLLM's fp8 cache: e4m3 under a given scale per layer, K and V each; windows of 4 drafted tokens."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=64,
    cache=presets.vllm(dtype="bf16", kv_heads=8, head_dim=128, kv_cache_dtype="fp8_e4m3"),
    ops=[
        ops.Append(),
        ops.Gather(),
        ops.Decode(split="balanced"),
        ops.Decode(name="verify", rows=4, split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
)

"""vLLM's FlashAttention cache before its packed layout: bf16, `[2, N, P, H, D]` per layer."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.vllm(dtype="bf16", kv_heads=8, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

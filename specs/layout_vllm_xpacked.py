"""vLLM's own paged-attention cache: f16, K in groups of 8 elements, V transposed."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.vllm_xpacked(dtype="f16", kv_heads=8, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode(), ops.Extend()],
    arch=["sm_80", "sm_90a"],
)

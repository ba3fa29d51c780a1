"""vLLM's cache in HND order: bf16, heads outside tokens."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=28,
    cache=presets.vllm_hnd(dtype="bf16", kv_heads=4, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Extend(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

"""vLLM's packed cache: bf16, V beside K in one row; appended by slot mapping."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.vllm_packed(dtype="bf16", kv_heads=8, head_dim=128),
    ops=[ops.Append(rows="slots"), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

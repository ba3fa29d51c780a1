"""vLLM's FlashAttention cache, its block tables read where the GPU model runner keeps them: no copy of the step's rows."""

from kvgen import KernelSet, Mapped, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.vllm(dtype="bf16", kv_heads=8, head_dim=128).model_copy(update={"table": Mapped()}),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

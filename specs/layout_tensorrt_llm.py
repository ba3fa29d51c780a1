"""TensorRT-LLM's block pool: bf16, 32-token HND blocks, page ids of their own for K and V."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.tensorrt_llm(dtype="bf16", kv_heads=8, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

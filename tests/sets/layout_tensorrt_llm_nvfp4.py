"""TensorRT-LLM's nvfp4 cache: HND blocks, K and V ids of their own, V's scales interleaved by 4 tokens."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.tensorrt_llm_nvfp4(dtype="bf16", kv_heads=8, head_dim=128),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_90a", "sm_100f"],
)

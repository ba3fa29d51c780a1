"""DeepSeek V3.2's indexer keys as vLLM has them: 128 e4m3 a token, one f32 scale each, behind the values of their page."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=64,
    cache=presets.vllm_indexer(),
    ops=[ops.Append(), ops.Gather()],
    arch=["sm_80", "sm_90a"],
)

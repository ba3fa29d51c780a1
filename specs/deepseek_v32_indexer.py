"""DeepSeek V3.2's indexer as vLLM has it: 128 e4m3 a token, one f32 scale each, behind the values of their page, and its scores."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=64,
    cache=presets.vllm_indexer(),
    ops=[ops.Append(), ops.Gather(), ops.IndexerScores(fill=False)],
    arch=["sm_80", "sm_90a"],
)

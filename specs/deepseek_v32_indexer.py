"""DeepSeek V3.2's indexer as vLLM has it: keys of 128 e4m3, f32 scales behind a page's codes; and its scores for 64 heads.

Keys come turned by their RoPE, q does not.
"""

from kvgen import KernelSet, Rope, ops, presets

ROPE = Rope(style="neox", theta=10_000.0, dim=64)

kernels = KernelSet(
    q_heads=64,
    cache=presets.vllm_indexer(),
    ops=[
        ops.Append(rope=None),
        ops.Gather(),
        ops.IndexerQuery(rope=ROPE, angles="halves"),
        ops.IndexerScores(fill=False),
    ],
    arch=["sm_80", "sm_90a"],
)

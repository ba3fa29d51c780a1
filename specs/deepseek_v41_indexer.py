"""DeepSeek V4.1's indexer over MXFP4 keys: 32 heads; layer 20 chooses blocks of 8 entries, later layers score those alone."""

from kvgen import KernelSet, ops, presets

kernels = KernelSet(
    q_heads=32,
    cache=presets.vllm_indexer_fp4(),
    ops=[
        ops.IndexerScores(name="block_scores", block_max=8, pin_newest=True, fill=False),
        ops.IndexerScores(name="candidate_scores", candidates=8),
        ops.RemapIndices(name="remap_candidates", candidates=8, counts=True, unseen="drop"),
    ],
    arch=["sm_80", "sm_90a"],
)

"""DeepSeek V4's indexer keys as vLLM has them: 128 e4m3 and an f32 scale for 4 tokens, pooled from f32 rows in pages of 4."""

from kvgen import KernelSet, RmsNorm, Rope, YarnScaling, ops, presets

ROPE = Rope(
    style="interleaved",
    theta=160_000.0,
    dim=64,
    part="last",
    scaling=YarnScaling(
        factor=16.0, original_max_positions=65_536, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0
    ),
)

kernels = KernelSet(
    q_heads=64,
    cache=presets.vllm_indexer(page_size=64, rate=4),
    ops=[
        ops.PoolTokens(
            overlap=True,
            ape=True,
            state="paged",
            norm=RmsNorm(multiply="before"),
            rope=ROPE,
            normed_dtype="same",
            rotated_dtype="same",
        ),
        ops.SlotMapping(),
    ],
    arch=["sm_80", "sm_90a"],
)

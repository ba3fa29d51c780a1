"""DeepSeek V4-Flash in FlashMLA's 584-byte records: entries of 4 tokens, and attention of one of four ranks."""

from kvgen import KernelSet, Keys, RmsNorm, Rope, YarnScaling, ops, presets

# Of layers with entries: YaRN without its factor of cos and sin.
ROPE = Rope(
    style="interleaved",
    theta=160_000.0,
    dim=64,
    part="last",
    scaling=YarnScaling(factor=16.0, original_max_positions=65_536, attention_factor=1.0),
)
ENTRIES = presets.flashmla_v4(page_size=64, rate=4)


def shared_heads(name: str, heads: int) -> KernelSet:
    """Attention of a rank that has some of the 64 query heads, over lists that are split among blocks beforehand."""
    attend = ops.MlaDecode(
        sparse=True,
        scale=512**-0.5,
        sinks="out",
        sources=[Keys(name="entries", cache=ENTRIES)],
        split="balanced",
    )
    return KernelSet(name=name, q_heads=heads, cache=presets.flashmla_v4(), ops=[attend], arch=["sm_90a"])


kernels = [
    KernelSet(
        name="deepseek_v4_flash_c4",
        q_heads=64,
        cache=ENTRIES,
        ops=[
            ops.PoolTokens(overlap=True, ape=True, norm=RmsNorm(multiply="before"), rope=ROPE),
            ops.RemapIndices(counts=True, unseen="drop"),
        ],
        arch=["sm_90a"],
    ),
    shared_heads("deepseek_v4_flash_tp4", 16),
]

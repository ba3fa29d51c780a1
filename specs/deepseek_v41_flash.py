"""DeepSeek V4.1-Flash in FlashMLA's records, scales in the row: a window of 528 bytes a row, entries of 528 or of 288."""

from kvgen import KernelSet, Keys, Latent, RmsNorm, Rope, YarnScaling, ops, presets

ROPE = Rope(
    style="interleaved",
    theta=160_000.0,
    dim=64,
    part="last",
    scaling=YarnScaling(factor=16.0, original_max_positions=65_536, attention_factor=1.0),
)
FP4 = presets.flashmla_v41_fp4(page_size=64, rate=2)


def attention(name: str, entries: Latent) -> KernelSet:
    """A row of q over lists of window rows and of entries."""
    attend = ops.MlaDecode(sparse=True, scale=512**-0.5, sinks="out", sources=[Keys(name="entries", cache=entries)])
    return KernelSet(name=name, q_heads=64, cache=presets.flashmla_v41(), ops=[attend], arch=["sm_80", "sm_90a"])


kernels = [
    attention("deepseek_v41_flash", presets.flashmla_v41(page_size=64, rate=2)),
    KernelSet(
        name="deepseek_v41_flash_c2",
        q_heads=64,
        cache=FP4,
        ops=[
            ops.PoolTokens(norm=RmsNorm(eps=1e-20, multiply="before"), rope=ROPE, latent_out=True),
            ops.RemapIndices(counts=True, unseen="drop"),
            ops.Gather(),
        ],
        arch=["sm_90a"],
    ),
]

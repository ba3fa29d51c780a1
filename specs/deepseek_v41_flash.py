"""DeepSeek V4.1-Flash in FlashMLA's 528-byte records, scales in the row: attention over a window and entries of 2 tokens."""

from kvgen import KernelSet, Keys, ops, presets

kernels = KernelSet(
    q_heads=64,
    cache=presets.flashmla_v41(),
    ops=[
        ops.MlaDecode(
            sparse=True,
            scale=512**-0.5,
            sinks="out",
            sources=[Keys(name="entries", cache=presets.flashmla_v41(page_size=64, rate=2))],
        ),
    ],
    arch=["sm_90a"],
)

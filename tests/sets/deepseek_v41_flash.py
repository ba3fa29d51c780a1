"""DeepSeek V4.1-Flash in FlashMLA's records, scales in the row: attention over a window and entries of 288 bytes."""

from kvgen import KernelSet, Keys, Latent, ops, presets

FP4 = presets.flashmla_v41_fp4(page_size=64, rate=2)


def attention(name: str, entries: Latent) -> KernelSet:
    """A row of q over lists of window rows and of entries."""
    attend = ops.MlaDecode(sparse=True, scale=512**-0.5, sinks="out", sources=[Keys(name="entries", cache=entries)])
    return KernelSet(name=name, q_heads=64, cache=presets.flashmla_v41(), ops=[attend], arch=["sm_90a"])


kernels = attention("deepseek_v41_flash_fp4", FP4)

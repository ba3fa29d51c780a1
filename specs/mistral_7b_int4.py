"""Mistral 7B v0.1, a window of 4096 tokens: int4 with f16 scale and zero point per group of 64 channels."""

from kvgen import Block, KernelSet, Mask, Paged, Quant, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(
        dtype="bf16",
        kv_heads=8,
        head_dim=128,
        page_size=64,
        quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=64)),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode(mask=Mask(window=4096), split="balanced")],
    arch=["sm_80", "sm_90a"],
)

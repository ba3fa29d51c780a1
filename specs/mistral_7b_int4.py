"""Mistral 7B: int4 with f16 scale and zero point per group of 64 channels."""

from kvgen import Block, KernelSet, Paged, Quant, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(
        dtype="bf16",
        kv_heads=8,
        head_dim=128,
        page_size=64,
        quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=64)),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

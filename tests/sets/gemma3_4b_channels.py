"""Gemma 3 4B: int8 under given scales per channel of every head."""

from kvgen import Block, KernelSet, Paged, Quant, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(
        dtype="bf16",
        kv_heads=4,
        head_dim=256,
        page_size=16,
        quant=Quant(dtype="i8", scale_dtype="f32", scale="given", block=Block(token=None, dim=1)),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
    arch=["sm_80", "sm_90a"],
)

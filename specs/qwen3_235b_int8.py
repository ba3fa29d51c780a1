"""Qwen3 235B-A22B: int8 with an f16 scale per token and head, found through a page table of their own."""

from kvgen import Dense, KernelSet, Paged, Quant, ops

kernels = KernelSet(
    q_heads=64,
    cache=Paged(
        dtype="bf16",
        kv_heads=4,
        head_dim=128,
        page_size=64,
        table=Dense(align=8),
        quant=Quant(dtype="i8", scale_dtype="f16", own_table=True),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode(split="balanced")],
    arch=["sm_80", "sm_90a"],
)

"""Llama 3.1 8B: scale-free e4m3 in 128-token pages, cast as it is written; attention's output is e4m3 too."""

from kvgen import KernelSet, Paged, Quant, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=128, quant=Quant(dtype="e4m3")),
    ops=[ops.Append(), ops.Gather(), ops.Decode(out_dtype="e4m3", split="balanced")],
    arch=["sm_80", "sm_89", "sm_90a"],
)

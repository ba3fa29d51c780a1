"""Qwen2.5 72B: e4m3 under a given scale per KV head and layer; a request's bits do not depend on its batch."""

from kvgen import Block, KernelSet, Paged, Quant, ops

kernels = KernelSet(
    q_heads=64,
    cache=Paged(
        dtype="bf16",
        kv_heads=8,
        head_dim=128,
        page_size=32,
        quant=Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None)),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode(split="invariant")],
    arch=["sm_80", "sm_90a"],
)

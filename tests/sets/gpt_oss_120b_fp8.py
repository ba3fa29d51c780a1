"""gpt-oss 120B, sliding-window layers: e5m2 with an f32 scale per token, a ring of pages for the last 128 tokens."""

from kvgen import Block, KernelSet, Mask, Paged, Quant, Ring, ops

kernels = KernelSet(
    q_heads=64,
    cache=Paged(
        dtype="bf16",
        kv_heads=8,
        head_dim=64,
        page_size=16,
        table=Ring(window=128),
        quant=Quant(dtype="e5m2", scale_dtype="f32", block=Block(head=None)),
    ),
    ops=[ops.Append(), ops.Gather(), ops.Decode(mask=Mask(window=128), sinks="lse", split="balanced")],
    arch=["sm_80", "sm_90a"],
)

"""Gemma 3 27B: int8 with scale and zero point per token and head, inside the page."""

from kvgen import KernelSet, Mask, Paged, Quant, ops

kernels = KernelSet(
    q_heads=32,
    cache=Paged(
        dtype="bf16",
        kv_heads=16,
        head_dim=128,
        page_size=32,
        layout="page kv layer head token dim",
        quant=Quant(dtype="i8", scale_dtype="f32", zero=True, place="page"),
    ),
    ops=[
        ops.Append(),
        ops.Gather(),
        ops.Decode(scale=168**-0.5, split="balanced"),
        ops.Decode(name="decode_local", scale=168**-0.5, mask=Mask(window=1024), split="balanced"),
    ],
    arch=["sm_80", "sm_90a"],
)

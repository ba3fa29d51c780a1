"""Llama 4 Scout in two-level nvfp4: e4m3 scales in 128 x 4 tiles under a given f32 scale per layer.

Layers with RoPE see their position's chunk of 8192 tokens (`decode_local`), the others everything.
"""

from kvgen import KernelSet, Mask, Paged, Quant, ops

kernels = KernelSet(
    q_heads=40,
    cache=Paged(
        dtype="bf16",
        kv_heads=8,
        head_dim=128,
        page_size=128,
        quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", order="swizzled"),
    ),
    ops=[
        ops.Append(),
        ops.Gather(),
        ops.Decode(split="balanced"),
        ops.Decode(name="decode_local", mask=Mask(chunk=8192), split="balanced"),
    ],
    arch=["sm_90a", "sm_100f", "sm_120f"],
)

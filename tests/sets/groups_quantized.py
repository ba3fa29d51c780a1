"""Quantized decode where 4, 8 or 16 query heads share a kv head: MAX's nvfp4, int8 with zero points in f32, KIVI."""

from kvgen import KernelSet, Paged, Quant, ops, presets

INT8 = Paged(
    dtype="bf16",
    kv_heads=2,
    head_dim=128,
    page_size=32,
    layout="page kv layer head token dim",
    quant=Quant(dtype="i8", scale_dtype="f32", zero=True, place="page"),
)
CACHES = {
    "nvfp4": presets.max_nvfp4(dtype="bf16", kv_heads=2, head_dim=128),
    "int8": INT8,
    "kivi": presets.kivi(dtype="f16", kv_heads=2, head_dim=128),
}

kernels = [
    KernelSet(
        name=f"group{group}_{name}",
        q_heads=2 * group,
        cache=cache,
        ops=[ops.Decode(split="none" if name == "kivi" else "balanced")],
        arch=["sm_90a"],
    )
    for name, cache in CACHES.items()
    for group in (4, 8, 16)
]

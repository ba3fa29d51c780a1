"""A few caches that between them have every variant, page table, kind of layout and quantization, at awkward sizes.

Operations that are built per cache take their test sets from here: `chosen` makes one of every cache that the operation is
for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvgen import CSR, Block, Continuous, Dense, KernelSet, Latent, Layout, Mapped, Paged, PerKV, Quant, Ring, presets
from kvgen.schema.cache import Cache
from kvgen.schema.codebooks import lloyd_max
from kvgen.schema.kernel_set import Op

_APART: Final = Layout(k="page layer token head dim", v="layer page token head dim")

CHOSEN: Final[dict[str, Cache]] = {
    # Page tables, variants and layouts; stored in the type that operations take.
    "dense": presets.max_paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    "hnd": Paged(
        dtype="f16",
        kv_heads=3,
        head_dim=24,
        page_size=3,
        layout=Layout(kv="page kv head token dim", layers="pointers"),
        table=Dense(dtype="i64", id_multiplier=2),
        lengths="after",
        lengths_dtype="i32",
    ),
    "kv_inside": Paged(
        dtype="f32",
        kv_heads=2,
        head_dim=24,
        page_size=3,
        layout="page layer token head kv dim",
        table=CSR(dtype="u32", id_multiplier=3),
    ),
    "flashinfer": presets.flashinfer_hnd(dtype="bf16", kv_heads=2, head_dim=40, page_size=16),
    "per_kv": Paged(
        dtype="f16",
        kv_heads=2,
        head_dim=64,
        page_size=1,
        layout=Layout(k="page token head dim", v="page head token dim", layers="pointers"),
        table=PerKV(id_multiplier=2),
        lengths="after",
        lengths_dtype="i32",
    ),
    "indirect": presets.sglang(dtype="bf16", kv_heads=2, head_dim=64),
    "mapped": Paged(
        dtype="bf16",
        kv_heads=2,
        head_dim=24,
        page_size=3,
        table=Mapped(id_multiplier=2),
    ),
    "ring": Paged(
        dtype="f16", kv_heads=2, head_dim=40, page_size=3, table=Ring(window=10, dtype="i64"), lengths="after"
    ),
    "continuous": Continuous(
        dtype="f16",
        kv_heads=2,
        head_dim=64,
        max_tokens=40,
        layout="block layer kv head token dim",
        table_dtype="i64",
        lengths="after",
        lengths_dtype="i64",
    ),
    "continuous_open": presets.max_continuous(dtype="f32", kv_heads=2, head_dim=24),
    "latent": presets.max_mla(latent_dim=64, rope_dim=16, page_size=16),
    "k_only": Paged(dtype="f32", kv_heads=2, head_dim=40, page_size=3, layout="layer page token head dim", stores="k"),
    "xpacked": presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=40, page_size=16),
    # Heads outside of layers, and of pages (vLLM's BHLNC and LHBNC): a page is a strip a head, between those of others.
    "heads_outside": Paged(
        dtype="bf16",
        kv_heads=3,
        head_dim=24,
        page_size=4,
        layout=Layout(kv="page head layer token kv dim"),
        total_layers=2,
        lengths="after",
    ),
    "heads_outermost": Paged(
        dtype="f16",
        kv_heads=2,
        head_dim=40,
        page_size=16,
        layout=Layout(k="head page token dim", v="head token page dim", layers="pointers"),
        total_pages=300,
        quant=Quant(dtype="e4m3", scale_dtype="f32"),
    ),
    "swizzled": Paged(
        dtype="bf16",
        kv_heads=2,
        head_dim=64,
        page_size=16,
        layout=Layout(kv="page kv layer head token dim", swizzle=(3, 3, 3)),
    ),
    # Quantized.
    "latent_row": Latent(
        dtype="bf16",
        latent_dim=256,
        rope_dim=64,
        page_size=16,
        quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), recipe="pow2", place="row"),
        layout=Layout(k="page token dim", layers="pointers"),
    ),
    "latent_pool": presets.max_mla_fp8(latent_dim=64, rope_dim=16, page_size=16),
    "fp8": Paged(
        dtype="f16", kv_heads=2, head_dim=24, page_size=3, table=CSR(), quant=Quant(dtype="e5m2"), lengths="after"
    ),
    "given": Paged(
        dtype="bf16",
        kv_heads=2,
        head_dim=64,
        page_size=16,
        layout=_APART,
        k_quant=Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, head=None)),
        v_quant=Quant(dtype="i8", scale_dtype="f32", scale="given", block=Block(token=None, dim=1)),
    ),
    # K with a scale a token and head, V as it is and with tokens innermost.
    "mixed": Paged(
        dtype="bf16",
        kv_heads=2,
        head_dim=40,
        v_head_dim=24,
        page_size=16,
        layout=Layout(k="page layer token head dim", v="layer page head dim token"),
        k_quant=Quant(dtype="e4m3", scale_dtype="f32"),
    ),
    "int8_own_table": Paged(
        dtype="bf16",
        kv_heads=2,
        head_dim=64,
        page_size=8,
        quant=Quant(dtype="i8", scale_dtype="f16", zero=True, own_table=True),
    ),
    "int4_in_page": Paged(
        dtype="f16",
        kv_heads=2,
        head_dim=64,
        page_size=3,
        quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=16), place="page"),
        lengths="after",
    ),
    "nvfp4": presets.max_nvfp4(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    "nvfp4_swizzled": Paged(
        dtype="f16",
        kv_heads=2,
        head_dim=64,
        page_size=128,
        quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", order="swizzled"),
    ),
    "kivi": presets.kivi(dtype="f16", group_size=8, page_size=16, kv_heads=2, head_dim=24),
}

# Codes of 3 and 2 bits, and codes of a byte that are no neighbours. Any run appends, gathers, converts and decodes such
# (tests/ops/test_scaled_rows.py).
if "KVGEN_FAMILY" in os.environ:
    CHOSEN |= {
        "narrow_rows": Paged(
            dtype="bf16",
            kv_heads=2,
            head_dim=32,
            page_size=3,
            layout=Layout(kv="page layer token head kv dim"),
            k_quant=Quant(
                dtype="i3",
                codebook=lloyd_max(3, 32),
                recipe="norm",
                norm_correction=True,
                scale_dtype="f16",
                place="row",
            ),
            v_quant=Quant(dtype="i3", scale_dtype="f16", zero=True, recipe="min", place="row"),
        ),
        "narrow_pool": Paged(
            dtype="f16",
            kv_heads=2,
            head_dim=24,
            page_size=8,
            layout=_APART,
            k_quant=Quant(dtype="i2", scale_dtype="f32", zero=True, block=Block(dim=8)),
            v_quant=Quant(dtype="i2", scale_dtype="f16", codebook=lloyd_max(2, 8), recipe="unit", block=Block(dim=12)),
        ),
        "narrow_strided": Paged(
            dtype="f16",
            kv_heads=2,
            head_dim=40,
            page_size=8,
            layout=_APART,
            k_quant=Quant(
                dtype="i4", scale_dtype="f32", zero=True, packing="strided", recipe="signs", codebook=lloyd_max(3, 40)
            ),
            v_quant=Quant(dtype="i2", scale_dtype="f16", codebook=lloyd_max(2, 40), recipe="unit", packing="strided"),
        ),
    }
FEW_BITS: Final = tuple(name for name in CHOSEN if name.startswith("narrow"))


def chosen(
    prefix: str, operations: Callable[[Cache], Sequence[Op] | None], names: Iterable[str] | None = None
) -> dict[str, KernelSet]:
    """The sets `<prefix>_<name>` of the chosen caches (`names`, or all) that have these operations; None: not this one."""
    found = {}
    for name in CHOSEN if names is None else names:
        cache = CHOSEN[name]
        ops = operations(cache)
        if ops is not None:
            kernels = KernelSet(name=f"{prefix}_{name}", q_heads=2 * cache.kv_heads, cache=cache, ops=tuple(ops))
            found[kernels.name] = kernels
    return found

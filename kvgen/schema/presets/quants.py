"""Quantizations that several engines share."""

from __future__ import annotations

import math
from typing import Final, Literal

from kvgen.errors import SpecError
from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Latent
from kvgen.schema.cache_fields import Layout
from kvgen.schema.quant import Block, CodeName, Quant
from kvgen.schema.tables import Dense, IndexName

KVCacheDType = Literal["auto", "fp8_e4m3", "fp8_e5m2"]
PerTokenHead = Literal["int8_per_token_head", "fp8_per_token_head"]
TurboQuant = Literal["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"]
TURBOQUANT: Final[dict[TurboQuant, tuple[CodeName, CodeName]]] = {
    "turboquant_k8v4": ("e4m3", "i4"),
    "turboquant_4bit_nc": ("i4", "i4"),
    "turboquant_k3v4_nc": ("i3", "i4"),
    "turboquant_3bit_nc": ("i3", "i3"),
}
# Magnitudes of vLLM's centroids of N(0, 1), which its solver finds by trapezoids of a 200th of each interval: within 0.002 of
# `lloyd_max`. Times 1 / sqrt(dim) they are its own, to the last bit of f32.
_CENTROIDS: Final[dict[CodeName, tuple[float, ...]]] = {
    "i3": (0.24498359250250515, 0.7556454989634354, 1.3431800020335032, 2.150349538993173),
    "i4": (
        0.1284276607427625, 0.3881377908946276, 0.6568799185298697, 0.9424482432760117,
        1.2562575696718017, 1.617881759577153, 2.0684471186825486, 2.7309222187735096,
    ),
}  # fmt: skip
_CODES: Final[dict[str, CodeName]] = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "int8": "i8"}


def per_tensor(kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8"]) -> Quant | None:
    """Codes with one given f32 scale a tensor; None for "auto", which stores the model's dtype. Raises SpecError for others."""
    if kv_cache_dtype == "auto":
        return None
    if kv_cache_dtype not in _CODES:
        raise SpecError(
            f"kv_cache_dtype: got {kv_cache_dtype!r}; it must be 'auto' or one of {', '.join(map(repr, _CODES))}; vLLM's 'fp8' "
            "is 'fp8_e4m3'"
        )
    given = Block(token=None, head=None)
    return Quant(dtype=_CODES[kv_cache_dtype], scale_dtype="f32", block=given, scale="given")


def per_token_head(kv_cache_dtype: PerTokenHead) -> Quant:
    """Codes with an f32 scale of at least 1e-6 a token and head, behind the codes."""
    codes: CodeName = "i8" if kv_cache_dtype == "int8_per_token_head" else "e4m3"
    return Quant(dtype=codes, scale_dtype="f32", scale_min=1e-6, place="row")


def turboquant(kv_cache_dtype: TurboQuant, head_dim: int) -> tuple[Quant, Quant]:
    """K and V of vLLM's turboquant caches: K cast, or codes of centroids under the norm of the row, which readers correct; V
    between the least and the largest value of the row.
    """
    k_bits, v_bits = TURBOQUANT[kv_cache_dtype]
    values = Quant(dtype=v_bits, scale_dtype="f16", zero=True, recipe="min", place="row")
    if k_bits == "e4m3":
        return Quant(dtype=k_bits), values
    magnitudes = [c / math.sqrt(head_dim) for c in _CENTROIDS[k_bits]]
    book = (*(-c for c in reversed(magnitudes)), *magnitudes)
    keys = Quant(dtype=k_bits, codebook=book, recipe="norm", norm_correction=True, scale_dtype="f16", place="row")
    return keys, values


def mixed_pow2(*, amax_min: float | None = None, scale_min: float | None = None) -> Quant:
    """DeepSeek V4's rows: e4m3 codes, an e8m0 scale per 64 dims behind all rows of the page, 8 bytes of them a row."""
    return Quant(
        dtype="e4m3",
        scale_dtype="e8m0",
        recipe="pow2",
        block=Block(dim=64),
        place="page",
        scale_pad=8,
        amax_min=amax_min,
        scale_min=scale_min,
    )


def mxfp8(place: Literal["page", "row"], *, amax_min: float | None = None, scale_min: float | None = None) -> Quant:
    """V4.1's rows: e4m3 codes, an e8m0 scale per 32 dims, behind the rows of their page or in each."""
    return Quant(
        dtype="e4m3",
        scale_dtype="e8m0",
        recipe="pow2",
        block=Block(dim=32),
        place=place,
        amax_min=amax_min,
        scale_min=scale_min,
    )


def record_v4(
    dtype: FloatName,
    latent_dim: int,
    rope_dim: int,
    page_size: int,
    rate: int,
    quant: Quant,
    *,
    page_align: int | None,
    quant_rope: bool = False,
    lengths_dtype: IndexName = "i32",
) -> Latent:
    """Rows that are key and value at once, found through a table of i32 page ids."""
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        values="row",
        page_size=page_size,
        rate=rate,
        layout=Layout(kv="page token head dim", layers="pointers", page_align=page_align),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype=lengths_dtype,
        quant=quant,
        quant_rope=quant_rope,
    )


def fp4_amax(place: Literal["page", "row"]) -> Quant:
    """V4.1's entries: e2m1 codes, one level of e4m3 scales of at least 2^-9 per 16 dims, behind the rows of a page or in each."""
    return Quant(dtype="e2m1", scale_dtype="e4m3", block=Block(dim=16), scale_min=2.0**-9, place=place)


def nvfp4() -> Quant:
    """Two-level nvfp4: e2m1 codes, an e4m3 scale per 16 dims, a given f32 scale a tensor on top."""
    return Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")


def fp4_block16() -> Quant:
    """e2m1 codes, an e8m0 scale of at least 2^-33 per 16 dims."""
    return Quant(dtype="e2m1", scale_dtype="e8m0", block=Block(dim=16), recipe="pow2", scale_min=1e-10)

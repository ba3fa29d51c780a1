"""Quantizations that several engines share."""

from __future__ import annotations

from typing import Final, Literal

from kvgen.errors import SpecError
from kvgen.layout.dtypes import FloatName
from kvgen.spec.cache import Latent
from kvgen.spec.cache_fields import Layout
from kvgen.spec.quant import Block, CodeName, Quant
from kvgen.spec.tables import Dense, IndexName

KVCacheDType = Literal["auto", "fp8_e4m3", "fp8_e5m2"]
PerTokenHead = Literal["int8_per_token_head", "fp8_per_token_head"]
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


def nvfp4() -> Quant:
    """Two-level nvfp4: e2m1 codes, an e4m3 scale per 16 dims, a given f32 scale a tensor on top."""
    return Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")


def fp4_block16() -> Quant:
    """e2m1 codes, an e8m0 scale of at least 2^-33 per 16 dims."""
    return Quant(dtype="e2m1", scale_dtype="e8m0", block=Block(dim=16), recipe="pow2", scale_min=1e-10)

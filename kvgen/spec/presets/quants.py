"""Quantizations that several engines share."""

from __future__ import annotations

from typing import Final, Literal

from kvgen.errors import SpecError
from kvgen.spec.quant import Block, CodeName, Quant

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
    """Codes with an f32 scale a token and head, behind the codes."""
    codes: CodeName = "i8" if kv_cache_dtype == "int8_per_token_head" else "e4m3"
    return Quant(dtype=codes, scale_dtype="f32", place="row")


def nvfp4() -> Quant:
    """Two-level nvfp4: e2m1 codes, an e4m3 scale per 16 dims, a given f32 scale a tensor on top."""
    return Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")

"""Quantizations that several engines share."""

from __future__ import annotations

from typing import Literal

from kvgen.spec.quant import Block, Quant

KVCacheDType = Literal["auto", "fp8_e4m3", "fp8_e5m2"]


def per_tensor(kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8"]) -> Quant | None:
    """Codes with one given f32 scale a tensor; None for "auto", which stores the model's dtype."""
    given = Block(token=None, head=None)
    match kv_cache_dtype:
        case "auto":
            return None
        case "fp8_e4m3":
            return Quant(dtype="e4m3", scale_dtype="f32", block=given, scale="given")
        case "fp8_e5m2":
            return Quant(dtype="e5m2", scale_dtype="f32", block=given, scale="given")
        case "int8":
            return Quant(dtype="i8", scale_dtype="f32", block=given, scale="given")


def nvfp4() -> Quant:
    """Two-level nvfp4: e2m1 codes, an e4m3 scale per 16 dims, a given f32 scale a tensor on top."""
    return Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")

"""The quantization oracle without the rest of kvgen.reference, which needs pydantic: a GPU machine has NumPy alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.numbers import Array

_FILE: Final = Path(__file__).resolve().parents[2] / "kvgen" / "reference" / "quant.py"


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("tests.golden_gpu._quant", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quant: Final = _loaded()
"""kvgen.reference.quant."""

PACKED: Final = ("e2m1", "i4", "u4")
TYPES: Final = ("e4m3", "e5m2", "e2m1", "i8", "u8", "i4", "u4")


def in_memory(codes: Array, dtype: str) -> Array:
    """Codes as bytes of memory, flat."""
    packed: Array = (quant.pack_nibbles(codes) if dtype in PACKED else codes).reshape(-1)
    return packed


def numbers_of(raw: Array, dtype: str) -> Array:
    """The numbers in bytes, flat, as f32."""
    codes = quant.unpack_nibbles(raw) if dtype in PACKED else raw
    values: Array = quant.values(codes, dtype).astype(np.float32).reshape(-1)
    return values


def floats(x: Array, kind: str = "f32", *, any_zero: bool = False) -> Wanted:
    """These floats bit for bit, but any NaN for a NaN."""
    bits = np.ascontiguousarray(x)
    return Wanted(bits.view(f"u{bits.itemsize}"), Rule(kind, any_nan=True, any_zero=any_zero))

"""What a per-opcode case is: PTX with named operands, and the same in Python numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
    "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`code` uses {d} and {a} {b} {c}; `reference` maps Python numbers to one."""

    code: str
    inputs: str
    output: str
    reference: Callable[..., Any]
    tolerance: float = 0.0
    ranges: str = "any"


CASES: dict[str, Case] = {}


def case(name: str, code: str, inputs: str, output: str, reference: Callable[..., Any], **more: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(code, inputs, output, reference, **more)


def bits_of(kind: str) -> int:
    return int(kind.lstrip("usbf"))


def wrap(value: int, kind: str) -> int:
    n = bits_of(kind)
    value &= (1 << n) - 1
    return value - (1 << n) if kind[0] == "s" and value >> (n - 1) else value


def integer(name: str, code: str, inputs: str, output: str, reference: Callable[..., int]) -> None:
    case(name, code, inputs, output, lambda *v: wrap(reference(*v), output))


def clamp(value: int, kind: str) -> int:
    n = bits_of(kind)
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)
    return max(low, min(high, value))

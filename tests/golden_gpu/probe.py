"""A probe: a kernel, its fixed inputs, and what its outputs must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.forms import Family
from tests.golden_gpu.numbers import Array

Shape = tuple[int, int, int]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class TensorMap:
    """A tensor map parameter over an array of the probe: cuTensorMapEncodeTiled's arguments, innermost dimension first.

    `strides` are in bytes, for all dimensions but the innermost; `swizzle` in bytes, 0 for none. The tensor begins
    `offset` bytes after the array, or before it: then no coordinate that is asked for may lie there.
    """

    array: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Literal[0, 32, 64, 128] = 0
    nan_fill: bool = False
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Probe:
    """One launch. `inputs` are arrays in the order of the parameters, their contents before the launch; those named in
    `wanted`'s result are also its outputs. Those named in `unpassed` are reached through tensor maps alone. `head` and
    `tail` are the parameters before and behind them: raw bytes, or tensor maps. `rows` name the rows of the output in
    messages.
    """

    name: str
    unit: str
    kernel: str
    inputs: Callable[[], dict[str, Array]]
    wanted: Callable[[Arrays], dict[str, Wanted]]
    block: int
    grid: Shape = (1, 1, 1)
    shared: int = 0
    head: Sequence[bytes | TensorMap] = ()
    tail: Sequence[bytes | TensorMap] = ()
    unpassed: Sequence[str] = ()
    rows: Sequence[str] = ()


def of_family(family: Family) -> Probe:
    """The probe of a family of forms."""
    grid = (family.count // 32, 1, 1)
    rows = [form.ptx for form in family.forms]
    return Probe(family.name, "families", family.name, family.inputs, family.wanted, 32, grid, rows=rows)


def u32(value: int) -> bytes:
    """A 32-bit parameter."""
    return (value & 0xFFFFFFFF).to_bytes(4, "little")


def pattern(array: Any) -> Array:
    """An array's bit patterns."""
    given = np.ascontiguousarray(array)
    return given.view(f"u{given.dtype.itemsize}")

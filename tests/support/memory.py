"""Memory of the tests: arrays with canaries around every row, page and layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import PoolTensor

Raw = NDArray[Any]
Bytes = NDArray[np.uint8]
CANARY = 0xEE
GUARD = 256  # bytes before and after every tensor
OUTER = ("page", "kv", "layer", "request")


def aligned(nbytes: int) -> Bytes:
    """`nbytes` bytes of canaries at an address divisible by 256."""
    raw = np.full(nbytes + 256, CANARY, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


def rows_array(rows: int, width: Sequence[int], element: str, *, strided: bool, guard: int = 1) -> tuple[Raw, Raw]:
    """(array `[rows, *width]`, all memory around it): canaries, `guard` rows before and after, gaps if `strided`."""
    kind = dtype(element).numpy()
    stride = math.prod(width) * kind.itemsize
    if strided:
        stride = -(-stride // 16) * 16 + 32
    base = -(-guard * stride // 16) * 16
    memory = aligned(base + (rows + guard) * stride)
    inner = np.cumprod((kind.itemsize, *width[:0:-1]))[::-1]
    return np.ndarray((rows, *width), kind, memory.data, base, (stride, *(int(s) for s in inner))), memory


class Tensor:
    """One array in memory of its own, canaries around it; `view` shows it in this memory or in a copy."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], kind: np.dtype[Any], fill: str) -> None:
        """`strides` in elements. `fill` "nan" and "inf" put those (or their bits) wherever no token lies."""
        self.shape, self.kind = tuple(shape), kind
        self.strides = tuple(s * kind.itemsize for s in strides)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        size = 0 if 0 in shape else reach * kind.itemsize
        self.memory = aligned(2 * GUARD + size)
        if fill != "bytes" and kind.kind in "iu":
            self.memory[...] = 0xFF if fill == "nan" else 0x7F
        elif fill != "bytes":
            words = len(self.memory) // kind.itemsize * kind.itemsize
            self.memory[:words].view(kind)[...] = np.nan if fill == "nan" else np.inf

    @classmethod
    def of(cls, tensor: PoolTensor, sizes: Mapping[str, int], element: str, fill: str) -> Tensor:
        """A tensor of a cache: pages, layers and requests lie apart, by as little as its alignment allows for scales."""
        kind = dtype(element).numpy()
        shape = [sizes[s] if isinstance(s, str) else s for s in tensor.shape]
        unit = max(1, tensor.align // kind.itemsize)
        step_by, gap = (max(8, unit), 16) if tensor.holds_values else (unit, unit)
        strides, step = [0] * len(shape), 1
        outer = next((i for i, n in enumerate(tensor.axes) if n not in OUTER), 0)
        for i in reversed(range(len(shape))):
            strides[i] = step if tensor.strides[i] is None or shape[i] == 1 else int(tensor.strides[i] or 0)
            step = strides[i] * shape[i]
            if i <= outer:  # from here outwards strides are free
                step = -(-step // step_by) * step_by + gap
            if i and tensor.axes[i - 1] == "page":
                unit = tensor.page_align // math.gcd(tensor.page_align, kind.itemsize)
                step = -(-step // unit) * unit
        return cls(shape, strides, kind, fill)

    def view(self, memory: Bytes) -> Raw:
        """The array in `memory`, its own or a copy."""
        return np.ndarray(self.shape, self.kind, memory.data, GUARD, self.strides)

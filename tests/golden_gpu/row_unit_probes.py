"""Rows that become one type on their way to shared memory (kernels/row_units.cu)."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

BF16: Final = ml_dtypes.bfloat16
PAGES, TOKENS, TILE = 5, 4, 32
COUNTS: Final = (5, 33)


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(260)
    codes = rng.integers(0, 256, (PAGES * TOKENS, 64), np.uint8)
    codes[:, :32][codes[:, :32] % 128 == 127] = 0x31  # a NaN is some NaN
    codes[:, 32:] = np.ascontiguousarray(rng.standard_normal((PAGES * TOKENS, 16)).astype(BF16)).view(np.uint8)
    scales = np.exp2(rng.integers(-9, 9, (PAGES * TOKENS, 2))) * rng.choice([1, 1.375], (PAGES * TOKENS, 2))
    first = rng.integers(-1, PAGES * TOKENS, 8).astype(np.int32)
    second = rng.integers(-1, PAGES * TOKENS, 40).astype(np.int32)
    first[2], second[[4, 32]] = -1, [-1, 7]
    return {
        "first": first,
        "second": second,
        "codes": codes.reshape(-1),
        "scales": pattern(scales.astype(np.float32)),
        "tiles": np.zeros((3, TILE, 28), np.uint32),
        "lists_of": np.zeros(3, np.uint32),
        "entries_of": np.zeros((3, TILE), np.uint32),
        "units": np.zeros((64, 16), np.uint16),
    }


def _values(arrays: Arrays) -> Array:
    """`[row, 48]` of all rows of the pool."""
    codes = arrays["codes"].reshape(-1, 64)
    scales = np.repeat(arrays["scales"].view(np.float32).reshape(-1, 2), 16, axis=1)
    coded = codes[:, :32].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    plain = np.ascontiguousarray(codes[:, 32:]).view(BF16)
    return np.concatenate([coded.astype(BF16), plain], axis=1)


def _wanted(arrays: Arrays) -> dict[str, Wanted]:
    entries = np.full((3, TILE), -1, np.int32)
    entries[0, : COUNTS[0]] = arrays["first"][: COUNTS[0]]
    entries[1:].reshape(-1)[: COUNTS[1]] = arrays["second"][: COUNTS[1]]
    values, tiles = _values(arrays), np.zeros((3, TILE, 56), BF16)
    tiles[..., :48] = np.where((entries >= 0)[..., None], values[entries], np.zeros((), BF16))
    thread = np.arange(64)
    units = values[2 * TOKENS + thread // 3 % TOKENS].reshape(64, 3, 16)[thread, thread % 3]
    return {
        "tiles": exact(tiles.view(np.uint32)),
        "lists_of": exact(np.array([0, 1, 1], np.uint32)),
        "entries_of": exact(entries.view(np.uint32)),
        "units": exact(np.ascontiguousarray(units).view(np.uint16)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [Probe("library_row_units", "row_units", "row_units_tiles", _inputs, _wanted, 64)]

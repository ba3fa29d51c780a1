"""Rows that keys of a batch take, and what chunks of a buffer have of them (kernels/plan_keys.cu)."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "plan_keys"
POSITION, LENGTH, OFFSETS = 2, 3, 5
THREADS, BLOCKS, BATCH, ROOM = 32, 3, 90, 600


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(280)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, BATCH))])
    offsets[40] = offsets[42] + 2
    lengths = rng.integers(0, ROOM - 4, BATCH)
    lengths[[3, 20, 50, 60]] = [-1, 0, ROOM + 1, 700]
    return {
        "lengths": lengths.astype(np.int32),
        "offsets": offsets.astype(np.int32),
        "out": np.zeros((THREADS * BLOCKS, 12), np.uint32),
        "errors": np.zeros(THREADS * BLOCKS, np.uint64),
    }


def _keys(length: int, offsets: list[int] | None, b: int) -> tuple[int, int]:
    """Keys of a request, and what is wrong with it; offsets count where those around the request do not decrease."""
    new = 0
    if offsets is not None:
        around = offsets[max(b - 1, 0) : b + 3]
        if around != sorted(around):
            return 0, OFFSETS
        new = offsets[b + 1] - offsets[b]
    if length < 0 or length + new > ROOM:
        return 0, LENGTH
    return length + new, 0


def _wanted(padded: bool, arrays: Arrays) -> dict[str, Wanted]:
    rows, alignment, chunks = (256, 64, 60) if padded else (100, 1, 150)
    lengths, offsets = arrays["lengths"].tolist(), arrays["offsets"].tolist() if padded else None
    out, errors = np.zeros((THREADS * BLOCKS, 12), np.uint32), np.zeros(THREADS * BLOCKS, np.uint64)
    begin = 0
    for b in range(len(out)):
        count, fault = _keys(lengths[b], offsets, b) if b < BATCH else (0, 0)
        count = -(-count // alignment) * alignment
        parts: list[int] = []
        for i in range(3):
            here = (begin // rows + i - (begin >= rows)) * rows
            parts += [min(max(begin - here, 0), rows), min(max(here - begin, 0), count), int(begin > here)]
        out[b] = [count, fault, begin, *parts]
        fitting = max(chunks * rows - begin, 0)
        if fault or count > fitting:
            position, code = (0, fault) if fault else (fitting, POSITION)
            errors[b] = 2**64 - 1 - (position << 32 | b << 8 | code)
        begin += count
    return {"out": exact(out), "errors": exact(errors)}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe(
            f"library_plan_keys_{name}",
            UNIT,
            f"plan_keys_{name}",
            _inputs,
            partial(_wanted, name == "padded"),
            THREADS,
            (BLOCKS, 1, 1),
        )
        for name in ("padded", "dense")
    ]

"""Pages that a call lists (kernels/listed_pages.cu)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "listed_pages"
LISTS, ENTRIES, PAGE, NONE = 8, 6, 24, 2**32 - 1
POSITION, LENGTH = 2, 3


def _inputs() -> dict[str, Array]:
    entries = np.array(
        [
            [3, 0, 2, 1, -1, 0],
            [0, 1, 2, 3, 4, 5],  # of a request that has failed
            [4, 0, -1, 9, 3, 1],  # pages past the last one
            [-2, -(2**31), 2**31 - 1, 0, -1, 1],
            [0, 0, 0, 0, 0, 0],  # of no tokens
            [0, 1, 2, 3, -1, -1],
            [1, 2, 3, 0, 1, 2],
            [-1, -1, -1, -1, -1, 2],
        ],
        np.int32,
    )
    return {
        "entries": entries,
        "counts": np.array([6, 6, 6, 6, 1, 0, 7, NONE], np.uint32),
        "tokens": np.array([96, 96, 95, 73, 0, 80, 80, 80], np.uint32),
        "out": np.zeros((LISTS, 32, 4), np.uint32),
        "errors": np.zeros(LISTS, np.uint64),
    }


def _places(arrays: Arrays) -> dict[str, Wanted]:
    out, errors = arrays["out"].copy(), arrays["errors"].copy()
    for b, entries in enumerate(arrays["entries"].tolist()):
        count, pages = int(arrays["counts"][b]), -(-int(arrays["tokens"][b]) // PAGE)
        faults = [(count, LENGTH)] if count > ENTRIES and b != 1 else []
        out[b, :, 3] = bool(faults) or b == 1
        known = [] if faults or b == 1 else [entry % 2**32 for entry in entries[:count]]
        known += [NONE] * (64 - len(known))
        for lane in range(32):
            page, tile = known[5 * lane // PAGE], known[lane // 3] * 3 + lane % 3
            out[b, lane, 0] = known[lane]
            out[b, lane, 1] = page * PAGE + 5 * lane % PAGE if page < pages else NONE
            out[b, lane, 2] = tile if known[lane // 3] < pages and 2 <= tile < 9 else NONE
            if pages <= known[lane] < NONE:
                faults.append((min(known[lane] * PAGE, NONE), POSITION))
                out[b, lane, 3] += 2
        if faults:
            position, code = min(faults)
            errors[b] = 2**64 - 1 - (position << 32 | b << 8 | code)
    return {"out": exact(out), "errors": exact(errors)}


def probes() -> list[Probe]:
    """All of this module."""
    return [Probe("library_listed_places", UNIT, "listed_places", _inputs, _places, 32, (LISTS, 1, 1))]

"""States by id, and rows that are filled where there is none (kernels/states.cu)."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "states"
IDS, LIVES, STATES = 8, 6, 5
MAX, INT_MAX, NO_STATE, CANARY = 2**32 - 1, 2**31 - 1, 2**64 - 1, 0x5A

# Ids ----------------------------------------------------------------------------------------------------------------

# The first count of each is not passed: all ids count.
LISTS: Final = (
    ("ids", np.int32, (0, -1, -2, STATES - 1, STATES, INT_MAX, 3, -(2**31)), (0, 3, -1, 0, INT_MAX, -(2**31))),
    ("unsigned_ids", np.uint32, (MAX, 0, MAX - 1, STATES, 2**31, STATES - 1, 1, 2), (0, 5, MAX, 0, IDS, MAX - 1)),
    ("wide_ids", np.int64, (2**32, -1, MAX, 2**32 + 1, -2, 2**63 - 1, 4, 0), (0, 7, -2, 2**32, MAX, IDS + 1)),
)


def _ids_inputs() -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, kind, ids, lives in LISTS:
        found |= {name: np.array(ids, kind), name.replace("ids", "lives"): np.array(lives, kind)}
    return found | {"out": np.full((len(LISTS), LIVES, IDS, 4), CANARY, np.uint64)}


def _ids(arrays: Arrays) -> dict[str, Wanted]:
    """Whoever does not count is not wrong, but that the first one stands for a count that is none."""
    out = arrays["out"].copy()
    for at, (name, kind, _, _) in enumerate(LISTS):
        lives = arrays[name.replace("ids", "lives")].tolist()
        for block, live in enumerate([IDS, *lives[1:]]):
            bad = not 0 <= live < MAX
            for i, number in enumerate(arrays[name].tolist()):
                found, none = 0 <= number < STATES, number == (MAX if kind is np.uint32 else -1)
                counts = not bad and i < live
                wrong = not (found or none) if counts else bad and i == 0
                out[at, block, i] = [number if found else NO_STATE, counts, none, wrong]
    return {"out": exact(out)}


# Rows ---------------------------------------------------------------------------------------------------------------

STRIDE, BYTES, LARGE_BYTES, TILE, PIECE = 60, 44, 24006, 1024, 16
WORDS: Final = (0, 0x11111111, 0x89ABCDEF, MAX)


def _fill_inputs() -> dict[str, Array]:
    return {
        "words": np.array(WORDS, np.uint32),
        "small": np.full((2, 4, STRIDE), CANARY, np.uint8),
        "large": np.full(LARGE_BYTES + 26, CANARY, np.uint8),
    }


def _fill(arrays: Arrays) -> dict[str, Wanted]:
    """The bytes of a row's pieces and none behind; of four rows the second is null and the last not of the tile."""
    small, large = arrays["small"].copy(), arrays["large"].copy()
    for row in (0, 2):
        word = np.tile(arrays["words"][row : row + 1].view(np.uint8), BYTES // 4)
        small[0, row, :BYTES] = word
        small[1, row, PIECE : 2 * PIECE] = word[PIECE : 2 * PIECE]
    large[TILE * PIECE : LARGE_BYTES] = 0xFF
    return {"small": exact(small), "large": exact(large)}


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_states_ids", UNIT, "states_ids", _ids_inputs, _ids, IDS, (LIVES, 1, 1)),
        Probe("library_states_fill", UNIT, "states_fill", _fill_inputs, _fill, 256, (3, 1, 1)),
    ]

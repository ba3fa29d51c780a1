"""States of attention that are merged by their log-sum-exps (kernels/merge_states.cu)."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "merge_states"
STATES, ROWS, HEADS, DIM, CHUNK = 7, 5, 3, 16, 3


def _inputs() -> dict[str, Array]:
    """Whole log-sum-exps, so that weights are powers of two; states without keys have values that are no numbers."""
    rng = np.random.default_rng(311)
    outs = rng.standard_normal((STATES, ROWS, HEADS, DIM)).astype(np.float32)
    lses = rng.integers(-4, 5, (STATES, ROWS, HEADS)).astype(np.float32)
    none = rng.random(lses.shape) < 0.25
    none[:, 2, 1] = none[:2, 4, 0] = True
    lses[none] = np.where(rng.random(none.sum()) < 0.5, np.inf, -np.inf)
    outs[none] = np.nan
    return {
        "outs": pattern(outs),
        "lses": pattern(lses),
        "out": np.zeros((ROWS, HEADS, DIM), np.uint32),
        "lse": np.zeros((ROWS, HEADS, 3), np.uint32),
    }


def _merged(count: int, arrays: Arrays) -> dict[str, Wanted]:
    """In f32, in the order of the states, relative to the largest so far; then lse, half of the sum of weights, state 1's lse."""
    outs, lses = (arrays[name].view(np.float32) for name in ("outs", "lses"))
    out, lse = np.zeros((ROWS, HEADS, DIM), np.float32), np.full((ROWS, HEADS, 3), np.inf)
    lse[..., 2] = lses[1]
    for t in range(ROWS):
        for head in range(HEADS):
            seen = [s for s in range(count) if np.isfinite(lses[s, t, head])]
            acc, total, most = np.zeros(DIM, np.float32), np.float32(0), None
            for begin in range(0, count, CHUNK):
                chunk = [s for s in seen if begin <= s < begin + CHUNK]
                if not chunk:
                    continue
                higher = max(float(lses[s, t, head]) for s in chunk)
                if most is not None:
                    higher = max(higher, most)
                    acc, total = acc * np.float32(2 ** (most - higher)), total * np.float32(2 ** (most - higher))
                for s in chunk:
                    weight = np.float32(2 ** (float(lses[s, t, head]) - higher))
                    total, acc = total + weight, acc + weight * outs[s, t, head]
                most = higher
            if most is None:
                lse[t, head, 1] = 0
                continue
            out[t, head] = acc * (np.float32(1) / total)
            lse[t, head, :2] = most + np.log2(float(total)), float(total) / 2
    rule = Rule("f32", absolute=2e-6)
    return {
        "out": exact(pattern(out)),
        "lse": Wanted(pattern(lse.astype(np.float32)), rule, np.where(np.isfinite(lse), lse, np.nan)[..., None]),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe(f"library_states_{name}", UNIT, f"states_{name}", _inputs, partial(_merged, count), 32, (2, 1, 1))
        for name, count in (("many", STATES), ("two", 2))
    ]

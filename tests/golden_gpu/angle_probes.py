"""Sines and cosines (kernels/angles.cu): angles of every size, of positions, next to quarter turns, and none at all."""

from __future__ import annotations

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern

LIMIT = 2.0**24
COUNT = 4096


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(97)
    least = np.array([0.0, -0.0, 2**-149, -(2**-126), 1e-20, LIMIT, -LIMIT])
    none = np.array([np.nextafter(np.float32(LIMIT), np.float32(np.inf)), -1e10, 3e38, np.inf, -np.inf, np.nan])
    quarters = rng.integers(1, int(LIMIT / (np.pi / 2)), 1024) * (np.pi / 2)
    positions = rng.integers(0, 1 << 20, 1024) * 500_000.0 ** -(rng.integers(0, 64, 1024) / 64)
    parts = [least, none, quarters, -positions, rng.uniform(-LIMIT, LIMIT, 1024)]
    rest = COUNT - sum(len(part) for part in parts)
    x = np.concatenate([*parts, np.exp2(rng.uniform(-20, 24, rest))]).astype(np.float32)
    outs: dict[str, Array] = {name: np.zeros(COUNT, np.uint32) for name in ("sines", "cosines")}
    outs |= {name: np.zeros(2 * COUNT, np.uint32) for name in ("halves", "entries")}
    return outs | {"in": pattern(x)}


def _wanted(arrays: Arrays) -> dict[str, Wanted]:
    """Within an ulp, which is at most 2^-23 of a number; NaN and what counts as 0 exactly."""
    x = arrays["in"].view(np.float32).astype(np.float64)
    x = np.where(np.isfinite(x) & (np.abs(x) > LIMIT), 0.0, x)
    found = {}
    with np.errstate(invalid="ignore"):
        for name, exact in (("sines", np.sin(x)), ("cosines", np.cos(x))):
            rule = Rule("f32", relative=2.0**-23, any_nan=True, any_zero=True)
            found[name] = Wanted(pattern(exact.astype(np.float32)), rule, exact[:, None])
        halves = np.stack([np.cos(x), np.sin(x)], axis=1).reshape(-1, 1) / 2
        found["halves"] = Wanted(pattern(halves.astype(np.float32)).reshape(-1), rule, halves)
    i = np.arange(COUNT)
    found["entries"] = floats(arrays["in"].view(np.float32)[np.stack([i, i // 2], axis=1).reshape(-1)])
    return found


def probes() -> list[Probe]:
    """All of this module."""
    return [Probe("library_angles", "angles", "angles", _inputs, _wanted, 128, (COUNT // 128, 1, 1))]

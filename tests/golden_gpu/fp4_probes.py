"""Tables of MAX's nvfp4 (kernels/fp4_tables.cu): every code below every scale is e4m3(code * scale), in both orders of a word."""

from __future__ import annotations

from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from kvgen.reference import quant
from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

TILE, HEADS, HEAD, DIMS = 16, 2, 1, 40
# Any NaN for a NaN, and any zero for a zero.
BYTES: Final = partial(Rule, "e4m3", any_nan=True, any_zero=True)


def products(codes: Array, scales: Array) -> Array:
    """e4m3(code * scale), as bytes: `[..., codes]`."""
    with np.errstate(all="ignore"):
        value = quant.values(codes, "e2m1") * quant.values(scales, "e4m3")[..., None]
        found: Array = quant.cast(value.astype(np.float32), "e4m3")
    return found


def _every_inputs() -> dict[str, Array]:
    return {"scales": np.arange(256, dtype=np.uint8).view(np.uint32), "out": np.zeros((256, 8), np.uint32)}


def _every(arrays: Arrays) -> dict[str, Wanted]:
    alone = products(np.arange(16), arrays["scales"].view(np.uint8)).reshape(64, 4, 2, 8)
    following = np.roll(alone, -1, axis=1)
    pairs = np.stack([alone[..., :4], following[..., 4:]], axis=-1).reshape(alone.shape)
    out = np.stack([alone, pairs], axis=2).reshape(256, 32)
    return {"out": Wanted(out.view(np.uint32), BYTES(4))}


def _tiles_inputs() -> dict[str, Array]:
    scales = np.exp2(np.random.default_rng(250).uniform(-8, 8, TILE * HEADS * 3)).astype(ml_dtypes.float8_e4m3fn)
    return {
        "scales": scales.view(np.uint8),
        "words": np.zeros((3, 32, 2), np.uint32),
        "halves": np.zeros((2, 32, 2), np.uint32),
    }


def _tiles(arrays: Arrays) -> dict[str, Wanted]:
    found = {}
    for name, groups in (("words", 3), ("halves", 2)):
        own = arrays["scales"][: TILE * HEADS * groups].reshape(TILE, HEADS, groups)[:, HEAD].T
        out = np.concatenate([products(np.arange(8), own)] * 2, axis=1)
        found[name] = Wanted(np.ascontiguousarray(out).view(np.uint32), BYTES(4))
    return found


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_fp4_tables", "fp4_tables", "fp4_tables", _every_inputs, _every, 64),
        Probe("library_fp4_tables_of_tiles", "fp4_tables", "fp4_tables_of_tiles", _tiles_inputs, _tiles, 32),
    ]

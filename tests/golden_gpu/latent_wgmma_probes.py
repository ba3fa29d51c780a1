"""Attention of two warpgroups over tiles of latent rows (kernels/latent_wgmma.cu), in float64."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.column_probes import UNUSED
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.latent_tile_probes import CHUNKS, Way, attention_inputs, attention_wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe

UNIT: Final = "latent_wgmma"
THREADS: Final = 256
# 64 columns of rows of 512 + 64 dims, in tiles of 32 tokens and of 64.
WAYS: Final = (
    Way("latent_wgmma_attend", 64, 512, 576, 0, 1152, 1152, 1152, 0),
    Way("latent_wgmma_attend_64", 64, 512, 576, 0, 1152, 1152, 1152, 0, tile=64, hides=True),
)


def _shared(way: Way) -> int:
    """Two tiles, 9 panels of Q, weights and maxima."""
    return 2 * 9 * way.tile * 128 + 73728 + 8192 + 512


def _places_inputs() -> dict[str, Array]:
    return {"out": np.full((THREADS, 4), UNUSED, np.uint32)}


def _places(_: Arrays) -> dict[str, Wanted]:
    """Both warpgroups' threads have the same places."""
    thread = np.arange(THREADS)
    warp, lane = thread % 128 // 32, thread % 32
    column = 16 * warp + lane // 4
    known = 4 * warp + lane % 4 + lane // 4 % 2 * 16
    total = (thread.reshape(-1, 4) ** 2).sum(axis=1).repeat(4)
    return {"out": exact(np.stack([column, column + 8, known, total], axis=1).astype(np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    attending = [
        Probe(
            f"library_{way.kernel}",
            UNIT,
            way.kernel,
            partial(attention_inputs, way, 270 + n),
            partial(attention_wanted, way),
            THREADS,
            (len(CHUNKS), 1, 1),
            _shared(way),
        )
        for n, way in enumerate(WAYS)
    ]
    return [
        *attending,
        Probe("library_latent_wgmma_places", UNIT, "latent_wgmma_places", _places_inputs, _places, THREADS),
    ]

"""Rows into a cache (kernels/write_rows.cu), over the runs of kernels/runs.cuh: copied, cast, quantized, into tails."""

from __future__ import annotations

import struct
from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.add_probes import NOWHERE, PLACES, STRIDE, _bytes
from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.golden_gpu.quantize_probes import GLOBAL
from tests.golden_gpu.segment_probes import BF16, DIMS, HEADS, KINDS, PAGES, TOKENS, Run, stored

UNIT: Final = "write_rows"
RUNS: Final = {
    "rows_i8": Run("i8", "f16"),
    "rows_u8": Run("u8", "f16", zero=True),
    "rows_nvfp4_global": Run("e2m1", "e4m3", "global"),
}
LIVE: Final = [i for i in range(6) if i != NOWHERE]
SHAPE: Final = (PAGES * TOKENS, HEADS, DIMS)
E4M3: Final = ml_dtypes.float8_e4m3fn


def _rows(seed: int, count: int) -> Array:
    return (np.random.default_rng(seed).standard_normal(count) * 3).astype(BF16)


def _written_inputs() -> dict[str, Array]:
    size = int(np.prod(SHAPE))
    return {
        "rows": pattern(_rows(120, 6 * STRIDE)),
        **{name: np.full(size, 0x7777, np.uint16) for name in ("plain", "cast", "padded")},
        "tails": np.full(3 * 4 * HEADS * DIMS, 0x7777, np.uint16),
    }


def _written(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["rows"].view(BF16)
    found = {name: arrays[name].copy().reshape(SHAPE) for name in ("plain", "cast", "padded")}
    tails = arrays["tails"].copy().reshape(3, 4, HEADS, DIMS)
    for i in LIVE:
        head = rows[i * STRIDE + 48 :][:DIMS]
        found["plain"][PLACES[i], 1] = pattern(head)
        found["cast"][PLACES[i], 1] = pattern(head.astype(np.float16))
        found["padded"][PLACES[i], 0] = pattern(rows[i // 3 * 100 + i % 3 * 44 + 4 :][:DIMS])
        if i != 3:
            tails[i // 2, PLACES[i] % 4] = pattern(rows[i * STRIDE :][: HEADS * DIMS]).reshape(HEADS, DIMS)
    return {name: exact(array.reshape(-1)) for name, array in found.items()} | {"tails": exact(tails.reshape(-1))}


def _quantized_inputs(run: Run) -> dict[str, Array]:
    size = int(np.prod(SHAPE)) // (2 if run.dtype == "e2m1" else 1)
    return {
        "rows": pattern(_rows(121, 6 * STRIDE)),
        "scales": pattern(np.zeros(PAGES * TOKENS * run.scale_row, KINDS[run.kind or "f32"])),
        "codes": np.zeros(size, np.uint8),
    }


def _quantized(run: Run, arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["rows"].view(BF16).astype(np.float32).reshape(6, STRIDE)[:, : HEADS * DIMS].reshape(6, HEADS, DIMS)
    scales = arrays["scales"].view(KINDS[run.kind or "f32"]).copy().reshape(PAGES * TOKENS, -1)
    codes, to = np.zeros(SHAPE, np.uint8), [PLACES[i] for i in LIVE]
    mine = scales[to]
    codes[to] = stored(run, rows[LIVE], mine)[0]
    scales[to] = mine
    return {"codes": exact(_bytes(run, codes)), "scales": floats(scales.reshape(-1), run.kind or "f32")}


def _heads_inputs() -> dict[str, Array]:
    return {
        "rows": pattern(np.random.default_rng(122).integers(-100, 101, 320).astype(BF16)),
        "q_scale": pattern(np.array([0.5], np.float32)),
        "out": np.full(160, 0x7777, np.uint16),
        "codes": np.full(160, 0x77, np.uint8),
        "ones": np.full(160, 0x77, np.uint8),
        "plain": np.full(int(np.prod(SHAPE)), 0x4040, np.uint16),  # 3.0
        "tiles": np.zeros(160, np.uint32),
        "squares": np.zeros((32, 4), np.uint32),
        "pieces": np.zeros((32, 4), np.uint32),
    }


def _heads(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["rows"].view(BF16).astype(np.float32)
    heads, keeps = rows[:160].reshape(4, 40), slice(80, 120)  # head 2 is padding
    unknown = heads.copy()
    unknown[1] = np.nan
    out = unknown.astype(BF16).reshape(-1)
    out[keeps] = arrays["out"][keeps].view(BF16)
    codes = {}
    for name, scale in (("codes", 0.5), ("ones", 1.0)):
        codes[name] = np.clip(unknown / scale, -448, 448).astype(E4M3).reshape(-1)
        codes[name][keeps] = arrays[name][keeps].view(E4M3)
    plain = arrays["plain"].copy().reshape(SHAPE)
    for h in (0, 1, 3):
        plain[PLACES[h], 1] = pattern(heads[h].astype(BF16))
    last = plain[PLACES[3]].reshape(-1).view(BF16).astype(np.float64)
    sums = [(rows[:152] ** 2).sum(), ((rows[:152] + rows[160:312]) ** 2).sum(), (last**2).sum(), 0.0]
    pieces = []
    for i in range(32):
        block, element = i % 6, (i // 6 % 2 * 2 + i // 12 % 2) * 4
        dim = block % 3 * 16 + element
        value = int(arrays["rows"][block // 3 * 40 + dim]) if dim < DIMS else 0
        pieces.append([i // 3, i % 3 * 16, value, 404])
    return {
        "out": floats(out, "bf16"),
        **{name: floats(array, "e4m3") for name, array in codes.items()},
        "plain": exact(plain.reshape(-1)),
        "tiles": floats(heads.reshape(-1)),
        "squares": Wanted(pattern(np.tile(np.array(sums, np.float32), (32, 1))), Rule("f32")),
        "pieces": exact(np.array(pieces, np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    tail = [struct.pack("<f", GLOBAL)]
    return [
        Probe("library_rows_written", UNIT, "rows_written", _written_inputs, _written, 96),
        *(
            Probe(
                f"library_{name}", UNIT, name, partial(_quantized_inputs, run), partial(_quantized, run), 96, tail=tail
            )
            for name, run in RUNS.items()
        ),
        Probe("library_rows_heads", UNIT, "rows_heads", _heads_inputs, _heads, 32),
    ]

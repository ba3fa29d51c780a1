"""A warpgroup over a tile of latent rows, the rows that lists name, and products of few columns (kernels/latent_warpgroups.cu).
Sums of the tile are of few bits, exact in whatever order."""

from __future__ import annotations

from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.mma_probes import matrix_of, places_a, product, to_registers
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "latent_warpgroups"
BF16: Final = ml_dtypes.bfloat16
CODES, DIMS, TOKENS, COLUMNS, GROUPS = 448, 512, 64, 16, 8
PITCH: Final = 592
QK_SCALE: Final = np.tile([0.5, 0.25], COLUMNS // 2)  # a half of it: Q was stored twice as large
ABSENT: Final = np.arange(TOKENS) % 5 == 3


# A tile --------------------------------------------------------------------------------------------------------------


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(280)
    q = np.zeros((COLUMNS, DIMS), np.float32)
    for col in range(COLUMNS):  # a dim of codes, and one of codes or of what is plain
        q[col, [rng.integers(256), 256 + rng.integers(192) if col % 4 else CODES + rng.integers(64)]] = rng.choice(
            [-1, 1], 2
        )
    rows = np.zeros((TOKENS, PITCH), np.uint8)
    rows[:, :CODES] = rng.choice([-1, 0, 1], (TOKENS, CODES)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    plain = rng.choice([-1, 0, 1], (TOKENS, DIMS - CODES)).astype(BF16)
    rows[:, CODES:576] = np.ascontiguousarray(plain).view(np.uint8)
    rows[ABSENT] = 0
    scales = np.zeros((TOKENS, 8), np.uint8)
    scales[:, :7] = 127 + rng.integers(0, 2, (TOKENS, 7))
    scales[:, 7] = 255  # what lies behind the last scale is none
    scales[ABSENT, :7] = 0
    return {
        "q": pattern(q.astype(BF16)),
        "in": rows.reshape(-1).view(np.uint32),
        "scales_in": scales.reshape(-1).view(np.uint32),
        "query": np.zeros((GROUPS, COLUMNS, 32), np.uint32),
        "scores": np.zeros((TOKENS, COLUMNS), np.uint32),
        "scales_of": np.zeros((7, TOKENS), np.uint32),
        "weights": np.zeros((GROUPS, COLUMNS, 32), np.uint32),
        "pairs": np.zeros((4, 128), np.uint32),
        "flags": np.zeros(128, np.uint32),
        "merged": np.zeros(COLUMNS * (DIMS + 2), np.uint32),
    }


def key_dims() -> Array:
    """The dim that stands at each place along the sum of S: codes as fragments have them, then plain ones in their order."""
    place = np.arange(DIMS)
    step, k = place // 16, place % 16
    half, j, element = k // 8, k % 8 // 2, k % 2
    block = step // 2 * 32 + step % 2 * 16 + 4 * j + 2 * half + element
    return np.where(place < CODES, block, place)


def panels(halves: Array) -> Array:
    """Rows `[row, panel * 64]` of 16 bits as panels of swizzled rows: `[panel, row, 32 words]`."""
    count = len(halves)
    words = np.ascontiguousarray(halves).view(np.uint32).reshape(count, -1, 8, 4).transpose(1, 0, 2, 3)
    chunk = np.arange(8) ^ np.arange(count)[:, None] % 8
    placed = np.zeros_like(words)
    placed[:, np.arange(count)[:, None], chunk] = words
    return placed.reshape(-1, count, 32)


def bits16(values: Array, codes: int) -> Array:
    """f16 for the first dims, bf16 for the others."""
    return np.concatenate(
        [pattern(values[:, :codes].astype(np.float16)), pattern(values[:, codes:].astype(BF16))], axis=1
    )


def _tile(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["in"].view(np.uint8).reshape(TOKENS, PITCH)
    bytes_of = arrays["scales_in"].view(np.uint8).reshape(TOKENS, 8)[:, :7].astype(int)
    scales = np.where(bytes_of == 0, 0, np.exp2(bytes_of - 127.0))
    codes = rows[:, :CODES].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(scales, 64, axis=1)
    k = np.concatenate([codes, np.ascontiguousarray(rows[:, CODES:576]).view(BF16).astype(np.float64)], axis=1)
    q = 2 * arrays["q"].view(BF16).reshape(COLUMNS, DIMS).astype(np.float64)
    scores = k @ q.T * QK_SCALE * 2
    scores[ABSENT] = -np.inf
    top = scores.max(axis=0)
    weights = np.exp2(scores - top)
    assert np.isin(weights, [0, *2.0 ** np.arange(-16, 1)]).all()
    by = np.concatenate([scales / 4, np.ones((TOKENS, 1))], axis=1)  # the unit is 4
    scaled = np.concatenate([weights.T * by[:, group] for group in range(GROUPS)], axis=1)
    thread, g = np.arange(128), np.arange(128) % 32 // 4
    pairs = np.zeros((4, 128, 2), np.float16)
    for i in range(4):
        token, col = thread // 32 * 16 + g + i % 2 * 8, i // 2 * 8 + thread % 4 * 2
        pairs[i] = np.stack([weights[token, col], weights[token, col + 1]], axis=-1)
    out = (weights.T @ k) * np.tile([2.0, 4.0], COLUMNS // 2)[:, None]
    out[:, :CODES] *= 0.5
    passed, any_says = 1 << 1, 1 << 2
    return {
        "query": exact(panels(bits16(q[:, key_dims()], CODES))),
        "scores": exact(pattern(scores.astype(np.float32))),
        "scales_of": exact(pattern(scales.T.astype(np.float32))),
        "weights": exact(panels(bits16(scaled, 7 * TOKENS))),
        "pairs": exact(pairs.view(np.uint32)[..., 0]),
        "flags": exact(np.full(128, 1 | passed | any_says, np.uint32)),
        "merged": exact(pattern(np.concatenate([top, weights.sum(axis=0), out.reshape(-1)]).astype(np.float32))),
    }


# Rows of lists -------------------------------------------------------------------------------------------------------


def _lists_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(281)
    first, second = (rng.integers(-1, 20, n).astype(np.int32) for n in (80, 80))
    first[[0, 7, 9, 65]], second[[2, 11]] = [-1, 20, -2, 3], [2**31 - 1, -(2**31)]
    return {
        "first": first,
        "second": second,
        "bytes": np.zeros(5 * 96, np.uint8),
        "out": np.zeros((4, 32, 5), np.int32),
    }


def _lists(arrays: Arrays) -> dict[str, Wanted]:
    entries = np.full((4, 64), -1, np.int64)
    entries[:2].reshape(-1)[:70] = arrays["first"][:70]
    entries[2:].reshape(-1)[:66] = arrays["second"][:66]
    lane = np.arange(32)
    known = np.stack([entries[:, lane], entries[:, lane + 8]], axis=-1)
    there = (known >= 0) & (known < 20)
    rows = np.where(there, known // 4 * 96 + known % 4 * 16, -1)
    scales = np.where(there, known // 4 * 96 + 64 + known % 4 * 8, -1)
    own = np.where(lane % 2 == 0, scales[..., 0], scales[..., 1])
    return {"out": exact(np.concatenate([known, rows, own[..., None]], axis=-1).astype(np.int32))}


# Products of few columns ---------------------------------------------------------------------------------------------


def _narrow_matrices(kind: str) -> tuple[Array, Array]:
    rng = np.random.default_rng(282)
    return matrix_of(kind, (64, 64), 0, rng), matrix_of(kind, (16, 64), 0, rng)


def _narrow_inputs(kind: str) -> dict[str, Array]:
    a, b = _narrow_matrices(kind)
    own = places_a(16, 16, 2)
    registers = np.stack(
        [
            np.concatenate([to_registers(a[16 * w : 16 * w + 16, 16 * k : 16 * k + 16], own) for w in range(4)])
            for k in range(4)
        ]
    )
    # Matrices of 8 k by 8 rows of b, which a warp has 4 of: lane 4g + j has k g of rows 2j and 2j + 1.
    lane, halves = np.arange(32), pattern(b).astype(np.uint32)
    turned = np.zeros((4, 4, 32), np.uint32)
    for w, i in np.ndindex(4, 4):
        k, row = w * 16 + i % 2 * 8 + lane // 4, i // 2 * 8 + lane % 4 * 2
        turned[w, i] = halves[row, k] | halves[row + 1, k] << 16
    return {
        "a": registers.transpose(0, 2, 1),
        "b": turned,
        "eight": np.zeros((4, 128), np.uint32),
        "sixteen": np.zeros((8, 128), np.uint32),
        "turned": np.zeros((16, 32), np.uint32),
    }


def _narrow(kind: str, arrays: Arrays) -> dict[str, Wanted]:
    a, b = _narrow_matrices(kind)
    d, _ = product(a, b.T, np.zeros((64, 16), np.float32))
    thread, r = np.arange(128), np.arange(4)[:, None]
    row, col = thread // 32 * 16 + thread % 32 // 4 + r // 2 * 8, thread % 4 * 2 + r % 2
    sums = [pattern((2 * d[row, col + n]).astype(np.float32)) for n in (0, 8)]
    return {
        "eight": exact(sums[0]),
        "sixteen": exact(np.concatenate(sums)),
        "turned": exact(panels(b).reshape(16, 32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    return [
        Probe("library_latent_warpgroups", UNIT, "latent_warpgroups_tile", _inputs, _tile, 128, shared=120 << 10),
        Probe("library_listed_rows", UNIT, "listed_rows", _lists_inputs, _lists, 32),
        *(
            Probe(
                f"library_narrow_products_{kind}",
                UNIT,
                f"narrow_products_{kind}",
                partial(_narrow_inputs, kind),
                partial(_narrow, kind),
                128,
                shared=4 << 10,
            )
            for kind in ("bf16", "f16")
        ),
    ]

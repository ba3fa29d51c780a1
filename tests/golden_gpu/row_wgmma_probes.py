"""Attention of a warpgroup over tiles of rows (kernels/row_wgmma.cu) in float64, and how warpgroups meet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.extend_probes import together
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.plan_probes import IDLE
from tests.golden_gpu.probe import Arrays, Probe, pattern, u32

UNIT: Final = "row_wgmma"
COLS, TOKENS, TILE, SLACK = 64, 96, 32, 8


@dataclass(frozen=True)
class Way:
    """A kernel: the type of elements, dims of K and of V."""

    kernel: str
    kind: Any
    keys: int
    values: int


WAYS: Final = (Way("row_wgmma_bf16", ml_dtypes.bfloat16, 128, 64), Way("row_wgmma_f16", np.float16, 64, 128))
SPECIAL: Final = ((40, 7, np.inf), (40, 33, np.nan), (41, 7, -np.inf), (70, 12, -np.inf), (95, 63, np.inf))


def _inputs(way: Way, seed: int) -> dict[str, Array]:
    """Scores of the last tile are the largest, but no weight is 0 in f16; the first columns see nothing, the last ones all."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((TOKENS, way.keys))
    keys[64:] *= 2
    values = np.exp2(rng.uniform(-4, 4, (TOKENS, way.values)))
    for token, dim, x in SPECIAL:
        values[token, dim] = x
    return {
        "q": pattern(rng.standard_normal((COLS, way.keys)).astype(way.kind)),
        "k": pattern(keys.astype(way.kind)),
        "v": pattern(values.astype(way.kind)),
        "limits": np.clip(2 * np.arange(COLS) - 10, 0, TOKENS).astype(np.uint32),
        "max": np.full(COLS, UNUSED, np.uint32),
        "sum": np.full(COLS, UNUSED, np.uint32),
        "out": np.full((COLS, way.values), UNUSED, np.uint32),
        "special": np.full(TOKENS // TILE, UNUSED, np.uint32),
    }


def _wanted(way: Way, arrays: Arrays) -> dict[str, Wanted]:
    q, k, v = (arrays[name].view(way.kind).astype(np.float64) for name in "qkv")
    scores = q @ k.T * 0.25 * np.log2(np.e)
    top, total, out = np.full(COLS, -np.inf), np.zeros(COLS), np.zeros((COLS, way.values))
    for col, limit in enumerate(arrays["limits"].tolist()):
        for first in range(0, limit, TILE):
            own = scores[col, first : min(first + TILE, limit)]
            if own.max() > top[col] + SLACK:
                shrink = 0.0 if np.isneginf(top[col]) else 2.0 ** (top[col] - own.max())
                top[col], total[col], out[col] = own.max(), total[col] * shrink, out[col] * shrink
            weights = np.exp2(own - top[col])
            total[col] += weights.sum()
            with np.errstate(invalid="ignore"):
                out[col] += (weights[:, None] * v[first : first + len(own)]).sum(axis=0)
    special = ~np.isfinite(v).reshape(TOKENS // TILE, -1).all(axis=1)
    return {
        "max": close(top, 1e-5, 1e-4),
        "sum": close(total, 2e-4),
        "out": close(out, 2.0**-8 if way.kind is ml_dtypes.bfloat16 else 2.0**-10),
        "special": exact(special.astype(np.uint32)),
    }


RESULTS, MERGED, DIM_TILES = 3, 64, 8


def _merge_inputs() -> dict[str, Array]:
    """Lanes of a column agree about its maximum; some results saw no token."""
    rng = np.random.default_rng(293)
    numbers = rng.uniform(0.1, 2, (RESULTS, 128, 4 + 4 * DIM_TILES))
    numbers[..., :2] = rng.uniform(-9, 9, (RESULTS, 32, 2)).repeat(4, axis=1)
    for result, thread in ((0, 0), (2, 4), (1, 8), (2, 8), (0, 12), (1, 12), (2, 12)):
        numbers[result, thread : thread + 4] = [-np.inf] * 2 + [0] * (2 + 4 * DIM_TILES)
    return {
        "in": pattern(numbers.astype(np.float32)),
        "slots": np.full((RESULTS, 1 + DIM_TILES, 128, 4), UNUSED, np.uint32),
        "heads": np.full((DIM_TILES // 4, 128, 4), UNUSED, np.uint32),
        "out": np.full((COLS, MERGED), UNUSED, np.uint32),
    }


def _merge(arrays: Arrays) -> dict[str, Wanted]:
    numbers = arrays["in"].view(np.float32).astype(np.float64)
    all_of = together(numbers[None])[0]
    thread, out = np.arange(128), np.zeros((COLS, MERGED))
    for n in range(4 * DIM_TILES):
        column = thread // 32 * 16 + thread % 32 // 4 + n // 2 % 2 * 8
        out[column, n // 4 * 8 + 2 * (thread % 4) + n % 2] = all_of[:, 4 + n]
    slots = numbers.reshape(RESULTS, 128, 1 + DIM_TILES, 4).transpose(0, 2, 1, 3)
    return {
        "slots": close(np.ascontiguousarray(slots), 0.0),
        "heads": close(np.stack([all_of[:, :4]] * (DIM_TILES // 4)), 1e-5),
        "out": close(out, 1e-5),
    }


def _halves_inputs() -> dict[str, Array]:
    """Lanes of a column agree about its maximum and have a part of its sum each; some warpgroups saw no token."""
    rng = np.random.default_rng(294)
    numbers = rng.uniform(0.1, 2, (2, 2, 128, 4 + 4 * DIM_TILES))
    numbers[..., :2] = rng.uniform(-9, 9, (2, 2, 32, 2)).repeat(4, axis=2)
    for half, thread in ((0, 0), (1, 4), (0, 8), (1, 8)):
        numbers[:, half, thread : thread + 4] = [-np.inf] * 2 + [0] * (2 + 4 * DIM_TILES)
    return {
        "in": pattern(numbers.astype(np.float32)),
        "out": np.full((2, 128, 4 + 4 * DIM_TILES), UNUSED, np.uint32),
    }


def _halves(arrays: Arrays) -> dict[str, Wanted]:
    numbers = arrays["in"].view(np.float32).astype(np.float64)
    sums = numbers[..., 2:4].reshape(2, 2, 32, 4, 2).sum(axis=3)
    numbers[..., 2:4] = sums.repeat(4, axis=2)
    numbers[1, 1, :, 2:4] = np.nan
    found = together(numbers)
    found[1, :, 2:4] = np.nan
    return {"out": close(found, 1e-5)}


# Q, and the rows of K and V -----------------------------------------------------------------------------------------


def _codes_inputs() -> dict[str, Array]:
    codes = np.random.default_rng(295).permutation(256).astype(np.uint8).reshape(32, 8)
    return {"q": codes, "halves": np.full((32, 8), 0xEEEE, np.uint16), "bf16s": np.full((32, 8), 0xEEEE, np.uint16)}


def _codes(arrays: Arrays) -> dict[str, Wanted]:
    with np.errstate(invalid="ignore"):
        q = arrays["q"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    q[np.arange(32) % 5 == 3] = 0
    return {
        "halves": Wanted(pattern(q.astype(np.float16)), Rule("f16", any_nan=True)),
        "bf16s": Wanted(pattern(q.astype(ml_dtypes.bfloat16)), Rule("bf16", any_nan=True)),
    }


STAGES: Final = 3


def _ring_inputs() -> dict[str, Array]:
    steps = np.random.default_rng(296).integers(0, STAGES + 1, (32, 8), np.uint32)
    steps[0] = STAGES
    return {"steps": steps, "out": np.full((32, 8, 2), UNUSED, np.uint32)}


def _ring(arrays: Arrays) -> dict[str, Wanted]:
    all_of = arrays["steps"].cumsum(axis=1)
    return {"out": exact(np.stack([all_of % STAGES, all_of // STAGES % 2], axis=-1).astype(np.uint32))}


COPIED, PLACES, NO_ROW = 128, 48, 0xFFFFFFFF


def _copies_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(297)
    rows = rng.permutation(40)[:32].astype(np.uint32)
    rows[[2, 7, 20, 31]] = NO_ROW
    return {
        "rows": rng.integers(1, 2**16, (40, COPIED), np.uint16),
        "from": rows,
        "wide": np.full(PLACES * COPIED // 2, UNUSED, np.uint32),
        "narrow": np.full(PLACES * COPIED // 4, UNUSED, np.uint32),
        "lanes": np.full(32, UNUSED, np.uint32),
    }


def grouped(rows: Array) -> Array:
    """Rows in groups of 8 whose every 64 dims are one pattern, swizzled over 128 bytes; eight elements stay together."""
    count, dims = rows.shape
    chunks = rows.reshape(count // 8, 8, dims // 64, 8, 8).transpose(0, 2, 1, 3, 4)
    found = np.empty_like(chunks)
    for row in range(8):
        for chunk in range(8):
            found[:, :, row, chunk ^ row] = chunks[:, :, row, chunk]
    return found


def _copies(arrays: Arrays) -> dict[str, Wanted]:
    rows = np.concatenate([arrays["rows"], np.zeros((1, COPIED), np.uint16)])
    own = rows[np.where(arrays["from"] == NO_ROW, len(rows) - 1, arrays["from"])]
    wide, narrow = (np.full((PLACES, dims), 0xEEEE, np.uint16) for dims in (COPIED, COPIED // 2))
    wide[8:40], narrow[40:] = own, own[:8, : COPIED // 2]
    return {
        "wide": exact(grouped(wide).reshape(-1).view(np.uint32)),
        "narrow": exact(grouped(narrow).reshape(-1).view(np.uint32)),
        "lanes": exact(arrays["from"][::-1].copy()),
    }


# Warpgroups ---------------------------------------------------------------------------------------------------------


def _registers_inputs() -> dict[str, Array]:
    return {"in": np.random.default_rng(292).integers(0, 2**30, 384, np.uint32), "out": np.zeros(384, np.uint32)}


def _registers(arrays: Arrays) -> dict[str, Wanted]:
    return {"out": exact(np.where(np.arange(384) < 256, 3 * arrays["in"], arrays["in"] + 1).astype(np.uint32))}


GROUPS: Final = 4


def _meetings_inputs() -> dict[str, Array]:
    """No thread, one or all vote; one counter is of more blocks, two were overwritten."""
    flags = np.zeros((3 * GROUPS, 2, 128), np.uint32)
    for n in range(3 * GROUPS):
        flags[n, n % 2, (37 * n) % 128] = n % 3
    flags[5] = 1
    return {
        "flags": flags,
        "votes": np.full((3 * GROUPS, 2, 128), UNUSED, np.uint32),
        "counters": np.array([IDLE, IDLE, IDLE + 7, 0], np.uint32),
        "blocks": np.array([3, 5, 3, 3], np.uint32),
        "times": np.zeros((GROUPS, 3), np.uint32),
    }


def _meetings(arrays: Arrays) -> dict[str, Wanted]:
    """Early, last or miscounted: a count begins anew after the last one."""
    counters, times = arrays["counters"].copy(), np.zeros((GROUPS, 3), np.uint32)
    for group, blocks in enumerate(arrays["blocks"].tolist()):
        for _ in range(3):
            before = (int(counters[group]) - IDLE) % 2**32
            times[group, 0 if before < blocks - 1 else 1 if before == blocks - 1 else 2] += 128
            counters[group] = IDLE if before == blocks - 1 else counters[group] + 1
    votes = np.broadcast_to(arrays["flags"].any(axis=2, keepdims=True), arrays["flags"].shape)
    return {"votes": exact(votes.astype(np.uint32)), "counters": exact(counters), "times": exact(times)}


WORKS, STAMP, WORK_BLOCKS = 41, 0xFFFFFFF0, 4
# How a group's counter is off: not at all, by a bit of either word, by works that nobody has had in one word.
OFF: Final = (0, 1, 1 << 40, 5)


def _works_inputs() -> dict[str, Array]:
    counters = np.zeros((len(OFF), 2), np.uint64)
    counters[:, 0] = [(STAMP << 32) ^ off for off in OFF]
    return {
        "workspaces": counters.view(np.uint32).copy(),
        "had": np.zeros((len(OFF), WORKS, 2), np.uint32),
    }


def _works(arrays: Arrays) -> dict[str, Wanted]:
    """Every work is had once by 3 warps. Where the counter was overwritten all but the first of each block are in doubt, and it
    stays so: as many ask as there are blocks."""
    found, had = arrays["workspaces"].view(np.uint64).copy(), np.zeros((len(OFF), WORKS, 2), np.uint32)
    had[0, :, 0] = 3
    had[1:, :WORK_BLOCKS, 0] = had[1:, WORK_BLOCKS:, 1] = 3
    found[1:, 0] += np.uint64(WORK_BLOCKS * (2**32 + 1) % 2**64)
    workspaces = found.view(np.uint32)
    workspaces[:, 2] = STAMP
    return {"workspaces": exact(workspaces), "had": exact(had)}


def probes() -> list[Probe]:
    """All of this module."""
    attending = [
        Probe(
            f"library_{way.kernel}",
            UNIT,
            way.kernel,
            partial(_inputs, way, 290 + n),
            partial(_wanted, way),
            128,
            shared=2 * (COLS * way.keys + TILE * (way.keys + way.values)),
        )
        for n, way in enumerate(WAYS)
    ]
    meetings = (3 * GROUPS, 1, 1)
    return [
        *attending,
        Probe("library_row_wgmma_merge", UNIT, "row_wgmma_merge", _merge_inputs, _merge, 128),
        Probe("library_row_wgmma_halves", UNIT, "row_wgmma_halves", _halves_inputs, _halves, 256, (2, 1, 1)),
        Probe("library_row_wgmma_codes", UNIT, "row_wgmma_codes", _codes_inputs, _codes, 32),
        Probe("library_row_wgmma_ring", UNIT, "row_wgmma_ring", _ring_inputs, _ring, 32),
        Probe("library_row_wgmma_copies", UNIT, "row_wgmma_copies", _copies_inputs, _copies, 32),
        Probe("library_row_wgmma_registers", UNIT, "row_wgmma_registers", _registers_inputs, _registers, 384),
        Probe(
            "library_row_wgmma_works",
            UNIT,
            "row_wgmma_works",
            _works_inputs,
            _works,
            96,
            (WORK_BLOCKS, len(OFF), 1),
            tail=[u32(STAMP), u32(WORKS)],
        ),
        Probe("library_row_wgmma_meetings", UNIT, "row_wgmma_meetings", _meetings_inputs, _meetings, 256, meetings),
    ]

"""Attention of a block over its columns and tiles of tokens in pages (kernels/row_tile.cu), in float64."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.attend_probes import (
    BF16,
    DIMS,
    E4M3,
    GROUP,
    HEAD,
    IN_PAGE,
    PAGE_ID,
    Way,
    _causal,
    _column,
    _inputs,
    _memory,
    _stage,
    _window,
)
from tests.golden_gpu.column_probes import UNUSED, close
from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.mma_probes import QUAD, ROW
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "row_tile"
COLS: Final = 32
# Request, first row, rows, tokens, first token and the one after the last one, first column. The second one leaves a warp without
# columns, in the fifth and the last one a page is not there.
TILES: Final = (
    (0, 0, 20, 53, 0, 53, 0),
    (0, 0, 20, 53, 0, 53, 32),
    (1, 20, 1, 40, 16, 33, 0),
    (2, 21, 5, 64, 32, 64, 0),
    (3, 26, 4, 30, 5, 30, 0),
    (0, 30, 4, 2, 0, 2, 0),  # more rows than tokens
    (3, 34, 2, 30, 18, 27, 0),
)
ROWS: Final = 36
WAYS: Final = (
    Way("rows_plain", BF16, 32, COLS, _causal),
    Way("rows_special", BF16, 32, COLS, partial(_window, 9)),
    Way("rows_tokens", E4M3, 32, COLS, _causal, "tokens"),
    Way("rows_groups", np.int8, 16, COLS, lambda position, token: True, "groups"),
    Way("rows_channels", np.int8, 32, COLS, partial(_window, 20), "channels"),
)


def _columns_of_warp(way: Way) -> int:
    return 32 if way.kernel == "rows_special" else 16


def _wanted(way: Way, arrays: Arrays) -> dict[str, Wanted]:
    memory, q = _memory(way, arrays), arrays["q"].view(BF16).astype(np.float64)
    shape = (len(TILES), COLS)
    top, total, out = np.zeros(shape), np.zeros(shape), np.zeros((*shape, DIMS))
    for n, (*own, first) in enumerate(TILES):
        row, rows, each = own[1], own[2], _columns_of_warp(way)
        for col in range(COLS):
            if first + col // each * each >= rows * GROUP:
                continue
            i, head = divmod(first + col, GROUP)
            mine = q[row + i, HEAD * GROUP + head] if i < rows else np.zeros(DIMS)
            top[n, col], total[n, col], out[n, col] = _column(way, memory, tuple(own), min(i, rows - 1), mine)
    errors = np.zeros(len(TILES), np.uint64)
    for n, first in ((4, 2 * IN_PAGE), (6, 2 * IN_PAGE + 2)):
        errors[n] = 2**64 - 1 - (first << 32 | 3 << 8 | PAGE_ID)
    return {
        "max": close(top, 1e-5, 1e-4),
        "sum": close(total, 2e-4),
        "out": close(out, 2.0**-8 if way.kind is BF16 else 2.0**-10),
        "failures": exact(np.array([0, 0, 0, 0, 1, 0, 1], np.uint32)),
        "errors": exact(errors),
    }


def _stages_inputs() -> dict[str, Array]:
    found = _inputs(WAYS[0], 259, TILES, ROWS)
    return {name: found[name] for name in ("keys", "values", "scales", "table", "chunks")} | {
        "out": np.full((len(TILES), 2, 32, DIMS // 2), UNUSED, np.uint32)
    }


def _stages(arrays: Arrays) -> dict[str, Wanted]:
    return {"out": exact(_stage(arrays, TILES, 32))}


# What these are made of ---------------------------------------------------------------------------------------------


def _queries_inputs() -> dict[str, Array]:
    q = np.random.default_rng(260).standard_normal((16, DIMS)).astype(BF16)
    return {"in": pattern(q), **{name: np.full((3, 32, 4), UNUSED, np.uint32) for name in ("read", "held", "shared")}}


def _queries(arrays: Arrays) -> dict[str, Wanted]:
    """A of m16n8k16, columns on M: register r has column g + r % 2 * 8, dims from r / 2 * 8 on."""
    q = np.zeros((16, 48), np.uint32)
    q[:, :DIMS] = arrays["in"]
    out = np.zeros((3, 32, 4), np.uint32)
    for step in range(3):
        for r in range(4):
            col, dim = ROW + r % 2 * 8, 16 * step + 2 * QUAD + r // 2 * 8
            out[step, :, r] = q[col, dim] | q[col, dim + 1] << 16
    return {name: exact(out) for name in ("read", "held", "shared")}


def _operands_inputs() -> dict[str, Array]:
    return {name: np.full((3, 32, 2, 2), UNUSED, np.uint32) for name in ("keys", "values")}


def _operands(_: Arrays) -> dict[str, Wanted]:
    """B of m16n8k16: register r has 8r + 2j and the next on K, g on N. V begins after 32 tokens of K; dims end at 40."""
    keys, values = np.zeros((3, 32, 2, 2), np.uint32), np.zeros((3, 32, 2, 2), np.uint32)
    for block in range(3):
        for half in range(2):
            for r in range(2):
                dim, at = 16 * block + 8 * r + 2 * QUAD, (16 + 8 * half + ROW) * DIMS
                keys[block, :, half, r] = np.where(dim < DIMS, at + dim | at + dim + 1 << 16, 0)
                dim, at = 16 * block + 8 * half + ROW, (32 + 16 + 8 * r + 2 * QUAD) * DIMS
                values[block, :, half, r] = np.where(dim < DIMS, at + dim | at + dim + DIMS << 16, 0)
    return {"keys": exact(keys), "values": exact(values)}


def _dims_inputs() -> dict[str, Array]:
    return {"heads": np.full(32, UNUSED, np.uint32), "dims": np.full((32, 6, 2), UNUSED, np.uint32)}


def _dims(_: Arrays) -> dict[str, Wanted]:
    """C of m16n8k16: element e of tile d is dim 2j + e of its 8; lanes of j = 0 store heads."""
    tile, element = np.ogrid[:6, :2]
    dims = 8 * tile + 2 * np.asarray(QUAD).reshape(32, 1, 1) + element
    return {"heads": exact((np.asarray(QUAD) == 0).astype(np.uint32)), "dims": exact(dims.astype(np.uint32))}


def _numbers_inputs() -> dict[str, Array]:
    return {
        "in": pattern(np.random.default_rng(261).standard_normal(32).astype(np.float32)),
        "largest": np.full(32, UNUSED, np.uint32),
        "factors": np.full((32, 3), UNUSED, np.uint32),
        "weights": np.full((32, 3), UNUSED, np.uint32),
        "rescaled": np.full((32, 6, 4), UNUSED, np.uint32),
    }


def _numbers(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32).astype(np.float64)
    rescaled = np.tile(np.arange(1.0, 25).reshape(6, 4), (32, 1, 1))
    rescaled[:, :, 2:] *= x[:, None, None]
    return {
        "largest": close(x.reshape(8, 4).max(axis=1)[ROW], 0.0, 1e-30),
        "factors": close(np.stack([9.0 + ROW, np.zeros(32), np.arange(32) + 0.5], axis=1), 0.0, 1e-30),
        "weights": close(np.stack([np.zeros(32), np.exp2(x / 4), np.exp2(x * (9 + ROW) - 3)], axis=1), 1e-5),
        "rescaled": close(rescaled, 1e-6),
    }


def _of_columns(lanes: Array) -> Array:
    """`[lane, element]` of a result, columns on M, as `[16, 8]`."""
    found = np.zeros((16, 8), lanes.dtype)
    for r in range(4):
        found[ROW + r // 2 * 8, 2 * QUAD + r % 2] = lanes[:, r]
    return found


def _seen_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(262)
    scores = np.where(rng.random((2, 4, 32, 4)) < 0.5, -np.inf, rng.standard_normal((2, 4, 32, 4)))
    return {"in": pattern(scores.astype(np.float32)), "out": np.full((2, 32), UNUSED, np.uint32)}


def _seen(arrays: Arrays) -> dict[str, Wanted]:
    """Bits 8t + 2r and the next: column g + r % 2 * 8, tokens 16t + 2j + r / 2 * 8 and the next, as weights are operands."""
    out = np.zeros((2, 32), np.uint32)
    for m in range(2):
        shown = np.concatenate([_of_columns(own) for own in arrays["in"].view(np.float32)[m]], axis=1) != -np.inf
        for bit in range(16):
            t, r, e = bit // 8, bit // 2 % 4, bit % 2
            out[m] |= shown[ROW + r % 2 * 8, 16 * t + 2 * QUAD + r // 2 * 8 + e].astype(np.uint32) << np.uint32(bit)
    return {"out": exact(out)}


def _stores_inputs() -> dict[str, Array]:
    results = np.random.default_rng(263).standard_normal((7, 32, 4)).astype(np.float32)
    results[0, :, :2] = results[0, ::4, :2][ROW]  # the lanes of a column agree about its maximum
    return {
        "in": pattern(results),
        "max": np.full(32, UNUSED, np.uint32),
        "sum": np.full(32, UNUSED, np.uint32),
        "out": np.full((32, DIMS), UNUSED, np.uint32),
    }


def _stores(arrays: Arrays) -> dict[str, Wanted]:
    results = arrays["in"].view(np.float32).astype(np.float64)
    top, total, out = np.zeros(32), np.zeros(32), np.zeros((32, DIMS))
    for h in range(2):
        top[16 + 8 * h :][:8] = results[0, ::4, h]
        total[16 + 8 * h :][:8] = results[0, :, 2 + h].reshape(8, 4).sum(axis=1)
    for d in range(DIMS // 8):
        out[16:, 8 * d : 8 * d + 8] = _of_columns(results[1 + d])
    return {"max": close(top, 0.0), "sum": close(total, 1e-6, 1e-6), "out": close(out * (1 + np.arange(DIMS)), 1e-6)}


def probes() -> list[Probe]:
    """All of this module."""
    attending = [
        Probe(
            f"library_{way.kernel}",
            UNIT,
            way.kernel,
            partial(_inputs, way, 250 + n, TILES, ROWS),
            partial(_wanted, way),
            32 * COLS // _columns_of_warp(way),
            (len(TILES), 1, 1),
        )
        for n, way in enumerate(WAYS)
    ]
    return [
        *attending,
        Probe("library_rows_stages", UNIT, "rows_stages", _stages_inputs, _stages, 64, (len(TILES), 1, 1)),
        Probe("library_rows_queries", UNIT, "rows_queries", _queries_inputs, _queries, 32),
        Probe("library_rows_operands", UNIT, "rows_operands", _operands_inputs, _operands, 32),
        Probe("library_rows_dims", UNIT, "rows_dims", _dims_inputs, _dims, 32),
        Probe("library_rows_numbers", UNIT, "rows_numbers", _numbers_inputs, _numbers, 32),
        Probe("library_rows_seen", UNIT, "rows_seen", _seen_inputs, _seen, 32),
        Probe("library_rows_stores", UNIT, "rows_stores", _stores_inputs, _stores, 32),
    ]

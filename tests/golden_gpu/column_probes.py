"""Columns of attention blocks, where their rows stand, and what becomes of their sums (kernels/columns.cu)."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "columns"
UNUSED: Final = np.uint32(0xC0FFEE00)
GROUP, COLUMNS = 3, 8
# The kv head, first column and rows of each block.
BLOCKS: Final = ((0, 0, 1), (2, 0, 3), (1, 8, 3), (3, 8, 5), (1, 24, 5))


def close(x: NDArray[Any], relative: float, absolute: float = 1e-30, kind: str = "f32") -> Wanted:
    """These float64 numbers, as floats that are off by no more than that."""
    with np.errstate(over="ignore"):
        bits = pattern(x.astype(np.float32 if kind == "f32" else ml_dtypes.bfloat16))
    number = np.where(np.isfinite(x), x, np.nan)[..., None]
    return Wanted(bits, Rule(kind, relative=relative, absolute=absolute, any_nan=True), number)


def _of_inputs() -> dict[str, Array]:
    return {"in": np.array(BLOCKS, np.uint32), "out": np.zeros((len(BLOCKS), COLUMNS, 6), np.uint32)}


def _of(_: Arrays) -> dict[str, Wanted]:
    """The row, the query head, and whether the chunk has the row; where it has none it is the last one. Then the same of a block
    that has two kv heads, where all live columns are neighbours."""
    out = np.zeros((len(BLOCKS), COLUMNS, 6), np.uint32)
    for block, (head, first, rows) in enumerate(BLOCKS):
        for col in range(COLUMNS):
            n, of_two = first + col, col // (rows * GROUP)
            out[block, col, :3] = min(n // GROUP, rows - 1), head * GROUP + n % GROUP, n // GROUP < rows
            out[block, col, 3:] = col // GROUP % rows, (head + of_two) * GROUP + col % GROUP, of_two < 2
    return {"out": exact(out)}


TOKENS, ROWS, WINDOW = 48, 6, 4
# Rows, tokens, first token and the one after the last one of chunks; with more rows than tokens, and of no tokens.
CHUNKS: Final = (
    (1, 33, 0, 33),
    (1, 33, 16, 32),
    (4, 33, 0, 33),
    (4, 33, 20, 33),
    (6, 40, 5, 31),
    (6, 40, 31, 40),
    (6, 6, 0, 6),
    (6, 3, 0, 3),
    (4, 1, 0, 1),
    (2, 0, 0, 0),
)


def _positions_inputs() -> dict[str, Array]:
    chunks = [[2 + n, 10 * n, rows, tokens, *rest, 0, 1, 0, 0, 0, 0] for n, (rows, tokens, *rest) in enumerate(CHUNKS)]
    return {
        "chunks": np.array(chunks, np.uint32),
        "see": np.zeros((len(CHUNKS), TOKENS, 3), np.uint32),
        "rows": np.full((len(CHUNKS), ROWS, 16), UNUSED, np.uint32),
    }


def _sees(mask: int, position: int, token: int, tokens: int) -> bool:
    """Of causal, window and full masks: whether a row at this position sees the token."""
    if token >= tokens:
        return False
    if mask == 2:
        return True
    return position >= 0 and token <= position and (mask == 0 or token > position - WINDOW)


def _positions(arrays: Arrays) -> dict[str, Wanted]:
    see, numbers = np.zeros_like(arrays["see"]), arrays["rows"].copy()
    for n, (rows, tokens, begin, end) in enumerate(CHUNKS):
        at = [tokens - rows + i for i in range(rows)]
        for mask in range(3):
            found = [
                [begin <= token < end and _sees(mask, position, token, tokens) for token in range(TOKENS + 16)]
                for position in at
            ]
            for token in range(TOKENS):
                word = sum(row[token] << i for i, row in enumerate(found))
                for bit, count in ((8, 1), (9, 3), (10, 16)):
                    word |= all(all(row[token : token + count]) for row in found) << bit
                see[n, token, mask] = word
        for i, position in enumerate(at):
            wrapped, clamped = position % 2**32, max(position, 0)
            numbers[n, i] = [
                position < 0,
                wrapped,
                *(2 + n, 10 * n + i, 5 + i, i, wrapped, 3 * i, tokens),
                *(2 + n, 10 * n + i, 5 + i, i, clamped, 3 * i + 1, tokens),
            ]
    return {"see": exact(see), "rows": exact(numbers)}


def _sums_inputs() -> dict[str, Array]:
    """Maximum, sum, four sums of V, the sink, and whether the request failed; a sum of 0: of no token."""
    rng = np.random.default_rng(230)
    x = rng.normal(0, 3, (64, 8)).astype(np.float32)
    x[:, 1], x[:, 7] = np.exp2(rng.uniform(-2, 9, 64)), 0
    x[:4, 1], x[[2, 5], 7] = 0, 1
    x[6, 6], x[7, 6], x[8, 6] = -np.inf, 60, -60
    empty, twice = np.zeros((64, 2), np.uint32), np.zeros((64, 8), np.uint32)
    return {
        "in": pattern(x),
        "lse": twice,
        "with": twice.copy(),
        "wide": np.zeros((64, 4), np.uint32),
        "narrow": np.zeros((64, 4), np.uint16),
        "empty": empty,
    }


def _sums(arrays: Arrays) -> dict[str, Wanted]:
    lse, with_sink, empty = np.zeros((64, 8)), np.zeros((64, 8)), np.zeros((64, 2), np.uint32)
    wide = np.zeros((64, 4))
    for i, own in enumerate(arrays["in"].view(np.float32).astype(np.float64)):
        none, failed = own[1] == 0, own[7] != 0
        top, total, out = (-np.inf, 0.0, np.zeros(4)) if none else (own[0], own[1], own[2:6])
        nobody = bool(none and not failed)
        sink = own[6] * np.log2(np.e)

        def logs(top: float, total: float, failed: bool = failed, nobody: bool = nobody) -> list[float]:
            base2 = np.nan if failed else -np.inf if nobody else top + np.log2(total)
            return [base2, base2 * np.log(2), -3 if nobody else base2, 7 if nobody else base2 * np.log(2)]

        wide[i] = np.nan if failed else 0 if none else out / total
        higher = top if nobody else max(top, sink)
        shrink = 0.0 if np.isneginf(top) else np.exp2(top - higher)
        all_sum = 0.0 if nobody else total * shrink + np.exp2(sink - higher)
        lse[i] = logs(top, total if total else 1.0) + logs(higher, all_sum if all_sum else 1.0)
        with_sink[i] = [higher, all_sum, *(out * shrink), failed, 0]
        empty[i] = nobody
    return {
        "lse": close(lse, 2e-6, 4e-6),
        "with": close(with_sink, 1e-5),
        "wide": close(wide, 1e-6),
        "narrow": close(2 * wide, 2.0**-8, kind="bf16"),
        "empty": exact(empty),
    }


def _scales_inputs() -> dict[str, Array]:
    """Zero, a subnormal number, infinity and a negative one among them."""
    x = np.random.default_rng(231).normal(0, 3, 32).astype(np.float32)
    x[:4] = [0, 1e-40, np.inf, -1]
    return {"in": pattern(x), "out": np.full((32, 2), UNUSED, np.uint32)}


def _scales(arrays: Arrays) -> dict[str, Wanted]:
    """Each is the factor as it is, but NaN where it is no scale."""
    x = arrays["in"].view(np.float32)
    factor = np.where(np.isfinite(x) & (x > 0), x, np.float32(np.nan))
    return {"out": Wanted(pattern(np.stack([factor, np.ones(32, np.float32)], axis=1)), Rule("f32", any_nan=True))}


def _unclaimed_inputs() -> dict[str, Array]:
    return {
        "out": np.full((4, 3, 40), UNUSED, np.uint32),
        "lse": np.full((4, 3), UNUSED, np.uint32),
        "times": np.zeros((4, 3, 10), np.uint32),
    }


def _unclaimed(_: Arrays) -> dict[str, Wanted]:
    """Zeros, once, as of no tokens; of orphans, the fourth kind, no numbers."""
    out, lse = np.zeros((4, 3, 40), np.float32), np.full((4, 3), -np.inf, np.float32)
    out[3] = lse[3] = np.nan
    rule = Rule("f32", any_nan=True)
    return {
        "out": Wanted(pattern(out), rule),
        "lse": Wanted(pattern(lse), rule),
        "times": exact(np.ones((4, 3, 10), np.uint32)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    blocks, chunks = (len(BLOCKS), 1, 1), (len(CHUNKS), 1, 1)
    return [
        Probe("library_columns_of", UNIT, "columns_of", _of_inputs, _of, COLUMNS, blocks),
        Probe("library_columns_positions", UNIT, "columns_positions", _positions_inputs, _positions, TOKENS, chunks),
        Probe("library_columns_sums", UNIT, "columns_sums", _sums_inputs, _sums, 64),
        Probe("library_columns_scales", UNIT, "columns_scales", _scales_inputs, _scales, 32),
        Probe("library_columns_unclaimed", UNIT, "columns_unclaimed", _unclaimed_inputs, _unclaimed, 64, (4, 1, 1)),
    ]

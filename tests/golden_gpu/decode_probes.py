"""Tiles of K and V on their way into shared memory, and their scales (kernels/ring.cu, tile_scales.cu)."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Arrays, Probe, pattern

FILLED: Final = np.uint8(0xEE)


# Tiles --------------------------------------------------------------------------------------------------------------

BLOCK, MOST_CHUNKS, MOST_BYTES, COPY_ROWS = 128, 32 * 16, 32 * 272, 32
# Bytes of a row and of an access, pitch, tokens, threads.
SHAPES: Final = (
    (8, 4, 16, 32, 32),
    (8, 8, 16, 16, 32),
    (20, 4, 48, 32, 64),
    (32, 4, 48, 16, 32),
    (40, 8, 48, 16, 32),
    (64, 8, 80, 32, 64),
    (80, 16, 80, 32, 128),
    (96, 16, 112, 8, 32),
    (128, 16, 144, 32, 32),
    (144, 16, 144, 16, 64),
    (160, 16, 176, 32, 32),
    (256, 16, 272, 32, 128),
    (256, 16, 272, 8, 128),
)


def _copies_inputs() -> dict[str, Array]:
    rows = np.random.default_rng(180).permutation(600)[:COPY_ROWS].astype(np.int32)
    rows[[1, 7, 30]] = -1
    return {
        "in": random_bytes(3 * 256 * 32, 181),
        "rows": rows,
        "times": np.zeros((len(SHAPES), MOST_CHUNKS), np.uint32),
        "out": np.zeros((len(SHAPES), 4, MOST_BYTES), np.uint8).view(np.uint32),
    }


def _copies(arrays: Arrays) -> dict[str, Wanted]:
    """Every chunk of every row once, whoever copies it."""
    times = np.zeros_like(arrays["times"])
    out = np.zeros((len(SHAPES), 4, MOST_BYTES), np.uint8)
    source = arrays["in"]
    for shape, (size, access, pitch, tokens, _) in enumerate(SHAPES):
        times[shape, : tokens * size // access] = 1
        first = [3 * size * row for row in range(tokens)]
        ways: tuple[list[int | None], ...] = (
            [*first],
            [at - 9 * size if 3 <= row < tokens - 2 else None for row, at in enumerate(first)],
            [at if row >= 1 else None for row, at in enumerate(first)],
            [int(row) * access if row >= 0 else None for row in arrays["rows"][:tokens]],
        )
        for way, begins in enumerate(ways):
            tile = np.full((tokens, pitch), FILLED)
            for row, at in enumerate(begins):
                tile[row, :size] = 0 if at is None else source[at : at + size]
            out[shape, way, : tile.size] = tile.reshape(-1)
    return {"times": exact(times), "out": exact(out.view(np.uint32))}


def _accesses_inputs() -> dict[str, Array]:
    return {
        "in": random_bytes(32 * 16, 182),
        "out": np.zeros((6, 32, 4), np.uint32),
        "numbers": np.zeros(32, np.uint32),
    }


def _accesses(arrays: Arrays) -> dict[str, Wanted]:
    out = np.full((6, 32, 16), FILLED)
    for i in range(6):
        size = (4, 8, 16)[i % 3]
        out[i, :, :size] = arrays["in"].reshape(32, 16)[:, :size]
        if i >= 3:
            out[i, 1::2, :size] = 0
    # As a machine with the most shared memory.
    return {"out": exact(out.view(np.uint32)), "numbers": exact(np.arange(100, 132, dtype=np.uint32))}


def _teams_inputs() -> dict[str, Array]:
    return {
        "in": random_bytes(4 * 192, 185).view(np.uint32),
        "cleared": np.zeros(108, np.uint32),
        "out": np.zeros(192, np.uint32),
    }


def _teams(arrays: Arrays) -> dict[str, Wanted]:
    """100 words are zeros, four on both sides are not; teams go round 5, 8 and 11 times."""
    cleared = np.full(108, 0xEEEEEEEE, np.uint32)
    cleared[4:104] = 0
    teams: list[Array] = []
    for team in range(3):
        sums: Array = arrays["in"][64 * team : 64 * (team + 1)]
        for _ in range(5 + 3 * team):
            sums = 3 * sums + np.roll(sums, -1)
        teams.append(sums)
    return {"cleared": exact(cleared), "out": exact(np.concatenate(teams))}


# Scales of tiles ----------------------------------------------------------------------------------------------------

TILE, HEADS, HEAD, DIMS, LINES = 16, 2, 1, 40, 8
# Array, heads and dims of a scale, zero points, use: the blocks of tile_scales.cu.
HELD: Final = (
    ("f32s", 1, 40, False, "token"),
    ("halves", 2, 40, False, "token"),
    ("halves", 1, 10, False, "key"),
    ("halves", 1, 10, False, "value"),
    ("halves", 1, 10, True, "key"),
    ("halves", 1, 10, True, "value"),
    ("eighths", 1, 20, False, "key"),
    ("eighths", 1, 20, False, "value"),
    ("halves", 2, 40, True, "key"),
    ("halves", 1, 16, False, "key"),
    ("halves", 1, 16, True, "value"),
    # Three of these begin some scales on; the fourth is loaded wherever it lies.
    ("halves", 2, 40, False, "token"),
    ("eighths", 1, 20, False, "value"),
    ("halves", 1, 10, True, "key"),
    ("halves", 1, 10, False, "key"),
    # Both heads together, the last of them pages that begin no word.
    ("f32s", 1, 40, False, "token"),
    ("halves", 1, 40, False, "token"),
    ("halves", 1, 10, True, "key"),
    ("eighths", 1, 20, False, "value"),
    ("eighths", 1, 20, False, "value"),
    ("halves", 1, 20, True, "zeros"),
    ("halves", 1, 20, True, "zeros"),
)
SHIFTED: Final = {11: 1, 12: 1, 13: 4, 19: 2}
HIDDEN: Final = slice(5, 8)  # tokens whose scales are zeros


def _held_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(183)
    halves = np.exp2(rng.uniform(-6, 3, 260)).astype(np.float16)
    halves[1::2] = np.where(rng.random(130) < 0.7, rng.integers(0, 256, 130), halves[1::2])
    halves[[40, 66, 131]] = [0, 2.0**-24, np.inf]
    eighths = np.exp2(rng.uniform(-8, 8, 66)).astype(ml_dtypes.float8_e4m3fn)
    codes = rng.integers(-15, 16, (LINES, TILE, 2)).astype(np.float16)
    codes[0, :3] = [[0, 6 / 2**14], [2.0**-15, -(2.0**-14)], [np.nan, 300]]
    return {
        "f32s": pattern(rng.standard_normal(32).astype(np.float32)),
        "halves": pattern(halves),
        "eighths": pattern(eighths),
        "codes": codes.view(np.uint32).reshape(LINES, TILE),
        "out": np.zeros((len(HELD), LINES * TILE * 3), np.uint32),
    }


def _held(arrays: Arrays) -> dict[str, Wanted]:
    kinds: dict[str, Any] = {"f32s": np.float32, "halves": np.float16, "eighths": ml_dtypes.float8_e4m3fn}
    codes = arrays["codes"].view(np.float16).reshape(LINES, TILE, 2).astype(np.float64)
    out = np.zeros((len(HELD), LINES * TILE * 3), np.uint32)
    for i, (name, heads, dims, zeros, use) in enumerate(HELD):
        groups, each = -(-DIMS // dims), 1 + zeros
        shape = (TILE, HEADS // heads, groups, each)
        size = int(np.prod(shape))
        mine = (
            arrays[name][SHIFTED.get(i, 0) :][:size]
            .view(kinds[name])
            .astype(np.float32)
            .reshape(shape)[:, HEAD // heads]
            .copy()
        )
        mine[HIDDEN] = 0
        if use == "token":
            out[i, :32] = np.tile(pattern(mine[:, 0, 0]), 2)
            continue
        if use == "zeros":
            out[i, : 2 * groups * TILE] = pattern(np.ascontiguousarray(mine.transpose(2, 1, 0))).reshape(-1)
            continue
        lines = np.zeros((2, groups, TILE), np.float16)
        lines[0] = mine[..., 0].T
        if zeros:
            with np.errstate(invalid="ignore", over="ignore"):
                lines[1] = -mine[..., 1].T
        to = out[i, : groups * TILE * 3].reshape(groups, TILE, 3)
        for token in range(0, TILE, 1 if use == "key" else 2):
            pairs = lines[:, :, [token, token if use == "key" else token + 1]]
            to[:, token, :2] = np.ascontiguousarray(pairs).view(np.uint32)[..., 0].T
            with np.errstate(invalid="ignore", over="ignore"):
                moved = codes[:groups, token]
                if zeros:  # (code - zero) * scale, each rounded to f16
                    moved = (moved + pairs[1].astype(np.float64)).astype(np.float16).astype(np.float64)
                values = moved * pairs[0].astype(np.float64)
                to[:, token, 2] = np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)[:, 0]
    rules = tuple(Rule("f32") if use in ("token", "zeros") else Rule("f16", 2, any_nan=True) for *_, use in HELD)
    return {"out": Wanted(out, rules)}


def _halves_inputs() -> dict[str, Array]:
    x = (np.random.default_rng(184).integers(-300, 301, 64) / 8).astype(np.float16)
    x[[6, 17, 40, 43]] = [2.0**-20, 60000, np.nan, -np.inf]
    x.view(np.uint16)[[50, 53]] = [0x7F80, 0xFFC1]  # infinity and no number as bf16
    return {"in": x.view(np.uint32), **{name: np.zeros(32, np.uint32) for name in ("products", "sums", "special")}}


def _halves(arrays: Arrays) -> dict[str, Wanted]:
    x, i, rule = (
        arrays["in"].view(np.float16).astype(np.float64).reshape(32, 2),
        np.arange(32),
        Rule("f16", 2, any_nan=True),
    )
    with np.errstate(over="ignore"):
        found = {"products": x * x[i ^ 1], "sums": x * x[i ^ 1] + x[i ^ 2]}
        wanted = {name: Wanted(values.astype(np.float16).view(np.uint32)[:, 0], rule) for name, values in found.items()}
    kinds = (np.float16, ml_dtypes.bfloat16)
    special = [(~np.isfinite(arrays["in"].view(kind).astype(np.float32))).reshape(32, 2).any(1) for kind in kinds]
    return wanted | {"special": exact((special[0] + 2 * special[1]).astype(np.uint32))}


def _bytes_inputs() -> dict[str, Array]:
    """Every finite e4m3, as scales of the groups of heads of tokens."""
    scales = np.arange(128, dtype=np.uint8) % 127 + 128 * (np.arange(128) % 5 == 0)
    return {"scales": scales.astype(np.uint8), "out": np.zeros((2, TILE, 2), np.uint32)}


def _bytes(arrays: Arrays) -> dict[str, Wanted]:
    found = arrays["scales"].view(ml_dtypes.float8_e4m3fn).astype(np.float16).reshape(TILE, 2, 4).transpose(1, 0, 2)
    return {"out": exact(np.ascontiguousarray(found).view(np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    shapes, held = (len(SHAPES), 1, 1), (len(HELD), 1, 1)
    return [
        Probe("library_ring_copies", "ring", "ring_copies", _copies_inputs, _copies, BLOCK, shapes, MOST_BYTES),
        Probe("library_ring_accesses", "ring", "ring_accesses", _accesses_inputs, _accesses, 32),
        Probe("library_ring_teams", "ring", "ring_teams", _teams_inputs, _teams, 192),
        Probe("library_scales_of_tiles", "tile_scales", "tile_scales_held", _held_inputs, _held, 32, held),
        Probe("library_scales_halves", "tile_scales", "tile_scales_halves", _halves_inputs, _halves, 32),
        Probe("library_scales_bytes", "tile_scales", "tile_scales_bytes", _bytes_inputs, _bytes, 32),
    ]

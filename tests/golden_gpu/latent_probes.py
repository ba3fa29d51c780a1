"""What attention over latent rows is made of (kernels/latent.cu). Sums are of whole numbers, exact in whatever order."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.mma_probes import QUAD, ROW
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "latent"
# 16-byte chunks of a row: of each block of latent_copies.
CHUNKS: Final = (8, 8, 9, 5, 1, 1, 3)
THREADS, TOKENS = 64, 32
COLUMNS: Final = {2: None, 8: ml_dtypes.bfloat16, 16: np.float16, 64: np.float16}


def _copies_inputs() -> dict[str, Array]:
    rows = np.random.default_rng(200).permutation(100)[:16].astype(np.int32)
    rows[[0, 6, 15]] = -1
    return {
        "in": random_bytes(16 * 110, 201),
        "rows": rows,
        "out": np.zeros((len(CHUNKS), 16 * 144 // 4), np.uint32),
    }


def _copies(arrays: Arrays) -> dict[str, Wanted]:
    out = np.full((len(CHUNKS), 16, 144), 0xEE, np.uint8)
    for i, chunks in enumerate(CHUNKS):
        for t, row in enumerate(arrays["rows"].tolist()):
            out[i, t, : 16 * chunks] = arrays["in"][16 * row :][: 16 * chunks] if row >= 0 else 0
    return {"out": exact(out.view(np.uint32).reshape(len(CHUNKS), -1))}


def _columns_inputs(cols: int) -> dict[str, Array]:
    scores = np.random.default_rng(202).integers(-60, 61, (2, cols, TOKENS + 4)).astype(np.float32)
    found = {
        "in": pattern(scores),
        "places": np.zeros((cols, TOKENS), np.uint32),
        "sums": np.zeros(cols * (TOKENS + 2), np.uint32),
    }
    if COLUMNS[cols] is None:
        return found
    return found | {"weights": np.zeros((cols, TOKENS), np.uint16), "operands": np.zeros(cols * TOKENS // 2, np.uint32)}


def _operands(weights: Array) -> Array:
    """Registers `[16 tokens, 8 columns, half, lane]` of weights `[column, token]`: two neighbouring tokens of a column."""
    pairs = np.ascontiguousarray(weights).view(np.uint32)
    tiles, tokens = pairs.shape[0] // 8, pairs.shape[1] // 8
    found = [
        pairs[8 * n + ROW, 8 * k + 4 * half + QUAD] for k in range(tokens) for n in range(tiles) for half in range(2)
    ]
    return np.stack(found).reshape(-1)


def _columns(cols: int, arrays: Arrays) -> dict[str, Wanted]:
    """Threads of a column side by side where they are eight or more, else as far apart as a warp has columns; four
    neighbouring tokens a thread, if it has so many."""
    members, of_warp = THREADS // cols, 32 * cols // THREADS
    together = min(TOKENS // members, 4)
    col, token = np.ogrid[:cols, :TOKENS]
    member, number = token // together % members, token // together // members * together + token % together
    lane = member + col % of_warp * members if members >= 8 else member * of_warp + col % of_warp
    thread = col // of_warp * 32 + lane
    sums = arrays["in"].view(np.float32).sum(axis=0)[:, :TOKENS]
    flat = np.concatenate([sums.reshape(-1), np.maximum(sums.max(axis=1), 0), sums.sum(axis=1)])
    found = {"places": exact((1 + thread << 16 | member << 8 | number).astype(np.uint32)), "sums": exact(pattern(flat))}
    kind: Any = COLUMNS[cols]
    if kind is not None:
        weights = sums.astype(kind).view(np.uint16)
        found |= {"weights": exact(weights), "operands": exact(_operands(weights))}
    return found


def _weights_inputs() -> dict[str, Array]:
    return {
        "in": pattern(np.random.default_rng(203).standard_normal((32, 64)).astype(np.float32)),
        "weights": np.zeros((32, 64), np.uint16),
        "operands": np.zeros(4 * 8 * 32, np.uint32),
    }


def _weights(arrays: Arrays) -> dict[str, Wanted]:
    weights = arrays["in"].view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return {"weights": exact(weights), "operands": exact(_operands(weights))}


def _words_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(204)
    halves, rows = (rng.integers(-300, 301, 64) / 8).astype(np.float16), rng.standard_normal(64).astype(np.float32)
    halves[[6, 17, 40]], rows[33] = [2.0**-20, 60000, np.nan], -9
    scales = np.exp2(rng.uniform(-12, 12, (8, 32))).astype(np.float32)
    scales[:, :8] = 0
    scales[:, 1], scales[:, 2] = [2.0**-140, 1e-37, 1, 1, 2, 3.5, 4, 1e36], [-1, np.nan, np.inf, 1e37, 1, 0.5, 1.99, 2]
    scales[3, 3], scales[7, 4] = 2.0**-149, 1.9999999
    return {
        "halves": halves.view(np.uint32),
        "rows": pattern(rows),
        "scales": pattern(scales),
        "products": np.zeros(32, np.uint32),
        "largest": np.zeros(32, np.uint32),
        "units": np.zeros((8, 32, 4), np.uint32),
    }


def _words(arrays: Arrays) -> dict[str, Wanted]:
    halves, i = arrays["halves"].view(np.float16).astype(np.float64).reshape(32, 2), np.arange(32)
    with np.errstate(over="ignore"):
        products = (halves * halves[i ^ 1]).astype(np.float16).view(np.uint32)[:, 0]
    rows = np.abs(arrays["rows"].view(np.float32)).reshape(2, 8, 4).max(axis=(0, 1))
    units = np.zeros((8, 32, 4))
    for lane in range(32):
        value = inverse = 0.0
        for n, scale in enumerate(arrays["scales"].view(np.float32)[:, lane].astype(float).tolist()):
            below, by = 0 < scale < float(np.float32(1e37)) and scale >= value, -1.0
            if below:
                before, started = value, inverse > 0
                value = max(2.0 ** np.frexp(scale)[1], 2.0**-126)  # above the scale, and a normal number
                inverse = 1 / value
                by = before * inverse if started else 1.0
            units[n, lane] = value, inverse, by, below
    return {
        "products": Wanted(products, Rule("f16", 2, any_nan=True)),
        "largest": floats(rows[i % 4]),
        "units": floats(units.astype(np.float32)),
    }


CLEARED: Final[dict[str, tuple[Any, int]]] = {
    "eighths": (np.uint8, 0x7F),
    "halves": (np.uint16, 0x7C00),
    "brains": (np.uint16, 0x7F80),
    "floats": (np.uint32, 0x7F800000),
}


def _clear_inputs() -> dict[str, Array]:
    rng, found = np.random.default_rng(205), {}
    for name, (kind, special) in CLEARED.items():
        count = 256 + 16 if name == "eighths" else 80 if kind is np.uint16 else 40
        words = (
            np.arange(count).astype(kind)
            if name == "eighths"
            else rng.integers(0, np.iinfo(kind).max, count).astype(kind)
        )
        words[3::5] |= kind(special)
        words[-2] = special
        found[name] = words.view(np.uint32)
    return found | {f"{name}_to": np.zeros_like(own) for name, own in found.items()}


def _clear(arrays: Arrays) -> dict[str, Wanted]:
    found = {}
    for name, (kind, special) in CLEARED.items():
        words = arrays[name].view(kind).copy()
        live = words[: -16 // words.itemsize]
        live[live & kind(special) == special] = 0
        found[f"{name}_to"] = exact(words.view(np.uint32))
    return found


def probes() -> list[Probe]:
    """All of this module."""
    blocks = (len(CHUNKS), 1, 1)
    return [
        Probe("library_latent_copies", UNIT, "latent_copies", _copies_inputs, _copies, 64, blocks),
        *(
            Probe(
                f"library_latent_columns_{n}",
                UNIT,
                f"latent_columns_{n}",
                partial(_columns_inputs, n),
                partial(_columns, n),
                THREADS,
            )
            for n in COLUMNS
        ),
        Probe("library_latent_weights", UNIT, "latent_weights", _weights_inputs, _weights, 1024),
        Probe("library_latent_words", UNIT, "latent_words", _words_inputs, _words, 32),
        Probe("library_latent_clear", UNIT, "latent_clear", _clear_inputs, _clear, 32),
    ]

"""Runs of dims (kernels/segment.cu): stored and read back under every recipe, special blocks and partial ones among them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import DTYPES, Array
from tests.golden_gpu.oracle import PACKED, floats, quant
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.golden_gpu.quantize_probes import GLOBAL, SPECIAL

BF16: Final = ml_dtypes.bfloat16
PAGES, TOKENS, HEADS, DIMS, WAITING = 2, 8, 2, 40, 4
SEALED: Final = (5, 0)


@dataclass(frozen=True)
class Run:
    """As the aliases of segment.cu say: element type, scale type (None: no scales), recipe, zero points, heads and dims
    of a scale, whether the newest tokens wait in a tail.
    """

    dtype: str
    kind: str | None
    recipe: str = "amax"
    zero: bool = False
    heads: int = 1
    dims: int = 16
    waiting: bool = False

    @property
    def plain(self) -> bool:
        return self.dtype in ("f16", "bf16")

    @property
    def spec(self) -> str:
        """The spec's name of the dtype: unsigned codes are those of a zero point."""
        return {"u8": "i8", "u4": "i4"}.get(self.dtype, self.dtype)

    @property
    def scale_row(self) -> int:
        """Places of scales of a token."""
        return HEADS // self.heads * -(-DIMS // self.dims) * (1 + self.zero)

    def blocks(self) -> Iterator[tuple[tuple[slice, ...], int]]:
        """Heads and dims of each block of a token, and the place of its scale."""
        place = 0
        for head in range(0, HEADS, self.heads):
            for dim in range(0, DIMS, self.dims):
                yield (slice(None), slice(head, head + self.heads), slice(dim, dim + self.dims)), place
                place += 1 + self.zero


RUNS: Final = {
    "segment_e4m3": Run("e4m3", "f32"),
    "segment_e5m2_pow2": Run("e5m2", "f32", "pow2", heads=2, dims=8),
    "segment_i8": Run("i8", "f16"),
    "segment_u8": Run("u8", "f16", zero=True),
    "segment_u4": Run("u4", "bf16", zero=True),
    "segment_i4": Run("i4", "e4m3", heads=2, dims=8),
    "segment_nvfp4_max": Run("e2m1", "e4m3", "max"),
    "segment_nvfp4_global": Run("e2m1", "e4m3", "global"),
    "segment_waiting": Run("u8", "f16", zero=True, waiting=True),
    "segment_given_e4m3": Run("e4m3", "f32", "given", dims=4),
    "segment_given_i4": Run("i4", "f32", "given", dims=4),
    "segment_given_i8": Run("i8", "f32", "given", dims=1),
    "segment_cast": Run("e5m2", None),
    "segment_f16": Run("f16", None),
    "segment_bf16": Run("bf16", None),
}
KINDS: Final = {**DTYPES, "e4m3": ml_dtypes.float8_e4m3fn}


def _inputs(run: Run) -> dict[str, Array]:
    rng = np.random.default_rng(97)
    x = rng.standard_normal((PAGES * TOKENS, HEADS, DIMS)) * np.exp2(rng.integers(-6, 7, (PAGES * TOKENS, HEADS, 1)))
    x = x.astype(BF16).astype(np.float32) if run.kind is None or run.recipe == "given" else x.astype(np.float32)
    if not run.plain and run.recipe != "given":
        for i, block in enumerate(SPECIAL[:22]):  # whole and partial blocks of every division
            x[i % 11, i // 11, (0, 16, 32)[i % 3] :][:8] = block
            x[i % 11, i // 11, 8:16] = block if i % 2 else x[i % 11, i // 11, 8:16]
    count, size = x.size, DTYPES[run.dtype].itemsize if run.plain else 1
    memory = count * size // (2 if run.dtype in PACKED else 1)
    kind = KINDS[run.kind or "f32"]
    places = PAGES * TOKENS * run.scale_row if run.kind else 1
    scales = np.zeros(places, kind)
    if run.recipe == "given":
        scales[:] = np.exp2(rng.uniform(-8, 2, places)).astype(kind)
        scales[5::9] = 0
    tail = rng.standard_normal((WAITING, HEADS, DIMS)).astype(BF16)
    found: dict[str, Array] = {"in": pattern(x), "tail": pattern(tail), "scales": pattern(scales)}
    found |= {"codes": np.zeros(memory, np.uint8), "copy": np.zeros(memory, np.uint8)}
    found |= {
        "out": np.zeros(count, np.uint32),
        "ones": np.zeros(count, np.uint32),
        "halves": np.zeros(count, np.uint16),
    }
    return found | {"found": np.zeros(count // 8, pattern(scales).dtype)}


def stored(run: Run, x: Array, scales: Array) -> tuple[Array, Array, Array]:
    """Codes a value, values in f32 and in bf16; `scales` `[token, place]` are chosen, or used where given."""
    codes, values, halves = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32), np.zeros(x.shape, BF16)
    given, level = run.recipe == "given", GLOBAL if run.recipe == "global" else None
    for block, place in run.blocks():
        mine = x[block].reshape(len(x), -1)
        scale, zero = None, None
        if given:
            scale = np.where(scales[:, place] > 0, scales[:, place], np.array(np.nan, scales.dtype))
        elif run.kind is not None:
            scale, zero = quant.choose(mine, run.spec, run.kind, run.recipe, run.zero, level)
            scales[:, place] = scale
            if zero is not None:
                scales[:, place + 1] = zero
        recipe = "amax" if given else run.recipe
        some = quant.quantize(mine, scale, zero, run.spec, recipe, level)
        codes[block] = some.reshape(x[block].shape)
        for out, kind in ((values, "f32"), (halves, "bf16")):
            out[block] = quant.dequantize(some, scale, zero, run.spec, recipe, kind, level).reshape(x[block].shape)
    return codes, values, halves


def _wanted(run: Run, arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32).reshape(PAGES * TOKENS, HEADS, DIMS)
    kind = KINDS[run.kind or "f32"]
    if run.plain:
        memory = x.astype(KINDS[run.dtype])
        raw, values = pattern(memory).view(np.uint8), memory.astype(np.float32)
        with np.errstate(over="ignore"):
            halves = values.astype(BF16)
        scales = np.zeros((1, 1), kind)
    else:
        scales = arrays["scales"].view(kind).copy().reshape(PAGES * TOKENS if run.kind else 1, -1)
        codes, values, halves = stored(run, x, scales)
        raw = (quant.pack_nibbles(codes) if run.dtype in PACKED else codes).reshape(-1)
    if run.waiting:
        tail = arrays["tail"].view(BF16).reshape(WAITING, HEADS, DIMS)
        for token in range(PAGES * TOKENS):
            if token % TOKENS >= SEALED[token // TOKENS]:
                values[token], halves[token] = tail[token % WAITING], tail[token % WAITING]
    found = {"codes": exact(raw.reshape(-1)), "copy": exact(raw.reshape(-1))}
    found |= {
        "out": floats(values.reshape(-1)),
        "ones": floats(values.reshape(-1)),
        "halves": floats(halves.reshape(-1), "bf16"),
    }
    if run.kind is None:
        return found
    first = np.zeros((PAGES * TOKENS, HEADS, DIMS), kind)
    for block, place in run.blocks():
        given = scales[:, place, None, None]
        first[block] = given if run.recipe != "given" else np.where(given > 0, given, np.array(np.nan, kind))
    found["found"] = floats(first.reshape(-1)[::8], run.kind)
    if run.recipe != "given":
        found["scales"] = floats(scales.reshape(-1), run.kind)
    return found


def _pad_inputs() -> dict[str, Array]:
    return {"scales": np.full((TOKENS, 4), 0x77, np.uint8)}


def _pad(arrays: Arrays) -> dict[str, Wanted]:
    found = arrays["scales"].copy()
    found[:, 3] = 0
    return {"scales": exact(found)}


# Layers of four scales, of which the first is none in some.
LAYERS = np.array(
    [[0, 1, 2, 3], [1, 2, 3, 4], [1, -1, 0, 1], [1, 1, np.nan, 1], [1, 1, 1, np.inf], [1e-30, 1, 1, 1]], np.float32
)


def _scales_inputs() -> dict[str, Array]:
    return {
        "in": pattern(LAYERS),
        "out": np.zeros((len(LAYERS), 2, 4), np.uint32),
        "errors": np.zeros(len(LAYERS), np.uint64),
        "first": np.zeros(1, np.uint64),
    }


def _usable(x: Array) -> Array:
    return np.where(np.isfinite(x) & (x > 0), x, np.float32(np.nan))


def _scales(_: Arrays) -> dict[str, Wanted]:
    """Factors, NaN where a scale is none; and the first such scale of a layer: SCALE, 12, of K, 0, or of q, 2."""
    bad = np.isnan(_usable(LAYERS))
    words = [~(int(row.argmax()) << 32 | 12) % 2**64 if row.any() else 0 for row in bad]
    factors = np.stack([_usable(LAYERS), _usable(-LAYERS)], axis=1)
    return {
        "out": Wanted(pattern(factors), Rule("f32", any_nan=True)),
        "errors": exact(np.array(words, np.uint64)),
        "first": exact(np.array([~(2 << 8 | 12) % 2**64], np.uint64)),
    }


def probes() -> list[Probe]:
    """All of this module."""
    tail = [struct.pack("<f", GLOBAL)]
    pad = Probe("library_segment_pad", "segment", "segment_pad", _pad_inputs, _pad, TOKENS)
    return [
        pad,
        Probe(
            "library_segment_given_scales",
            "segment",
            "segment_given_scales",
            _scales_inputs,
            _scales,
            32,
            (len(LAYERS), 1, 1),
        ),
        *(
            Probe(f"library_{name}", "segment", name, partial(_inputs, run), partial(_wanted, run), 192, tail=tail)
            for name, run in RUNS.items()
        ),
    ]

"""Fragments of K and V for the tensor cores: every code at every place, and products of whole tiles against NumPy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.compile.flatten import flatten
from kvgen.emulator import Counters, Library, build
from kvgen.reference import quant
from tests.emulator.programs import run
from tests.quant.kernels import memory

Array = NDArray[Any]
ROOT = Path(__file__).resolve().parents[2]
SOURCE = "tests/device_fragments/fragments.cu"
# Element type of memory -> its bits.
BITS = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8, "i8": 8, "u8": 8, "i4": 4, "u4": 4, "e2m1": 4}
# Codes that are widened to bf16 in place of f16.
WIDE = {"e4m3_bf16": "e4m3", "e5m2_bf16": "e5m2", "e2m1_bf16": "e2m1"}
BITS |= {dtype: BITS[code] for dtype, code in WIDE.items()}
PLAIN: dict[str, Any] = {"bf16": bfloat16, "f16": np.float16}
PITCHES = (80, 144, 272, 1168)
TILES = 2

# Where conversions differ: fp8 has none in hardware on sm_80, fp4 has some on sm_100f.
OTHERS = {"sm_80": {"e4m3": "e4m3", "e4m3_bf16": "InBf16<e4m3>"}, "sm_100f": {"e2m1": "e2m1x2"}}
CASES = [("sm_90a", dtype) for dtype in BITS] + [(arch, dtype) for arch, own in OTHERS.items() for dtype in own]

cases = pytest.mark.parametrize(("arch", "dtype"), CASES)


@cache
def library(arch: str) -> Library:
    text = flatten(SOURCE, lambda path: (ROOT / path).read_text(encoding="utf-8"))
    own = OTHERS.get(arch, {"bf16": "bf16"})
    if arch in OTHERS:
        text = f"#define TYPES {' '.join(f'KERNELS({n}, {e})' for n, e in own.items())}\n{text}"
    ptx = compile_unit(
        Unit("fragments", f"score_{next(iter(own))}", text), arch, "ptx", cache=default_cache()
    ).data.decode()
    return build([ptx], mode="check")


def launch(arch: str, kernel: str, *args: Any, tiles: int, pitch: int, outs: int = 1) -> Counters:
    inputs = tuple(range(outs, len(args)))
    return run(library(arch), kernel, *args, grid=(tiles, 1, 1), block=32, read_only=inputs, dynamic_shared=16 * pitch)


def decoded(raw: Array, dtype: str) -> Array:
    """The numbers in rows of bytes, float64."""
    if dtype in PLAIN:
        with np.errstate(invalid="ignore"):  # signalling NaN
            plain: Array = np.ascontiguousarray(raw).view(PLAIN[dtype]).astype(np.float64)
            return plain
    return quant.values(quant.unpack_nibbles(raw) if BITS[dtype] == 4 else raw, WIDE.get(dtype, dtype))


def operand(dtype: str) -> Any:
    """What products take."""
    return bfloat16 if dtype in WIDE else PLAIN.get(dtype, np.float16)


def same(found: Array, wanted: Array) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(np.nan_to_num(found), np.nan_to_num(wanted))
    np.testing.assert_array_equal(np.signbit(found)[found == 0], np.signbit(wanted)[found == 0])


def places() -> tuple[Array, Array]:
    """Rows and columns of an a operand's elements, [lane, register, element]."""
    lane, register, element = np.ogrid[:32, :4, :2]
    shape = (32, 4, 2)
    row, column = lane // 4 + register % 2 * 8, lane % 4 * 2 + element + register // 2 * 8
    return np.broadcast_to(row, shape), np.broadcast_to(column, shape)


def factor(arch: str, dtype: str) -> float:
    """kFactor: bit tricks leave exponents as they are."""
    hardware = {"e4m3": arch != "sm_80", "e2m1": arch == "sm_100f"}
    return 1.0 if hardware.get(dtype, True) else {"e4m3": 2.0**8, "e2m1": 2.0**14}[dtype]


@cases
@pytest.mark.parametrize("role", ["keys", "values"])
def test_every_code_at_every_place(arch: str, dtype: str, role: str) -> None:
    """Whole blocks and halves: fragments are the codes of the tokens and dims that they should have, each once."""
    tiles, pitch, dims = 256, 48, 256 // BITS[dtype]
    raw = (np.arange(256)[:, None, None] + 37 * np.arange(16)[:, None] + 101 * np.arange(48)).astype(np.uint8)
    source = memory(raw.size, np.uint8, raw.reshape(-1))
    kernel, blocks = f"dump_{role}_{dtype}", max(dims // 16, 1)
    halves = (blocks + 1) // 2
    count = tiles * (blocks + 2 * halves)
    out, found_dims = memory(count * 256, np.uint16), memory(count // tiles * 256, np.uint32)
    launch(arch, kernel, out, found_dims, source, pitch, tiles=tiles, pitch=pitch, outs=2)
    kind = operand(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaN
        found = out.view(kind).astype(np.float64).reshape(tiles, -1, 32, 4, 2) * factor(arch, dtype)
    of_dim = found_dims.reshape(found.shape[1:])
    row, column = places()
    token = np.broadcast_to(row if role == "keys" else column, found.shape[1:])
    numbers = decoded(raw[..., :32], dtype)
    plain_half = np.zeros(found.shape[1:], bool)  # what half a block of 16-bit elements has not
    if dtype in PLAIN:
        plain_half[1:] = (column if role == "keys" else row) >= 8
        assert not found[:, plain_half].any()
    live = ~plain_half
    same(found[:, live], numbers[:, token[live], of_dim[live]])
    if BITS[dtype] > 4:
        assert all(len(np.unique(raw[:, t, b])) == 256 for t in range(16) for b in range(32))
    for part in (slice(0, blocks), slice(blocks, None)):
        pairs = token[part][live[part]] * 1000 + of_dim[part][live[part]]
        assert sorted(pairs) == [1000 * t + d for t in range(16) for d in range(dims)]


def drawn(dtype: str, pitch: int, dims: int, rng: np.random.Generator, filler: int) -> tuple[Array, Array]:
    """TILES tiles of any finite numbers, and these: `filler` behind the dims, NaN or so behind what may be read."""
    width = dims * BITS[dtype] // 8
    raw = np.full((TILES, 16, pitch), 0xFF, np.uint8)
    raw[..., : -(-width // 16) * 16] = filler
    if dtype in PLAIN:
        raw[..., :width] = rng.standard_normal((TILES, 16, dims)).astype(PLAIN[dtype]).view(np.uint8)
    else:
        own = rng.integers(0, 256, (TILES, 16, width)).astype(np.uint8)
        bad = ~np.isfinite(decoded(own, dtype)) if BITS[dtype] == 8 else np.zeros(own.shape, bool)
        raw[..., :width] = np.where(bad, 0x3B, own)
    return raw, decoded(raw[..., :width], dtype)


def sizes(dtype: str, pitch: int) -> list[int]:
    """Dims that fill a row, and fewer: tails of every kind."""
    most = min((pitch - 16) * 8 // BITS[dtype], 512)
    return sorted({d for d in (8, 24, 40, 64, 72, 80, 96, 120, 128, 192, 512, most) if d <= most})


@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("dtype", ["i8", "u8", "i4", "u4"])
def test_codes_from_zero(dtype: str, role: str) -> None:
    """Moved up, as multiples of 2^-24, at the places of the dims that even_out tells apart; no code is a conversion."""
    kinds = {"i8": "int8_t", "u8": "uint8_t", "i4": "i4x2", "u4": "u4x2"}
    source = flatten(SOURCE, lambda path: (ROOT / path).read_text(encoding="utf-8"))
    own = " ".join(f"KERNELS({n}, FromZero<{e}>)" for n, e in kinds.items())
    text = f"#define TYPES {own}\n{source}"
    ptx = compile_unit(Unit("from_zero", "score_i8", text), "sm_90a", "ptx", cache=default_cache()).data.decode()
    tiles, pitch, dims = 256, 48, 256 // BITS[dtype]
    raw = (np.arange(256)[:, None, None] + 37 * np.arange(16)[:, None] + 101 * np.arange(48)).astype(np.uint8)
    blocks = dims // 16
    out, of_dim = memory(tiles * 2 * blocks * 256, np.uint16), memory(2 * blocks * 256, np.uint32)
    source_bytes = memory(raw.size, np.uint8, raw.reshape(-1))
    run(
        build([ptx], mode="check"), f"dump_{role}_{dtype}", out, of_dim, source_bytes, pitch,
        grid=(tiles, 1, 1), block=32, read_only=(2,), dynamic_shared=16 * pitch,
    )  # fmt: skip
    found = out.view(np.float16).astype(np.float64).reshape(tiles, -1, 32, 4, 2) * 2.0**24
    dim = of_dim.reshape(found.shape[1:])
    if BITS[dtype] == 4:
        found /= np.where(dim % 2 == 1, 16, 1)
    row, column = places()
    token = np.broadcast_to(row if role == "keys" else column, dim.shape)
    moved = {"i8": 128, "i4": 8}.get(dtype, 0)
    same(found, decoded(raw[..., :32], dtype)[:, token, dim] + moved)
    assert sorted((token * 1000 + dim)[:blocks].reshape(-1)) == [1000 * t + d for t in range(16) for d in range(dims)]


@cases
@pytest.mark.parametrize("pitch", PITCHES)
def test_products(arch: str, dtype: str, pitch: int) -> None:
    rng = np.random.default_rng(pitch)
    kind = operand(dtype)
    for dims in sizes(dtype, pitch):
        raw, keys = drawn(dtype, pitch, dims, rng, 0)
        q = memory(8 * dims, kind, rng.standard_normal(8 * dims).astype(kind))
        scores = memory(TILES * 128, np.float32)
        source = memory(raw.size, np.uint8, raw.reshape(-1))
        counted = launch(arch, f"score_{dtype}", scores, source, q, pitch, dims, tiles=TILES, pitch=pitch)
        assert counted.shared.worst_ways == 1
        given = q.astype(np.float64).reshape(8, dims)
        bound = 1e-6 * np.einsum("btd,nd->btn", np.abs(keys), np.abs(given))
        assert (np.abs(scores.reshape(TILES, 16, 8) - np.einsum("btd,nd->btn", keys, given)) <= bound).all(), dims

        raw, rows = drawn(dtype, pitch, dims, rng, 0xFF)
        p = memory(128, kind, rng.random(128).astype(kind))
        sums = memory(TILES * 8 * dims, np.float32)
        source = memory(raw.size, np.uint8, raw.reshape(-1))
        counted = launch(arch, f"sum_{dtype}", sums, source, p, pitch, dims, tiles=TILES, pitch=pitch)
        assert counted.shared.worst_ways == 1
        weights = p.astype(np.float64).reshape(16, 8)
        bound = 1e-6 * np.einsum("btd,tn->bnd", np.abs(rows), weights)
        assert (np.abs(sums.reshape(TILES, 8, dims) - np.einsum("btd,tn->bnd", rows, weights)) <= bound).all(), dims

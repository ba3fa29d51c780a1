"""Tiles of K and V as the tensor cores' operands (tests/device_fragments/fragments.cu, kernels/kv_fragments.cu).

Sums are of whole and half numbers, exact in whatever order; so a GPU's answers must be the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.mma_probes import QUAD, ROW, places_a
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import PACKED, TYPES, numbers_of, quant
from tests.golden_gpu.probe import Arrays, Probe, u32

UNIT: Final = "kv_fragments"
PLAIN: Final[dict[str, Any]] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Codes that are widened to bf16 in place of f16.
WIDE: Final = {"e4m3_bf16": "e4m3", "e5m2_bf16": "e5m2", "e2m1_bf16": "e2m1"}
# Bytes between rows of products; dims of those by bits of an element, whole blocks and 8 more.
PITCH, DIMS = 144, {16: 56, 8: 104, 4: 200}
# Bytes between rows of dumps, and how many tiles they are of.
DUMPED, BLOCKS = 48, 16


def _bits(dtype: str) -> int:
    return 16 if dtype in PLAIN else 4 if WIDE.get(dtype, dtype) in PACKED else 8


def _operand(dtype: str) -> Any:
    """What products take."""
    return ml_dtypes.bfloat16 if dtype in WIDE else PLAIN.get(dtype, np.float16)


def _factor(dtype: str, tricks: bool) -> float:
    """kFactor."""
    return 1.0 if dtype in WIDE else 2.0**14 if dtype == "e2m1" else 2.0**8 if tricks else 1.0


def _decoded(rows: Array, dtype: str) -> Array:
    """The numbers in rows of bytes."""
    raw = np.ascontiguousarray(rows)
    if dtype in PLAIN:
        plain: Array = raw.view(PLAIN[dtype]).astype(np.float32)
        return plain
    return numbers_of(raw, WIDE.get(dtype, dtype)).reshape(*raw.shape[:-1], -1)


# Fragments ----------------------------------------------------------------------------------------------------------


def _dims(role: str, dtype: str) -> Array:
    """The dim of each element, [step or tile, lane, register, element]: of a whole block, then of each of its halves."""
    in_word = 32 // _bits(dtype)
    steps = max(in_word // 2, 1)
    halves = (steps + 1) // 2
    row, column = (np.moveaxis(np.asarray(x), 0, 1) for x in places_a(16, 16, 2))
    lane, register, element = np.ogrid[:32, :4, :2]
    found = []
    for step in (*range(steps), *range(halves), *range(halves)):
        if dtype in PLAIN:
            dims = column if role == "keys" else row
        elif role == "keys":
            i = 2 * (step % halves) + register // 2
            at = 2 * i + element if in_word == 4 or dtype in WIDE else i + steps * element
            dims = step // halves * 4 * in_word + in_word * QUAD[lane] + at
        else:
            dims = step // halves * 4 * in_word + ROW[lane] * steps + step % halves * 2 + register % 2
        found.append(np.broadcast_to(dims, (32, 4, 2)))
    out = np.stack(found).astype(np.uint32)
    out[steps + halves :] += np.uint32(4 * in_word)
    return out


def _dump_inputs(role: str, dtype: str) -> dict[str, Array]:
    raw = (11 * np.arange(BLOCKS)[:, None, None] + 37 * np.arange(16)[:, None] + 101 * np.arange(DUMPED)).astype(
        np.uint8
    )
    shape = _dims(role, dtype).shape
    return {
        "out": np.zeros((BLOCKS, shape[0], 128), np.uint32),
        "dims": np.zeros(shape, np.uint32),
        "tiles": raw.reshape(-1).view(np.uint32),
    }


def _dump(role: str, dtype: str, tricks: bool, arrays: Arrays) -> dict[str, Wanted]:
    raw = arrays["tiles"].view(np.uint8).reshape(BLOCKS, 16, DUMPED)[..., :32]
    dims = _dims(role, dtype)
    row, column = (np.moveaxis(np.asarray(x), 0, 1) for x in places_a(16, 16, 2))
    token = np.broadcast_to(row if role == "keys" else column, dims.shape)
    if dtype in PLAIN:
        values: Array = np.ascontiguousarray(raw).view(np.uint16)[:, token, np.minimum(dims, 15)]
        values[:, 1:, (column if role == "keys" else row) >= 8] = 0
        rule = Rule("b32")
    else:
        values = (_decoded(raw, dtype)[:, token, dims] / np.float32(_factor(dtype, tricks))).astype(_operand(dtype))
        rule = Rule("bf16" if dtype in WIDE else "f16", 2, any_nan=True)
    words = np.ascontiguousarray(values).view(np.uint32).reshape(BLOCKS, -1, 128)
    return {"out": Wanted(words, rule), "dims": exact(dims)}


# Products -----------------------------------------------------------------------------------------------------------


def _small(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Bytes of whole and half numbers of at most 16, or of any integers; the last axis in bytes."""
    if dtype in PLAIN:
        return rng.integers(-8, 9, (*shape[:-1], shape[-1] // 2)).astype(PLAIN[dtype]).view(np.uint8)
    if WIDE.get(dtype, dtype) not in ("e4m3", "e5m2"):
        return rng.integers(0, 256, shape).astype(np.uint8)
    values = quant.values(np.arange(256), WIDE.get(dtype, dtype))
    return rng.choice(np.flatnonzero((np.abs(values) <= 16) & (values * 2 == np.rint(values * 2))), shape).astype(
        np.uint8
    )


def _product_inputs(kernel: str, dtype: str) -> dict[str, Array]:
    rng, dims, kind = np.random.default_rng(170), DIMS[_bits(dtype)], _operand(dtype)
    tiles = np.full((2, 16, PITCH), 0xFF, np.uint8)
    width = dims * _bits(dtype) // 8
    tiles[..., : -(-width // 16) * 16] = 0
    tiles[..., :width] = _small(dtype, (2, 16, width), rng)
    count = 8 * dims if kernel == "score" else 128
    other = rng.integers(-2, 3, count).astype(kind).view(np.uint16)
    out = np.zeros((2, 16, 8) if kernel == "score" else (2, 8, dims), np.uint32)
    return {"out": out, "tiles": tiles.reshape(-1).view(np.uint32), "other": other}


def _product(kernel: str, dtype: str, arrays: Arrays) -> dict[str, Wanted]:
    dims, kind = DIMS[_bits(dtype)], _operand(dtype)
    raw = arrays["tiles"].view(np.uint8).reshape(2, 16, PITCH)[..., : dims * _bits(dtype) // 8]
    rows, other = _decoded(raw, dtype).astype(np.float64), arrays["other"].view(kind).astype(np.float64)
    if kernel == "score":
        out = np.einsum("btd,nd->btn", rows, other.reshape(8, dims))
    else:
        out = np.einsum("btd,tn->bnd", rows, other.reshape(16, 8))
    return {"out": exact((out + 0.0).astype(np.float32).view(np.uint32))}


# What they are made of ----------------------------------------------------------------------------------------------


def _matrices_inputs() -> dict[str, Array]:
    return {"in": np.random.default_rng(171).integers(0, 1 << 32, 128, np.uint32), "out": np.zeros((15, 32), np.uint32)}


def _matrices(arrays: Arrays) -> dict[str, Wanted]:
    elements = arrays["in"].view(np.uint16).reshape(4, 8, 8)
    plain = [np.ascontiguousarray(m).view(np.uint32).reshape(32) for m in elements]
    turned = [np.ascontiguousarray(m.T).view(np.uint32).reshape(32) for m in elements]
    rows = [m for own in (plain, turned) for m in (own[0], *own[:2], *own)]
    return {"out": exact(np.stack([*rows, turned[0]]))}


def _words_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(172)
    codes = np.concatenate([np.roll(np.arange(256, dtype=np.uint8), i).view(np.uint32) for i in range(4)])
    pairs = rng.integers(-30, 31, 2 * len(codes)).astype(np.float16).view(np.uint32)
    return {"codes": codes, "pairs": pairs, "out": np.zeros((32, len(codes)), np.uint32)}


def _words(arrays: Arrays) -> dict[str, Wanted]:
    raw, n = arrays["codes"].view(np.uint8), len(arrays["codes"])
    rows: list[Array] = []

    def add(values: Array, columns: tuple[tuple[int, int], ...]) -> None:
        rows.extend(
            np.ascontiguousarray(values[:, c].astype(np.float16)).view(np.uint32)[:, 0] for c in map(list, columns)
        )

    together, apart = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    for columns in (together, apart):
        add(numbers_of(raw, "u8").reshape(n, 4), columns)
    add(numbers_of(raw, "u4").reshape(n, 8), tuple((i, i + 4) for i in range(4)))
    for dtype in ("e4m3", "e5m2"):
        for columns in (together, apart):
            add(numbers_of(raw, dtype).reshape(n, 4), columns)
    # Moved up to begin at zero, in units of 2^-24; the second one of a pair is 16 times as much.
    for dtype, up in (("u8", 0), ("i8", 128)):
        add((numbers_of(raw, dtype).reshape(n, 4) + up) * 2.0**-24, apart)
    for dtype, up in (("u4", 0), ("i4", 8)):
        moved = (numbers_of(raw, dtype).reshape(n, 8) + up) * 2.0**-24
        moved[:, 1::2] *= 16
        add(moved, tuple((i, i + 4) for i in range(4)))
    bytes_of = raw.reshape(n, 4).astype(np.uint32) ^ 128
    rows += [bytes_of[:, 0] | bytes_of[:, 2] << 16, np.where(np.arange(n) % 2 == 0, 16, 1).astype(np.uint32)]
    pairs, i = arrays["pairs"].view(np.float16).astype(np.float64).reshape(n, 2), np.arange(n)
    for sums in (pairs + pairs[i ^ 1], pairs * pairs[i ^ 1] + pairs[i ^ 2]):
        add(sums + 0.0, ((0, 1),))
    return {
        "out": Wanted(
            np.stack(rows),
            (Rule("f16", 2, any_nan=True),) * 28 + (Rule("b32"),) * 2 + (Rule("f16", 2, any_zero=True),) * 2,
        )
    }


def _of_type(dtype: str, unit: str, suffix: str) -> Iterator[Probe]:
    tricks = bool(suffix)
    for role in ("keys", "values"):
        inputs, wanted = partial(_dump_inputs, role, dtype), partial(_dump, role, dtype, tricks)
        kernel, tail = f"dump_{role}_{dtype}", [u32(DUMPED)]
        yield Probe(
            f"library_{kernel}{suffix}", unit, kernel, inputs, wanted, 32, (BLOCKS, 1, 1), 16 * DUMPED, tail=tail
        )
    for product in ("score", "sum"):
        inputs, wanted = partial(_product_inputs, product, dtype), partial(_product, product, dtype)
        kernel, tail = f"{product}_{dtype}", [u32(PITCH), u32(DIMS[_bits(dtype)])]
        yield Probe(f"library_{kernel}{suffix}", unit, kernel, inputs, wanted, 32, (2, 1, 1), 16 * PITCH, tail=tail)


def probes() -> list[Probe]:
    """All of this module."""
    found = [probe for dtype in (*PLAIN, *TYPES, *WIDE) for probe in _of_type(dtype, UNIT, "")]
    for dtype in ("e4m3", "e4m3_bf16"):
        found += _of_type(dtype, "kv_fragments_tricks", "_tricks")
    blocks = len(_words_inputs()["codes"]) // 64
    return [
        *found,
        Probe("library_matrices", UNIT, "fragments_matrices", _matrices_inputs, _matrices, 32),
        Probe("library_fragment_words", UNIT, "fragments_words", _words_inputs, _words, 64, (blocks, 1, 1)),
    ]

"""What kernels/memory.cu and kernels/fragments.cu must leave."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.float_families import float_words, pairs
from tests.golden_gpu.forms import numbers, packed
from tests.golden_gpu.integer_families import integer_words
from tests.golden_gpu.numbers import Array, add, exactly
from tests.golden_gpu.probe import Arrays, Probe

BF16 = ml_dtypes.bfloat16
WORDS = Rule("b32")


def random_bytes(count: int, seed: int) -> Array:
    """Any bytes."""
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def exact(array: Array) -> Wanted:
    """These bits."""
    return Wanted(array, Rule(f"b{8 * array.itemsize}"))


def _vectors(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["in"].reshape(32, 256)
    out = np.zeros_like(rows)

    def put(at: int, columns: list[int]) -> None:
        out[:, at : at + len(columns)] = rows[:, columns]

    def extended(at: int, start: int, kind: Any, wide: Any) -> None:
        size = np.dtype(kind).itemsize
        values = np.ascontiguousarray(rows[:, start : start + size]).view(kind).astype(wide)
        out[:, at : at + values.itemsize] = values.view(np.uint8)

    put(0, [0])
    extended(2, 1, np.int8, np.int16)
    put(4, [4, 5])
    extended(8, 6, np.int16, np.int32)
    put(12, [9, 8])
    put(16, [15, 14, 13, 12])
    put(24, [*range(24, 32)])
    put(32, [*range(36, 40), *range(32, 36), *range(44, 48), *range(40, 44)])
    put(48, [*range(56, 64), *range(48, 56)])
    put(64, [*range(68, 72), *range(64, 68)])
    put(72, [*range(72, 76)])
    put(80, [*range(80, 88)])
    put(96, [*range(96, 128)])
    words = np.ascontiguousarray(rows[:, 128:144]).view(np.uint32)
    for lane in range(32):
        start, shift = int(rows[lane, 128]), int(rows[lane, 129])
        local = np.zeros(4, np.uint32)
        for i in range(4):
            local[(i + start) % 4] = words[lane, i]
        shared = np.array([local[(i + shift) % 4] for i in range(4)], np.uint32)
        generic = local if rows[lane, 130] % 2 else shared
        out[lane, 128:144] = (generic + shared).view(np.uint8)
    out[:, 144:148] = np.array([1 | 2], np.uint32).view(np.uint8)
    return {"out": exact(out.reshape(-1))}


def _wide_atomics(arrays: Arrays) -> dict[str, Wanted]:
    cells = arrays["cells"].reshape(32, 48).copy()
    x = arrays["in"].reshape(32, 32)
    old = np.zeros((32, 6), np.uint64)
    old[:, :4] = np.ascontiguousarray(cells[:, :32]).view(np.uint64)
    old[:, 4] = np.ascontiguousarray(cells[:, 32:34]).view(np.uint16)[:, 0]
    old[:, 5] = np.ascontiguousarray(cells[:, 34:36]).view(np.uint16)[:, 0]
    low, high = (np.ascontiguousarray(x[:, s : s + 2]).view(np.uint16)[:, 0] for s in (16, 24))
    same = (cells[:, 16:32] == x[:, :16]).all(axis=1)
    hit = old[:, 4] == low
    total = [
        packed("f16", [exactly(add, "f16")(a, b)])
        for (a,), (b,) in zip(numbers("f16", old[:, 5]), numbers("f16", high), strict=True)
    ]
    cells[:, :16] = x[:, :16]
    cells[same, 16:32] = x[same, 16:32]
    cells[hit, 32:34] = np.ascontiguousarray(x[hit, 24:26])
    cells[:, 34:36] = np.array(total, np.uint16).view(np.uint8).reshape(32, 2)
    return {"cells": exact(cells.reshape(-1)), "out": exact(old.reshape(-1).view(np.uint8))}


def _wide_inputs() -> dict[str, Array]:
    cells, x = random_bytes(32 * 48, 60).reshape(32, 48), random_bytes(32 * 32, 61).reshape(32, 32)
    cells[::2, 16:32] = x[::2, :16]  # the comparisons that hold
    cells[::3, 32:34] = x[::3, 16:18]
    halves = (np.random.default_rng(62).standard_normal((2, 32)) * 30).astype(np.float16)
    cells[:, 34:36] = halves[0].view(np.uint8).reshape(32, 2)
    x[:, 24:26] = halves[1].view(np.uint8).reshape(32, 2)
    return {"cells": cells.reshape(-1), "in": x.reshape(-1), "out": np.zeros(32 * 48, np.uint8)}


def _shared_atomics(arrays: Arrays) -> dict[str, Wanted]:
    before, x = arrays["before"], arrays["x"]
    after = before.copy()
    add32 = [
        exactly(add, "f32")(a, b) for (a,), (b,) in zip(numbers("f32", before[1]), numbers("f32", x[1]), strict=True)
    ]
    after[0] += x[0]
    after[1] = [packed("f32", [v]) for v in add32]
    halves = zip(numbers("f16x2", before[2]), numbers("f16x2", x[2]), strict=True)
    after[2] = [packed("f16x2", [exactly(add, "f16")(p, q) for p, q in zip(a, b, strict=True)]) for a, b in halves]
    after[3] = np.maximum(before[3].view(np.int32), x[0].view(np.int32)).view(np.uint32)
    after[4] = np.where(before[4] == x[0], x[1], before[4])
    after[5] = np.where(before[5] >= x[0], 0, before[5] + 1)
    rules = tuple(Rule(k, n, any_nan=k[0] == "f") for k, n in
                  (("b32", 1), ("f32", 1), ("f16", 2), ("b32", 1), ("b32", 1), ("b32", 1)))  # fmt: skip
    return {"after": Wanted(after, rules), "old": exact(before)}


def _shared_inputs() -> dict[str, Array]:
    before = np.stack(
        [
            integer_words(32, 32, 63),
            float_words("f32", 32, 64),
            pairs("f16", 32, 65),
            *(integer_words(32, 32, s) for s in (66, 67, 68)),
        ]
    )
    x = np.stack([integer_words(32, 32, 69), float_words("f32", 32, 70), pairs("f16", 32, 71)]).astype(np.uint32)
    before = before.astype(np.uint32)
    before[4, ::2] = x[0, ::2]
    zeros = np.zeros((6, 32), np.uint32)
    return {"before": before, "x": x, "after": zeros, "old": zeros.copy()}


def _contention(arrays: Arrays) -> dict[str, Wanted]:
    cells, x = arrays["cells"].copy(), arrays["x"]
    small = x % 16
    cells[0] = (int(cells[0]) + int(x.astype(np.uint64).sum())) & 0xFFFFFFFF
    cells[1] = np.array(max(int(cells[1:2].view(np.int32)[0]), int(x.view(np.int32).max())), np.int32).view(np.uint32)
    cells[2] |= np.bitwise_or.reduce(np.uint32(1) << x % 32)
    cells[3] ^= np.bitwise_xor.reduce(x)
    cells[4] = np.array(small.sum(), np.float32).view(np.uint32)
    odd = np.array((small % 2).sum(), np.float16).view(np.uint16)
    cells[5] = int(odd) << 16 | int(odd)
    cells[6:8] = np.array([int(x.astype(object).sum()) << 20], np.uint64).view(np.uint32)
    cells[8] = (int(cells[8]) + len(x)) % 100
    return {"cells": exact(cells)}


def _contention_inputs() -> dict[str, Array]:
    cells = np.array([7, 0x80000000, 0, 5, 0, 0, 0, 0, 3], np.uint32)
    return {"cells": cells, "x": integer_words(32, 256, 72)}


def _async_copies(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["in"].reshape(32, 64)
    out = rows.copy()
    for lane in range(32):
        out[lane, lane % 17 : 16] = 0
        out[lane, 16:32] *= lane % 2 == 0
        out[lane, 32 + lane % 9 : 40] = 0
        out[lane, 48 + lane % 5 : 52] = 0
    out[:, 56:] = 0xAA
    return {"out": exact(out.reshape(-1))}


def _barriers(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["x"]
    votes = int((x & 1).sum()) | int((x & 2 != 0).all()) << 8 | int((x & 4 != 0).any()) << 9
    return {"out": exact(np.concatenate([np.full(64, votes, np.uint32), x[31::-1]]))}


def _bulk_copies(arrays: Arrays) -> dict[str, Wanted]:
    data = arrays["in"]
    copied = np.concatenate([data[256:1024], data[:256]])
    memory = copied.copy()
    memory[:64] ^= 0xFF
    reduced = arrays["reduced"].reshape(8, 64).copy()
    operand = memory[:512].reshape(8, 64)

    def each(k: int, kind: Any) -> tuple[Any, Any]:
        return reduced[k].view(kind).copy(), operand[k].view(kind)

    def put(k: int, values: Any, kind: Any) -> None:
        reduced[k] = np.asarray(values).astype(kind).view(np.uint8)

    for k, kind, function in (
        (0, np.uint32, lambda a, b: a + b),
        (1, np.int32, np.minimum),
        (2, np.uint64, np.maximum),
        (3, np.uint32, np.bitwise_xor),
        (4, np.uint32, lambda a, b: np.where(a >= b, 0, a + 1)),
        (5, np.float16, lambda a, b: a + b),
        (6, BF16, lambda a, b: a.astype(np.float32) + b.astype(np.float32)),
        (7, np.float32, lambda a, b: a + b),
    ):
        put(k, function(*each(k, kind)), kind)
    return {"copied": exact(copied), "stored": exact(memory[:512]), "reduced": exact(reduced.reshape(-1))}


def _bulk_inputs() -> dict[str, Array]:
    """Ordinary numbers where floats are added: what the copy engine makes of the rest is not said."""
    rng = np.random.default_rng(73)
    data, reduced = random_bytes(1024, 74), random_bytes(512, 75)
    for memory, at in ((data, 256), (reduced, 0)):
        for k, kind in ((5, np.float16), (6, BF16), (7, np.float32)):
            count = 64 // np.dtype(kind).itemsize
            values = (rng.standard_normal(count) * 8).astype(kind)
            memory[at + k * 64 : at + k * 64 + 64] = values.view(np.uint8)
    return {"in": data, "copied": np.zeros(1024, np.uint8), "stored": np.zeros(512, np.uint8), "reduced": reduced}


def fragment(matrix: Any) -> Any:
    """The register of each lane: row lane / 4, columns 2 (lane % 4) and one more, of an 8 x 8 matrix of u16."""
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32)


def _load_fragments(arrays: Arrays) -> dict[str, Wanted]:
    matrices = arrays["in"].view(np.uint16).reshape(4, 8, 8)
    out = np.zeros((6, 4, 32), np.uint32)
    for form, (count, turned) in enumerate(((1, False), (1, True), (2, False), (2, True), (4, False), (4, True))):
        for k in range(count):
            out[form, k] = fragment(matrices[k].T if turned else matrices[k])
    return {"out": exact(out)}


def _store_fragments(arrays: Arrays) -> dict[str, Wanted]:
    matrices = arrays["in"].view(np.uint16).reshape(4, 8, 8)
    out = np.full((6, 4, 8, 8), 0xAAAA, np.uint16)
    for form, (count, turned) in enumerate(((1, False), (1, True), (2, False), (4, False), (4, True))):
        for k in range(count):
            out[form, k] = matrices[k].T if turned else matrices[k]
    out[5, 0] = matrices[0].T
    return {"out": exact(out.reshape(-1).view(np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""

    def zeros(count: int) -> Array:
        return np.zeros(count, np.uint8)

    words = np.random.default_rng(76).integers(0, 2**32, 128, np.uint32)
    return [
        Probe("vectors", "memory", "vectors", lambda: {"in": random_bytes(8192, 77), "out": zeros(8192)}, _vectors, 32),
        Probe("wide_atomics", "memory", "wide_atomics", _wide_inputs, _wide_atomics, 32),
        Probe("shared_atomics", "memory", "shared_atomics", _shared_inputs, _shared_atomics, 32),
        Probe("contention", "memory", "contention", _contention_inputs, _contention, 128, (2, 1, 1)),
        Probe(
            "async_copies",
            "memory",
            "async_copies",
            lambda: {"in": random_bytes(2048, 78), "out": zeros(2048)},
            _async_copies,
            32,
        ),
        Probe(
            "barriers",
            "memory",
            "barriers",
            lambda: {"x": words[:64] | 2, "out": np.zeros(96, np.uint32)},
            _barriers,
            64,
        ),
        Probe("bulk_copies", "memory", "bulk_copies", _bulk_inputs, _bulk_copies, 128),
        Probe(
            "load_fragments",
            "fragments",
            "load_fragments",
            lambda: {"in": words, "out": np.zeros((6, 4, 32), np.uint32)},
            _load_fragments,
            32,
        ),
        Probe(
            "store_fragments",
            "fragments",
            "store_fragments",
            lambda: {"in": words, "out": np.zeros(768, np.uint32)},
            _store_fragments,
            32,
        ),
    ]

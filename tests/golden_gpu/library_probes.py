"""The device library's functions (kernels/device_library.cu) in Python."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.float_families import float_words, log2, power_of_two
from tests.golden_gpu.forms import numbers, packed
from tests.golden_gpu.memory_probes import exact, random_bytes
from tests.golden_gpu.numbers import Array, converted, flushed
from tests.golden_gpu.probe import Arrays, Probe

MAX = 0xFFFFFFFF


def _types(arrays: Arrays) -> dict[str, Wanted]:
    words = arrays["in"]
    count = len(words)
    floats = [x for (x,) in numbers("f32", words)]
    f16 = [x for (x,) in numbers("f16", words & 0xFFFF)]
    approximate = [[flushed(power_of_two(flushed(x))) for x in floats], [log2(flushed(x)) for x in floats]]
    shifted = (words & 0xFFFF) << 16
    rows = [
        words,
        [packed("f32", [x]) for x in f16],
        shifted,
        words,
        [packed("f16", [converted(x, "f16")]) for x in floats],
        [packed("bf16", [converted(x, "bf16")]) for x in floats],
        *([packed("f32", [np.float32(x)]) for x in row] for row in approximate),
        [0x7F800000] * count,
        [0x7FFFFFFF] * count,
    ]
    out = np.array(rows, np.uint32)
    bits = Rule("b32")
    rules = (
        bits,
        Rule("f32", any_nan=True),
        bits,
        bits,
        Rule("f16"),
        Rule("bf16"),
        Rule("f32", relative=2.0**-22),
        Rule("f32", relative=2.0**-22, absolute=2.0**-22),
        bits,
        bits,
    )
    precise = np.full((*out.shape, 1), math.nan)
    precise[6, :, 0], precise[7, :, 0] = approximate
    return {"out": Wanted(out, rules, precise)}


BATCHES = [
    [0, 3, 7, 7, 12, 20],
    [0, 1, 2, 3, 4, 5],
    [2, 4, 6, 8, 10, 12],
    [0, 9, 4, 12, 15, 18],
    [0, 4, 8, 12, 16, 25],
    [0, -1, 8, 12, 16, 20],
    [0, 0, 0, 0, 0, 0],
    [5, 6, 2**31 - 1, 9, 10, 11],
]


def _index(value: int, kind: str) -> int:
    return value if 0 <= value <= MAX else MAX


def _request(offsets: list[int], row: int) -> int:
    low, high = 0, len(offsets) - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = (middle, high) if offsets[middle] <= row else (low, middle)
    return low


def _range(own: list[int], b: int, row: int, rows: int) -> tuple[int, int, bool, bool]:
    """The row's first and last of request b, whether it is padding before the first request, and whether it is known."""
    begin, end, batch = own[b], own[b + 1], len(own) - 1
    before, after = own[b - 1] if b else 0, own[b + 2] if b + 2 <= batch else end
    padding = b == 0 and row < begin <= end
    return begin, end, padding, before <= begin <= end <= after and begin <= row < end <= rows


def _indices(arrays: Arrays) -> dict[str, Wanted]:
    offsets = arrays["offsets"]
    kind = offsets.dtype.name
    out = np.zeros((8, 32, 5), np.uint32)
    for batch in range(8):
        own = [_index(int(x), kind) for x in offsets[batch]]
        total = own[5]
        bad = total > 20 or total < own[4]
        for row in range(32):
            b, begin, end = _request(own, row), 0, 0
            if row >= total:
                found = 0 | 1 << 8 | 1 << 9
            else:
                begin, end, padding, valid = _range(own, b, row, 20)
                found = b | padding << 8 | valid << 9
                if padding or not valid:
                    begin = end = 0
            index, entry = own[row % 6], int(offsets[batch, row % 6])
            page_id = index if kind == "int64" else entry % 2**32
            out[batch, row] = [found | bad << 10, begin << 16 | end, _request(own, row), index, page_id]
    return {"out": exact(out)}


def _index_inputs(dtype: str) -> dict[str, Array]:
    offsets = np.array(BATCHES, np.int64)
    if dtype == "int64":
        offsets[5, 2], offsets[7, 2] = 2**32, 2**40
    return {"offsets": offsets.astype(dtype), "out": np.zeros((8, 32, 5), np.uint32)}


LANES = {"two": 2, "eight": 8, "all": 32}


def _lanes_inputs(dtype: str) -> dict[str, Array]:
    """40 requests with up to 90 rows: right, shifted, with empty ones, and with a wrong entry or several."""
    rng = np.random.default_rng(83)
    offsets = np.zeros((6, 41), np.int64)
    for batch in range(6):
        offsets[batch] = np.concatenate([[0], np.sort(rng.integers(0, 91, 40))])
    offsets[1], offsets[2] = np.sort(rng.integers(5, 90, 41)), np.repeat(offsets[2][::10], [1, 10, 10, 10, 10])
    offsets[3, rng.integers(0, 41, 3)] = [95, 0, 60]
    offsets[4, [1, 20]] = -1 if dtype != "uint32" else 2**31
    offsets[5] = rng.integers(0, 100, 41)
    if dtype == "int64":
        offsets[3, 9] = 2**32 + 1
    outs = {name: np.zeros((6, 96, lanes, 3), np.uint32) for name, lanes in LANES.items()}
    return {"offsets": offsets.astype(dtype), **outs}


def _lanes(arrays: Arrays) -> dict[str, Wanted]:
    offsets = arrays["offsets"]
    out = np.zeros((6, 96, 1, 3), np.uint32)

    def packed(own: list[int], b: int, row: int) -> int:
        begin, end, padding, valid = _range(own, b, row, 90)
        return b | padding << 6 | valid << 7 | (begin << 8 | end << 16 if valid and not padding else 0)

    for batch in range(6):
        own = [_index(int(x), offsets.dtype.name) for x in offsets[batch]]
        for row in range(96):
            b = _request(own, row)
            found = packed(own, b, row) if row < own[40] else 1 << 6 | 1 << 7
            out[batch, row, 0] = [found, b, packed(own, row * 7 % 40, row)]
    return {name: exact(np.repeat(out, lanes, axis=2)) for name, lanes in LANES.items()}


def _report(arrays: Arrays) -> dict[str, Wanted]:
    given = arrays["in"].reshape(64, 3).astype(object)
    words = [2**64 - 1 - (p << 32 | min(int(r), 0xFFFFFF) << 8 | int(c) % 7) for c, r, p in given]
    best = [max(int(arrays["errors"][i]), *words[8 * i : 8 * i + 8]) for i in range(8)]
    return {"errors": exact(np.array(best, np.uint64))}


def _report_inputs() -> dict[str, Array]:
    rng = np.random.default_rng(80)
    reports = rng.integers(0, 2**32, (64, 3), np.uint32)
    reports[:, 2] %= 4  # ties in position are broken by the request
    reports[::5, 1] %= 100
    errors = np.zeros(8, np.uint64)
    errors[3] = 2**64 - 1 - 0x0000000000000101
    return {"in": reports.reshape(-1), "errors": errors}


def _lengths_inputs() -> dict[str, Array]:
    edge = 2**32 - 1
    pairs = [
        (n, rows) for n in (0, 7, *range(edge - 5, edge + 1)) for rows in (0, 1, 2, 6, 7, edge - 2, edge - 1, edge)
    ]
    return {"in": np.array(pairs[:64], np.uint32).reshape(-1), "out": np.zeros(64, np.uint32)}


def _lengths(arrays: Arrays) -> dict[str, Wanted]:
    """A request has at most 2^32 - 2 tokens, its new rows among them; 2^32 - 1 is no length."""
    most, found = 2**32 - 2, []
    for length, rows in arrays["in"].reshape(64, 2).tolist():
        past = length + rows > most
        found.append(past | (not rows <= length <= most) << 1 | past << 2)
    return {"out": exact(np.array(found, np.uint32))}


def _copy(arrays: Arrays) -> dict[str, Wanted]:
    rows = arrays["in"].view(np.uint16).reshape(64, 8)[::-1]
    filled = rows.copy()
    filled[::3] = 0x1234
    return {"out": exact(np.concatenate([filled] * 4 + [rows]).reshape(-1).view(np.uint8))}


def _load_live(arrays: Arrays) -> dict[str, Wanted]:
    """Of 1 and 2 bytes the rest of their word is zeros; words behind what is loaded stay as they were."""
    rows = arrays["in"].reshape(32, 16)
    before = np.array([0x01234567, 0x89ABCDEF, 0xFEDCBA98, 0x76543210], np.uint32).view(np.uint8)
    out = np.tile(before, (5, 32, 1))
    for n, count in enumerate((1, 2, 4, 8, 16)):
        loaded = np.zeros((32, max(count, 4)), np.uint8)
        loaded[:, :count] = rows[:, count % 16 :][:, :count]
        out[n, :, : loaded.shape[1]] = loaded
    out[:, ::3] = before
    return {"out": exact(out.view(np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""

    def copied() -> dict[str, Array]:
        return {"in": random_bytes(1024, 81), "out": np.zeros(5 * 1024, np.uint8)}

    def live() -> dict[str, Array]:
        return {"in": random_bytes(512, 84), "out": np.zeros((5, 32, 4), np.uint32)}

    def patterns() -> dict[str, Array]:
        return {"in": float_words("f32", 192, 82), "out": np.zeros((10, 192), np.uint32)}

    unit = "device_library"
    found = [
        Probe("library_types", unit, "library_types", patterns, _types, 32, (6, 1, 1)),
        Probe("library_report", unit, "library_report", _report_inputs, _report, 64),
        Probe("library_lengths", unit, "library_lengths", _lengths_inputs, _lengths, 64),
        Probe("library_copy", unit, "library_copy", copied, _copy, 64),
        Probe("library_load_live", unit, "library_load_live", live, _load_live, 32),
    ]
    for short, dtype in (("u32", "uint32"), ("i32", "int32"), ("i64", "int64")):
        kernel = f"library_index_{short}"
        found.append(Probe(kernel, unit, kernel, partial(_index_inputs, dtype), _indices, 32, (8, 1, 1)))
        kernel = f"library_lanes_{short}"
        found.append(Probe(kernel, unit, kernel, partial(_lanes_inputs, dtype), _lanes, 32, (6, 1, 1)))
    return found

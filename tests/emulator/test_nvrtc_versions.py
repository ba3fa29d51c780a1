"""PTX of several NVRTC versions, checked in as text (tests/emulator/ptx/make.py): all of it translates and computes right."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Buffer, Library, TensorMap
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, run
from tests.support.each_case import each_case

HERE = Path(__file__).parent / "ptx"
VERSIONS = sorted((p.name for p in HERE.iterdir() if p.is_dir() and p.name[0].isdigit()), key=lambda v: v.split("."))
BF16 = np.dtype(ml_dtypes.bfloat16)
N = 96


@pytest.fixture(scope="module", params=VERSIONS)
def library(request: pytest.FixtureRequest, build: Build) -> Library:
    """Every module of one version, as one library."""
    return build([p.read_text() for p in sorted((HERE / request.param).glob("*.ptx"))])


def array(values: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """A copy where a GPU's allocation could lie."""
    source = np.asarray(values, dtype)
    memory = aligned(source.nbytes).view(source.dtype).reshape(source.shape)
    memory[...] = source
    return memory


def test_the_versions_are_these() -> None:
    assert VERSIONS == ["12.9", "13.0", "13.5"]
    for version in VERSIONS:
        names = {p.stem for p in (HERE / version).glob("*.ptx")}
        assert names == {"scalars", "pipeline", "matmul", "hopper", "append", "gather", "decode"}


FLOATS: tuple[tuple[Callable[[float, float], float], float], ...] = (
    (lambda a, b: float(Fraction(a) * Fraction(b) + 1), 0),
    (lambda a, b: a / b, 0),
    (lambda a, b: math.sqrt(abs(a)), 0),
    (lambda a, b: 1 / math.sqrt(float(np.float32(abs(a)) + np.float32(1))), 1e-6),
    (lambda a, b: math.exp(a), 1e-6),
    (lambda a, b: 2.0**a, 1e-6),
    (lambda a, b: math.exp(a), 4e-6),
    (lambda a, b: math.log2(abs(b)), 1e-6),
    (lambda a, b: math.log(abs(b)), 1e-6),
    (lambda a, b: math.sin(a), 1e-6),
    (lambda a, b: math.cos(float(np.float32(1000) * np.float32(a))), 1e-6),
    (lambda a, b: math.tanh(a), 1e-6),
    (lambda a, b: math.erf(a), 1e-6),
    (lambda a, b: abs(a) ** b, 4e-6),
    (lambda a, b: math.floor(a), 0),
    (lambda a, b: math.ceil(b), 0),
    (lambda a, b: round(a), 0),
    (lambda a, b: math.trunc(b), 0),
    (lambda a, b: min(a, b), 0),
    (lambda a, b: max(a, b), 0),
    (lambda a, b: math.copysign(a, b), 0),
    (lambda a, b: math.fmod(a, b), 0),
)


def test_floats(library: Library) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(-6, 6, N).astype(np.float32) for _ in range(2))
    out = np.zeros((len(FLOATS), N), np.float32)
    run(library, "floats", x, y, out, N, block=N)
    for got, (reference, tolerance) in zip(out, FLOATS, strict=True):
        wanted = np.array([reference(float(a), float(b)) for a, b in zip(x, y, strict=True)]).astype(np.float32)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=2.0**-24 if tolerance else 0)


def test_doubles(library: Library) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.uniform(-50, 50, N) for _ in range(2))
    out = np.zeros((8, N))
    run(library, "doubles", x, y, out, N, block=N)
    product = np.array([float(Fraction(a) * Fraction(b) + 1) for a, b in zip(x, y, strict=True)])
    exact = [product, x / y, np.sqrt(abs(x)), np.rint(x), x.astype(np.float32).astype(float), np.trunc(y)]
    for got, wanted in zip(out[[0, 1, 2, 5, 6, 7]], exact, strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_allclose(out[3], np.exp(x), rtol=1e-15)
    np.testing.assert_allclose(out[4], np.log(abs(y)), rtol=1e-15)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def turned(which: int, a: int, b: int) -> int:
    pool = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    return [
        a + b,
        a * b,
        a ^ b,
        a * b >> 32,
        int(f"{a:032b}"[::-1], 2),
        int.from_bytes(bytes(pool[i] for i in (0, 4, 1, 5)), "little"),
        (b << 32 | a) << 7 >> 32,
        min(a, b),
        77,
    ][which] & 0xFFFFFFFF


def steps(a: int, count: int) -> int:
    return count if a <= 1 or count == 0 else 1 + steps(3 * a + 1 if a % 2 else a // 2, count - 1)


def integers_of(i: int, a: int, b: int) -> list[int]:
    wide = a << 32 | b
    whole = abs(signed(wide, 64)) // 7
    dots = sum(signed(a >> s & 255, 8) * signed(b >> s & 255, 8) for s in (0, 8, 16, 24))
    shifted = signed(a, 32) >> b % 32
    return [
        wide // (a | 1),
        wide % (b | 1),
        whole if not wide >> 63 else -whole,
        wide * wide >> 64,
        wide.bit_count(),
        64 - wide.bit_length(),
        (b & -b).bit_length(),
        (dots + 5) & 0xFFFFFFFF,
        turned(i % 9, a, b),
        b >> (b - a) % 16 & 255,
        steps(a % 64, 12),
        shifted,
    ]


def test_integers(library: Library) -> None:
    rng = np.random.default_rng(2)
    x, y = (np.concatenate([[0, 1, 2**31, 2**32 - 1], rng.integers(0, 2**32, N - 4)]).astype(np.uint32) for _ in "xy")
    out = np.zeros((12, N), np.uint64)
    run(library, "integers", x, y, out, N, block=N)
    for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        assert out[:, i].tolist() == [v & (2**64 - 1) for v in integers_of(i, a, b)], (i, a, b)


@each_case("schedule", ["ascending", "descending", 5])
def test_reduction_by_the_last_block(library: Library, schedule: Any) -> None:
    x = np.random.default_rng(3).integers(0, 2**20, 3 * 128, np.uint32)
    partial, ticket, out = np.zeros(3, np.uint32), np.zeros(1, np.uint32), np.zeros(3, np.uint32)
    run(library, "reduce", x, partial, ticket, out, grid=(3, 1, 1), block=128, schedule=schedule, read_only=(0,))
    groups = x.reshape(-1, 32) % 4
    earlier = sum(int((g[:lane] == g[lane]).sum()) for g in groups for lane in range(32))
    assert out.tolist() == [int(x.sum()), int(x.max()), earlier] and ticket == 3


def test_cp_async_pipeline(library: Library) -> None:
    data = array(np.random.default_rng(4).integers(-9, 9, (2 * 5 * 64 - 30, 4)), np.float32)
    out = np.zeros((2, 64), np.float32)
    run(library, "pipeline", data, out, 5, len(data), grid=(2, 1, 1), block=64, read_only=(0,))
    padded = np.concatenate([data, np.zeros((30, 4), np.float32)]).reshape(2, 5, 64, 4)
    np.testing.assert_array_equal(out, np.roll((padded * [1, 2, 3, 4]).sum((1, 3)), -1, axis=1))


def test_mma(library: Library) -> None:
    rng = np.random.default_rng(5)
    a, b = array(rng.integers(-8, 9, (32, 32)), BF16), array(rng.integers(-8, 9, (32, 16)), BF16)
    out = np.zeros((32, 16), np.float32)
    run(library, "matmul", a, b, out, block=64, read_only=(0, 1))
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


def test_tma_and_wgmma(library: Library) -> None:
    rng = np.random.default_rng(6)
    a, b = (array(rng.integers(-4, 5, (64, 256)), BF16) for _ in "ab")
    maps = [TensorMap("bfloat16", x.ctypes.data, (256, 64), (512,), (64, 64), swizzle=128) for x in (a, b)]
    out = np.zeros((64, 64), np.float32)
    buffers = [Buffer(n, x.ctypes.data, x.nbytes, n == "c") for n, x in (("a", a), ("b", b), ("c", out))]
    args = [*(m.encode() for m in maps), struct.pack("<Q", out.ctypes.data), struct.pack("<I", 256)]
    library.kernels["hopper"].launch((1, 1, 1), (160, 1, 1), args, dynamic_shared=4 * 8192, buffers=buffers)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32).T)


class Step:
    """Two requests of a decode step on llama3_8b: 3 and 17 tokens, 16 to a page."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.pool = array(rng.standard_normal((4, 2, 1, 16, 8, 128)), BF16)
        self.totals = np.array([3, 17], np.uint32)
        self.table = np.array([[2, 0], [3, 1]], np.uint32)
        self.offsets = np.array([0, 1, 2], np.uint32)
        self.errors = np.full(1, 2**64 - 1, np.uint64)
        self.k, self.v = (array(rng.standard_normal((2, 8, 128)), BF16) for _ in "kv")
        self.q = array(rng.standard_normal((2, 32, 128)), BF16)

    def run(self, library: Library, op: str, grid: int, threads: int, *arguments: Any) -> None:
        page, v_at = 2 * 16 * 8 * 128, struct.pack("<Q", self.pool.ctypes.data + 2 * 16 * 8 * 128)
        strides = struct.pack("<q", page), struct.pack("<q", page)
        lengths = self.totals - 1
        cache = (self.pool, v_at, *strides, 4, lengths, 2, self.table, struct.pack("<q", 2), 2)
        run(library, f"llama3_8b_{op}", *cache, *arguments, self.errors, grid=(grid, 1, 1), block=threads)

    def token(self, request: int, position: int) -> Any:
        """The K and V rows `[2, heads, dim]` of a token."""
        return self.pool[self.table[request, position // 16], :, 0, position % 16]


NULL = bytes(8)


def stride(elements: int) -> bytes:
    return struct.pack("<q", elements)


def test_generated_operations(library: Library) -> None:
    step = Step()
    before, row = step.pool.copy(), stride(8 * 128)
    step.run(library, "append", 1, 256, step.k, step.v, step.offsets, row, row, 2)
    for b, total in enumerate(step.totals.tolist()):
        np.testing.assert_array_equal(step.token(b, total - 1), np.stack([step.k[b], step.v[b]]))
        step.token(b, total - 1)[...] = before[step.table[b, (total - 1) // 16], :, 0, (total - 1) % 16]
    assert step.pool.tobytes() == before.tobytes(), "nothing else was written"

    outs = [array(np.zeros((4, 8, 128)), BF16) for _ in "kv"]
    starts = np.array([0, 14], np.uint32)
    step.run(library, "gather", 1, 256, np.array([0, 2, 4], np.uint32), *outs, starts, row, row, 4)
    for i, (b, position) in enumerate([(0, 0), (0, 1), (1, 14), (1, 15)]):
        np.testing.assert_array_equal(np.stack([outs[0][i], outs[1][i]]), step.token(b, position))

    out, lse = array(np.zeros((2, 32, 128)), BF16), np.zeros((2, 32), np.float32)
    wide = stride(32 * 128)
    step.run(library, "decode", 2 * 8, 128, step.q, out, lse, NULL, wide, wide)
    for b, total in enumerate(step.totals.tolist()):
        k, v = np.stack([step.token(b, t) for t in range(total)], axis=1).astype(np.float64)
        for head in range(32):
            scores = k[:, head // 4] @ step.q[b, head].astype(np.float64) / math.sqrt(128)
            weights = np.exp(scores - scores.max())
            np.testing.assert_allclose(lse[b, head], scores.max() + math.log(weights.sum()), rtol=1e-5)
            wanted = weights @ v[:, head // 4] / weights.sum()
            np.testing.assert_allclose(out[b, head].astype(np.float64), wanted, rtol=2.0**-7, atol=1e-5)
    assert step.errors == 2**64 - 1

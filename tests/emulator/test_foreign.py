"""PTX that another compiler made of kernels in the style of public libraries: see ptx/foreign/make.sh."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import Library
from tests.emulator.conftest import Build
from tests.emulator.programs import aligned, run
from tests.support.each_case import each_case

FOLDER = Path(__file__).parent / "ptx" / "foreign"
MODULES = ("reduce", "dispatch", "half", "blocks", "fp8", "math", "math_fast")


@pytest.fixture(scope="module")
def library(build: Build) -> Callable[[str], Library]:
    return lambda name: build([(FOLDER / f"{name}.ptx").read_text()])


def filled(values: object, dtype: object) -> np.ndarray:
    """An array of these values where a GPU allocation may lie."""
    source = np.asarray(values, dtype)
    out = aligned(source.nbytes).view(source.dtype).reshape(source.shape)
    out[...] = source
    return out


def test_every_source_is_made() -> None:
    assert {p.stem for p in FOLDER.glob("*.ptx")} == set(MODULES)
    assert {p.stem for p in FOLDER.glob("*.cu")} == set(MODULES) - {"math_fast"}


@pytest.mark.parametrize("columns", [1, 100, 1024])
@each_case("schedule", ["ascending", 4])
def test_row_reductions(columns: int, schedule: str | int, library: Callable[[str], Library]) -> None:
    data = np.random.default_rng(columns).standard_normal((3, columns))
    for mangled, dtype, expected in (
        ("_Z11reduce_rowsIf3SumIfELi4EEvPT_PKS2_i", np.float32, data.astype(np.float32).sum(1, dtype=np.float64)),
        ("_Z11reduce_rowsIf3MaxIfELi1EEvPT_PKS2_i", np.float32, data.astype(np.float32).max(1)),
        ("_Z11reduce_rowsId3SumIdELi2EEvPT_PKS2_i", np.float64, data.sum(1)),
    ):
        out, rows = filled(np.zeros(3), dtype), filled(data, dtype)
        counters = run(
            library("reduce"), mangled, out, rows, columns, grid=(3, 1, 1), schedule=schedule, read_only=(1,)
        )
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        loads = counters.per_buffer["arg1"]
        assert loads.load_bytes == rows.nbytes
    assert library("reduce").kernels[mangled].static_shared == 256


@each_case("schedule", ["ascending", "descending", 4])
def test_last_block_finishes(schedule: str | int, library: Callable[[str], Library]) -> None:
    data = filled(np.arange(300) % 11, np.float32)
    total, parts = filled([0], np.float32), filled(np.zeros(4), np.float32)
    run(library("reduce"), "weighted_total", total, parts, data, 300, grid=(4, 1, 1), block=64, schedule=schedule)
    assert total[0] == (data.astype(np.float64) * 2.0 ** (np.arange(300) % 8 - 3)).sum()


def test_dispatch(library: Callable[[str], Library], capsys: pytest.CaptureFixture[str]) -> None:
    opcode, value = np.arange(64) % 13, np.arange(64) * 37 - 900
    out = filled(np.zeros(64), np.int32)
    run(
        library("dispatch"),
        "jump_table",
        out,
        filled(opcode, np.int32),
        filled(value, np.int32),
        grid=(2, 1, 1),
        block=32,
    )

    def expected(op: int, v: int) -> int:
        u = v & 0xFFFFFFFF
        bits = f"{u:032b}"
        r = [v + 11, v * v, u.bit_count(), 32 - u.bit_length(), v ^ 0x55, int(math.fmod(v, 7)), int(v / 3),
             int(bits[::-1], 2), abs(v), min(v, -4), v << 3, -1, -1][op]  # fmt: skip
        return (r + 2**31) % 2**32 - 2**31

    assert list(out) == [expected(int(o), int(v)) for o, v in zip(opcode, value, strict=True)]

    which = np.arange(32) * 5 % 7
    out = filled(np.zeros(32), np.int32)
    run(
        library("dispatch"),
        "indirect",
        out,
        filled(which, np.int32),
        np.array([-3, 20, 2], np.int32).tobytes(),
        block=32,
    )
    for t in range(32):
        x = t - 9
        f = [x * x, -x, int(x / 2)][which[t] % 3]
        clamped = min(max(f, -3 - (t & 1) * 2), 20 + (t & 1) * 2)
        ackermann = [(t & 3) + 1, (t & 3) + 2][t & 1]
        assert out[t] == (f << (t & 3) if which[t] & 1 else clamped) + ackermann

    out = filled(np.zeros(4), np.int32)
    run(library("dispatch"), "tickets", out, 1, grid=(4, 1, 1), block=1)
    assert list(out) == [100, 102, 104, 106]
    assert capsys.readouterr().out == "ticket 104 of block 2\n"


SINGLES: list[Callable[[float, float], float]] = [
    lambda a, b: math.sin(a), lambda a, b: math.cos(a), lambda a, b: math.exp(a), lambda a, b: math.log(b),
    lambda a, b: b**a, lambda a, b: math.sqrt(b), lambda a, b: a / b, lambda a, b: b**-0.5,
    lambda a, b: math.tanh(a), lambda a, b: math.erf(a), lambda a, b: 2.0**a, lambda a, b: a * b - a,
]  # fmt: skip
DOUBLES: list[Callable[[float, float], float]] = [
    lambda a, b: math.sin(a), lambda a, b: math.cos(a * 1e4), lambda a, b: math.exp(a), lambda a, b: math.log(b),
    lambda a, b: b**a, lambda a, b: math.copysign(abs(a) ** (1 / 3), a), lambda a, b: a / b, lambda a, b: b**-0.5,
    lambda a, b: math.tanh(a), lambda a, b: math.erf(a), lambda a, b: math.lgamma(b), lambda a, b: math.fmod(a, b),
]  # fmt: skip


@pytest.mark.parametrize("fast", [False, True])
def test_library_functions(fast: bool, library: Callable[[str], Library]) -> None:
    rng = np.random.default_rng(7)
    a, b = rng.uniform(-3, 3, 64), rng.uniform(0.1, 5, 64)
    for kernel, dtype, references, rtol in (
        ("singles", np.float32, SINGLES, 2e-4 if fast else 1e-6),
        ("doubles", np.float64, DOUBLES, 1e-13),
    ):
        x, y = filled(a, dtype), filled(b, dtype)
        out = filled(np.zeros((64, 12)), dtype)
        run(library("math_fast" if fast else "math"), kernel, out, x, y, 64, block=64, read_only=(1, 2))
        expected = [[f(float(p), float(q)) for f in references] for p, q in zip(x, y, strict=True)]
        np.testing.assert_allclose(out, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("kernel", "dtype"), [("silu_half", np.float16), ("silu_bfloat", ml_dtypes.bfloat16)])
def test_silu(kernel: str, dtype: type, library: Callable[[str], Library]) -> None:
    rng = np.random.default_rng(3)
    gate, up = filled(rng.standard_normal(256) * 3, dtype), filled(rng.standard_normal(256), dtype)
    out = filled(np.zeros(256), dtype)
    counters = run(library("half"), kernel, out, gate, up, 32, block=64, read_only=(1, 2))
    g = gate.astype(np.float64)
    tolerance = 2 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        out.astype(np.float64), g / (1 + np.exp(-g)) * up.astype(np.float64), rtol=tolerance, atol=1e-6
    )
    loads, stores = counters.per_buffer["arg1"], counters.per_buffer["arg0"]
    assert (loads.load_requests, loads.load_sectors, stores.store_sectors) == (1, 16, 16)


def test_half_arithmetic(library: Callable[[str], Library]) -> None:
    rng = np.random.default_rng(5)
    a, b = (filled(rng.standard_normal((32, 2)) * 2, np.float16) for _ in range(2))
    out = filled(np.zeros((32, 8, 2)), np.float16)
    run(library("half"), "half_arithmetic", out, a, b, block=32, read_only=(1, 2))
    wide = a.astype(np.float64) * b.astype(np.float64) + a.astype(np.float64)
    expected = [
        a + b,
        wide.astype(np.float16),
        np.maximum(a, b),
        np.clip(a - b, 0, 1),
        -np.abs(a),
        a > b,
        a[:, ::-1],
        np.rint(a),
    ]
    np.testing.assert_array_equal(out, np.stack(expected, 1).astype(np.float16))


@each_case("schedule", ["ascending", "descending", 8])
def test_cooperative_groups(schedule: str | int, library: Callable[[str], Library]) -> None:
    data = filled(np.random.default_rng(1).standard_normal((8, 100)), ml_dtypes.bfloat16)
    out = filled(np.zeros(8), np.float32)
    run(library("half"), "mean_square", out, data, 100, grid=(2, 1, 1), block=128, schedule=schedule, read_only=(1,))
    np.testing.assert_allclose(out, (data.astype(np.float64) ** 2).mean(1), rtol=1e-5)


@each_case("schedule", ["ascending", "descending", 8])
def test_block_primitives(schedule: str | int, library: Callable[[str], Library]) -> None:
    rng = np.random.default_rng(2)
    data, out, total = (
        filled(rng.integers(-50, 50, 64), np.int32),
        filled(np.zeros(64), np.int32),
        filled([0], np.int32),
    )
    run(library("blocks"), "scan", out, data, total, block=64, schedule=schedule)
    np.testing.assert_array_equal(out, np.cumsum(data) - data)
    assert total[0] == data.sum()
    keys, values = filled(rng.integers(0, 2**32, 128), np.uint32), filled(np.arange(128), np.int32)
    order = np.argsort(keys, kind="stable")
    expected = keys[order]
    run(library("blocks"), "sort", keys, values, block=64, schedule=schedule)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, order)
    numbers, out = filled(rng.standard_normal(1000), np.float32), filled(np.zeros(2), np.float32)
    run(library("blocks"), "sum", out, numbers, 1000, schedule=schedule, read_only=(1,))
    own = [numbers[t::128].astype(np.float64).sum() for t in range(128)]
    np.testing.assert_allclose(out, [sum(own), max(own)], rtol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "dtype", "top"),
    [("quantize_e4m3", ml_dtypes.float8_e4m3fn, 448), ("quantize_e5m2", ml_dtypes.float8_e5m2, 57344)],
)
def test_fp8(kernel: str, dtype: type, top: float, library: Callable[[str], Library]) -> None:
    data = filled(np.random.default_rng(6).standard_normal((3, 100)) * [[1], [1e-3], [50]], ml_dtypes.bfloat16)
    out, scales = filled(np.zeros((3, 100)), dtype), filled(np.zeros(3), np.float32)
    run(library("fp8"), kernel, out, scales, data, 100, grid=(3, 1, 1), block=32, read_only=(2,))
    values = data.astype(np.float32)
    expected = np.abs(values).max(1) / np.float32(top)
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(out.view(np.uint8), (values / expected[:, None]).astype(dtype).view(np.uint8))


def test_every_e4m3(library: Callable[[str], Library]) -> None:
    codes = filled(np.arange(256), np.uint8)
    out = filled(np.zeros(256), np.float32)
    run(library("fp8"), "widen_e4m3", out, codes, block=64, read_only=(1,))
    np.testing.assert_array_equal(out, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))

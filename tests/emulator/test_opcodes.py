"""Every arithmetic opcode against Python integers and exact rationals, on corner cases and random operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvgen.emulator import Library
from tests.emulator import float_cases, integer_cases
from tests.emulator.cases import CASES, DTYPES, Case, bits_of
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, entry, run

assert integer_cases and float_cases  # they fill CASES
N = 128
REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def register(kind: str, index: int) -> str:
    return f"{REGISTER[WIDTH.get(kind) or bits_of(kind)]}{index}"


def ptx_type(kind: str) -> str:
    return "b16" if kind in ("f16", "bf16") else kind


def kernel(name: str, c: Case) -> str:
    kinds = c.inputs.split()
    body = ["setp.ne.u32 %p0, 0, 0;", "mov.u32 %r40, %tid.x;"]
    names = {}
    for i, kind in enumerate(kinds):
        names["abc"[i]] = register(kind, 10 + i)
        size = np.dtype(DTYPES[kind]).itemsize
        body.append(f"ld.param.u64 %rd20, [p{i + 1}]; mad.wide.u32 %rd21, %r40, {size}, %rd20;")
        body.append(f"ld.global.{ptx_type(kind)} {names['abc'[i]]}, [%rd21];")
    names["d"] = register(c.output, 15 if WIDTH.get(c.output, 32) != 16 else 14)
    body.append(c.code.format(**names))
    size = np.dtype(DTYPES[c.output]).itemsize
    body.append(f"mad.wide.u32 %rd22, %r40, {size}, %rd0; st.global.{ptx_type(c.output)} [%rd22], {names['d']};")
    params = ", ".join(f".param .u64 p{i}" for i in range(len(kinds) + 1))
    return entry(f"op_{name}", "\n".join(body), params)


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    return build([HEADER + "".join(kernel(n, c) for n, c in CASES.items())])


FLOAT_CORNERS = [
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 65504.0, 65520.0, 1e-8, 6e-8, 448.0, 460.0, 3e38, 1e-40, -1e-45,
    math.inf, -math.inf, math.nan, 2147483648.0, 4294967296.0, -2147483904.0, 127.5, 1 / 3,
]  # fmt: skip


def operands(kind: str, ranges: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    dtype = DTYPES[kind]
    if kind in WIDTH:
        if ranges == "positive":
            return rng.uniform(0.01, 8, N).astype(dtype)
        if ranges == "small":
            return (rng.standard_normal(N) * 300 + 0.01).astype(dtype)
        corners = rng.choice(FLOAT_CORNERS, N // 2)
        spread = rng.standard_normal(N // 2) * 2.0 ** rng.integers(-20, 20, N // 2)
        with np.errstate(over="ignore"):
            return np.concatenate([corners, spread]).astype(dtype)
    info = np.iinfo(dtype)
    corners = rng.choice(np.array([info.min, info.max, 0, 1, info.max - 1, info.max // 2, 31, 32], dtype), N // 2)
    return np.concatenate([corners, rng.integers(info.min, info.max, N - N // 2, dtype, endpoint=True)]).astype(dtype)


@pytest.mark.parametrize("name", CASES)
def test_opcode(name: str, library: Library) -> None:
    c = CASES[name]
    rng = np.random.default_rng(sum(name.encode()))
    inputs = [operands(k, c.ranges, rng) for k in c.inputs.split()]
    out = np.zeros(N, DTYPES[c.output])
    run(library, f"op_{name}", out, *inputs)
    plain = [[float(x) if k in WIDTH else int(x) for x in v] for k, v in zip(c.inputs.split(), inputs, strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):
        values = [c.reference(*row) for row in zip(*plain, strict=True)]
        expected = np.array(values, np.float64 if c.output in WIDTH else object).astype(DTYPES[c.output])
    if c.tolerance:
        np.testing.assert_allclose(out, expected, rtol=c.tolerance, atol=1e-6)
        return
    same = out == expected
    if c.output in WIDTH:
        nan = np.isnan(out.astype(np.float64)) & np.isnan(expected.astype(np.float64))
        same = (same & (np.signbit(out) == np.signbit(expected))) | nan
    wrong = np.flatnonzero(~same)
    assert not wrong.size, [(tuple(p[i] for p in plain), out[i], expected[i]) for i in wrong[:4]]

"""Per-opcode cases: PTX with named operands beside the same in Python numbers, many of them built into one library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from kvgen.emulator import Library
from tests.emulator.forms import form
from tests.emulator.programs import aligned, run

Array = np.ndarray[Any, Any]
ROWS = 128
_PER_KERNEL = 40
_STRIDE = 16  # bytes between two rows of results


@dataclass(frozen=True)
class Kind:
    """How values of one PTX type travel: memory as `dtype`, registers as `register`, numbers of each `lane` (low first)."""

    dtype: Any
    register: str
    memory: str
    lane: Any = None
    nan: int | None = None  # the canonical one

    @property
    def element(self) -> Any:
        return self.lane or self.dtype

    @property
    def floating(self) -> bool:
        return not np.issubdtype(self.element, np.integer)

    def lanes(self, values: Array) -> list[Array]:
        if self.lane is FLOAT4:  # two in a byte
            return [(values & 15).view(FLOAT4), (values >> 4).view(FLOAT4)]
        return list(np.ascontiguousarray(values).view(self.element).reshape(len(values), -1).T)


FLOAT4 = ml_dtypes.float4_e2m1fn
KINDS: dict[str, Kind] = {
    "u8": Kind(np.uint8, "%rs", "u8"), "s8": Kind(np.int8, "%rs", "s8"), "pred": Kind(np.uint8, "%p", "u8"),
    "u16": Kind(np.uint16, "%rs", "u16"), "s16": Kind(np.int16, "%rs", "s16"),
    "u32": Kind(np.uint32, "%r", "u32"), "s32": Kind(np.int32, "%r", "s32"),
    "u64": Kind(np.uint64, "%rd", "u64"), "s64": Kind(np.int64, "%rd", "s64"),
    "f16": Kind(np.float16, "%rs", "b16", nan=0x7FFF), "bf16": Kind(ml_dtypes.bfloat16, "%rs", "b16", nan=0x7FFF),
    "f32": Kind(np.float32, "%f", "f32", nan=0x7FFFFFFF), "f64": Kind(np.float64, "%fd", "f64"),
    "tf32": Kind(np.float32, "%r", "b32"),
    "u16x2": Kind(np.uint32, "%r", "b32", np.uint16), "s16x2": Kind(np.uint32, "%r", "b32", np.int16),
    "f16x2": Kind(np.uint32, "%r", "b32", np.float16, 0x7FFF),
    "bf16x2": Kind(np.uint32, "%r", "b32", ml_dtypes.bfloat16, 0x7FFF),
    "f32x2": Kind(np.uint64, "%rd", "b64", np.float32, 0x7FFFFFFF),
    "e4m3x2": Kind(np.uint16, "%rs", "b16", ml_dtypes.float8_e4m3fn, 0x7F),
    "e5m2x2": Kind(np.uint16, "%rs", "b16", ml_dtypes.float8_e5m2, 0x7F),
    "e2m3x2": Kind(np.uint16, "%rs", "b16", ml_dtypes.float6_e2m3fn),
    "e3m2x2": Kind(np.uint16, "%rs", "b16", ml_dtypes.float6_e3m2fn),
    "e2m1x2": Kind(np.uint8, "%rb", "b8", FLOAT4),
    "ue8m0x2": Kind(np.uint16, "%rs", "b16", ml_dtypes.float8_e8m0fnu, 0xFF),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`code` names its result {d} and its operands {a} {b} {c} {e}, and may use %p5, %p6 and %r60 up as it likes.

    `inputs` are kinds with an optional range ("u32:count"). Of packed kinds `reference` is called for each lane; with
    `spread` the operands are the lanes, upper one first. `canonical`: a NaN must be the canonical one of its type. In
    a suite with `slots` each thread has 32 bytes of its own at %rd20 in global, %r62 in shared and %rd22 in local
    memory; %rd21 is the generic address of the second.
    """

    code: str
    inputs: tuple[str, ...]
    output: str
    reference: Callable[..., Any]
    tolerance: float = 0.0
    absolute: float = 0.0
    canonical: bool = True
    spread: bool = False

    def forms(self) -> Iterator[str]:
        for statement in self.code.split(";"):
            if words := re.sub(r"^\s*@!?%p\d+\s*", "", statement).split():
                opcode, *rest = words[0].split(".")
                yield form(opcode, rest)


@dataclass
class Suite:
    """Cases whose kernels share a build. `vectorised` references take and give whole columns of numbers."""

    name: str
    slots: bool = False
    rows: int = ROWS
    vectorised: bool = False
    operands: Callable[[Sequence[str], np.random.Generator], list[Array]] | None = None
    declarations: str = ""
    cases: list[Case] = field(default_factory=list)

    def add(self, code: str, inputs: str, output: str, reference: Callable[..., Any], **more: Any) -> None:
        self.cases.append(Case(code, tuple(inputs.split()), output, reference, **more))

    def groups(self) -> Iterator[tuple[str, tuple[str, ...], list[Case]]]:
        """Cases that share a kernel: the same inputs, few enough to compile quickly."""
        by_inputs: dict[tuple[str, ...], list[Case]] = {}
        for c in self.cases:
            by_inputs.setdefault(c.inputs, []).append(c)
        for inputs, cases in by_inputs.items():
            for i in range(0, len(cases), _PER_KERNEL):
                words = "_".join(inputs).replace(":", "_")
                yield f"{self.name}_{words}_{i}", inputs, cases[i : i + _PER_KERNEL]

    def ptx(self) -> str:
        kernels = (_kernel(name, self, inputs, cases) for name, inputs, cases in self.groups())
        return f".version 9.0\n.target sm_100a\n.address_size 64\n{self.declarations}\n" + "".join(kernels)

    def failures(self, library: Library) -> list[str]:
        """What came out wrong, at most two rows of a case."""
        out: list[str] = []
        for name, inputs, cases in self.groups():
            rng = np.random.default_rng([*name.encode()])
            values = (self.operands or random_operands)(inputs, rng)
            results = np.zeros(len(cases) * self.rows * _STRIDE, np.uint8)
            grid, block = (-(-self.rows // 1024), 1, 1), min(self.rows, 1024)
            slots = [aligned(self.rows * 32), bytes(range(32))] if self.slots else []
            inputs_only = tuple(range(1, len(values) + 1))
            run(library, name, results, *values, *slots, grid=grid, block=block, read_only=inputs_only)
            kinds = map(_kind, inputs)
            columns = [[self._numbers(k, lane) for lane in k.lanes(v)] for k, v in zip(kinds, values, strict=True)]
            for c, raw in zip(cases, results.reshape(len(cases), self.rows, _STRIDE), strict=True):
                out += self._wrong(c, columns, raw)
        return out

    def _numbers(self, kind: Kind, lane: Array) -> Any:
        with np.errstate(invalid="ignore"):
            numbers = lane.astype(np.float64) if kind.floating else lane
        return numbers if self.vectorised else numbers.tolist()

    def _wrong(self, c: Case, columns: Sequence[Sequence[Any]], raw: Array) -> Iterator[str]:
        kind = _kind(c.output)
        width = np.dtype(kind.dtype).itemsize
        results = kind.lanes(np.ascontiguousarray(raw[:, :width]).view(kind.dtype)[:, 0])
        for i, got in enumerate(results):
            chosen = [lanes[i if len(lanes) > 1 else 0] for lanes in columns]
            if c.spread:
                chosen = [chosen[len(results) - 1 - i], *chosen[len(results) :]]
            with np.errstate(all="ignore"):
                if self.vectorised:
                    expected = c.reference(*chosen)
                else:
                    expected = [c.reference(*row) for row in zip(*chosen, strict=True)]
                at = np.flatnonzero(~_same(c, kind, got, expected))
            for row in at[:2]:
                yield f"{c.code} {[v[row] for v in chosen]}: got {got[row]!r}, expected {expected[row]!r}"


def _same(c: Case, kind: Kind, got: Array, expected: Any) -> Array:
    if not kind.floating:
        if not isinstance(expected, np.ndarray):
            expected = np.array([int(x) % (1 << 64) for x in expected], np.uint64)
        return np.asarray(got == expected.astype(kind.element))
    wanted, value = np.asarray(expected, np.float64), got.astype(np.float64)
    if c.tolerance or c.absolute:
        wanted = wanted.astype(kind.element).astype(np.float64)  # as far as the format goes
    same = (value == wanted) & (np.signbit(value) == np.signbit(wanted))
    if c.tolerance or c.absolute:
        same |= np.isclose(value, wanted, rtol=c.tolerance, atol=c.absolute)
    nan = np.isnan(value)
    if kind.nan is not None and c.canonical:
        nan &= got.view(f"u{got.dtype.itemsize}") == kind.nan
    return np.where(np.isnan(wanted), nan, same)


def _kind(text: str) -> Kind:
    return KINDS[text.partition(":")[0]]


def _kernel(name: str, suite: Suite, inputs: Sequence[str], cases: Sequence[Case]) -> str:
    body = ["mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 1024, %r0;"]
    body += [f"ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd0, %r0, {_STRIDE}, %rd0;"]
    names = {}
    for i, kind in enumerate(map(_kind, inputs)):
        size = np.dtype(kind.dtype).itemsize
        register = f"{kind.register}{10 + i}"
        names["abce"[i]] = register
        body.append(f"ld.param.u64 %rd1, [p{i + 1}]; mad.wide.u32 %rd1, %r0, {size}, %rd1;")
        if kind.register == "%p":
            body.append(f"ld.global.u8 %rs1, [%rd1]; setp.ne.u16 {register}, %rs1, 0;")
        else:
            body.append(f"ld.global.{kind.memory} {register}, [%rd1];")
    for i, c in enumerate(cases):
        kind = _kind(c.output)
        result = f"{kind.register}9"
        body.append(c.code.format(d=result, **names))
        if kind.register == "%p":
            body.append(f"selp.u16 %rs1, 1, 0, {result};")
            result = "%rs1"
        body.append(f"st.global.{kind.memory} [%rd0+{i * suite.rows * _STRIDE}], {result};")
    params = [f".param .u64 p{i}" for i in range(len(inputs) + 1)]
    slots = ""
    if suite.slots:
        params += [".param .u64 slots", ".param .align 16 .b8 block[32]"]
        slots = f""".shared .align 32 .b8 window[{suite.rows * 32}]; .local .align 32 .b8 mine[32];
ld.param.u64 %rd20, [slots]; mov.u32 %r62, %tid.x; mad.wide.u32 %rd20, %r62, 32, %rd20;
mov.u32 %r63, window; mad.lo.u32 %r62, %r62, 32, %r63; cvt.u64.u32 %rd21, %r62; cvta.shared.u64 %rd21, %rd21;
mov.u64 %rd22, mine;
"""
    registers = """.reg .pred %p<16>; .reg .b8 %rb<16>; .reg .b16 %rs<40>; .reg .b32 %r<80>; .reg .b64 %rd<40>;
.reg .f32 %f<24>; .reg .f64 %fd<24>; .reg .b128 %q<4>;
"""
    return f".visible .entry {name}({', '.join(params)})\n{{\n{registers}{slots}" + "\n".join(body) + "\nret;\n}\n"


# ---------------------------------------------------------------- operands
_FLOATS = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 6.0, 28.0, 448.0, 460.0, 65504.0, 65519.0, 65520.0, 1e-8, 6e-8,
    2.0**-126, -(2.0**-127), 2.0**-133, 2.0**-24, 2.0**-25, 1e-40, -1e-45, 1.2e38, 3.4e38, math.inf, -math.inf, math.nan,
    2147483648.0, 4294967296.0, -2147483904.0, 9.3e18, 1.9e19, 127.5, 255.5, -0.75, 1 / 3,
]  # fmt: skip


def _floats(dtype: Any, chosen: str, rng: np.random.Generator) -> Array:
    if chosen == "positive":
        return rng.uniform(0.01, 8, ROWS).astype(dtype)
    if chosen == "moderate":
        return (rng.standard_normal(ROWS) * 300 + 0.01).astype(dtype)
    third = ROWS // 3
    size = np.dtype(dtype).itemsize
    anything = rng.integers(0, 256, (third, size), np.uint8).view(dtype).reshape(third)
    spread = rng.standard_normal(ROWS - 2 * third) * 2.0 ** rng.integers(-20, 20, ROWS - 2 * third)
    with np.errstate(over="ignore", invalid="ignore"):
        corners = rng.choice(_FLOATS, third).astype(dtype)
        return np.concatenate([corners, anything, spread.astype(dtype)])


def _integers(dtype: Any, chosen: str, rng: np.random.Generator) -> Array:
    info = np.iinfo(dtype)
    if chosen == "count":
        return rng.choice(np.array([*range(70), 127, 128, 255, 256, 288, 2**31, 2**32 - 1], dtype), ROWS)
    corners = rng.choice(np.array([info.min, info.max, 0, 1, info.max - 1, info.max // 2, 31, 32], dtype), ROWS // 2)
    whole = rng.integers(info.min, info.max, ROWS - ROWS // 2, dtype, endpoint=True)
    out = np.concatenate([corners, whole >> rng.integers(0, 8 * info.dtype.itemsize, len(whole), dtype)]).astype(dtype)
    if chosen == "nonzero":
        out[out == 0] = 1
    return out


def random_operands(inputs: Sequence[str], rng: np.random.Generator) -> list[Array]:
    out: list[Array] = []
    for text in inputs:
        kind, _, chosen = text.partition(":")
        k = KINDS[kind]
        lanes = np.dtype(k.dtype).itemsize // np.dtype(k.element).itemsize
        columns = [(_floats if k.floating else _integers)(k.element, chosen, rng) for _ in range(lanes)]
        if kind == "pred":
            columns = [rng.integers(0, 2, ROWS, np.uint8)]
        for column in columns:
            rng.shuffle(column)
        values = np.ascontiguousarray(np.stack(columns, 1)).view(k.dtype).reshape(ROWS)
        if out and out[0].dtype == values.dtype and not chosen:
            values[:8] = out[0][:8]  # equal operands, which a difference cancels
        if k.floating and not chosen:  # normal numbers with subnormal sums
            pairs = np.array([1.5, -1.0][min(len(out), 1)] * np.array([2.0**-126, 2.0**-14] * lanes)).astype(k.element)
            values[8:10] = pairs.view(k.dtype)
        out.append(values)
    return out


def wrap(value: int, kind: str) -> int:
    n = int(kind[1:])
    value &= (1 << n) - 1
    return value - (1 << n) if kind[0] == "s" and value >> (n - 1) else value


def clamp(value: int, kind: str) -> int:
    n = int(kind[1:])
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)
    return max(low, min(high, value))

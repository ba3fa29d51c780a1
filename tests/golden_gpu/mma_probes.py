"""mma.sync in every shape and type: whole numbers, whose sums are exact, ordinary ones, and infinities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.numbers import DTYPES, Array, is_float
from tests.golden_gpu.probe import Arrays, Probe

CASES: Final = 3
LANES = np.arange(32)
ROW, QUAD = LANES // 4, LANES % 4


@dataclass(frozen=True)
class Mma:
    """One shape and its types; `error` is what a sum of ordinary numbers may be off by, relative to its terms' sum."""

    m: int
    k: int
    a: str
    b: str
    acc: str
    error: float = 0.0
    satfinite: bool = False

    @property
    def ptx(self) -> str:
        sat = ".satfinite" if self.satfinite else ""
        return f"mma.sync.aligned.m{self.m}n8k{self.k}.row.col{sat}.{self.acc}.{self.a}.{self.b}.{self.acc}"

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a, b and the accumulators."""
        size = DTYPES[self.a].itemsize
        return self.m * self.k * size // 128, self.k * size // 16, self.m * 8 * DTYPES[self.acc].itemsize // 128


# Sums of f32 may be cut to 24 bits at every step, those of fp8 products to about 14 bits.
FORMS: Final = (
    *(Mma(16, k, "f16", "f16", "f32", 2.0**-20) for k in (8, 16)),
    *(Mma(16, k, "f16", "f16", "f16", 2.0**-9) for k in (8, 16)),
    *(Mma(16, k, "bf16", "bf16", "f32", 2.0**-20) for k in (8, 16)),
    *(Mma(16, k, "tf32", "tf32", "f32", 2.0**-20) for k in (4, 8)),
    *(Mma(16, 32, a, b, "f32", 2.0**-11) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *(Mma(m, k, a, b, "s32", satfinite=s) for m, k in ((8, 16), (16, 16), (16, 32)) for a in ("s8", "u8")
      for b in ("s8", "u8") for s in (False, True)),
)  # fmt: skip


def places_a(m: int, k: int, per: int) -> tuple[Array, Array]:
    """Rows and columns of a's elements, [register, lane, element]."""
    register, lane, element = np.ogrid[: m * k // (32 * per), :32, :per]
    shape = (m * k // (32 * per), 32, per)
    halves = m // 8
    row = ROW[lane] + 8 * (register % halves)
    column = QUAD[lane] * per + element + 4 * per * (register // halves)
    return np.broadcast_to(row, shape), np.broadcast_to(column, shape)


def places_b(k: int, per: int) -> tuple[Array, Array]:
    """Rows (along k) and columns of b's elements, [register, lane, element]."""
    register, lane, element = np.ogrid[: k // (4 * per), :32, :per]
    shape = (k // (4 * per), 32, per)
    return np.broadcast_to(QUAD[lane] * per + element + 4 * per * register, shape), np.broadcast_to(ROW[lane], shape)


def places_c(m: int, per: int) -> tuple[Array, Array]:
    """Rows and columns of the accumulators' elements, [register, lane, element]."""
    register, lane, element = np.ogrid[: m * 8 // (32 * per), :32, :per]
    index = register * per + element
    shape = (m * 8 // (32 * per), 32, per)
    return np.broadcast_to(ROW[lane] + 8 * (index // 2), shape), np.broadcast_to(2 * QUAD[lane] + index % 2, shape)


def to_registers(matrix: Array, places: tuple[Array, Array]) -> Array:
    """A matrix's words, [lane, register]."""
    picked = np.ascontiguousarray(matrix[places])
    words = picked.view(np.uint32)[..., 0]
    return np.ascontiguousarray(words.T)


def from_registers(words: Array, places: tuple[Array, Array], kind: str, shape: tuple[int, int]) -> Array:
    """The matrix of words [lane, register]."""
    elements = np.ascontiguousarray(words.T)[..., None].view(DTYPES[kind])
    matrix = np.zeros(shape, DTYPES[kind])
    matrix[places] = elements
    return matrix


def matrix_of(kind: str, shape: tuple[int, int], case: int, rng: np.random.Generator) -> Array:
    """Case 0: whole numbers; 1: ordinary ones, or all integers; 2: whole numbers with infinities, or extreme integers."""
    if not is_float(kind):
        info = np.iinfo(DTYPES[kind])
        low, high = (info.min, info.max) if case else (max(-9, info.min), 9)
        whole = rng.integers(low, high, shape, np.int64, endpoint=True)
        return (whole if case != 2 else rng.choice([info.min, info.max], shape)).astype(DTYPES[kind])
    values = rng.integers(-4, 5, shape).astype(np.float64) if case != 1 else rng.standard_normal(shape)
    if case == 2:
        values.flat[rng.integers(0, values.size, 2)] = [np.inf, -np.inf] if kind != "e4m3" else [np.nan, 448.0]
    made = values.astype(DTYPES[kind])
    return (made.view(np.uint32) & 0xFFFFE000).view(np.float32) if kind == "tf32" else made


def _inputs() -> dict[str, Array]:
    rng = np.random.default_rng(90)
    a, b, c = (np.zeros((CASES, len(FORMS), 32, n), np.uint32) for n in (4, 2, 4))
    for case in range(CASES):
        for i, form in enumerate(FORMS):
            size = 4 // DTYPES[form.a].itemsize
            of_acc = 4 // DTYPES[form.acc].itemsize
            numbers = form.registers
            kinds = (matrix_of(form.a, (form.m, form.k), case, rng), matrix_of(form.b, (form.k, 8), case, rng))
            accumulators = matrix_of(form.acc, (form.m, 8), case if form.acc == "s32" else min(case, 1), rng)
            a[case, i, :, : numbers[0]] = to_registers(kinds[0], places_a(form.m, form.k, size))
            b[case, i, :, : numbers[1]] = to_registers(kinds[1], places_b(form.k, size))
            c[case, i, :, : numbers[2]] = to_registers(accumulators, places_c(form.m, of_acc))
    return {"a": a, "b": b, "c": c, "out": np.zeros((CASES * len(FORMS), 128), np.uint32)}


def _wanted(arrays: Arrays) -> dict[str, Wanted]:
    out = np.zeros((CASES * len(FORMS), 32, 4), np.uint32)
    rules = []
    for case in range(CASES):
        for i, form in enumerate(FORMS):
            size, of_acc = 4 // DTYPES[form.a].itemsize, 4 // DTYPES[form.acc].itemsize
            n = form.registers
            a = from_registers(
                arrays["a"][case, i, :, : n[0]], places_a(form.m, form.k, size), form.a, (form.m, form.k)
            )
            b = from_registers(arrays["b"][case, i, :, : n[1]], places_b(form.k, size), form.b, (form.k, 8))
            at = places_c(form.m, of_acc)
            c = from_registers(arrays["c"][case, i, :, : n[2]], at, form.acc, (form.m, 8))
            d, scale = product(a, b, c, form.satfinite)
            out[case * len(FORMS) + i, :, : n[2]] = to_registers(d.astype(DTYPES[form.acc]), at)
            absolute = form.error * scale if case == 1 and form.acc != "s32" else 0.0
            kind, count = (form.acc, of_acc) if form.acc != "s32" else ("b32", 1)
            rules.append(Rule(kind, count, absolute=absolute, any_nan=True))
    return {"out": Wanted(out.reshape(-1, 128), tuple(rules))}


def product(a: Array, b: Array, c: Array, satfinite: bool = False) -> tuple[Any, float]:
    """a b + c, and the largest sum of its terms' magnitudes."""
    if c.dtype.kind == "i":
        total = a.astype(object) @ b.astype(object) + c.astype(object)
        wrap = np.frompyfunc(
            lambda x: max(-(2**31), min(2**31 - 1, x)) if satfinite else (x + 2**31) % 2**32 - 2**31, 1, 1
        )
        return wrap(total).astype(np.int64), 0.0
    x, y, z = (m.astype(np.float64) for m in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        finite = [np.nan_to_num(np.abs(m), nan=0.0, posinf=0.0) for m in (x, y, z)]
        return x @ y + z, float((finite[0] @ finite[1] + finite[2]).max())


def cuda() -> str:
    """The kernel: block `case`, all forms one after another."""
    lines = [
        'extern "C" __global__ void mma(const unsigned* as, const unsigned* bs, const unsigned* cs, unsigned* out) {'
    ]
    for i, form in enumerate(FORMS):
        n = form.registers
        at = f"((blockIdx.x * {len(FORMS)} + {i}) * 32 + threadIdx.x)"
        kind, letter = ("float", "f") if form.acc == "f32" else ("unsigned", "r")
        acc = f"const {kind}* c = (const {kind}*)cs + {at} * 4;"
        places = [f"%{j}" for j in range(2 * n[2] + n[0] + n[1])]
        d, a, b, c = (
            ", ".join(places[start : start + count])
            for start, count in ((0, n[2]), (n[2], n[0]), (n[2] + n[0], n[1]), (n[2] + n[0] + n[1], n[2]))
        )
        outputs = ", ".join(f'"={letter}"(d[{j}])' for j in range(n[2]))
        inputs = [f'"r"(a[{j}])' for j in range(n[0])] + [f'"r"(b[{j}])' for j in range(n[1])]
        inputs += [f'"{letter}"(c[{j}])' for j in range(n[2])]
        lines.append(
            f"  {{ const unsigned *a = as + {at} * 4, *b = bs + {at} * 2; {acc} {kind}* d = ({kind}*)out + {at} * 4;\n"
            f'    asm volatile("{form.ptx} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};" : {outputs} : {", ".join(inputs)}); }}'
        )
    return "\n".join([*lines, "}", ""])


def probes() -> list[Probe]:
    """All of this module."""
    rows = [f"{f.ptx} {case}" for case in range(CASES) for f in FORMS]
    return [Probe("mma", "mma", "mma", _inputs, _wanted, 32, (CASES, 1, 1), rows=rows)]

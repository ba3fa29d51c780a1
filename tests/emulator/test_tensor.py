"""ldmatrix, stmatrix, movmatrix and every form of mma.sync, against NumPy on the layouts the PTX ISA states."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library, TranslateError
from tests.emulator.conftest import Build
from tests.emulator.fragments import BITS, FLOATS, A, B, c_place, numbers, packed, unpacked
from tests.emulator.programs import HEADER, entry, run
from tests.support.each_case import each_case


@dataclass(frozen=True)
class Form:
    shape: str
    a: str
    b: str
    d: str
    suffix: str = ""
    saturate: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape}_{self.a}_{self.b}_{self.d}{'_sat' * self.saturate}{self.suffix.replace('.', '_')}"

    @property
    def m(self) -> int:
        return int(self.shape[1 : self.shape.index("n")])

    @property
    def k(self) -> int:
        return int(self.shape.split("k")[1])

    def words(self) -> tuple[int, int, int]:
        """32-bit words of a lane's A, B and C."""
        bits, sum_bits = BITS[self.a], BITS[self.d]
        return self.m * self.k * bits // 1024, 8 * self.k * bits // 1024, self.m * 8 * sum_bits // 1024


FP8, S8, S4 = ("e4m3", "e5m2"), ("s8", "u8"), ("s4", "u4")
FORMS = [
    *(Form(s, "f16", "f16", d) for s in ("m16n8k8", "m16n8k16") for d in ("f32", "f16")),
    *(Form(s, "bf16", "bf16", "f32") for s in ("m16n8k8", "m16n8k16")),
    *(Form(s, "tf32", "tf32", "f32") for s in ("m16n8k4", "m16n8k8")),
    *(Form(s, a, b, d) for s in ("m16n8k16", "m16n8k32") for a in FP8 for b in FP8 for d in ("f32", "f16")),
    *(Form(s, "f64", "f64", "f64") for s in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    *(Form(s, a, b, "s32", saturate=a != b) for s in ("m8n8k16", "m16n8k16", "m16n8k32") for a in S8 for b in S8),
    *(Form(s, a, b, "s32", saturate=a == b) for s in ("m8n8k32", "m16n8k32", "m16n8k64") for a in S4 for b in S4),
    *(
        Form(f"m{s}", "b1", "b1", "s32", f".{x}.popc")
        for s in ("8n8k128", "16n8k128", "16n8k256")
        for x in ("xor", "and")
    ),
]


def fragment_kernel(name: str, code: str, loads: int, stores: int) -> str:
    """Lane i loads `loads` words from in[i*loads] into %x0.., runs code, stores %y0.. to out."""
    return entry(
        name,
        f"""
  .reg .b32 %x<{max(loads, 1)}>; .reg .b32 %y<{max(stores, 1)}>;
  .shared .align 16 .b8 tile_{name}[2048];
  ld.param.u64 %rd1, [p1]; mov.u32 %r40, %tid.x;
  mad.wide.u32 %rd2, %r40, {4 * stores}, %rd0; mad.wide.u32 %rd3, %r40, {4 * loads}, %rd1;
  {"".join(f"ld.global.u32 %x{i}, [%rd3+{4 * i}]; " for i in range(loads))}
  {code}
  {"".join(f"st.global.u32 [%rd2+{4 * i}], %y{i}; " for i in range(stores))}""",
        ".param .u64 p0, .param .u64 p1",
    )


def registers(prefix: str, start: int, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{start + i}" for i in range(count)) + "}"


def mma(f: Form) -> str:
    a, b, c = f.words()
    op = f"mma.sync.aligned.{f.shape}.row.col{'.satfinite' * f.saturate}.{f.d}.{f.a}.{f.b}.{f.d}{f.suffix}"
    if f.a != "f64":
        parts = [registers("y", 0, c), registers("x", 0, a), registers("x", a, b), registers("x", a + b, c)]
        return fragment_kernel(f"mma_{f.name}", f"{op} {', '.join(parts)};", a + b + c, c)
    code = f".reg .f64 %w<{(a + b + c) // 2}>; .reg .f64 %v<{c // 2}>; "
    code += "".join(f"mov.b64 %w{i}, {{%x{2 * i}, %x{2 * i + 1}}}; " for i in range((a + b + c) // 2))
    a, b, c = a // 2, b // 2, c // 2
    parts = [registers("v", 0, c), registers("w", 0, a), registers("w", a, b), registers("w", a + b, c)]
    code += f"{op} {', '.join(parts)}; "
    code += "".join(f"mov.b64 {{%y{2 * i}, %y{2 * i + 1}}}, %v{i}; " for i in range(c))
    return fragment_kernel(f"mma_{f.name}", code, 2 * (a + b + c), 2 * c)


TILE = "mov.u32 %r41, tile_{name}; "
WRITE = "mad.lo.u32 %r42, %r40, 64, %r41; " + "".join(
    f"st.shared.v4.b32 [%r42+{16 * i}], {registers('x', 4 * i, 4)}; " for i in range(4)
)


def ldmatrix(name: str, count: int, trans: bool, space: str) -> str:
    code = TILE.format(name=name) + WRITE + "bar.sync 0; mad.lo.u32 %r42, %r40, 16, %r41; "
    code += f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.{space}.b16 {registers('y', 0, count)}, [%r42];"
    return fragment_kernel(name, code, 16, count)


def stmatrix(name: str, count: int, trans: bool) -> str:
    code = TILE.format(name=name) + "mad.lo.u32 %r42, %r40, 16, %r41; "
    code += f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 [%r42], {registers('x', 0, count)}; "
    code += "bar.sync 0; mov.u32 %y0, 0; mov.u32 %y1, 0; mov.u32 %y2, 0; mov.u32 %y3, 0; "
    code += f"setp.lt.u32 %p1, %r40, {8 * count}; @%p1 ld.shared.v4.b32 {registers('y', 0, 4)}, [%r42];"
    return fragment_kernel(name, code, count, 4)


MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16 %y0, %x0;"
MATRICES = [(count, trans) for count in (1, 2, 4) for trans in (False, True)]


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    parts = [mma(f) for f in FORMS]
    parts += [ldmatrix(f"ldm{c}{'t' * t}", c, t, "shared::cta" if t else "shared") for c, t in MATRICES]
    parts += [stmatrix(f"stm{c}{'t' * t}", c, t) for c, t in MATRICES]
    parts.append(fragment_kernel("movm", MOVMATRIX, 1, 1))
    return build([HEADER.replace("8.6", "8.7") + "".join(parts)])


def multiply(f: Form, a: Any, b: Any, c: Any) -> Any:
    """D in float64, not yet rounded to its format."""
    with np.errstate(invalid="ignore"):
        total = (a[:, :, None] != b[None, :, :]).sum(1) + c if f.suffix == ".xor.popc" else a @ b + c
    if f.d != "s32":
        return total
    whole = total.astype(np.int64)  # sums of at most 64 products of 8 bits, exact
    return np.clip(whole, -(2**31), 2**31 - 1) if f.saturate else whole.astype(np.uint32).view(np.int32)


def spreads(f: Form) -> list[str]:
    return ["exact", "random", "corners"] if f.a in FLOATS else ["random"]


@pytest.mark.parametrize("f", FORMS, ids=lambda f: f.name)
def test_mma(f: Form, library: Library) -> None:
    rng = np.random.default_rng(sum(f.name.encode()))
    for spread in spreads(f):
        a, b = numbers(rng, f.a, (f.m, f.k), spread), numbers(rng, f.b, (f.k, 8), spread)
        if f.d == "s32":
            c = rng.choice([2**31 - 1, -(2**31), 0, 77, -5], (f.m, 8)).astype(np.float64)
        else:
            c = numbers(rng, f.d, (f.m, 8), spread)
        noisy = packed(a, A[f.shape, BITS[f.a]], f.a)
        if f.a == "tf32":
            noisy |= rng.integers(0, 1 << 13, noisy.shape, np.uint32) * np.isfinite(noisy.view(np.float32))
        parts = [noisy, packed(b, B[f.k, BITS[f.b]], f.b), packed(c, c_place, f.d)]
        out = np.zeros((32, f.words()[2]), np.uint32)
        run(library, f"mma_{f.name}", out, np.concatenate(parts, axis=1), block=32)
        got, wanted = unpacked(out, c_place, f.d, (f.m, 8)), multiply(f, a, b, c)
        if f.d == "s32":
            np.testing.assert_array_equal(got, wanted)
            continue
        with np.errstate(over="ignore"):
            rounded = wanted.astype(FLOATS[f.d])
        if spread == "random" or f.d == "f64":
            ulp = {"f16": 2.0**-10, "f32": 2.0**-23, "f64": 2.0**-50}[f.d]
            np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=ulp, atol=ulp)
        else:
            np.testing.assert_array_equal(got, rounded)
        nan = np.isnan(rounded)
        canonical = {"f16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}[f.d]
        assert set(got[nan].view(f"u{got.itemsize}").tolist()) <= {canonical}


@pytest.mark.parametrize(("count", "trans"), MATRICES)
def test_ldmatrix(count: int, trans: bool, library: Library) -> None:
    memory = np.random.default_rng(11).integers(0, 2**32, 512, np.uint32)
    out = np.zeros((32, count), np.uint32)
    run(library, f"ldm{count}{'t' * trans}", out, memory, block=32)
    rows = memory.view(np.uint16).reshape(-1, 8)[: 8 * count].reshape(count, 8, 8)
    for m in range(count):
        matrix = rows[m].T if trans else rows[m]
        np.testing.assert_array_equal(out[:, m], np.ascontiguousarray(matrix).reshape(-1).view(np.uint32))


@pytest.mark.parametrize(("count", "trans"), MATRICES)
def test_stmatrix(count: int, trans: bool, library: Library) -> None:
    held = np.random.default_rng(12).integers(0, 2**32, (32, count), np.uint32)
    out = np.zeros((32, 4), np.uint32)
    run(library, f"stm{count}{'t' * trans}", out, held, block=32)
    rows = out.view(np.uint16).reshape(32, 8)[: 8 * count].reshape(count, 8, 8)
    for m in range(count):
        matrix = held[:, m].copy().view(np.uint16).reshape(8, 8)
        np.testing.assert_array_equal(rows[m], matrix.T if trans else matrix)


def test_movmatrix(library: Library) -> None:
    held = np.random.default_rng(13).integers(0, 2**32, 32, np.uint32)
    out = np.zeros(32, np.uint32)
    run(library, "movm", out, held, block=32)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), held.view(np.uint16).reshape(8, 8).T)


# name: (code, fault or None); lanes hold %r40 = thread and write a row of 16 bytes each at %r42.
ROWS = "mad.lo.u32 %r42, %r40, 16, %r41; st.shared.v4.b32 [%r42], {%x0, %x0, %x0, %x0}; "
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%y0, %y1, %y2, %y3}, [%r42]; "
STORE = "mad.lo.u32 %r42, %r40, 16, %r41; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r42], {%x0, %x0, %x0, %x0}; "
SYNC = "bar.warp.sync -1; "
NEXT = "xor.b32 %r43, %r40, 1; mad.lo.u32 %r42, %r43, 16, %r41; "
BUGS = {
    "load_misaligned": (ROWS + SYNC + "xor.b32 %r42, %r42, 8; " + LOAD, "misaligned"),
    "load_unwritten": (ROWS + SYNC + "add.u32 %r42, %r42, 256; " + LOAD, "uninitialised"),
    "load_outside": (ROWS + SYNC + "add.u32 %r42, %r42, 2048; " + LOAD, "shared_out_of_bounds"),
    "load_race": (ROWS + SYNC + ROWS + NEXT + LOAD, "race"),
    "load_fine": (ROWS + SYNC + NEXT + LOAD, None),
    "load_part_unwritten_fine": (
        ROWS + SYNC + "setp.gt.u32 %p1, %r40, 7; @%p1 mov.u32 %r42, 0; "
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 %y0, [%r42]; mov.u32 %y1, 0; mov.u32 %y2, 0; mov.u32 %y3, 0; ",
        None,
    ),
    "store_misaligned": (STORE.replace("16, %r41", "24, %r41"), "misaligned"),
    "store_outside": (STORE.replace("16, %r41", "80, %r41"), "shared_out_of_bounds"),
    "store_race": (STORE + SYNC + STORE + NEXT + "ld.shared.v4.b32 {%y0, %y1, %y2, %y3}, [%r42]; ", "race"),
    "store_overlaps": (STORE.replace("16, %r41", "0, %r41"), "race"),
    "store_fine": (STORE + SYNC + NEXT + "ld.shared.v4.b32 {%y0, %y1, %y2, %y3}, [%r42]; ", None),
    "half_a_warp": (ROWS + SYNC + "setp.gt.u32 %p1, %r40, 15; @%p1 bra SKIP; " + LOAD + "SKIP: ", "warp_mask"),
    "two_places": (
        ROWS + SYNC + "setp.gt.u32 %p1, %r40, 15; @%p1 bra OTHER; " + LOAD + "bra JOIN; OTHER: \n" + LOAD + "JOIN: ",
        "warp_mismatch",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted(build: Build) -> Library:
    return build([HEADER + "".join(fragment_kernel(n, TILE.format(name=n) + c, 1, 4) for n, (c, _) in BUGS.items())])


@each_case("schedule", ["ascending", "descending", 3])
@pytest.mark.parametrize("name", BUGS)
def test_planted(name: str, schedule: str | int, planted: Library) -> None:
    out, data, kind = np.zeros((32, 4), np.uint32), np.arange(32, dtype=np.uint32), BUGS[name][1]
    if kind is None:
        run(planted, name, out, data, block=32, schedule=schedule)
        return
    with pytest.raises(KernelFault) as caught:
        run(planted, name, out, data, block=32, schedule=schedule)
    assert caught.value.kind == kind, str(caught.value)


F4, R4, R2 = "{%f0, %f1, %f2, %f3}", "{%r0, %r1, %r2, %r3}", "{%r4, %r5}"
REFUSED = {
    "sparse": (f"mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {F4}, {R4}, {R4}, {F4}, %r0, 0;", ".sp is not"),
    "kind": (f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 {F4}, {R4}, {R2}, {F4};", ".kind::f8f6f4"),
    "volta": (f"mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {F4}, {R4}, {R2}, {F4};", "needs one of .m16n8k8"),
    "mixed": (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {F4}, {R4}, {R2}, {F4};", "cannot be multiplied"),
    "accumulator": (f"mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {F4}, {R4}, {R2}, {F4};", "accumulators of"),
    "two accumulators": (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16 {F4}, {R4}, {R2}, {R2};", "accumulators of"),
    "order": (f"mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {F4}, {R4}, {R2}, {F4};", "needs one of .col"),
    "count": (f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {F4}, {R4}, {R2}, {F4};", "takes 4, 2, 1 and 4"),
    "satfinite": (f"mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 {F4}, {R4}, {R2}, {F4};", ".satfinite"),
    "popc": ("mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32 {%r0, %r1}, {%r2}, {%r3}, {%r0, %r1};", ".xor.popc"),
    "ldmatrix of bytes": ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r2];", "needs one of .m8n8"),
    "ldmatrix from anywhere": ("ldmatrix.sync.aligned.m8n8.x1.b16 %r0, [%rd0];", "needs .shared"),
    "ldmatrix registers": ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0}, [%r2];", "1 registers for .x2"),
    "stmatrix of bytes": ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], %r0;", "needs one of .m8n8"),
    "movmatrix": ("movmatrix.sync.aligned.m8n8.b16 %r0, %r1;", "needs one of .trans"),
    "wmma": ("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r0}, [%rd0], 16;", "wmma is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, build: Build) -> None:
    code, message = REFUSED[name]
    with pytest.raises(TranslateError, match=re.escape(message)):
        build([HEADER + entry("k", code)])

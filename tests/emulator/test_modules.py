"""Module level: variables and their initial values, several entries and modules, directives of entries, aliases."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvgen.emulator import EmulatorError, KernelFault, TranslateError
from kvgen.emulator.parser import parse
from kvgen.emulator.writer import translate
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, entry, nvrtc_ptx, run


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


# declaration of a variable v, and its bytes
VALUES: dict[str, tuple[str, bytes]] = {
    "scalar": (".global .u32 v = 7", u32(7)),
    "zero": (".visible .global .align 8 .b8 v[12]", bytes(12)),
    "weak": (".weak .global .s16 v = -2", b"\xfe\xff"),
    "common": (".common .global .align 4 .u32 v[2]", bytes(8)),
    "managed": (".global .attribute(.managed) .align 4 .u32 v = 4", u32(4)),
    "octal_and_hex": (".global .u32 v[4] = {017, 0xFFU, 0b101, 0x0}", u32(15, 255, 5, 0)),
    "signs": (".global .s32 v[3] = {-4, +3, ~1}", struct.pack("<3i", -4, 3, -2)),
    "shorter": (".global .u16 v[5] = {1, 2}", struct.pack("<5H", 1, 2, 0, 0, 0)),
    "unsized": (".global .u8 v[] = {1, 2, 3, 255}", bytes([1, 2, 3, 255])),
    "wrapped": (".global .b8 v[3] = {256, -1, 97}", bytes([0, 255, 97])),
    "nested": (".global .u32 v[2][3] = {{1, 2}, {4}}", u32(1, 2, 0, 4, 0, 0)),
    "nested_three": (".global .u8 v[][2][2] = {{{1}, {2, 3}}, {{4, 5}}}", bytes([1, 0, 2, 3, 4, 5, 0, 0])),
    "floats": (".global .f32 v[4] = {1.5, -2e3, 0f3F800000, .25}", struct.pack("<4f", 1.5, -2000, 1, 0.25)),
    "doubles": (".global .f64 v[3] = {0.1, 0d4008000000000000, 0f40000000}", struct.pack("<3d", 0.1, 3, 2)),
    "float_bits": (".global .b32 v[2] = {0f3F800000, -1}", u32(0x3F800000, 0xFFFFFFFF)),
    "vector": (".global .v4 .f32 v = {1.0, 2.0, 3.0, 4.0}", struct.pack("<4f", 1, 2, 3, 4)),
    "vectors": (".global .align 16 .v2.u32 v[2] = {{1, 2}, {3}}", u32(1, 2, 3, 0)),
    "const": (".const .align 4 .b8 v[8] = {1, 0, 2}", bytes([1, 0, 2, 0, 0, 0, 0, 0])),
    "const_zero": (".const .u64 v", bytes(8)),
    "several": (".global .u32 before = 1, v = 5, after[2] = {2, 3}", u32(5)),
}


def copies(name: str, space: str, nbytes: int) -> str:
    """An entry that copies the variable v, byte by byte."""
    return entry(name, f"mov.u64 %rd1, v; cvta.{space}.u64 %rd1, %rd1;" + "".join(
        f" ld.u8 %r1, [%rd1+{i}]; st.global.u8 [%rd0+{i}], %r1;" for i in range(nbytes)
    ))  # fmt: skip


@pytest.fixture(scope="module")
def values(build: Build) -> dict[str, bytes]:
    """Every case is a module of its own, with a variable of the same name."""
    modules = [
        HEADER + text + ";\n" + copies(f"k_{n}", "const" if ".const" in text else "global", len(b))
        for n, (text, b) in VALUES.items()
    ]
    library = build(modules)
    out = {}
    for name, (_, expected) in VALUES.items():
        got = np.full(len(expected), 0xAA, np.uint8)
        run(library, f"k_{name}", got, block=1)
        out[name] = got.tobytes()
    return out


@pytest.mark.parametrize("name", VALUES)
def test_initial_values(name: str, values: dict[str, bytes]) -> None:
    assert values[name] == VALUES[name][1]


BAD_VARIABLES = {
    ".global .u32 v = {1}": "braces around one value",
    ".global .u32 v[2] = {1, 2, 3}": "does not fit 2 elements",
    ".global .u32 v[2][3] = {1, 2, 3, 4, 5, 6}": "does not fit",
    ".global .u32 v = 1.5": "is no .u32",
    ".global .f32 v = 1": "is no .f32",
    ".global .u32 x; .global .u32 v = x": "needs 64-bit integer elements",
    ".global .u64 v = missing": "address of unknown 'missing'",
    ".global .u32 x; .global .b8 v[2] = {0xFF(x), 0xFF00(x)}": "part of the address of 'x'",
    ".shared .u32 v = 3": "has no initial value",
    ".global .u32 v; .global .u32 v": "declared twice",
    ".global .texref v": "textures",
    ".global .u99 v": "unknown declaration",
    ".global .align 3 .u32 v": "no power of two",
    ".local .u32 v": "outside a function",
    ".shared .u32 v[]": "'v' has no size",
    ".global .u32 v[0]": "'v' has no size",
    ".global .pred v": "unknown declaration",
    ".global .attribute(.odd) .u32 v": "unknown attribute",
    ".global .align 4 .b8 v[9000000000]": "9000000000 bytes",
}


@pytest.mark.parametrize("text", BAD_VARIABLES)
def test_bad_declarations(text: str, build: Build) -> None:
    with pytest.raises(TranslateError, match=BAD_VARIABLES[text]) as caught:
        build([HEADER + text + ";\n" + entry("k", "")])
    assert caught.value.ptx_line == 4


def test_addresses_in_initial_values(build: Build) -> None:
    masks = ", ".join(f"0xFF{'00' * i}(generic(x)+4)" for i in range(8))
    text = (
        HEADER
        + f"""
.func (.param .b32 r) eleven() {{ st.param.b32 [r], 11; ret; }}
.global .u32 x[3] = {{5, 6, 7}};
.const .u32 c = 9;
.global .align 8 .u64 table[4] = {{x, generic(x)+8, eleven, generic(c)}};
.const .align 8 .u64 fixed[2] = {{x+4, eleven}};
.global .align 1 .b8 packed[9] = {{3, {masks}}};
"""
        + entry(
            "k",
            """
  ld.global.u64 %rd1, [table]; ld.u32 %r1, [%rd1]; st.global.u32 [%rd0], %r1;
  ld.global.u64 %rd1, [table+8]; ld.u32 %r1, [%rd1]; st.global.u32 [%rd0+4], %r1;
  ld.global.u64 %rd1, [table+16]; call (%r1), %rd1, (), P0; P0: .callprototype (.param .b32 _) _ ();
  st.global.u32 [%rd0+8], %r1;
  ld.global.u64 %rd1, [table+24]; ld.u32 %r1, [%rd1]; st.global.u32 [%rd0+12], %r1;
  ld.const.u64 %rd1, [fixed]; ld.u32 %r1, [%rd1]; st.global.u32 [%rd0+16], %r1;
  ld.const.u64 %rd1, [fixed+8]; call (%r1), %rd1, (), P0; st.global.u32 [%rd0+20], %r1;
  mov.u64 %rd2, 0; mov.u64 %rd4, 0;
L: add.u64 %rd3, %rd2, packed; ld.global.u8 %rd5, [%rd3+1]; cvt.u32.u64 %r2, %rd2; shl.b32 %r2, %r2, 3;
  shl.b64 %rd5, %rd5, %r2; or.b64 %rd4, %rd4, %rd5; add.u64 %rd2, %rd2, 1; setp.lt.u64 %p1, %rd2, 8; @%p1 bra L;
  ld.u32 %r1, [%rd4]; st.global.u32 [%rd0+24], %r1;
  ld.global.u8 %r1, [packed]; st.global.u32 [%rd0+28], %r1;""",
        )
    )
    out = np.zeros(8, np.uint32)
    run(build([text]), "k", out, block=1)
    assert list(out) == [5, 7, 11, 9, 6, 11, 6, 3]


STATE = r"""
__constant__ float weights[4] = {0.5f, 1, 2, 4};
__device__ int counter = 3;
__device__ int history[8];
extern __shared__ __align__(16) float dynamic[];
extern "C" __global__ void first(float* out) {
  int t = threadIdx.x; dynamic[t] = t; __syncthreads(); out[t] = dynamic[t ^ 1] * weights[t & 3];
  if (t == 0) { int n = atomicAdd(&counter, 1); history[n & 7] = n; }
}
extern "C" __global__ void second(int* out) { out[0] = counter; out[1] = history[3]; }
extern "C" __global__ void past(int* out, int i) { out[0] = ((volatile int*)history)[i]; }
extern "C" __global__ void constant(float* out, int write) {
  float* p = write ? (float*)weights : out; *(volatile float*)p = 1;
}
"""


def test_variables_of_a_module(build: Build) -> None:
    library = build([nvrtc_ptx(STATE)])
    out = np.zeros(32, np.float32)
    run(library, "first", out, block=32, dynamic_shared=128)
    t = np.arange(32)
    np.testing.assert_array_equal(out, (t ^ 1) * np.array([0.5, 1, 2, 4])[t & 3])
    seen = np.zeros(2, np.int32)
    run(library, "second", seen, block=1)
    assert list(seen) == [3, 0]  # a launch begins with the initial values
    run(library, "past", seen, 7, block=1)
    with pytest.raises(KernelFault) as caught:
        run(library, "past", seen, 8, block=1)
    assert (caught.value.kind, caught.value.buffer) == ("global_out_of_bounds", "history")
    run(library, "constant", out, 0, block=1)
    with pytest.raises(KernelFault) as caught:
        run(library, "constant", out, 1, block=1)
    assert (caught.value.kind, caught.value.buffer) == ("read_only", "weights")


def test_variables_that_no_kernel_reaches_are_left_out(build: Build) -> None:
    """NVRTC writes every constant of a header as a variable: only what a function names, or a named one points to, is made."""
    variables = """
    .global .align 8 .u64 named = generic(pointed);
    .global .align 8 .u64 pointed = generic(behind);
    .global .align 4 .u32 behind = 5;
    .global .align 4 .u32 other = 6;
    .global .align 8 .u64 points = generic(other);
    .const .align 4 .u32 constant = 7;
    """
    body = "ld.global.u64 %rd1, [named]; ld.u64 %rd1, [%rd1]; ld.u32 %r1, [%rd1]; st.global.u32 [%rd0], %r1;"
    text = f"{HEADER}{variables}{entry('chain', body)}"
    made = translate([parse(text)]).text()
    table = made.partition("GlobalVariable m0_globals[] =")[2].partition("\n")[0]
    assert [n for n in ("named", "pointed", "behind", "other", "points", "constant") if f'"{n}"' in table] == [
        "named", "pointed", "behind",
    ]  # fmt: skip
    assert "m0_g3" not in made and "m0_g4" not in made and "m0_g5" not in made
    out = np.zeros(1, np.uint32)
    run(build([text]), "chain", out, block=1)
    assert out[0] == 5


def test_modules_may_use_the_same_names(build: Build) -> None:
    def module(n: int) -> str:
        return (
            HEADER
            + f".global .u32 v = {n};\n.shared .align 4 .b8 s[{4 * n}];\n"
            + f".func (.param .b32 r) f() {{ .reg .b32 %x; ld.global.u32 %x, [v]; add.u32 %x, %x, {n}; "
            + "st.param.b32 [r], %x; ret; }\n"
            + entry(
                f"k{n}", "call (%r1), f, (); st.shared.u32 [s], %r1; ld.shared.u32 %r1, [s]; st.global.u32 [%rd0], %r1;"
            )
        )

    library = build([module(1), module(2)])
    for n in (1, 2):
        out = np.zeros(1, np.uint32)
        run(library, f"k{n}", out, block=1)
        assert out[0] == 2 * n
        assert library.kernels[f"k{n}"].static_shared == 4 * n
    with pytest.raises(TranslateError, match="two kernels of one build are named 'k1'"):
        build([module(1), module(1)])


def test_alias(build: Build) -> None:
    text = HEADER + (
        ".func (.param .b32 r) f(.param .b32 a) { .reg .b32 %x; ld.param.u32 %x, [a]; neg.s32 %x, %x;"
        " st.param.b32 [r], %x; ret; }\n"
        ".weak .func (.param .b32 r) g(.param .b32 a);\n.alias g, f;\n"
    )
    library = build([text + entry("k", "call (%r1), g, (5); st.global.u32 [%rd0], %r1;")])
    out = np.zeros(1, np.int32)
    run(library, "k", out, block=1)
    assert out[0] == -5
    with pytest.raises(TranslateError, match=r"\.alias"):
        build([HEADER + ".alias g, f;\n" + entry("k", "")])


def facts(directives: str) -> tuple[int | None, tuple[int, int, int] | None]:
    text = HEADER + entry("k", "").replace("\n{", f"\n{directives}\n{{", 1)
    (kernel,) = translate([parse(text)]).kernels
    return kernel.max_threads, kernel.cluster


@pytest.mark.parametrize(
    ("directives", "expected"),
    [
        ("", (None, None)),
        (".maxntid 128, 2, 1\n.minnctapersm 2\n.maxnreg 64", (256, None)),
        (".reqntid 96", (96, None)),
        (".explicitcluster\n.reqnctapercluster 2, 1, 1", (None, (2, 1, 1))),
        (".maxntid 128\n.reqnctapercluster 4\n.maxclusterrank 8", (128, (4, 1, 1))),
        ('.pragma "nounroll";', (None, None)),
    ],
)
def test_directives_of_an_entry(directives: str, expected: tuple[int | None, tuple[int, int, int] | None]) -> None:
    assert facts(directives) == expected


def test_a_kernel_compiled_for_a_cluster_runs_in_one(build: Build) -> None:
    body = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd1, %r1, 4; add.u64 %rd1, %rd0, %rd1; mov.u32 %r2, %cluster_ctarank;"
    text = entry("k", body + "st.global.u32 [%rd1], %r2;").replace("\n{", "\n.reqnctapercluster 2, 1, 1\n{", 1)
    library = build([HEADER + text])
    out = np.zeros(4, np.uint32)
    run(library, "k", out, grid=(4, 1, 1), block=1)
    assert list(out) == [0, 1, 0, 1]
    run(library, "k", out, grid=(4, 1, 1), block=1, cluster=(2, 1, 1))
    for options in ({"cluster": (4, 1, 1)}, {"cluster": (1, 1, 1)}, {"grid": (3, 1, 1)}):
        with pytest.raises(EmulatorError, match="cluster: got"):
            run(library, "k", out, block=1, **({"grid": (4, 1, 1)} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("directive", [".blocksareclusters", ".reqntid", ".maxntid 1, 2, 3, 4", ".frame 12"])
def test_unknown_directives_of_an_entry(directive: str) -> None:
    with pytest.raises(TranslateError, match="unknown directive") as caught:
        facts(directive)
    assert caught.value.ptx_line == 5


def test_sections_pragmas_and_debug_targets_are_read(build: Build) -> None:
    text = HEADER.replace("sm_90a", "sm_90a, debug") + (
        '.pragma "nounroll";\n.file 1 "a.cu"\n.section .debug_str {\n.b8 1, 2\n$L: .b8 3\n}\n' + entry("k", "")
    ).replace("ret;", '.pragma "nounroll";\nret;')
    run(build([text]), "k", np.zeros(1, np.int32), block=1)

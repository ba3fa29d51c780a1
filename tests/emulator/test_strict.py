"""What the translator does not know in full, it refuses, with the PTX line and the CUDA line."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest

from kvgen.emulator import TranslateError
from kvgen.emulator.parser import parse
from kvgen.emulator.writer import translate
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, entry, nvrtc_ptx, run

REFUSED = {
    "unknown opcode": ("frobnicate.b32 %r1, %r2;", "unknown opcode 'frobnicate'"),
    "unknown modifier": ("add.fuzzy.s32 %r1, %r2, %r3;", "unknown modifier .fuzzy"),
    "saturation on the wrong type": ("add.sat.u32 %r1, %r2, %r3;", "needs .s32"),
    "approximate flag on bfind": ("bfind.approx.u32 %r1, %r2;", "unknown modifier .approx"),
    "unknown cache operator": ("ld.global.zz.u32 %r1, [%rd0];", "unknown modifier .zz"),
    "scope without order": ("ld.global.gpu.u32 %r1, [%rd0];", "needs .relaxed"),
    "ftz on integers": ("add.ftz.s32 %r1, %r2, %r3;", "unknown modifier .ftz"),
    "ftz on f64": ("add.ftz.f64 %fd1, %fd2, %fd3;", "does not take .f64"),
    "rounding missing": ("cvt.f16.f32 %rs1, %f1;", "needs one of"),
    "rounding on an exact conversion": ("cvt.rz.f32.f16 %f1, %rs1;", "unknown modifier .rz"),
    "type of another family": ("popc.u32 %r1, %r2;", "type .u32 is not one of"),
    "operand missing": ("add.s32 %r1, %r2;", "2 operands, expected 3"),
    "operand too many": ("neg.s32 %r1, %r2, %r3;", "3 operands, expected 2"),
    "unknown register": ("add.s32 %r1, %q2, %r3;", "unknown operand '%q2'"),
    "unknown special register": ("mov.u32 %r1, %envreg3;", "unknown operand '%envreg3'"),
    "narrow register": ("add.s64 %rd1, %r2, %rd3;", "32-bit register where"),
    "predicate as value": ("add.s32 %r1, %p2, %r3;", "a predicate and a value are mixed"),
    "unknown label": ("bra NOWHERE;", "unknown label"),
    "vector length": ("ld.global.v4.u32 {%r1, %r2}, [%rd0];", "2 registers with .v4"),
    "narrow address": ("ld.global.u32 %r1, [%r2];", "64-bit address"),
    "call of an undeclared function": ("call foo, ();", "'foo' is no function of this module"),
    "im2col": (
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4}],"
        " [%r5], {%rs1};",
        "tensor copies in .im2col mode are not supported",
    ),
    "mbarrier": ("mbarrier.arrive.acquire.shared.b64 _, [%r1];", "unknown modifier .acquire"),
    "tensor memory": ("tcgen05.wait::ld.sync.aligned;", "unknown opcode 'tcgen05'"),
    "copy size": ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "cannot copy 8 bytes"),
    "mma shape": ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};", "needs one of"),
    "fence of a proxy": ("fence.proxy.texture;", "needs one of"),
    "directive": (".frame 12;", "unknown directive"),
    "wide register": ("popc.b64 %rd1, %rd2;", "64-bit register where 32 bits"),
    "wide part": ("mov.b64 %rd1, {%r1, %rd2};", "64-bit register where 32 bits"),
    "predicate as part": ("mov.b64 %rd1, {%r1, %p1};", "a predicate and a value are mixed"),
    "float register": ("add.u32 %r1, %r2, %f1;", "a .f32 register where .u32"),
    "float register of another width": ("cvt.rn.f32.s32 %fd1, %f1;", "a .f32 register where .s32"),
    "three parts": ("mov.b64 %rd1, {%r1, %r2, %r3};", "3 parts of 64 bits"),
    "no parts": ("mov.b64 {}, %rd1;", "0 parts of 64 bits"),
    "parts of a sum": ("add.u32 %r1, %r2, {%rs1, %rs2};", "unknown operand"),
    "special register": ("add.u32 %r1, %r2, %tid.x;", "%tid.x is read by mov and cvt only"),
    "octal": ("mov.u32 %r1, 089;", "unknown operand '089'"),
    "guard": ("@089 mov.u32 %r1, 1;", "unknown operand '089'"),
    "registers": (".reg .b32 %x<999999999>;", "more registers than"),
    "local": (".local .b8 x[99999999];", "'x' has 99999999 bytes"),
    "parameter": (".param .b8 x[99999999];", "'x' has 99999999 bytes"),
    "alignment": (".local .align 8589934592 .b8 x[4];", "no power of two up to 65536"),
    "aligned bar": ("bar.sync.aligned 0;", "unknown modifier .aligned"),
    "bar of a cluster": ("bar.cluster.wait;", "needs one of .sync"),
    "barrier of a warp": ("barrier.warp.sync -1;", "unknown modifier .warp"),
    "restricted fence": ("fence.acquire.sync_restrict::shared::cluster.gpu;", "needs one of .cluster"),
    "membar of a proxy": ("membar.proxy.async;", "needs one of .alias"),
    "narrow shared address": ("cvta.shared.u64 %rd1, %r1;", "32-bit register where 64 bits"),
    "mbarrier scope": ("mbarrier.arrive.relaxed.shared.b64 _, [%r1];", "needs one of .cta .cluster"),
    "mbarrier order": ("mbarrier.expect_tx.cta.shared.b64 [%r1], 4;", "unknown modifier .cta"),
    "mbarrier noComplete": ("mbarrier.arrive.noComplete.release.cluster.shared.b64 %rd1, [%r1], 1;", "one of .cta"),
    "bulk reduction": ("cp.reduce.async.bulk.global.shared::cta.bulk_group.and.u32 [%rd1], [%r1], 16;",
                       "type .u32 is not one of b32 b64"),
    "asynchronous store": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b64 [%r1], "
                           "{%rd1, %rd2, %rd3, %rd4}, [%r2];", "4 of .b64 are more than 16 bytes"),
    "hint for shared memory": ("ld.shared.L1::evict_last.u32 %r1, [%r2];", "unknown modifier .L1::evict_last"),
    "policy for shared memory": ("st.shared.L2::cache_hint.u32 [%r1], %r2, %rd1;", "3 operands, expected 2"),
    "two hints": ("ld.global.ca.L1::evict_last.u32 %r1, [%rd1];", "unknown modifier .L1::evict_last"),
    "hint for 4 bytes": ("ld.global.L2::evict_first.u32 %r1, [%rd1];", "unknown modifier .L2::evict_first"),
    "prefetch of shared memory": ("ld.shared.L2::128B.u32 %r1, [%r2];", "unknown modifier .L2::128B"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, build: Build) -> None:
    code, message = REFUSED[name]
    text = HEADER + entry("k", "  " + code)
    with pytest.raises(TranslateError, match=re.escape(message)) as caught:
        build([text])
    assert caught.value.ptx_line == text[: text.index(code)].count("\n") + 1
    assert f"PTX line {caught.value.ptx_line}: " in str(caught.value)


def test_names_do_not_collide(build: Build) -> None:
    """Registers, parameters and local arrays of inner scopes whose C++ names could be those of outer ones."""
    body = """.reg .b32 r, %r1_s1, r_s1; .local .b32 x, x_array; .param .b32 r_s2;
  mov.u32 %r1_s1, 1; mov.u32 r_s1, 2;
  { .reg .b32 %r1, r; mov.u32 %r1, 3; mov.u32 r, 4; { .reg .b32 r; .local .b32 q; mov.u32 r, 5; } }
  add.u32 r, %r1_s1, r_s1; st.global.u32 [%rd0], r;"""
    out = np.zeros(1, np.uint32)
    run(build([HEADER + entry("names", body)]), "names", out, block=1)
    assert out[0] == 3


def test_cuda_line_is_named(build: Build) -> None:
    text = nvrtc_ptx('#line 41 "generated/x.cu"\n__global__ void k(int* p) {\n  asm("bogus.u32 %0;" : "=r"(*p)); }')
    with pytest.raises(TranslateError, match="unknown opcode 'bogus'") as caught:
        build([text])
    assert caught.value.source is not None and caught.value.source.endswith("generated/x.cu:42")


WHOLE = (
    HEADER
    + """.extern .shared .align 16 .b8 dyn[];
.global .align 8 .u64 table[2] = {f, 7};
.func (.param .b32 r) f(.param .b32 a, .reg .b32 b) { st.param.b32 [r], 5; ret; }
"""
    + entry("k", """  { .reg .b32 t; .param .b32 q; call (q), f, (1, %r2); ld.param.b32 t, [q]; }
  .loc 1 2 3
P: .callprototype (.param .b32 _) _ (.param .b32 _, .reg .b32 _);
  @!%p1 bra L; call (%r1), %rd1, (3, 4), P;
L: ld.global.v2.u32 {%r1, %r2}, [%rd0+8]; // a comment
  st.global.u32 [%rd0], %r1;""")
)  # fmt: skip


def test_every_truncation_is_an_error() -> None:
    translate([parse(WHOLE)])
    for cut in range(len(WHOLE.rstrip())):
        with pytest.raises(TranslateError):
            translate([parse(WHOLE[:cut])])


def test_every_missing_character_is_read_or_refused() -> None:
    """Whatever else is wrong with the text, only TranslateError comes out of it."""
    for cut in range(len(WHOLE)):
        for text in (
            WHOLE[:cut] + WHOLE[cut + 1 :],
            WHOLE[:cut] + "}" + WHOLE[cut:],
            WHOLE[:cut] + "," + WHOLE[cut + 1 :],
        ):
            with contextlib.suppress(TranslateError):
                translate([parse(text)])


FUNC = ".func (.param .b32 r) f(.param .b32 a) { st.param.b32 [r], 5; ret; }\n"
NOT_MODULES = {
    "empty": ("", "no .target line", 1),
    "words": ("hello", "unexpected text 'hello'", 1),
    "no kernel": (HEADER, "no .entry", None),
    "no version": (HEADER.partition("\n")[2] + entry("k", ""), "no .version line", 1),
    "no target": (HEADER.replace(".target sm_90a", "") + entry("k", ""), "no .target line", 1),
    "version 99": (HEADER.replace("8.6", "99.1") + entry("k", ""), "unknown version '99.1'", 1),
    "version 6.9": (HEADER.replace("8.6", "6.9") + entry("k", ""), "unknown version '6.9'", 1),
    "version x": (HEADER.replace("8.6", "x") + entry("k", ""), "unknown version 'x'", 1),
    "target": (HEADER.replace("sm_90a", "gfx90a") + entry("k", ""), "unknown target 'gfx90a'", 2),
    "target feature": (HEADER.replace("sm_90a", "sm_13, map_f64_to_f32") + entry("k", ""), "unknown target", 2),
    "32 bits": (HEADER.replace("64\n", "32\n") + entry("k", ""), "address size '32'", 3),
    "texture": (HEADER + ".global .texref t;", "textures", 4),
    "two kernels": (HEADER + entry("k", "") + entry("k", ""), "'k' is declared twice, first on line 4", 11),
    "two functions": (HEADER + FUNC + FUNC, "'f' is declared twice, first on line 4", 5),
    "other shape": (HEADER + ".func f(.param .b32 a);\n" + FUNC, "'f' has other parameters than", 5),
    "two labels": (HEADER + entry("k", "L: L: ret;"), "label 'L' is declared twice", 8),
    "two registers": (HEADER + entry("k", ".reg .b32 %x, %x;"), "register '%x' is declared twice", 8),
    "two arrays": (HEADER + entry("k", ".local .b32 x; .local .b32 x;"), ".local 'x' is declared twice", 8),
    "two params": (HEADER + entry("k", ".param .b32 x; .param .b32 x;"), ".param 'x' is declared twice", 8),
    "scope": (HEADER + entry("k", "} {"), "unexpected text", 8),
    "kernel in register": (HEADER + entry("k", "", ".reg .u64 p0"), "a parameter of k is no .param", 4),
    "unsized parameter": (HEADER + entry("k", "", ".param .u64 p0, .param .b8 x[]"), "'x' has no size", 4),
    "argument missing": (HEADER + FUNC + entry("k", "call (%r1), f, ();"), "0 arguments where the function takes 1", 9),
    "argument too many": (HEADER + FUNC + entry("k", "call (%r1), f, (1, 2);"), "2 arguments where", 9),
    "result missing": (HEADER + FUNC + entry("k", "call f, (1);"), "0 results where the function gives 1", 9),
    "argument of 64 bits": (HEADER + FUNC + entry("k", ".param .b64 x;\ncall (%r1), f, (x);"), "'x' has 8 bytes", 10),
    "result of 64 bits": (HEADER + FUNC + entry("k", ".param .b64 x;\ncall (x), f, (1);"), "'x' has 8 bytes", 10),
    "narrow argument": (HEADER + FUNC + entry("k", "call (%r1), f, (%rs1);"), "16-bit register where", 9),
    "no body": (HEADER + ".extern .func g();\n" + entry("k", "call g;"), "'g' has no body in this module", 9),
    "printf of another shape": (HEADER + ".extern .func vprintf(.param .b32 a);\n" + entry("k", "call vprintf, (1);"),
                                "'vprintf' has no body", 9),
    "undefined variable": (HEADER + ".extern .global .u32 v;\n" + entry("k", "ld.global.u32 %r1, [v];"),
                           "'v' is declared in this module, but not defined", 9),
    "address of a declaration": (HEADER + ".extern .func g();\n" + entry("k", "mov.u64 %rd1, g;"), "not defined", 9),
    "prototype": (HEADER + FUNC + entry("k", "call (%r1), %rd1, (1), P;"), "no .callprototype or .calltargets", 9),
    "no prototype": (HEADER + FUNC + entry("k", "call (%r1), %rd1, (1);"), "names a prototype", 9),
    "call target": (HEADER + FUNC + entry("k", "T: .calltargets f, h;\ncall (%r1), %rd1, (1), T;"), "'T' is not", 10),
    "past a parameter": (HEADER + entry("k", "ld.param.u64 %rd1, [p0+4];"), "bytes 4 to 12 of 'p0', which has 8", 8),
    "write to a parameter": (HEADER + entry("k", "st.param.u64 [p0], %rd1;"), "'p0' cannot be written", 8),
    "read of a result": (HEADER + FUNC.replace("ret;", ".reg .b32 x; ld.param.b32 x, [r]; ret;") + entry("k", ""),
                         "'r' cannot be read", 4),
    "missing operands": (HEADER + entry("k", "ld.global.u32;"), "0 operands, expected 2", 8),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_MODULES)
def test_not_a_module(name: str, build: Build) -> None:
    text, message, line = NOT_MODULES[name]
    with pytest.raises(TranslateError, match=re.escape(message)) as caught:
        build([text])
    assert line is None or caught.value.ptx_line == line


def test_scoped_registers_and_labels(build: Build) -> None:
    """What inline assembly does: the same names in two scopes, and jumps inside them."""
    scope = (
        "{ .reg .pred p; .reg .b32 x; mov.b32 x, %d; setp.eq.u32 p, x, %d; @p bra DONE; add.u32 x, x, 100; DONE: "
        "add.u32 %%r1, %%r1, x; }"
    )
    library = build(
        [HEADER + entry("scopes", "mov.u32 %r1, 0;" + scope % (3, 3) + scope % (4, 5) + "st.global.u32 [%rd0], %r1;")]
    )
    out = np.zeros(1, np.uint32)
    run(library, "scopes", out, block=1)
    assert out[0] == 107


def test_jump_table(build: Build) -> None:
    body = """mov.u32 %r40, %tid.x; mad.wide.u32 %rd2, %r40, 4, %rd0; and.b32 %r2, %r40, 3; mov.u32 %r1, 9;
  brx.idx %r2, TABLE;
TABLE: .branchtargets A, B, C, B;
A: mov.u32 %r1, 10; bra.uni C;
B: mov.u32 %r1, 20;
C: st.global.u32 [%rd2], %r1;"""
    library = build([HEADER + entry("table", body)])
    out = np.zeros(32, np.uint32)
    run(library, "table", out, block=32)
    np.testing.assert_array_equal(out, np.tile([10, 20, 9, 20], 8))

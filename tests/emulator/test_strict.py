"""What the translator does not know in full, it refuses, with the PTX line and the CUDA line."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvgen.emulator import TranslateError
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
    "device calls": ("call foo, ();", "unknown opcode 'call'"),
    "bulk copies": ("cp.async.bulk.commit_group;", "cp.async.bulk is not supported"),
    "mbarrier": ("mbarrier.init.shared.b64 [%r1], 1;", "unknown opcode 'mbarrier'"),
    "wgmma": ("wgmma.fence.sync.aligned;", "unknown opcode 'wgmma'"),
    "copy size": ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "cannot copy 8 bytes"),
    "mma shape": ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f2};", "needs one of"),
    "fence of a proxy": ("fence.proxy.async;", "needs one of"),
    "directive": (".frame 12;", "unknown directive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, build: Build) -> None:
    code, message = REFUSED[name]
    text = HEADER + entry("k", "  " + code)
    with pytest.raises(TranslateError, match=re.escape(message)) as caught:
        build([text])
    assert caught.value.ptx_line == text[: text.index(code)].count("\n") + 1
    assert f"PTX line {caught.value.ptx_line}: " in str(caught.value)


def test_cuda_line_is_named(build: Build) -> None:
    text = nvrtc_ptx('#line 41 "generated/x.cu"\n__global__ void k(int* p) {\n  asm("bogus.u32 %0;" : "=r"(*p)); }')
    with pytest.raises(TranslateError, match="unknown opcode 'bogus'") as caught:
        build([text])
    assert caught.value.source is not None and caught.value.source.endswith("generated/x.cu:42")


@pytest.mark.parametrize("lines", [0, 1, 6, 9, 11])
def test_truncated_text(lines: int, build: Build) -> None:
    whole = (HEADER + entry("k", "  add.s32 %r1, %r2, %r3;\n  st.global.u32 [%rd0], %r1;")).splitlines(keepends=True)
    assert len(whole) > 9
    with pytest.raises(TranslateError):
        build(["".join(whole[: min(lines, len(whole) - 1)])])


@pytest.mark.parametrize(
    "text", ["", "hello", HEADER, HEADER + ".func f() { ret; }", HEADER + ".global .texref t;",
             HEADER + entry("k", "") + entry("k", ""), HEADER + entry("k", "L: L: ret;"), HEADER + entry("k", "} {")]
)  # fmt: skip
def test_not_a_module_with_kernels(text: str, build: Build) -> None:
    with pytest.raises(TranslateError):
        build([text])


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

"""No form of an instruction is translated without a case that says what it must compute."""

from __future__ import annotations

import re

import pytest

from kvgen.emulator import (
    TranslateError,
    atomic_ops,
    compare_ops,
    convert_ops,
    float_ops,
    integer_ops,
    memory_ops,
    move_ops,
    video_ops,
)
from kvgen.emulator.context import Handler
from kvgen.emulator.parser import parse
from kvgen.emulator.writer import translate
from tests.emulator.cases import Case
from tests.emulator.forms import accepted, pairs
from tests.emulator.programs import HEADER, entry
from tests.emulator.test_memory import DISCARDS
from tests.emulator.test_opcodes import SUITES

HANDLERS: dict[str, Handler] = {
    **integer_ops.HANDLERS, **float_ops.HANDLERS, **compare_ops.HANDLERS, **convert_ops.HANDLERS, **move_ops.HANDLERS,
    **memory_ops.HANDLERS, **atomic_ops.HANDLERS, **video_ops.HANDLERS,
    "st": memory_ops.store, "red": atomic_ops.atomic, "prefetch": memory_ops.prefetch,
}  # fmt: skip
BY_PAIRS = ("set", "setp", "ld", "st", "atom", "red")  # thousands of forms: every two words together
COVERED = {form for suite in SUITES.values() for case in suite.cases for form in case.forms()}
COVERED |= set(Case(DISCARDS, (), "", id).forms())


@pytest.mark.parametrize("opcode", HANDLERS)
def test_every_accepted_form_has_a_case(opcode: str) -> None:
    forms = set(accepted(opcode, HANDLERS[opcode]))
    assert forms
    if opcode in BY_PAIRS:
        met = {pair for form in COVERED if form.startswith((f"{opcode}.", f"{opcode} ")) for pair in pairs(form)}
        missing = {pair for form in forms for pair in pairs(form)} - met
        assert not missing, sorted(missing)[:10]
    else:
        assert forms <= COVERED, sorted(forms - COVERED)[:10]


def test_the_search_for_forms_finds_what_a_handler_takes() -> None:
    assert set(accepted("bmsk", HANDLERS["bmsk"])) == {"bmsk.clamp b32", "bmsk.wrap b32"}
    assert len(set(accepted("set", HANDLERS["set"]))) == 3264  # as many as ptxas 13.0 assembles


REFUSED = {
    "add.rna.f32 %f1, %f2, %f3;": "unknown modifier .rna",
    "add.sat.f64 %fd1, %fd2, %fd3;": "unknown modifier .sat",
    "add.sat.f32x2 %rd1, %rd2, %rd3;": "unknown modifier .sat",
    "add.ftz.bf16 %rs1, %rs2, %rs3;": "does not take .bf16",
    "add.sat.s16x2 %r1, %r2, %r3;": "unknown modifier .sat",
    "sub.s16x2 %r1, %r2, %r3;": "type .s16x2 is not one of",
    "add.cc.u16 %rs1, %rs2, %rs3;": ".cc does not take .u16",
    "mul.lo.sat.s32 %r1, %r2, %r3;": "unknown modifier .sat",
    "mul.wide.u64 %rd1, %rd2, %rd3;": ".wide does not take",
    "mad.f32 %f1, %f2, %f3, %f4;": "needs one of .rn",
    "fma.f32 %f1, %f2, %f3, %f4;": "needs one of .rn",
    "fma.rn.oob.f16 %rs1, %rs2, %rs3, %rs4;": "unknown modifier .oob",
    "fma.rz.bf16 %rs1, %rs2, %rs3, %rs4;": "needs one of .rn",
    "fma.rn.sat.relu.f16 %rs1, %rs2, %rs3, %rs4;": "unknown modifier .sat",
    "div.f32 %f1, %f2, %f3;": "needs one of .approx",
    "div.approx.f64 %fd1, %fd2, %fd3;": "needs one of .rn",
    "sqrt.approx.ftz.f64 %fd1, %fd2;": "does not take .ftz",
    "rcp.approx.f64 %fd1, %fd2;": "no .approx without .ftz",
    "ex2.approx.bf16 %rs1, %rs2;": "needs one of .ftz",
    "tanh.approx.ftz.f32 %f1, %f2;": "unknown modifier .ftz",
    "max.xorsign.f32 %f1, %f2, %f3;": ".xorsign needs .abs",
    "max.abs.f32 %f1, %f2, %f3;": "unknown modifier .abs",
    "max.xorsign.abs.f32 %f1, %f2, %f3, %f4;": "unknown modifier .xorsign",
    "max.relu.u32 %r1, %r2, %r3;": "unknown modifier .relu",
    "setp.lo.s32 %p1, %r1, %r2;": "needs one of .eq",
    "setp.lt.b32 %p1, %r1, %r2;": "needs one of .eq .ne",
    "setp.lt.f16 %p1|%p2, %rs1, %rs2;": "writes one predicate",
    "set.lt.f32.f16 %f1, %rs1, %rs2;": "type .f32 is not one of",
    "set.lt.u32.bf16x2.f16 %r1, %r2, %r3;": "type .bf16x2 is not one of",
    "slct.ftz.s32.s32 %r1, %r2, %r3, %r4;": "unknown modifier .ftz",
    "cvt.rn.u32.f32 %r1, %f1;": "needs one of .rni",
    "cvt.u32.f32 %r1, %f1;": "needs one of .rni",
    "cvt.f32.s32 %f1, %r1;": "needs one of .rn",
    "cvt.sat.s32.u8 %r1, %rs1;": "every .u8 is a .s32",
    "cvt.rni.f32.f64 %f1, %fd1;": "needs one of .rn",
    "cvt.rn.sat.bf16.f32 %rs1, %f1;": "unknown modifier .sat",
    "cvt.rm.relu.f16.f32 %rs1, %f1;": "unknown modifier .relu",
    "cvt.rn.e4m3x2.f32 %rs1, %f1, %f2;": "needs one of .satfinite",
    "cvt.rn.satfinite.ue8m0x2.f32 %rs1, %f1, %f2;": "needs one of .rz .rp",
    "cvt.rn.bf16x2.e4m3x2 %r1, %rs1;": "no conversion from .e4m3x2 to .bf16x2",
    "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;": "needs one of .rn .rz",
    "cvt.rs.satfinite.e4m3x4.f32 %r1, {%f1, %f2, %f3, %f4}, %r2;": ".e4m3x4 is not supported",
    "cvt.rz.tf32.f64 %r1, %fd1;": "no conversion from .f64 to .tf32",
    "cvt.pack.sat.u8.s32 %r1, %r2, %r3;": "needs one of .u16 .s16",
    "mov.u64 %rd1, {%r1, %r2};": "a vector needs a .b type",
    "mov.b8 %rs1, %rs2;": "type .b8 is not one of",
    "mov.u32 %r1, %pm0;": "unknown operand '%pm0'",
    "ld.global.f16 %rs1, [%rd1];": "type .f16 is not one of",
    "ld.shared.nc.u32 %r1, [%r2];": ".nc needs a weak .global",
    "ld.global.volatile.nc.u32 %r1, [%rd1];": ".nc needs a weak .global",
    "ld.volatile.global.cg.u32 %r1, [%rd1];": "unknown modifier .cg",
    "ld.global.wt.u32 %r1, [%rd1];": "unknown modifier .wt",
    "ld.relaxed.gpu.local.u32 %r1, [%rd1];": ".relaxed does not take .local",
    "ld.relaxed.global.u32 %r1, [%rd1];": "needs one of .cta",
    "ld.mmio.relaxed.gpu.global.u32 %r1, [%rd1];": "needs one of .sys",
    "ld.mmio.relaxed.sys.shared.u32 %r1, [%r2];": ".mmio does not take .shared",
    "ld.shared.v4.b64 {%rd1, %rd2, %rd3, %rd4}, [%r1];": "more than 16 bytes",
    "ld.global.L2::cache_hint.u32 %r1, [%rd1];": "2 operands, expected 3",
    "ldu.shared.u32 %r1, [%rd2];": "unknown modifier .shared",
    "st.const.u32 [%rd1], %r1;": "unknown modifier .const",
    "st.acquire.gpu.global.u32 [%rd1], %r1;": ".gpu needs .relaxed or .release",
    "st.global.nc.u32 [%rd1], %r1;": "unknown modifier .nc",
    "atom.global.add.s64 %rd1, [%rd2], %rd3;": "type .s64 is not one of",
    "atom.global.add.f16 %rs1, [%rd2], %rs3;": "needs one of .noftz",
    "atom.global.min.noftz.f16 %rs1, [%rd2], %rs3;": "needs a vector",
    "atom.shared.add.v2.f32 {%f1, %f2}, [%r1], {%f3, %f4};": "2 registers with no vector modifier",
    "atom.global.add.v4.f64 {%fd1, %fd2, %fd3, %fd4}, [%rd1], {%fd1, %fd2, %fd3, %fd4};": "4 registers with no vector",
    "atom.global.add.noftz.v8.f16x2 _, [%rd1], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};": "8 registers with no vector",
    "red.acquire.gpu.global.add.u32 [%rd1], %r1;": "unknown modifier .acquire",
    "red.global.exch.b32 [%rd1], %r1;": "needs one of .add",
    "atom.volatile.global.add.u32 %r1, [%rd1], %r2;": "unknown modifier .volatile",
    "discard.global.L2 [%rd1], 64;": "size 64: it must be 128",
    "createpolicy.fractional.L2::evict_last.L2::evict_last.b64 %rd1;": "unknown modifier .L2::evict_last",
    "prefetch.L2::evict_last [%rd1];": "needs one of .L1 .L2",
    "prmt.b32.f8e %r1, %r2, %r3, %r4;": "unknown modifier .f8e",
    "lop3.xor.b32 %r1|%p1, %r2, %r3, %r4, 5, %p2;": "6 operands, expected 5",
    "pmevent %r1;": "must be a constant",
    "vadd.u32.u32.u32 %r1, %r2, %r3;": "unknown opcode 'vadd'",
    "vadd2.u32.u32.u32 %r1, %r2.h4, %r3, %r4;": "cannot read the selector .h4",
    "vadd2.u32.u32.u32 %r1, %r2.h1, %r3, %r4;": "a selector names 2 pieces",
    "vadd4.u32.u32.u32.sat.add %r1, %r2, %r3, %r4;": "unknown modifier .sat",
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    module = parse(HEADER + entry("k", code))
    with pytest.raises(TranslateError, match=re.escape(REFUSED[code])):
        translate([module])

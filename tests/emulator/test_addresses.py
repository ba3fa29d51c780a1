"""Addresses in .param, .const and .local are held in 32 bits until cvta makes them generic, as Triton's PTX does."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library, TensorMap
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, aligned, entry, run

VARIABLES = """
.const .align 8 .u32 table[4] = {10, 20, 30, 40};
.global .align 8 .u64 near_table = table;
.global .align 8 .u64 far_table = generic(table) + 8;
.func (.param .b32 r) second(.param .align 8 .b8 a[8]) {
  .reg .b32 x, y; .reg .b64 q; mov.b32 x, a; cvt.u64.u32 q, x; ld.param.u32 y, [q+4]; st.param.b32 [r], y; ret; }
"""
# Each leaves its result in %r1 of the first thread.
NEAR = "mov.b32 %r2, {0}; cvt.u64.u32 %rd1, %r2;"
VALUES = {
    "param": (NEAR.format("p1") + "cvta.param.u64 %rd2, %rd1; ld.u32 %r1, [%rd2+4];", 77),
    "param_back": (
        NEAR.format("p1") + "cvta.param.u64 %rd2, %rd1; cvta.to.param.u64 %rd3, %rd2; ld.param.u32 %r1, [%rd3+4];", 77),
    "param_is_one": (NEAR.format("p1") + "cvta.param.u64 %rd2, %rd1; isspacep.param %p1, %rd2; selp.u32 %r1, 1, 0, %p1;", 1),
    "param_offset": ("mov.b32 %r2, p1+4; cvt.u64.u32 %rd1, %r2; ld.param.u32 %r1, [%rd1];", 77),
    "const": (NEAR.format("table") + "ld.const.u32 %r1, [%r2+4];", 20),
    "const_by_name": ("ld.const.u32 %r1, [table+12];", 40),
    "const_generic": (NEAR.format("table") + "cvta.const.u64 %rd2, %rd1; ld.u32 %r1, [%rd2+8];", 30),
    "const_back": (
        NEAR.format("table") + "cvta.const.u64 %rd2, %rd1; cvta.to.const.u64 %rd3, %rd2; ld.const.u32 %r1, [%rd3];", 10),
    "const_pointer": ("ld.global.u64 %rd1, [near_table]; ld.const.u32 %r1, [%rd1+8];", 30),
    "const_generic_pointer": ("ld.global.u64 %rd1, [far_table]; ld.u32 %r1, [%rd1+4];", 40),
    "local": (".local .align 8 .b32 q[4];" + NEAR.format("q") + "st.local.u32 [%r2+8], 5; ld.local.u32 %r1, [%rd1+8];", 5),
    "local_generic": (
        ".local .align 8 .b32 q[4];" + NEAR.format("q") + "st.local.u32 [q+4], 6;"
        "cvta.local.u64 %rd2, %rd1; ld.u32 %r1, [%rd2+4];",
        6),
    "local_back": (
        ".local .align 8 .b32 q[4]; mov.u64 %rd1, q; cvta.local.u64 %rd1, %rd1; st.u32 [%rd1], 8; cvta.to.local.u64 %rd2, %rd1;"
        "cvt.u32.u64 %r2, %rd2; ld.local.u32 %r1, [%r2];", 8),
    "alloca": (
        "alloca.u64 %rd1, 16; cvt.u32.u64 %r2, %rd1; st.local.u32 [%r2+12], 9; cvta.local.u64 %rd2, %rd1;"
        "ld.u32 %r1, [%rd2+12];", 9),
    "alignment": (".local .align 128 .b32 q[4]; mov.b32 %r2, q; and.b32 %r1, %r2, 127;", 0),
    "function": (".param .align 8 .b8 a[8]; st.param.b32 [a], 3; st.param.b32 [a+4], 4; call (%r1), second, (a);", 4),
    "tensor_map": (
        ".shared .align 128 .b32 tile[32]; .shared .align 8 .b64 bar; mov.u32 %r3, tile; mov.u32 %r4, bar; mov.u32 %r5, 4;"
        + NEAR.format("map") + "cvta.param.u64 %rd2, %rd1; mbarrier.init.shared::cta.b64 [%r4], 1; fence.proxy.async;"
        "prefetch.param.tensormap [%rd1]; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 128;"
        "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd2, {%r5}], [%r4];"
        "W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], 0; @!%p1 bra W; ld.shared.u32 %r1, [tile+8];", 106),
}  # fmt: skip
FAULTS = {
    "param_end": (NEAR.format("p1") + "ld.param.u64 %rd2, [%rd1+512];", "param_out_of_bounds"),
    "const_end": (NEAR.format("table") + "ld.const.u32 %r1, [%r2+16];", "global_out_of_bounds"),
    "local_end": (".local .b32 q[4];" + NEAR.format("q") + "st.local.u32 [%r2+16], 5;", "local_out_of_bounds"),
    "local_is_not_generic": (".local .b32 q[4];" + NEAR.format("q") + "ld.u32 %r1, [%rd1];", "global_out_of_bounds"),
}
PARAMS = ".param .u64 p0, .param .align 8 .b8 p1[8], .param .align 64 .b8 map[128]"


@pytest.fixture(scope="module", params=["fast", "check"])
def library(build: Build, request: pytest.FixtureRequest) -> Library:
    codes = VALUES | (FAULTS if request.param == "check" else {})
    kernels = (entry(name, f"{code} st.global.u32 [%rd0], %r1;", PARAMS) for name, (code, _) in codes.items())
    return build([HEADER + VARIABLES + "".join(kernels)], mode=request.param)


def launch(library: Library, name: str) -> int:
    out, data = np.zeros(1, np.uint32), aligned(400).view(np.uint32)
    data[:] = 100 + np.arange(100)
    tensor = TensorMap("uint32", data.ctypes.data, (100,), (), (32,)).encode()
    run(library, name, out, np.array([66, 77], np.uint32).tobytes(), tensor, block=1, memory=(data,))
    return int(out[0])


@pytest.mark.parametrize("name", VALUES)
def test_value(name: str, library: Library) -> None:
    assert launch(library, name) == VALUES[name][1]


@pytest.mark.parametrize("library", ["check"], indirect=True)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, library: Library) -> None:
    with pytest.raises(KernelFault) as caught:
        launch(library, name)
    assert caught.value.kind == FAULTS[name][1], str(caught.value)

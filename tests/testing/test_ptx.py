"""kvgen.testing.run_ptx: PTX of another compiler on NumPy arrays, and what it says to arguments that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.emulator import EmulatorError, KernelFault
from kvgen.errors import ArgumentError
from kvgen.testing import run_ptx, tensor_map

ROW_SUM = (Path(__file__).parent / "row_sum.ptx").read_text()
WAIT = "  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;\n  @!%p2 bra WAIT;\n"
HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
# Writes what it is given, in order, to `out`.
ECHO = (
    HEADER
    + """.visible .entry echo(
  .param .u64 out, .param .u8 a, .param .s16 b, .param .f32 c, .param .f64 d, .param .b8 e[3], .param .u64 f) {
  .reg .b32 x; .reg .b64 p, y; ld.param.u64 p, [out];
  ld.param.u8 x, [a]; st.global.u32 [p], x; ld.param.s16 x, [b]; st.global.u32 [p+4], x; ld.param.u32 x, [c];
  st.global.u32 [p+8], x; ld.param.u8 x, [e+2]; st.global.u32 [p+12], x; ld.param.u64 y, [d]; st.global.u64 [p+16], y;
  ld.param.u64 y, [f]; st.global.u64 [p+24], y; ret; }
.visible .entry grow(.param .u64 out) {
  .reg .b32 x, y; .reg .b64 p, q; ld.param.u64 p, [out];
  mov.u32 x, %ctaid.x; mul.wide.u32 q, x, 4; add.u64 p, p, q;
  mov.u32 x, %dynamic_smem_size; mov.u32 y, %cluster_nctarank; mad.lo.u32 x, y, 1000000, x; st.global.u32 [p], x; ret; }
.visible .entry follow(.param .u64 table) {
  .reg .b32 x; .reg .b64 p; ld.param.u64 p, [table]; ld.global.u64 p, [p]; ld.global.u32 x, [p]; add.u32 x, x, 1;
  st.global.u32 [p], x; ret; }
"""
)


def row_sums(text: str = ROW_SUM, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(4).standard_normal((5, 64)).astype(np.float32)
    out = np.zeros(5, np.float32)
    counters = run_ptx(text, "row_sum", grid=5, block=32, args=[tensor_map(rows, box=(64, 1)), out, 64], **options)
    assert counters.per_buffer["args[0]"].load_bytes == rows.nbytes
    return out, rows.astype(np.float64).sum(axis=1)


@pytest.mark.parametrize("mode", ["fast", "check", "hardware"])
@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
def test_a_tensor_map_by_its_32_bit_address(mode: Any, schedule: Any) -> None:
    if mode == "fast":
        rows, out = np.ones((1, 64), np.float32), np.zeros(1, np.float32)
        run_ptx(ROW_SUM, block=32, args=[tensor_map(rows, box=(64, 1)), out, 64], mode=mode, schedule=schedule)
        assert out[0] == 64
        return
    out, expected = row_sums(mode=mode, schedule=schedule)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", ["ascending", "descending", 3])
def test_a_missing_wait_is_found(schedule: Any) -> None:
    with pytest.raises(KernelFault) as caught:
        row_sums(ROW_SUM.replace(WAIT, ""), mode="hardware", schedule=schedule)
    assert caught.value.kind in ("in_flight", "race", "uninitialised"), str(caught.value)


def test_every_kind_of_argument() -> None:
    out = np.zeros(8, np.uint32)
    run_ptx(ECHO, "echo", block=1, args=[out, 200, np.int16(-2), 1.5, -0.25, b"abc", None])
    assert out[:2].tolist() == [200, 2**32 - 2] and out[2:3].view(np.float32)[0] == 1.5 and out[3] == ord("c")
    assert out[4:6].view(np.float64)[0] == -0.25 and out[6:].tolist() == [0, 0]


def test_shared_memory_cluster_and_memory_behind_pointers() -> None:
    out = np.zeros(4, np.uint32)
    run_ptx(ECHO, "grow", grid=(4, 1), block=(2, 1, 1), cluster=4, shared=4096, args=[out])
    assert out.tolist() == [4_004_096] * 4
    value = np.array([41], np.uint32)
    table = np.array([value.ctypes.data], np.uint64)
    run_ptx(ECHO, "follow", block=1, args=[table], memory=[value])
    assert value[0] == 42
    with pytest.raises(KernelFault, match="global_out_of_bounds"):
        run_ptx(ECHO, "follow", block=1, args=[table])
    value.flags.writeable = False
    with pytest.raises(KernelFault, match=re.escape("read_only")) as caught:
        run_ptx(ECHO, "follow", block=1, args=[table], memory=[value])
    assert caught.value.buffer == "memory[0]"


def test_tensor_maps_of_views() -> None:
    rows = np.zeros((6, 128), ml_dtypes.float8_e4m3fn)
    made = tensor_map(rows[::2, 16:48], (32, 3), swizzle=32)
    assert (made.map.element, made.map.dims, made.map.strides) == ("uint8", (32, 3), (256,))
    assert made.map.address == rows.ctypes.data + 16


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"entry": None}, "entry: got None; the module has 3 kernels; pass one of echo, grow, follow"),
    ({"entry": "x"}, "entry: got 'x'; the module has no such kernel; pass one of echo, grow, follow"),
    ({"args": []}, "args: got 0 values; follow takes 1 parameters"),
    ({"args": [np.float32(1)]}, "args[0]: got numpy.float32, 4 bytes; the parameter has 8; pass as many"),
    ({"args": [1 << 64]}, "args[0]: got 18446744073709551616; the parameter has 8 bytes; pass a number that fits"),
    ({"args": ["a"]}, "args[0]: got str for a parameter of 8 bytes; pass a NumPy array or scalar, tensor_map(...), an int, "
                      "a float, bytes or None"),
    ({"block": (1, 1, 1, 1)}, "block: got (1, 1, 1, 1); it has up to three extents; pass x or (x, y, z)"),
    ({"grid": ()}, "grid: got (); it has up to three extents; pass x or (x, y, z)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"entry": "follow", "block": 1, "args": [np.zeros(1, np.uint64)], **change}
    with pytest.raises(ArgumentError) as caught:
        run_ptx(ECHO, **options)
    assert str(caught.value) == message


def test_what_the_machine_refuses() -> None:
    with pytest.raises(EmulatorError, match="mode: got 'loose'"):
        run_ptx(ECHO, "follow", block=1, args=[0], mode="loose")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="args") as caught:
        run_ptx(ECHO, "echo", block=1, args=[np.zeros(8, np.uint32), 0, 0, 0, 0, 7, None])
    assert str(caught.value) == "args[5]: got 7; the parameter has 3 bytes and is no number; pass bytes"
    with pytest.raises(ArgumentError, match="array: got a last axis of stride 8 bytes for elements of 4"):
        tensor_map(np.zeros((4, 8), np.float32)[:, ::2], (4, 1))
    with pytest.raises(ArgumentError, match="array: got list; a tensor map describes memory"):
        tensor_map([1], (1,))  # type: ignore[arg-type]
    with pytest.raises(EmulatorError, match=r"box\[0\]: got 3"):
        tensor_map(np.zeros((4, 8), np.float32), (3, 1))

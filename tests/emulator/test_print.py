"""printf and assert: every conversion, the order of blocks, what a fault leaves, limits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvgen.emulator import KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import nvrtc_ptx, run

Int, Long, Double, Text = ctypes.c_int, ctypes.c_longlong, ctypes.c_double, ctypes.c_char_p
# format, values in CUDA, the same for the C library of this machine
FORMATS: list[tuple[str, str, tuple[object, ...]]] = [
    ("plain text 100%%", "", ()),
    ("%d|%i", "-5, 2147483647", (Int(-5), Int(2147483647))),
    ("%u|%x|%X|%o", "4000000000u, 0xbeefu, 0xbeefu, 8u", (Int(4000000000), Int(0xBEEF), Int(0xBEEF), Int(8))),
    ("%hd|%hu|%hhd|%hhu", "(short)-3, (unsigned short)65535, 200, 300", (Int(-3), Int(65535), Int(200), Int(300))),
    ("%hd|%hu", "70000, -1", (Int(70000), Int(-1))),
    ("%ld|%lld|%lu", "-5000000000l, -6ll, 7ul", (Long(-5000000000), Long(-6), Long(7))),
    ("%llu|%llx", "18446744073709551615ull, 1ull << 40", (Long(2**64 - 1), Long(1 << 40))),
    ("%c%c", "'o', 'k'", (Int(ord("o")), Int(ord("k")))),
    (
        "%s|%8s|%-8s|%.2s",
        '"text", "right", "left", "cut"',
        (Text(b"text"), Text(b"right"), Text(b"left"), Text(b"cut")),
    ),
    ("%f|%.3f|%10.2f", "1.5, 2.0 / 3, -3.14159", (Double(1.5), Double(2.0 / 3), Double(-3.14159))),
    ("%-10.1f|%+f", "9.95, 1.25f", (Double(9.95), Double(1.25))),
    (
        "%e|%.2E|%g|%G",
        "12345.678, 0.00012, 1e-7, 1e20",
        (Double(12345.678), Double(0.00012), Double(1e-7), Double(1e20)),
    ),
    ("%a|%A", "1.0, -0.1", (Double(1.0), Double(-0.1))),
    ("%f %f %f", "1.0 / 0, -1.0 / 0, 1e300", (Double(float("inf")), Double(float("-inf")), Double(1e300))),
    ("%5d|%-5d|%05d|%+d|% d|%#x|%#o", "42, 42, 42, 42, 42, 42, 42", (Int(42),) * 7),
    ("%*d|%-*d|%.*f", "6, 42, 6, 42, 2, 3.14159", (Int(6), Int(42), Int(6), Int(42), Int(2), Double(3.14159))),
    ("%*d", "-6, 7", (Int(-6), Int(7))),
    ("%p", "(void*)0x1234abcd", (ctypes.c_void_p(0x1234ABCD),)),
    ("%d %s %d", '1, "mixed", 2', (Int(1), Text(b"mixed"), Int(2))),
]
PRINT = (
    'extern "C" __global__ void formats(int* out) {\n'
    + "".join(f'  printf("{f}\\n"{", " if v else ""}{v});\n' for f, v, _ in FORMATS)
    + '  out[0] = printf("%d %s", 1, "two"); out[1] = printf("none\\n"); out[2] = printf("%*d", 3, 4); }\n'
    + r"""
extern "C" __global__ void order(int* out, int stop) {
  printf("b%d t%d\n", blockIdx.x, threadIdx.x); __syncthreads(); if (threadIdx.x == 0) printf("end of %d\n", blockIdx.x);
  assert(blockIdx.x != stop || threadIdx.x != 1);
}
extern "C" __global__ void indirect(const char* text) { printf("%s", text); }
extern "C" __global__ void flood(int n) { for (int i = 0; i < n; i++) printf("%100d\n", i); }
"""
)


@pytest.fixture(scope="module")
def printing(build: Build) -> Library:
    return build([nvrtc_ptx(PRINT, name="generated/print.cu")])


def test_printf_formats_like_the_c_library(printing: Library, capsys: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    libc.snprintf.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    out = np.zeros(3, np.int32)
    run(printing, "formats", out, block=1)
    got = capsys.readouterr().out.split("\n")
    expected = ctypes.create_string_buffer(1000)
    for (text, _, values), line in zip(FORMATS, got, strict=False):
        libc.snprintf(expected, 1000, text.encode(), *values)
        assert line == expected.value.decode()
    assert got[len(FORMATS)] == "1 twonone"
    assert list(out) == [2, 0, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_print_in_order(workers: int, printing: Library, capsys: pytest.CaptureFixture[str]) -> None:
    run(printing, "order", np.zeros(1, np.int32), -1, grid=(3, 1, 1), block=2, workers=workers)
    expected = "".join(f"b{b} t0\nb{b} t1\nend of {b}\n" for b in range(3))
    assert capsys.readouterr().out == expected
    run(printing, "order", np.zeros(1, np.int32), -1, grid=(1, 1, 1), block=2, schedule="descending")
    assert capsys.readouterr().out == "b0 t1\nb0 t0\nend of 0\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_assert_names_what_failed(workers: int, printing: Library, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KernelFault) as caught:
        run(printing, "order", np.zeros(1, np.int32), 1, grid=(4, 1, 1), block=2, workers=workers)
    fault = caught.value
    assert (fault.kind, fault.block, fault.thread) == ("assert", (1, 0, 0), (1, 0, 0))
    assert "generated/print.cu:" in fault.detail and "order(int *, int)" in fault.detail
    assert "`blockIdx.x != stop || threadIdx.x != 1`" in fault.detail
    assert capsys.readouterr().out == "b0 t0\nb0 t1\nend of 0\nb1 t0\nb1 t1\n"


def test_blocks_after_a_fault_print_nothing(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    """Even where another worker has run them by then."""
    source = """extern "C" __global__ void k(int* out) {
      unsigned x = blockIdx.x; printf("%d ", blockIdx.x);
      if (blockIdx.x < 2) for (int i = 0; i < 20000000 << 2 * blockIdx.x; i++) asm volatile("mad.lo.u32 %0, %0, 5, 1;" : "+r"(x));
      out[blockIdx.x] = x; if (blockIdx.x == 1) __trap(); }"""
    library = build([nvrtc_ptx(source)], mode="fast")
    with pytest.raises(KernelFault, match="trap"):
        run(library, "k", np.zeros(8, np.int32), grid=(8, 1, 1), block=1, workers=2)
    assert capsys.readouterr().out == "0 1 "


def test_text_from_a_buffer_is_bounded(printing: Library, capsys: pytest.CaptureFixture[str]) -> None:
    text = np.frombuffer(b"from a buffer\0", np.uint8).copy()
    run(printing, "indirect", text, block=1, read_only=(0,))
    assert capsys.readouterr().out == "from a buffer"
    text[-1] = ord("!")
    with pytest.raises(KernelFault) as caught:
        run(printing, "indirect", text, block=1, read_only=(0,))
    assert (caught.value.kind, caught.value.buffer) == ("global_out_of_bounds", "arg0")


def test_a_flood_is_cut(printing: Library, capsys: pytest.CaptureFixture[str]) -> None:
    run(printing, "flood", 11000, block=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2**20 // 101 + 1 and "left out" in lines[-1]
    assert lines[-2].strip() == str(len(lines) - 2)

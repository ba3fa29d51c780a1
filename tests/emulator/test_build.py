"""Builds: which compiler makes a kernel, units that do not compile, several processes that build the same thing at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvgen import emulator
from kvgen.emulator import host
from kvgen.emulator.functions import FunctionWriter
from kvgen.emulator.parser import parse
from kvgen.emulator.writer import translate
from tests.emulator.programs import HEADER, entry, run

ROOT = Path(__file__).resolve().parents[2]
ADD = "ld.global.u32 %r1, [%rd0]; add.u32 %r1, %r1, {0}; st.global.u32 [%rd0], %r1;"
# A function and a variable that two kernels share.
SHARED = (
    HEADER
    + """
.global .u32 total;
.func (.param .u32 out) next(.param .u32 by) {
  .reg .u32 %a; .reg .u32 %b;
  ld.param.u32 %a, [by]; ld.global.u32 %b, [total]; add.u32 %b, %b, %a; st.global.u32 [total], %b;
  st.param.u32 [out], %b; ret;
}
"""
)
CALL = (
    "{{ .param .u32 a; .param .u32 b; st.param.u32 [a], {0}; call (b), next, (a); ld.param.u32 %r1, [b]; }}"
    "st.global.u32 [%rd0], %r1;"
)


def modules() -> list[str]:
    apart = [HEADER + "".join(entry(f"k{m}{i}", ADD.format(10 * m + i)) for i in range(4)) for m in range(3)]
    return [*apart, SHARED + entry("c0", CALL.format(5)) + entry("c1", CALL.format(7))]


def test_modules_are_one_library(own_cache: Path) -> None:
    library = emulator.build(modules(), mode="fast", cache_dir=own_cache)
    for m in range(3):
        for i in range(4):
            out = np.array([100], np.uint32)
            run(library, f"k{m}{i}", out, block=1)
            assert out[0] == 100 + 10 * m + i
    for name, by in (("c0", 5), ("c1", 7)):
        out = np.zeros(1, np.uint32)
        run(library, name, out, block=1)
        assert out[0] == by


@pytest.mark.parametrize("unit", ["unit0.cpp", "unit1.cpp", "made.c"])
def test_a_unit_that_does_not_compile(
    unit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path
) -> None:
    """Nothing is kept of what was compiled beside it."""
    real = host._run

    def compile_all_but_one(command: Sequence[str]) -> None:
        if any(word.endswith(unit) for word in command):
            raise emulator.HostCompilerError("broken")
        real([*command, "-O0"])  # what is made here is not run

    cache = own_cache if unit == "made.c" else tmp_path / "empty"
    monkeypatch.setattr(host, "_run", compile_all_but_one)
    monkeypatch.setattr(
        host, "_RUNTIME_SOURCES", (("machine.cpp",), ("print.cpp",)) if cache != own_cache else host._RUNTIME_SOURCES
    )
    before = {path.name for path in own_cache.glob("*.so")} if cache == own_cache else set()
    with pytest.raises(emulator.HostCompilerError, match="broken"):
        emulator.build([HEADER + entry("one_more", "")], mode="fast", cache_dir=cache)
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} == before


def test_processes_build_the_same_at_once(tmp_path: Path) -> None:
    log, compiler = tmp_path / "log", tmp_path / "logging-g++"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec g++ "$@" -O0\n')  # what it makes runs once
    compiler.chmod(0o755)
    text, cache = HEADER + entry("k", ADD.format(3)), tmp_path / "cache"
    code = (
        "import sys, pathlib, numpy as np; from kvgen import emulator; from tests.emulator.programs import run\n"
        f"library = emulator.build([{text!r}], mode='fast', cache_dir=pathlib.Path({str(cache)!r}))\n"
        "out = np.zeros(1, np.uint32); run(library, 'k', out, block=1); sys.exit(int(out[0]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": str(compiler)}
    beside = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment) for _ in range(3)]
    assert [process.wait(timeout=120) for process in beside] == [3, 3, 3]
    compiled = [line for line in log.read_text().splitlines() if "-o" in line]
    assert sum("-frounding-math" in line and "-shared" in line for line in compiled) == 1  # the runtime
    left = {p.suffix for p in cache.iterdir()}
    assert left == {".so", ".lock"} and len(list(cache.glob("*.so"))) == 2


LOOPS = {
    "bra AHEAD; AHEAD: ret;": 0,
    "AGAIN: mov.u32 %r1, 1; bra AGAIN;": 1,
    "AGAIN: mov.u32 %r1, 1; @%p1 bra.uni AGAIN; bra AHEAD; AHEAD: ret;": 1,
    "{ AGAIN: mov.u32 %r1, 1; bra AGAIN; }": 1,
    "bra IN; OUTER: mov.u32 %r1, 1; IN: mov.u32 %r1, 2; @%p1 bra IN; bra OUTER;": 2,
    "T: .branchtargets A, B; A: mov.u32 %r1, 1; B: mov.u32 %r1, 2; brx.idx %r1, T;": 2,
}


@pytest.mark.parametrize("body", LOOPS)
def test_loops_are_watched_where_they_come_back(body: str) -> None:
    """An endless loop passes one of these places, and straight code pays for none."""
    text = translate([parse(HEADER + entry("k", body))]).text()
    assert text.count("emu_runaway(") == LOOPS[body]
    assert text.count("++bb[") > LOOPS[body]


def test_registers_that_nothing_uses_cost_nothing() -> None:
    text = translate([parse(HEADER + entry("k", ".reg .f32 %unused<5000>; mov.u32 %r1, 5;"))]).text()
    assert "unused" not in text and "v0_r1 = 0" in text


def test_moves_keep_every_bit_of_a_float(own_cache: Path) -> None:
    """A signalling NaN and denormals in .f32 and .f64 registers, through moves, selections, loads and stores."""
    body = (
        ".reg .f32 %x<4>; .reg .f64 %y<4>; .reg .b64 %w<2>; .reg .b16 %h<2>;"
        "ld.global.f32 %x0, [%rd0]; mov.f32 %x1, %x0; mov.b32 %r1, %x1; mov.b32 %x2, %r1; setp.eq.u32 %p1, %r1, %r1;"
        "selp.f32 %x3, %x2, 0f00000000, %p1; st.global.f32 [%rd0+8], %x3; mov.b32 {%h0, %h1}, %x3; mov.b32 %x0, {%h0, %h1};"
        "st.global.b32 [%rd0+12], %x0; ld.global.v2.f32 {%x1, %x2}, [%rd0]; mov.b64 %w0, {%x1, %x2}; mov.b64 %y0, %w0;"
        "mov.f64 %y1, %y0; selp.f64 %y2, %y1, 0d0000000000000000, %p1; st.global.f64 [%rd0+16], %y2;"
        "ld.global.f32 %y3, [%rd0]; st.global.b64 [%rd0+24], %y3;"
    )
    library = emulator.build([HEADER + entry("k", body)], mode="fast", cache_dir=own_cache)
    for low, high in ((0x7F800001, 0xFFF00000), (0xFFA12345, 0x7FF00000), (1, 0x80000000), (0x80000000, 0x7FF80001)):
        out = np.array([low, high] + [0xEE] * 6, np.uint32)
        run(library, "k", out, block=1)
        np.testing.assert_array_equal(out, np.array([low, high, low, low, low, high, low, 0], np.uint32))


def frames_of_tcc(source: Path) -> dict[str, int]:
    """Bytes that each function of a C file takes of the stack, out of the first instructions of its machine code."""
    made = source.with_suffix(".o")
    host._run([str(host.tcc_path()), "-w", "-c", "-DEMU_CHECK=1", f"-I{host._RUNTIME}", str(source), "-o", str(made)])
    code = source.with_suffix(".text")
    host._run(["objcopy", "-O", "binary", "--only-section=.text", str(made), str(code)])
    text = code.read_bytes()
    names = subprocess.run(["nm", str(made)], capture_output=True, text=True, check=True).stdout
    found = {}
    for at, _, name in (words for line in names.splitlines() if len(words := line.split()) == 3):
        opening = re.match(rb"\x55\x48\x89\xe5\x48\x81\xec(....)", text[int(at, 16) :][:11], re.DOTALL)
        if opening:  # push rbp; mov rbp, rsp; sub rsp, N
            found[name] = int.from_bytes(opening[1], "little")
    return found


def frames_of_host(source: Path) -> dict[str, int]:
    """The same of the compiler of the runtime, which says so."""
    flags = [
        *host._FLAGS,
        *host._cpu_flags(),
        "-O0",
        "-std=gnu11",
        "-x",
        "c",
        "-DEMU_CHECK=1",
        f"-I{host._RUNTIME}",
        "-fstack-usage",
    ]
    host._run([host.host_compiler(), *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))])
    rows = [row.split("\t") for row in source.with_suffix(".su").read_text().splitlines()]
    return {m[1]: int(size) for place, size, _ in rows if (m := re.search(r":(\w+)$", place))}


@pytest.mark.parametrize("name", ["dispatch", "reduce", "math"])
def test_stacks_hold_unoptimized_frames(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's stack has twice `frame_bytes`: more than the frame of every function in check mode, by either compiler."""
    stated: dict[str, int] = {}
    finish = FunctionWriter._finish

    def finished(writer: FunctionWriter) -> None:
        finish(writer)
        stated[writer.name] = writer.frame_bytes

    monkeypatch.setattr(FunctionWriter, "_finish", finished)
    source = tmp_path / "kernels.c"
    source.write_text(
        translate([parse((Path(__file__).parent / "ptx" / "foreign" / f"{name}.ptx").read_text())]).text()
    )
    for frames in (frames_of_tcc(source), frames_of_host(source)):
        assert stated.keys() <= frames.keys()
        for function, size in stated.items():
            assert frames[function] <= 2 * size + 256, function


WIDE = "{ .reg .b128 %q; mov.b128 %q, {%rd0, %rd0}; mov.b128 {%rd1, %rd0}, %q; }"


@pytest.mark.parametrize(
    ("mode", "body", "tcc"),
    [("check", ADD.format(3), True), ("fast", ADD.format(3), False), ("check", WIDE + ADD.format(3), False)],
    ids=["check", "fast", "128 bits"],
)
def test_which_compiler_makes_a_kernel(
    mode: host.Mode, body: str, tcc: bool, monkeypatch: pytest.MonkeyPatch, own_cache: Path, check_cache: Path
) -> None:
    """TCC in check mode; the compiler of the runtime for registers of 128 bits, in fast mode, and where there is no TCC."""
    real, used = host._compile, []
    monkeypatch.setattr(host, "_compile", lambda command, *a: used.append(command[0]) or real(command, *a))
    for found, expected in ((host.tcc_path(), tcc), (None, False)):
        monkeypatch.setattr(host, "tcc_path", lambda found=found: found)
        out = np.array([4], np.uint32)
        cache = check_cache if mode == "check" else own_cache
        run(emulator.build([HEADER + entry("k", body)], mode=mode, cache_dir=cache), "k", out, block=1)
        assert out[0] == 7
        assert used.pop() == (str(found) if expected else host.host_compiler())


def test_a_kernel_of_tcc_needs_no_executable_stack(check_cache: Path) -> None:
    """Newer C libraries refuse to load an object that does not say so."""
    emulator.build([HEADER + entry("k", ADD.format(3))], mode="check", cache_dir=check_cache)
    (made,) = (p for p in check_cache.glob("*.so") if not p.name.startswith("runtime"))
    headers = subprocess.run(["readelf", "-lW", str(made)], capture_output=True, text=True, check=True).stdout
    (stack,) = (line.split() for line in headers.splitlines() if "GNU_STACK" in line)
    assert stack[6] == "RW"

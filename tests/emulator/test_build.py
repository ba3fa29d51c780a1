"""Builds: several translation units compiled side by side, and several processes that build the same thing at once."""

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


def test_units_share_the_work() -> None:
    unit = translate([parse(text) for text in modules()])
    assert len(unit.parts) == 13  # the two kernels that share a function stay together
    for most in (1, 2, 5, 50):
        texts = unit.texts(most)
        assert len(texts) == min(most, 13)
        assert sum(text.count("emu_program") for text in texts) == 1
        for part in unit.parts:
            assert sum(part in text for text in texts) == 1
        assert max(map(len, texts)) < 2 * sum(map(len, texts)) / len(texts) + 2000
    assert len(unit.texts(5, 10**9)) == 1


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_UNIT_BYTES", 1)
    monkeypatch.setattr(host, "cores", lambda: 4)


@pytest.mark.usefixtures("in_pieces")
def test_units_are_one_library(own_cache: Path) -> None:
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


@pytest.mark.usefixtures("in_pieces")
def test_a_bad_unit_among_several(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    real, compiled = host._run, []

    def compile_all_but_one(command: Sequence[str]) -> None:
        if "-c" in command:
            compiled.append(Path(command[-1]).name)
        if compiled and command[-1].endswith("source1.cpp.o"):
            raise emulator.HostCompilerError("broken")
        real(command)

    monkeypatch.setattr(host, "_run", compile_all_but_one)
    texts = [*modules(), HEADER + entry("one_more", "")]
    with pytest.raises(emulator.HostCompilerError, match="broken"):
        emulator.build(texts, mode="fast", cache_dir=own_cache)
    assert sorted(compiled) == [f"source{i}.cpp.o" for i in range(4)]
    monkeypatch.setattr(host, "_run", real)
    assert len(emulator.build(texts, mode="fast", cache_dir=own_cache).kernels) == 15


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
    (text,) = translate([parse(HEADER + entry("k", body))]).texts()
    assert text.count("emu_runaway(") == LOOPS[body]
    assert text.count("++bb[") > LOOPS[body]


def test_registers_that_nothing_uses_cost_nothing() -> None:
    (text,) = translate([parse(HEADER + entry("k", ".reg .f32 %unused<5000>; mov.u32 %r1, 5;"))]).texts()
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


@pytest.mark.parametrize("name", ["dispatch", "reduce", "math"])
def test_stacks_hold_unoptimized_frames(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's stack has twice `frame_bytes`: more than the host compiler's frame of every function in check mode."""
    stated: dict[str, int] = {}
    finish = FunctionWriter._finish

    def finished(writer: FunctionWriter) -> None:
        finish(writer)
        stated[writer.name] = writer.frame_bytes

    monkeypatch.setattr(FunctionWriter, "_finish", finished)
    (text,) = translate([parse((Path(__file__).parent / "ptx" / "foreign" / f"{name}.ptx").read_text())]).texts()
    (tmp_path / "kernels.cpp").write_text(text)
    compiler, _ = host._compiler(os.environ.get("CXX", "g++"))
    flags = [*host._FLAGS, *host._cpu_flags(), "-Og", "-DEMU_CHECK=1", f"-I{host._RUNTIME}", "-fstack-usage"]
    host._run([compiler, *flags, "-c", str(tmp_path / "kernels.cpp"), "-o", str(tmp_path / "kernels.o")])
    rows = [row.split("\t") for row in (tmp_path / "kernels.su").read_text().splitlines()]
    frames = {m[1]: int(size) for place, size, _ in rows if (m := re.search(r":(?:void )?(\w+)\(", place))}
    assert stated.keys() <= frames.keys()
    for function, size in stated.items():
        assert frames[function] <= 2 * size + 256, function

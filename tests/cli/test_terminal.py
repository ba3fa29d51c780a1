"""Verbs in a terminal of 80 and of 100 columns: names are whole, no number is cut, and nothing is longer than the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Final

import pytest

from kvgen.cli import demo_steps
from kvgen.cli.app import app
from kvgen.cli.demo_steps import Outcome
from kvgen.cli.progress import progress
from kvgen.cli.table import Column, Table, numbers, words
from kvgen.runtime import first_compile
from kvgen.runtime.first_compile import told

from .conftest import Folder, command

COLUMNS: Final = (80, 100)
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo terminal in the place of stdout or stderr; `close` gives what was written, without colours and cursor moves."""

    def __init__(self, columns: int, patch: pytest.MonkeyPatch, stream: str = "stdout") -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._data = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._file = os.fdopen(slave, "w", encoding="utf-8")
        patch.delenv("COLUMNS", raising=False)
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, stream, self._file)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            self._data += data

    def close(self) -> str:
        self._file.close()
        self._reader.join()
        os.close(self._master)
        return _ESCAPES.sub("", self._data.decode()).replace("\r\n", "\n").replace("\r", "\n")


def shown(folder: Folder, columns: int, *arguments: str) -> str:
    """The text that a verb writes to a terminal of so many columns."""
    before = Path.cwd()
    os.chdir(folder.root)
    try:
        with pytest.MonkeyPatch.context() as patch:
            out, err = Terminal(columns, patch), Terminal(columns, patch, "stderr")
            try:
                command(app).main(list(arguments), prog_name="kvgen")
            except SystemExit as end:
                assert end.code == 0
            finally:
                text, bars = out.close(), err.close()
    finally:
        os.chdir(before)
    assert "…" not in text + bars and "..." not in text
    assert max(map(len, text.splitlines())) <= columns, max(text.splitlines(), key=len)
    return text


LONG: Final = "deepseek_v41_indexer_of_all_layers"


@pytest.fixture
def wide(built: Folder) -> Folder:
    """A set more, with names as long as they get."""
    spec = (built.root / "specs/wide.py").read_text(encoding="utf-8")
    spec = spec.replace("kernels = KernelSet(", f'kernels = KernelSet(name="{LONG}",')
    (built.root / f"specs/{LONG}.py").write_text(
        spec.replace("ops.Gather()", 'ops.Gather(name="gather_all_of_a_request")')
    )
    built.kvgen("build", LONG)
    return built


@pytest.mark.parametrize("columns", COLUMNS)
def test_verbs(wide: Folder, columns: int) -> None:
    names = ["tiny/append", "wide/append", "wide/gather", f"{LONG}/append", f"{LONG}/gather_all_of_a_request"]
    listed = shown(wide, columns, "list")
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in ("tiny", "wide", LONG))
    assert "gather_all_of_a_request" in listed and "page kv layer token head dim" in listed
    compiled = shown(wide, columns, "compile")
    assert [line.split()[0] for line in compiled.splitlines() if "/" in line] == [
        n for n in sorted(names) for _ in range(2)
    ]
    counted = shown(wide, columns, "bench", "--tokens", "40")
    piped = wide.kvgen("bench", "--tokens", "40").stdout
    assert numbers_of(counted) == numbers_of(piped)
    assert all(name in counted for name in names)
    verified = shown(wide, columns, "verify", "--quick", "wide", f"{LONG}/gather_all_of_a_request")
    assert [line.split()[0] for line in verified.splitlines() if line.startswith((LONG, "wide"))] == [
        names[4],
        *names[1:3],
    ]
    assert len(re.findall(r"\bok\b", verified)) == 3
    assert numbers_of(verified) == numbers_of(wide.kvgen("verify", "--quick", "wide", names[4]).stdout)
    shown(wide, columns, "list", "--presets")


def numbers_of(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*", text))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.usefixtures("demo_from_cache")
def test_the_demo(empty: Folder, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's first command, with numbers as large as they are there; `test_demo.py` runs its batch."""
    outcomes = [
        Outcome(kernel, 4, 136, 0.0098, share, True, 3_375_456, 3_342_336)
        for kernel, share in (("append", 1.0), ("extend", 0.2), ("decode", 0.16), ("gather", 0.0))
    ]
    monkeypatch.setattr(demo_steps, "run", lambda *_: outcomes)
    said = shown(empty, columns, "demo", "--device", "cpu")
    heads = "launches  rows  largest error  of its bound"
    assert heads in said and "bytes moved" in said and "registers" in said
    for name in ("append", "extend", "decode", "gather"):
        assert re.search(rf"^{name} +\d+ +\d+ ", said, re.MULTILINE)
    assert len(re.findall(r"\d[\d,]* \(\d\.\d\dx\)", said)) == 4
    assert "every number is right" in said


def lines_of(table: Table, columns: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal(columns, patch)
        table.print()
        text = terminal.close()
    return text.splitlines()


def test_a_row_that_does_not_fit_goes_on_below() -> None:
    table = Table((*words("kernel"), *numbers("one", "two"), Column("why", prose=True), Column("", spare=True)))
    table.add("a/kernel_of_some_length", "1", "1,234,567", "for a reason that is longer than the line", "cached")
    table.add("b", "22", "1", "none", "")
    assert lines_of(table, 100) == [
        "kernel                   one        two  why",
        "a/kernel_of_some_length    1  1,234,567  for a reason that is longer than the line  cached",
        "b                         22          1  none",
    ]
    assert lines_of(table, 44) == [
        "kernel                   one        two",
        "    why",
        "a/kernel_of_some_length    1  1,234,567",
        "    for a reason that is longer than the",
        "    line",
        "b                         22          1",
        "    none",
    ]
    long = Table((*words("kernel"), *numbers("one", "two")))
    long.add("a/kernel_of_a_length_of_31_columns", "1,234,567", "1")
    assert lines_of(long, 20) == [
        "kernel",
        "          one  two",
        "a/kernel_of_a_length_of_31_columns",
        "    1,234,567    1",
    ]
    with pytest.raises(ValueError, match="cells: got 1 for 5 columns"):
        table.add("a")


def test_a_bar_names_the_kernel() -> None:
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal(80, patch, "stderr")
        with progress("verifying", 3) as done:
            done.at(f"{LONG}/append sm_90a")
            assert first_compile._silent.is_set(), "a line about a long compile would tear the bar"
            done()
            time.sleep(0.15)  # a frame
        text = terminal.close()
    assert re.search(rf"verifying [━╺]+ 1/3 0:00:0\d {LONG}/append\s+sm_90a", text)


def test_a_long_first_compile_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After a while, once a process, and never where KVGEN_PROGRESS is 0."""
    monkeypatch.setattr(first_compile, "SECONDS", 0.01)
    monkeypatch.setattr(first_compile, "_said", threading.Event())
    monkeypatch.setenv("KVGEN_PROGRESS", "0")
    with told("tiny/append", "sm_90a", "NVRTC", "Ahead."):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("KVGEN_PROGRESS")
    for _ in range(2):
        with told("tiny/append", "sm_90a", "NVRTC", "Ahead.") as stage:
            stage.name = "the host compiler"
            time.sleep(0.05)
    assert capsys.readouterr().err == (
        "kvgen: the first call of tiny/append compiles for sm_90a; the host compiler after 0.01 s. Ahead. Said once; "
        "KVGEN_PROGRESS=0 says nothing.\n"
    )

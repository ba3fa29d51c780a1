"""Which template lines each test executes: `pytest -p tests.template_cover` writes build/template_cover.json.

The CPU machine counts how often each basic block of a kernel ran and knows its generated lines; rendering knows the template
line behind each of those. Kernels of generated/ are left out: what is checked in does not change with a template.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
FILE: Final = ROOT / "build" / "template_cover.json"
KEPT: Final = 64  # tests of a line, the cheapest
ALIKE: Final = 8  # of them of the same function, and with the same kernels
_COMPILING: Final = 0.3  # seconds of NVRTC, translation and TCC, a kernel
_RESULT = pytest.StashKey["Cover"]()


@dataclass(frozen=True)
class Ran:
    """A test that passed: its id, the seconds that it takes when all its kernels are compiled anew, and which these are."""

    test: str
    seconds: float
    kernels: str

    @property
    def function(self) -> str:
        """The test without its parameters."""
        return self.test.partition("[")[0]


class Cover:
    """`lines`: "ops/decode_mma.cu.j2:31" -> the cheapest tests that execute it; `rendered`: lines that some test rendered."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Ran]] = {}
        self.rendered: set[str] = set()

    def add(self, line: str, ran: Ran) -> None:
        """Note that a test executes a line."""
        kept = self.lines.setdefault(line, [])
        if ran not in kept:
            kept.append(ran)
            kept.sort(key=lambda r: r.seconds)
            for alike in (
                [r for r in kept if r.function == ran.function],
                [r for r in kept if r.kernels == ran.kernels],
            ):
                if len(alike) > ALIKE and alike[-1] in kept:
                    kept.remove(alike[-1])
            del kept[KEPT:]

    def merge(self, data: dict[str, Any]) -> None:
        """Add what `data()` gave elsewhere."""
        tests = [Ran(*ran) for ran in data["tests"]]
        for line, numbers in data["lines"].items():
            for n in numbers:
                self.add(line, tests[n])
        self.rendered.update(data["rendered"])

    def data(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        tests = list(dict.fromkeys(ran for kept in self.lines.values() for ran in kept))
        number = {ran: n for n, ran in enumerate(tests)}
        return {
            "tests": [[ran.test, round(ran.seconds, 2), ran.kernels] for ran in tests],
            "lines": {line: [number[ran] for ran in self.lines[line]] for line in sorted(self.lines)},
            "rendered": sorted(self.rendered),
        }


def key() -> str:
    """A digest of all that the record depends on."""
    found = hashlib.sha256()
    for folder, pattern in (("templates", "*"), ("tests", "*.py"), ("kvgen", "*.py")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            if path.is_file():
                found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def read() -> Cover | None:
    """The record of these sources; None where there is none yet."""
    try:
        data = json.loads(FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    if data["key"] != key():
        return None
    cover = Cover()
    cover.merge(data)
    return cover


# Recording --------------------------------------------------------------------------------------------------------------

_BANNER: Final = 2  # lines above a generated file's body
_origins: dict[str, tuple[str, ...]] = {}  # of files rendered in this process, by path below their package
_blocks: dict[Any, set[int]] = {}  # basic blocks that ran since the test began, by kernel
_clock = [0.0]


def _install() -> None:
    """See every file that is rendered, every library that is loaded and every launch."""
    from kvgen.codegen import emit
    from kvgen.emulator import launch

    file, load, run = emit._file, launch.Library.__init__, launch.Kernel.launch

    def rendered(path: str, sources: str, body: str, trace: Callable[[], tuple[str, ...]]) -> emit.File:
        found = file(path, sources, body, trace)
        _origins[path] = found.origins
        return found

    def loaded(self: launch.Library, built: Any, *more: Any) -> None:
        load(self, built, *more)
        self.object = built.library  # type: ignore[attr-defined]

    @functools.wraps(run)
    def launched(self: launch.Kernel, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        counters = run(self, *args, **kwargs)
        _clock[0] += time.perf_counter() - begin
        (tally,) = counters.tallies
        ran = tally.executed[: len(tally.blocks)]
        _blocks.setdefault(self, set()).update(i for i, times in enumerate(ran) if times)
        return counters

    emit._file = rendered
    launch.Library.__init__ = loaded  # type: ignore[method-assign]
    launch.Kernel.launch = launched  # type: ignore[method-assign]


@functools.cache
def _template_lines(place: str) -> tuple[str, ...]:
    """The template lines of "file:line|file:line", a line of CUDA and where it was inlined."""
    found = []
    for part in place.split("|"):
        path, _, number = part.rpartition(":")
        line, (_, _, below) = int(number or 0), path.partition("/")
        if path.startswith(("templates/", "device/")):  # as it stands
            found.append(f"{path.removeprefix('templates/')}:{line}")
        elif path.startswith("generated/"):
            continue
        elif below.startswith("device/"):
            found.append(f"{below}:{line - _BANNER}")
        elif 0 < line <= len(origins := _origins.get(below, ())) and origins[line - 1].startswith("templates/"):
            found.append(origins[line - 1].removeprefix("templates/"))
    return tuple(found)


def _executed() -> set[str]:
    lines: set[str] = set()
    for kernel, blocks in _blocks.items():
        for block in blocks:
            for where, _, _ in kernel._facts.blocks[block]:
                lines.update(_template_lines(kernel._lines[where]))
    return lines


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULT] = Cover()
    _install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    if call.when == "setup":
        _clock[0] = 0.0
    if call.when == "call":
        if report.passed and _blocks:
            objects = sorted({kernel._library.object for kernel in _blocks})
            seconds = _clock[0] + _COMPILING * len(objects)
            kernels = hashlib.sha256("".join(path.name for path in objects).encode()).hexdigest()[:8]
            for line in _executed():
                item.config.stash[_RESULT].add(line, Ran(item.nodeid, seconds, kernels))
        _blocks.clear()
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    cover = session.config.stash[_RESULT]
    for origins in _origins.values():
        cover.rendered.update(o.removeprefix("templates/") for o in origins if o.startswith("templates/"))
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["template_cover"] = cover.data()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if data := getattr(node, "workeroutput", {}).get("template_cover"):
        node.config.stash[_RESULT].merge(data)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    cover = config.stash[_RESULT]
    FILE.parent.mkdir(exist_ok=True)
    scratch = FILE.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps({"key": key()} | cover.data(), separators=(",", ":")), encoding="utf-8")
    os.replace(scratch, FILE)
    terminalreporter.write_line(f"{FILE.relative_to(ROOT)}: {len(cover.lines)} template lines executed")

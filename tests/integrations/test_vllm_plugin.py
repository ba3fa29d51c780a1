"""The entry point that every vLLM process runs: what it imports and costs, what it registers, what it leaves alone."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvgen.integrations.vllm import plugin

ROOT = Path(__file__).resolve().parents[2]
# A process in which vLLM has imported its registry already; what the plugin costs there, and what it leaves behind.
FRESH = """
import importlib.metadata, json, sys, time
import logging, tests.integrations.vllm_registry as registry
sys.modules["vllm.v1.attention.backends.registry"] = registry
before = set(sys.modules)
start = time.process_time()
from kvgen.integrations.vllm.plugin import register
register()
cost = time.process_time() - start
print(json.dumps([cost, sorted(set(sys.modules) - before), registry.AttentionBackendEnum["KVGEN"].value]))
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A registry in which nobody has registered anything."""
    monkeypatch.delitem(sys.modules, "tests.integrations.vllm_registry", raising=False)
    made = importlib.import_module("tests.integrations.vllm_registry")
    monkeypatch.setitem(sys.modules, plugin.REGISTRY, made)
    yield made


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout


def test_it_imports_nothing_else_and_takes_5_ms() -> None:
    found = [json.loads(run(FRESH)) for _ in range(3)]
    for _, loaded, path in found:
        assert loaded == ["kvgen", "kvgen.integrations", "kvgen.integrations.vllm", "kvgen.integrations.vllm.plugin"]
        assert path == "kvgen.integrations.vllm.backend.KvgenBackend"
    assert min(cost for cost, *_ in found) <= 0.005


def test_the_entry_point_names_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (name, path), *others = project["entry-points"]["vllm.general_plugins"].items()
    assert (name, path, others) == ("kvgen", f"{plugin.__name__}:{plugin.register.__name__}", [])


def test_no_extra_depends_on_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "vllm" not in json.dumps([project["dependencies"], project["optional-dependencies"]])


def test_names_of_its_own_and_nothing_else_change(registry: ModuleType) -> None:
    before = dict(registry.AttentionBackendEnum.__members__)
    for _ in range(2):
        plugin.register()
    names = registry.AttentionBackendEnum.__members__
    assert {name: names[name].value for name in names if name not in before} == plugin.BACKENDS
    assert {name: names[name] for name in before} == before
    assert {member.name: path for member, path in registry.OVERRIDES.items()} == plugin.BACKENDS


def test_a_name_that_vllm_has_stays_its_own(registry: ModuleType) -> None:
    registry.AttentionBackendEnum.register("KVGEN", "vllm.v1.attention.backends.kvgen.Backend")
    plugin.register()
    assert registry.AttentionBackendEnum["KVGEN"].value == "vllm.v1.attention.backends.kvgen.Backend"
    assert [member.name for member in registry.OVERRIDES] == ["KVGEN_MLA"]


class Closed(Enum):
    """Names of a registry that takes no new one."""

    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in TAKEN


TAKEN: dict[Closed, str] = {}


@pytest.mark.parametrize("path", [None, "other.Backend"])
def test_the_shared_name_only_where_it_is_free(
    registry: ModuleType, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.setattr(registry, "AttentionBackendEnum", Closed)
    monkeypatch.setattr(registry, "register_backend", TAKEN.__setitem__)
    TAKEN.clear()
    if path:
        TAKEN[Closed.CUSTOM] = path
    for _ in range(2):
        plugin.register()
    assert {Closed.CUSTOM: path or plugin.BACKENDS["KVGEN"]} == TAKEN


def test_names_pass_to_processes_where_no_plugin_ran(registry: ModuleType) -> None:
    """vLLM pickles its config for the processes that it spawns, and these load it first of all."""
    plugin.register()
    for name in plugin.BACKENDS:
        member = registry.AttentionBackendEnum[name]
        data = pickle.dumps(member)
        assert pickle.loads(data) is member
        said = run(
            "import pickle, sys, tests.integrations.vllm_registry as registry\n"
            f"sys.modules[{plugin.REGISTRY!r}] = registry\n"
            f"print(repr(pickle.loads({data!r})))"
        )
        assert said == f"<AttentionBackendEnum.{name}: '{plugin.BACKENDS[name]}'>\n"


REGISTRIES = {
    "gone": None,
    "without names": SimpleNamespace(),
    "without register_backend": SimpleNamespace(AttentionBackendEnum=SimpleNamespace(__members__={}, register=None)),
}


@pytest.mark.parametrize("found", REGISTRIES.values(), ids=REGISTRIES)
def test_it_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], found: object
) -> None:
    monkeypatch.setitem(sys.modules, plugin.REGISTRY, found)
    with caplog.at_level(logging.DEBUG, "kvgen"):
        plugin.register()
    assert [(r.levelname, r.name) for r in caplog.records] == [("DEBUG", plugin.__name__)]
    assert capfd.readouterr() == ("", "")

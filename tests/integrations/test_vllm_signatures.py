"""signatures.json of the integration: it is of the adapter as it is, and what the table of versions says was read, was."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from kvgen.integrations.vllm import signatures, versions
from kvgen.integrations.vllm.versions import KNOWN, Known
from tests_vllm.signatures import EXPLAINED, Archive

RECORD = json.loads(signatures.RECORD.read_text(encoding="utf-8"))


def test_the_record_is_of_the_adapter_as_it_is() -> None:
    """What the adapter asks of vLLM is in the record; `python -m tests_vllm.signatures` makes it anew."""
    asked = signatures.asked_by(RECORD["adapter"])
    for field in ("imports", "names", "methods"):
        assert set(getattr(asked, field)) <= set(RECORD["asked"][field])


def test_the_record_begins_with_a_version_that_ran() -> None:
    (first,) = (known for known in KNOWN if known.version == RECORD["version"])
    assert (first.how, first.adapter) == ("proved", RECORD["adapter"])
    assert len(RECORD["found"]) > 100


@pytest.mark.parametrize("known", [known for known in KNOWN if known.how == "read"], ids=lambda known: known.version)
def test_a_version_that_is_called_read_was(known: Known) -> None:
    assert known.adapter == RECORD["adapter"]
    compared = RECORD["compared"][known.version]
    assert len(compared["sha256"]) == 64
    assert {name: found["why"] for name, found in compared["differing"].items()} == EXPLAINED[known.version]


BACKEND = """
from vllm.base import Base

class Backend(Base):
    supported: list[str] = ["auto"]

    def forward(self, query, output=None):
        return query
"""
BASE = """
from abc import abstractmethod

class Base:
    @staticmethod
    @abstractmethod
    def get_name() -> str:
        ...

    def build(self, prefix: int, fast: bool = False) -> None:
        self.layer_name = prefix
"""
CALLER = "def step(self):\n    self.impl.forward(self.query, output=self.output)\n"
ASKED = signatures.Asked(
    ("vllm.backend:Backend",), ("build", "forward", "get_name", "layer_name", "supported"), ("forward",)
)
CHANGES = {
    "a body": (BACKEND.replace("return query", "return output"), BASE, CALLER, []),
    "a name that is not asked for": (BACKEND + "\n    def unused(self): ...\n", BASE, CALLER, []),
    "an argument": (BACKEND.replace("output=None", "output"), BASE, CALLER, ["vllm.backend:Backend.forward"]),
    "a value": (BACKEND.replace('"auto"', '"fp8"'), BASE, CALLER, ["vllm.backend:Backend.supported"]),
    "an inherited default": (BACKEND, BASE.replace("False", "True"), CALLER, ["vllm.backend:Backend.build"]),
    "an attribute of self": (
        BACKEND,
        BASE.replace("= prefix", "= 1"),
        CALLER,
        ["vllm.backend:Backend.self.layer_name"],
    ),
    "what must be defined": (
        BACKEND,
        BASE.replace("    @abstractmethod\n", ""),
        CALLER,
        ["vllm.backend:Backend.get_name", "vllm.backend:Backend: abstract"],
    ),
    "a call": (BACKEND, BASE, CALLER.replace("output=", ""), ["calls of forward"]),
    "where it lies": ("from vllm.moved import Backend\n", BASE, CALLER, []),
}


def sources(folder: Path, backend: str, base: str, caller: str) -> Archive:
    """A source distribution of such a vLLM."""
    path = folder / "vllm-0.1.0.tar.gz"
    files = {"backend.py": backend, "base.py": base, "moved.py": BACKEND, "v1/worker.py": caller}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-0.1.0/vllm/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return Archive(path)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_a_difference(change: str, tmp_path: Path) -> None:
    first = signatures.found_in(sources(tmp_path, BACKEND, BASE, CALLER), ASKED)
    *texts, names = CHANGES[change]
    other = signatures.found_in(sources(tmp_path, *texts), ASKED)  # type: ignore[arg-type]
    assert list(signatures.differing(first, other, {})) == sorted(names)


def installed(folder: Path, backend: str = BACKEND, base: str = BASE, caller: str = CALLER) -> Path:
    """Such a vLLM as an installed package."""
    texts = {"__init__.py": "", "backend.py": backend, "base.py": base, "moved.py": BACKEND, "v1/worker.py": caller}
    for name, text in texts.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "vllm"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of that vLLM as 0.32.0, and of one without the body's `prefix` as 0.33.0."""
    first = signatures.found_in(sources(tmp_path, BACKEND, BASE, CALLER), ASKED)
    other = signatures.found_in(sources(tmp_path, BACKEND, BASE.replace("prefix: int, ", ""), CALLER), ASKED)
    differing = signatures.differing(first, other, {})
    record = {"version": "0.32.0", "found": first, "compared": {"0.33.0": {"differing": differing}}}
    path = tmp_path / "signatures.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(signatures, "RECORD", path)
    monkeypatch.setattr(signatures, "asked_by", lambda adapter: ASKED)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("change", CHANGES)
def test_a_release_between_known_ones_is_served_where_nothing_differs(change: str, tmp_path: Path) -> None:
    *texts, names = CHANGES[change]
    folder = installed(tmp_path, *texts)  # type: ignore[arg-type]
    for version in ("0.32.1", "0.32.1.dev3+g0123abc", "0.32.0rc2"):
        if not names:
            assert versions.adapter_of(version, folder=folder) == "v0_32"
            continue
        with pytest.raises(versions.VersionError) as raised:
            versions.adapter_of(version, folder=folder)
        says = f"vllm: got version {version}; not as in 0.32.0 is {', '.join(sorted(names))}; kvgen's backend serves 0.32.0 ("
        assert str(raised.value).startswith(says)
    with pytest.raises(versions.VersionError, match=r"^vllm: got version 0.34.0; kvgen's backend serves"):
        versions.adapter_of("0.34.0", folder=folder)


@pytest.mark.usefixtures("recorded")
def test_a_release_is_compared_with_that_of_its_own_minor_version(tmp_path: Path) -> None:
    folder = installed(tmp_path, base=BASE.replace("prefix: int, ", ""))
    assert versions.adapter_of("0.33.1", folder=folder) == "v0_32"
    with pytest.raises(versions.VersionError, match=r"not as in 0.32.0 is vllm.backend:Backend.build; "):
        versions.adapter_of("0.32.1", folder=folder)


@pytest.mark.usefixtures("recorded")
def test_names_that_differ_are_shown_in_part(tmp_path: Path) -> None:
    folder = installed(tmp_path, "x = 1\n")
    with pytest.raises(
        versions.VersionError, match=r"not as in 0.32.0 is calls of forward, .* and \d+ more; kvgen's backend"
    ):
        versions.adapter_of("0.32.7", folder=installed(tmp_path, "class Backend:\n    pass\n", caller=""))
    assert versions.adapter_of("0.32.0", folder=folder) == "v0_32"  # a known one is not compared
    with pytest.warns(UserWarning, match="0.32.7 is untested"):
        assert versions.adapter_of("0.32.7", folder=folder, untested=True) == "v0_32"


def test_what_the_record_says_of_each_known_version() -> None:
    first, second = (signatures.known_of(known.version) for known in KNOWN)
    assert first is not None and second is not None and signatures.known_of("0.1.0") is None
    assert {name for name in {*first, *second} if first.get(name) != second.get(name)} == set(EXPLAINED["0.33.0"])

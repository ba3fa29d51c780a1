"""docs/engines/signatures.json: it is of the adapter as it is, and what the table of versions says was read, was."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from kvgen.integrations.vllm.versions import KNOWN, Known
from tests_vllm import signatures

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
    assert {name: found["why"] for name, found in compared["differing"].items()} == signatures.EXPLAINED[known.version]


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


def sources(folder: Path, backend: str, base: str, caller: str) -> signatures.Sources:
    """A source distribution of such a vLLM."""
    path = folder / "vllm-0.1.0.tar.gz"
    files = {"backend.py": backend, "base.py": base, "moved.py": BACKEND, "v1/worker.py": caller}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-0.1.0/vllm/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return signatures.Sources(path)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_a_difference(change: str, tmp_path: Path) -> None:
    first = signatures.found_in(sources(tmp_path, BACKEND, BASE, CALLER), ASKED)
    *texts, names = CHANGES[change]
    other = signatures.found_in(sources(tmp_path, *texts), ASKED)  # type: ignore[arg-type]
    assert list(signatures.differing(first, other, {})) == sorted(names)

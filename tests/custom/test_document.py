"""docs/custom_kernels.md, run as it stands: its spec and kernel built, its two programs executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Folder
from tests.custom.document import DOCUMENT, blocks
from tests.docs.blocks import run

ROOT = DOCUMENT.parents[1]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("document")
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    for name, text in blocks().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Folder(root)


def test_it_has_what_is_run() -> None:
    assert list(blocks()) == [
        "specs/small.py",
        "specs/include/dot.cuh",
        "specs/kernels/dump_scores.cu",
        "use.py",
        "inline.py",
    ]


def test_the_example(project: Folder) -> None:
    project.kvgen("build")
    project.kvgen("check")
    project.kvgen("compile", "small/dump_scores", "--strict")
    raised, _ = run(project.root, "use.py")
    assert not raised, raised["use.py"]


def test_without_a_project(project: Folder, tmp_path: Path) -> None:
    """From a folder that is not the program's."""
    command, environment = [sys.executable, str(project.root / "inline.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

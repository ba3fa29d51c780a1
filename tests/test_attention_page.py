"""docs/attention.md, run as it stands: its specs built, its programs executed, its error raised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cli.conftest import Folder

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCKS: Final = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S))
PROGRAMS: Final = ("step.py", "own.py", "graph.py", "draft.py", "cross.py")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("page")
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    for name, text in BLOCKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    folder = Folder(root)
    folder.kvgen("build")
    return folder


def run(program: str, root: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, program], cwd=root, env=environment, capture_output=True, text=True)


def test_it_has_what_is_run() -> None:
    assert sorted(BLOCKS) == sorted((*PROGRAMS, "refused.py", "specs/chat.py", "specs/cross.py", "specs/latent.py"))
    assert PAGE.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program(program: str, project: Folder) -> None:
    done = run(program, project.root)
    assert done.returncode == 0, done.stderr


def test_what_is_refused(project: Folder) -> None:
    said = " ".join(run("refused.py", project.root).stderr.replace(f"{project.root}/", "").split())
    shown = " ".join(PAGE.split("Score(function=sharpen)\n```\n\n    ")[1].split("\n\n")[0].split())
    assert shown in said

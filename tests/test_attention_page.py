"""docs/attention.md, run as it stands: its specs built, its programs executed, its error raised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.cli.conftest import Folder
from tests.docs.blocks import run

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCKS: Final = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S))
PROGRAMS: Final = ("step.py", "own.py", "graph.py", "draft.py", "cross.py", "picked.py", "sparse.py")
SPECS: Final = ("specs/chat.py", "specs/cross.py", "specs/latent.py", "specs/picked.py", "specs/sparse.py")


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


@pytest.fixture(scope="module")
def raised(project: Folder) -> dict[str, str]:
    """What the programs of the page that do not end well raise."""
    found, _ = run(project.root, *PROGRAMS, "refused.py")
    return found


def test_it_has_what_is_run() -> None:
    assert sorted(BLOCKS) == sorted((*PROGRAMS, "refused.py", *SPECS))
    assert PAGE.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program(program: str, raised: dict[str, str]) -> None:
    assert program not in raised, raised[program]


def test_what_is_refused(project: Folder, raised: dict[str, str]) -> None:
    said = " ".join(raised["refused.py"].replace(f"{project.root}/", "").split())
    shown = " ".join(PAGE.split("Score(function=sharpen)\n```\n\n    ")[1].split("\n\n")[0].split())
    assert shown in said

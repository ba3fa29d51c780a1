"""docs/calling.md, run as it stands: its spec built, its programs executed one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.cli.conftest import Folder
from tests.docs.blocks import run

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = (ROOT / "docs" / "calling.md").read_text(encoding="utf-8")
BLOCKS: Final = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.S))
PROGRAMS: Final = ("bound.py", "copies.py", "loaded.py")  # bound.py imports the others, in the order of the page


def test_its_programs_run(tmp_path: Path) -> None:
    assert set(BLOCKS) == {"specs/small.py", "cache.py", "call.py", "step.py", *PROGRAMS}
    assert PAGE.count("```python") == len(BLOCKS)
    (tmp_path / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    for name, text in BLOCKS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    Folder(tmp_path).kvgen("build")
    said: list[str] = []
    for program in PROGRAMS:
        raised, printed = run(tmp_path, program)
        assert not raised, raised[program]
        said += printed.splitlines()
    comments = re.findall(r"^print\(.*\)  # (.*)$", PAGE, re.MULTILINE)
    assert said == comments

"""Programs of the documentation that need PyTorch, run as they stand. Those named `*_gpu.py` run where there is a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

ROOT: Final = Path(__file__).parent.parent
PROGRAM: Final = re.compile(r"^```python\n(?P<text># (?P<name>\w+\.py)\n.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: Path) -> dict[str, str]:
    return {found["name"]: found["text"] for found in PROGRAM.finditer(page.read_text(encoding="utf-8"))}


PAGES: Final = {page: programs(page) for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
CASES: Final = [
    pytest.param(page, name, id=f"{page.stem}-{name}")
    for page, found in PAGES.items()
    for name, text in found.items()
    if "import torch" in text
]


def test_the_pages_have_their_programs() -> None:
    assert list(programs(ROOT / "docs" / "transformers.md")) == ["generate.py"]
    page = ROOT / "docs" / "torch.md"
    names = ["launchers.py", "operators.py", "states.py", "compiled.py", "exported.py", "graph_gpu.py"]
    assert list(programs(page)) == names
    assert page.read_text(encoding="utf-8").count("```python") == len(names)


@pytest.mark.parametrize(("page", "name"), CASES)
def test_programs(page: Path, name: str, tmp_path: Path) -> None:
    for each, text in PAGES[page].items():
        (tmp_path / each).write_text(text, encoding="utf-8")
        compile(text, each, "exec")
    if name.endswith("_gpu.py") and not torch.cuda.is_available():
        pytest.skip("compiled; needs an NVIDIA GPU to run")
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

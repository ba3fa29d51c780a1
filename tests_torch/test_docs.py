"""Programs of the documentation that need PyTorch, run as they stand. Those named `*_gpu.py` run where there is a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
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
    assert list(programs(ROOT / "docs" / "transformers.md")) == ["generate.py", "batch.py", "shards.py"]
    page = ROOT / "docs" / "torch.md"
    names = ["launchers.py", "operators.py", "states.py", "compiled.py", "exported.py", "graph_gpu.py"]
    assert list(programs(page)) == names
    assert page.read_text(encoding="utf-8").count("```python") == len(names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvgen as its wheel has it, beside no checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-c",
        "import sys, hatchling.build; hatchling.build.build_wheel(sys.argv[1])",
        str(folder),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    zipfile.ZipFile(made).extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize(("page", "name"), CASES)
def test_programs(page: Path, name: str, tmp_path: Path, wheel: Path) -> None:
    """Those of docs/transformers.md from the wheel alone, in an empty folder."""
    for each, text in PAGES[page].items():
        (tmp_path / each).write_text(text, encoding="utf-8")
        compile(text, each, "exec")
    if name.endswith("_gpu.py") and not torch.cuda.is_available():
        pytest.skip("compiled; needs an NVIDIA GPU to run")
    of_wheel = page.stem == "transformers"
    environment = {**os.environ, "PYTHONPATH": str(wheel if of_wheel else ROOT)}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if name == "shards.py" else []
    done = subprocess.run(
        [sys.executable, *several, name], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if of_wheel:
        where = [sys.executable, "-c", "import kvgen.paths; print(kvgen.__file__, kvgen.paths.templates_root())"]
        said = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.count(str(wheel)) == 2, said

"""What users read when they are wrong: one folder a case, compared to the letter.

A case holds `cmd` (the command line), `exit` (its status) and `stderr.txt` (what it says, with the project's folder as
<project> and NVRTC's version as <nvrtc>), and the files it runs over: `spec.txt` becomes specs/x.py; `project/` is
copied, its files named x.py.txt becoming x.py (linters would mind the broken ones); a pyproject.toml is added where
there are specs and none. KVGEN_UPDATE_GOLDEN=1 rewrites stderr.txt.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvgen.cli.app import app
from kvgen.cli.recorded import installed

HERE = Path(__file__).parent
CASES = sorted(path.parent.name for path in HERE.glob("*/cmd"))


def _lay_out(case: Path, root: Path) -> None:
    if (case / "project").is_dir():
        shutil.copytree(case / "project", root, dirs_exist_ok=True)
        for path in sorted(root.rglob("*.txt")):
            path.rename(path.with_suffix(""))
    if (case / "spec.txt").is_file():
        (root / "specs").mkdir(exist_ok=True)
        shutil.copy(case / "spec.txt", root / "specs" / "x.py")
    if (root / "specs").is_dir() and not (root / "pyproject.toml").exists():
        (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")


def test_there_are_cases() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, root = HERE / name, tmp_path / "project"
    root.mkdir()
    _lay_out(case, root)
    if "--against" in (case / "cmd").read_text(encoding="utf-8"):
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    program, *arguments = shlex.split((case / "cmd").read_text(encoding="utf-8"))
    assert program == "kvgen"
    result = CliRunner().invoke(app, arguments, prog_name="kvgen")

    said = result.stderr.replace(str(root.resolve()), "<project>").replace(str(tmp_path.resolve()), "<above>")
    said = said.replace(installed(), "<nvrtc>")
    golden = case / "stderr.txt"
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        golden.write_text(said, encoding="utf-8")
        pytest.skip("rewritten")
    assert said == golden.read_text(encoding="utf-8")
    assert result.exit_code == int((case / "exit").read_text(encoding="utf-8"))
    assert result.stdout == ""
    assert "Traceback" not in said
    assert not (root / "generated").exists(), "a refused command wrote something"

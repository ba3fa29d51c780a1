"""What users read when they are wrong: one file a case, compared to the letter.

`NAME.txt` holds the command line, its status, the project it runs over and what it says (tests/errors/case.py), with the
project's folder as <project> and NVRTC's version as <nvrtc>. KVGEN_UPDATE_GOLDEN=1 rewrites what it says.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from kvgen.cli.resources_json import installed
from tests.cli.conftest import invoke
from tests.errors.case import Case, Link, read_case, write_case

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in HERE.glob("*.txt"))


def test_there_are_cases() -> None:
    assert len(CASES) >= 178
    folders = [path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert not folders, "a case is one file"


def test_a_case_is_read_as_it_is_written() -> None:
    for name in CASES:
        text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
        assert write_case(read_case(text)) == text, name
    files: dict[str, bytes | Link | None] = {
        "specs/x.py": b"x = 1\n",
        "specs/empty.py": b"",
        "pyproject.toml": b"no newline at its end",
        "form.py": b'a = "\x0c\x1c\n--- specs/x.py\n"\n',
        "config.json": bytes(range(256)),
        "generated": Link("../elsewhere"),
        "empty": None,
    }
    case = Case("kvgen build 'x y'", 2, files, "--- a\n--- stderr\nno newline")
    assert read_case(write_case(case)) == dataclasses.replace(case, stderr=f"{case.stderr}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kvgen build\nexit 2\n", "begins with"),
        ("$ kvgen build\nstatus 2\n", "begins with"),
        ("$ kvgen build\nexit 2\nx = 1\n", "before the first"),
        ("$ kvgen build\nexit 2\n--- a\n--- a\n--- stderr\n", "a: given twice"),
        ("$ kvgen build\nexit 2\n--- a -> b\nx\n--- stderr\n", "no content"),
    ],
)
def test_a_case_that_says_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_case(text)


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, root = HERE / f"{name}.txt", tmp_path / "project"
    case = read_case(path.read_text(encoding="utf-8"))
    root.mkdir()
    case.lay_out(root)
    if "--against" in case.command:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    program, *arguments = shlex.split(case.command)
    assert program == "kvgen"
    result = invoke(*arguments)

    said = result.stderr.replace(str(root.resolve()), "<project>").replace(str(tmp_path.resolve()), "<above>")
    said = said.replace(installed(), "<nvrtc>")
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        path.write_text(write_case(dataclasses.replace(case, stderr=said)), encoding="utf-8")
        pytest.skip("rewritten")
    assert said == case.stderr
    assert result.exit_code == case.exit
    assert result.stdout == ""
    assert "Traceback" not in said
    assert not (root / "generated").exists(), "a refused command wrote something"

"""`kvgen build`: what it writes and leaves alone, and that its output depends on specs and templates only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.codegen.emit import banner_digest, body_digest, body_of

from .conftest import Folder


def test_build_writes_everything_and_ends_with_the_import_line(project: Folder) -> None:
    said = project.kvgen("build").stdout
    assert said.splitlines()[-1] == "from generated.tiny import Cache, append"
    assert {"tiny/append.cu", "tiny/cache.cuh", "tiny/__init__.py", "wide/gather.cu"} <= project.tree().keys()
    assert "new      generated/tiny/append.cu" in said
    for path, data in project.tree().items():
        text = data.decode()
        assert banner_digest(text) == body_digest(body_of(text)), path


def test_the_import_line_follows_the_configured_folder(project: Folder) -> None:
    (project.root / "pyproject.toml").write_text('[tool.kvgen]\nout = "src/engine/kernels"\n', encoding="utf-8")
    said = project.kvgen("build", "wide").stdout
    assert said.splitlines()[-1] == "from engine.kernels.wide import Cache, append, gather"
    assert (project.root / "src/engine/kernels/wide/append.cu").is_file()


def test_a_second_build_touches_nothing(built: Folder) -> None:
    stamps = {p: p.stat().st_mtime_ns for p in built.out.rglob("*")}
    said = built.kvgen("build").stdout
    assert "0 written, 0 removed" in said
    assert {p: p.stat().st_mtime_ns for p in built.out.rglob("*")} == stamps


def test_a_spec_edit_touches_only_what_it_changes(built: Folder) -> None:
    before = built.tree()
    built.spec("tiny", page_size=32)
    said = built.kvgen("build").stdout
    changed = {path for path, data in built.tree().items() if before[path] != data}
    assert changed == {"tiny/cache.cuh", "tiny/__init__.py"}
    assert "changed  generated/tiny/cache.cuh" in said
    assert "2 written" in said


def test_files_of_a_removed_spec_go_and_others_stay(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    (built.out / "wide/notes.txt").write_text("mine\n", encoding="utf-8")
    (built.out / "__init__.py").write_text('"""A package."""\n', encoding="utf-8")
    said = built.kvgen("build").stdout
    assert "removed  generated/wide/append.cu" in said
    assert sorted(p.name for p in (built.out / "wide").iterdir()) == ["notes.txt"]
    assert (built.out / "__init__.py").is_file()


def test_an_emptied_folder_goes(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    built.kvgen("build")
    assert not (built.out / "wide").exists()


def test_a_selector_builds_one_set_and_removes_nothing_else(project: Folder) -> None:
    project.kvgen("build", "tiny")
    assert {path.split("/")[0] for path in project.tree()} == {"device", "tiny"}
    project.kvgen("build", "wide/gather")
    assert "wide/gather.cu" in project.tree()
    assert "wide/append.cu" not in project.tree()
    (project.root / "specs/tiny.py").unlink()
    project.kvgen("build", "wide")
    assert "tiny/append.cu" in project.tree(), "a set that was not asked about"


def test_an_unwritable_folder_is_an_error(project: Folder) -> None:
    project.out.write_text("a file in the way\n", encoding="utf-8")
    result = project.kvgen("build", code=2)
    assert result.stderr.endswith("generated: cannot be written: a file is in the folder's place; move it\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["build"], ["check"]])
def test_verbs_work_from_a_folder_below(built: Folder, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Folder(built.root / "specs").kvgen(*command)


def test_two_folders_and_hash_seeds_give_the_same_bytes(project: Folder, tmp_path: Path) -> None:
    trees = []
    for seed in ("0", "4711"):
        root = tmp_path / f"copy{seed}"
        root.mkdir()
        (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
        copy = Folder(root)
        copy.spec("tiny")
        copy.spec("wide", head_dim=128, ops="ops.Append(), ops.Gather()")
        run = "from kvgen.cli import main; main()"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", run, "build"], cwd=root, env=environment, check=True, capture_output=True)
        trees.append(copy.tree())
    assert trees[0]
    assert trees[0] == trees[1]

"""`kill -9` in the middle of build and compile: the next command works, and mends what was left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.compile import find, read_folder
from kvgen.compile.cubin_cache import default_cache
from tests.compile.test_sass import needs_tool

from .conftest import Folder


def killed(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, at: int, *, half: bool) -> None:
    """Run in a forked process, which is killed when it would rename its file number `at`, of which `half` cuts half away."""
    default_cache().stats()
    child = os.fork()
    if child == 0:
        replace, left = os.replace, iter(range(at))

        def stop(new: Any, name: Any, **folders: Any) -> None:
            if "src_dir_fd" not in folders or next(left, None) is not None:
                replace(new, name, **folders)
                return
            if half:
                with open(os.open(new, os.O_RDWR, dir_fd=folders["src_dir_fd"]), "r+b") as file:
                    file.truncate(os.fstat(file.fileno()).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(os, "replace", stop)
        try:
            run()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def left_over(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob(".*") if p.is_file()]


@pytest.mark.parametrize(("at", "half"), [(0, False), (3, True), (20, False)])
def test_killed_in_build(project: Folder, monkeypatch: pytest.MonkeyPatch, at: int, half: bool) -> None:
    killed(lambda: project.kvgen("build"), monkeypatch, at, half=half)
    (name,) = left_over(project.out)
    said = project.kvgen("check", code=1).stdout
    assert any(name in line and line.endswith("left over from a write that was stopped") for line in said.splitlines())
    assert said.splitlines()[-1] == "kvgen build"
    assert f"{name}\n" in project.kvgen("build").stdout
    project.kvgen("check")
    assert left_over(project.out) == []


@pytest.mark.parametrize(("at", "half"), [(0, True), (1, False), (2, False)])
def test_killed_in_compile(project: Folder, monkeypatch: pytest.MonkeyPatch, at: int, half: bool) -> None:
    """The kill hits cubin, launchers or manifest; the folder's other set stays as it was."""
    project.kvgen("compile", "wide/gather", "tiny", "-o", "before")
    project.kvgen("compile", "wide/gather", "-o", "cubins")
    killed(lambda: project.kvgen("compile", "tiny", "-o", "cubins"), monkeypatch, at, half=half)
    cubins = project.root / "cubins"
    assert len(left_over(cubins)) == 2, "a temporary file, and that of the lock"
    project.kvgen("compile", "tiny", "-o", "cubins")
    assert left_over(cubins) == []
    manifest = read_folder(cubins)
    assert [each.set for each in manifest.sets] == ["tiny", "wide"]
    for entry in manifest.entries:
        assert find(manifest, entry.set, entry.kernel, entry.arch, entry.digest)


@needs_tool
def test_killed_in_record(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    built.kvgen("compile", "tiny", "--record")
    (built.out / "tiny/resources.json").unlink()
    killed(lambda: built.kvgen("compile", "tiny", "--record"), monkeypatch, 0, half=True)
    built.kvgen("compile", "tiny", "--record")
    assert "left over" in built.kvgen("check", code=1).stdout
    built.kvgen("build")
    built.kvgen("check")


def test_another_process_at_work(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another build is writing is no finding, and nor is what Python renames to bytecode."""
    replace, said = os.replace, []

    def meanwhile(new: Any, name: Any, **folders: Any) -> None:
        if "src_dir_fd" in folders:
            said.append(built.kvgen("check", "wide", code=1).stdout)
        replace(new, name, **folders)

    (built.out / "tiny/__pycache__").mkdir()
    (built.out / "tiny/__pycache__/__init__.cpython-311.pyc.140234").write_bytes(b"half of")
    built.kvgen("check")
    (built.out / "wide/append.cu").unlink()
    monkeypatch.setattr(os, "replace", meanwhile)
    built.kvgen("build", "wide")
    assert len(said) == 1 and said[0].splitlines()[2] == "1 missing"

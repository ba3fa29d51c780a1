"""Every verb that takes a path, given what is none: one line on stderr, exit 2, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import models

from .conftest import Folder, invoke

# Option -> the command line before it.
READERS = {"--from": ["init"], "--wheel": ["check"]}
WRITERS = {"init -o": ["init", "--from", "config.json", "--force", "-o"], "demo -o": ["demo", "-o"]}
CUBINS = ["compile", "tiny", "-o"]

LONG = "x" * 300
READ = {
    "nothing": "No such file or directory",
    "folder": "not a file but a folder",
    "fifo": "not a file but a FIFO",
    "/dev/zero": "not a file but a device",
    "loop": "Too many levels of symbolic links",
    "file/below": "Not a directory",
    LONG: "File name too long",
    "odd\udcff": "No such file or directory",
    "line\nbreak": "No such file or directory",
    "": "not a file but a folder",
}


@pytest.fixture
def odd(empty: Folder) -> Folder:
    """A project with a spec, and something odd of every kind."""
    empty.spec("tiny")
    os.mkfifo(empty.root / "fifo")
    (empty.root / "folder").mkdir()
    (empty.root / "folder/x.py").mkdir()
    (empty.root / "file").write_text("not JSON\n", encoding="utf-8")
    (empty.root / "loop").symlink_to("loop")
    (empty.root / "loop.py").symlink_to("loop.py")
    (empty.root / "link.py").symlink_to("nowhere")
    (empty.root / "config.json").write_text(json.dumps(models.example()), encoding="utf-8")
    return empty


def error_of(folder: Folder, *arguments: str) -> str:
    """What the refusal says: one line, after `error: `."""
    before = sorted(os.listdir(folder.root))
    result = folder.kvgen(*arguments, code=2)
    assert result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.endswith("\n")
    line = result.stderr[len("error: ") : -1]
    assert line.isprintable(), line
    assert sorted(os.listdir(folder.root)) == before
    return line


@pytest.mark.parametrize("option", READERS)
def test_what_is_read(odd: Folder, option: str) -> None:
    own = {"folder": "config.json: cannot be read (No such file or directory); give the path of a model's config.json"}
    for path, said in (READ | own if option == "--from" else READ).items():
        if option == "--from" and not path:
            continue  # the folder of the project, whose config.json is read
        line = error_of(odd, *READERS[option], option, path)
        assert said in line, (path, line)
    assert "not JSON" in error_of(odd, "init", "--from", "file")
    assert "File is not a zip file" in error_of(odd, "check", "--wheel", "file")


def test_what_init_writes(odd: Folder) -> None:
    for path, said in {
        "folder/x.py": "-o: folder/x.py is a folder; give the name of a new file",
        "loop.py": "-o: loop.py is a link; give the name of a new file",
        "link.py": "-o: link.py is a link; give the name of a new file",
        "file/x.py": "file/x.py: cannot be written (File exists)",
        "loop/x.py": "loop/x.py: cannot be looked at (Too many levels of symbolic links)",
        f"{LONG}/x.py": "cannot be looked at (File name too long)",
        "x\n.py": "-o: got 'x\\n'; it names files",
        "x.txt": "-o: got 'x.txt'; specs are Python files",
        "": "-o: got '.'; specs are Python files",
    }.items():
        assert said in error_of(odd, *WRITERS["init -o"], path), path
    assert odd.kvgen("init", "--from", "config.json", "-o", "new/llama.py").stdout.startswith("wrote new/llama.py; ")


def test_what_demo_and_compile_write(odd: Folder) -> None:
    for path, said in {
        "file": "-o: got 'file', which is there and not empty; give a new folder",
        "loop": "-o: got 'loop', which is there and not empty",
        "fifo": "-o: got 'fifo', which is there and not empty",
        f"folder/{LONG}": "cannot be looked at (File name too long)",
        "file/new": "file/new/pyproject.toml: cannot be written (Not a directory)",
    }.items():
        assert said in error_of(odd, *WRITERS["demo -o"], path), path
    for path, said in {
        "file": "file/.manifest.lock: cannot be written (File exists)",
        "loop": "loop/.manifest.lock: cannot be written (File exists)",
        "file/new": "cannot be written (Not a directory)",
        LONG: "cannot be written (File name too long)",
    }.items():
        assert said in error_of(odd, *CUBINS, path), path


def test_where_projects_and_exports_lie(odd: Folder) -> None:
    (odd.root / "link").symlink_to("nowhere")
    for path, said in {
        "fifo": "got 'fifo', where a FIFO is; give ",
        "link": "got 'link', where a link is; give ",
        "loop": "loop: cannot be looked at (Too many levels of symbolic links)",
        "loop/below": "loop/below: cannot be looked at (Too many levels of symbolic links)",
        LONG: "cannot be looked at (File name too long)",
        f"folder/{LONG}": "cannot be looked at (File name too long)",
    }.items():
        for arguments in (["list", "--project"], ["export", "tiny", "-o"]):
            assert said in error_of(odd, *arguments, path), (arguments, path)


@pytest.mark.parametrize("verb", ["build", "check", "diff", "show", "compile", "bench"])
def test_a_project_whose_files_are_none(odd: Folder, verb: str) -> None:
    arguments = [verb, "tiny"] if verb == "show" else [verb]
    spec = odd.root / "specs/tiny.py"
    for make, said in (
        (os.mkfifo, "specs/tiny.py: not a file but a FIFO"),
        (os.mkdir, "specs/tiny.py: not a file but a folder"),
        (lambda p: p.symlink_to("nowhere"), "specs/tiny.py: cannot be read (No such file or directory)"),
        (lambda p: p.write_bytes(b"\xff"), "specs/tiny.py: no UTF-8 (byte 0); save it as UTF-8"),
    ):
        spec.unlink()
        make(spec)
        assert odd.kvgen(*arguments, code=2).stderr == f"{said}\n"
        if spec.is_dir() and not spec.is_symlink():
            spec.rmdir()
            spec.touch()
    shutil.rmtree(odd.root / "specs")
    assert "specs is no folder; the specs must lie in it; create it" in odd.kvgen(*arguments, code=2).stderr
    (odd.root / "pyproject.toml").unlink()
    os.mkfifo(odd.root / "pyproject.toml")
    assert error_of(odd, *arguments).endswith("pyproject.toml: not a file but a FIFO")


def test_a_specs_folder_that_may_not_be_read_removes_nothing(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glob finds no specs in it, for which nothing is to be generated: build would remove everything."""
    listed, before = os.listdir, built.tree()

    def refuse(path: str | Path = ".") -> list[str]:
        if Path(path).name == "specs":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    said = built.kvgen("build", code=2).stderr
    assert said == f"error: {built.root}/specs: cannot be read (Permission denied)\n"
    monkeypatch.undo()
    assert built.tree() == before


def test_an_output_folder_that_may_not_be_read_is_no_folder_in_step(
    built: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.listdir

    def refuse(path: str | Path = ".") -> list[str]:
        if Path(path).name == "wide":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert "generated/wide: cannot be read (Permission denied)" in built.kvgen("check", code=2).stderr


def test_files_of_any_kind_in_the_output_folder_hang_no_verb(built: Folder) -> None:
    (built.out / "tiny/append.cu").unlink()
    os.mkfifo(built.out / "tiny/append.cu")
    os.mkfifo(built.out / "tiny/more.cu")
    assert "tiny/append.cu" in built.kvgen("diff").stdout
    assert "a FIFO is in its place" in built.kvgen("check", code=1).stdout
    assert "a FIFO is in its place" in built.kvgen("build", code=2).stderr
    assert "changed  generated/tiny/append.cu" in built.kvgen("build", "--force").stdout


@pytest.mark.parametrize("value", ["~nobody_of_that_name/x", "odd\udcff", "file", "/dev/null", LONG])
def test_a_cache_folder_that_is_none(odd: Folder, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs a warning, or a line; never a traceback."""
    monkeypatch.chdir(odd.root)
    monkeypatch.setenv("KVGEN_CACHE_DIR", value)
    result = odd.kvgen("compile", "tiny", code=2 if value.startswith("~") else 0)
    assert "Traceback" not in result.stderr
    if value.startswith("~"):
        assert result.stderr == (
            f"error: KVGEN_CACHE_DIR: got '{value}'; no such user's home is known; give the whole path\n"
        )
    odd.kvgen("doctor", code=int(value.startswith("~")))


# What a shell can pass: bytes without NUL, as Python decodes them. A dash first would be an option.
RAW = st.binary(max_size=40).filter(lambda raw: b"\0" not in raw and raw[:1] != b"-")
NAMES = RAW.map(os.fsdecode) | st.sampled_from([*READ, "..", ".", "/", "a/../b"])


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(name=NAMES)
def test_any_name_of_a_config(name: str) -> None:
    result = invoke("init", "--from", name)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr[:-1].isprintable()

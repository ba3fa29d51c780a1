"""Nothing leaves the project through a link, and `check` knows every name that build did not write."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import shutil
from pathlib import Path

import pytest

from .conftest import Folder


def states(folder: Folder, *selectors: str) -> dict[str, str]:
    """Path -> "state: note", as `check --json` reports them."""
    content = json.loads(folder.kvgen("check", "--json", *selectors, code=1).stdout)
    return {f["path"]: f"{f['state']}: {f['note']}" for f in content["findings"]}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody else's, beside the project."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/mine.txt").write_text("mine\n", encoding="utf-8")
    return tmp_path / "outside"


def untouched(outside: Path) -> bool:
    return [p.name for p in outside.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("verb", [["build"], ["build", "--force"], ["check"], ["compile", "--record"]])
def test_the_output_folder_is_no_link(project: Folder, outside: Path, verb: list[str]) -> None:
    (project.root / "src").mkdir()
    for target, link in ((outside, "generated"), (Path("src"), "generated"), (outside, "a"), (outside / "no", "a")):
        (project.root / link).symlink_to(target)
        out = "generated" if link == "generated" else "a/../a/generated"
        (project.root / "pyproject.toml").write_text(f'[tool.kvgen]\nout = "{out}"\n', encoding="utf-8")
        said = project.kvgen(*verb, code=2).stderr
        assert said == (
            f"error: {project.root}/pyproject.toml: tool.kvgen.out: got '{out}'; {project.root / link} is a link to {target}, "
            "and nothing is written through a link; put a folder there, or name the folder itself\n"
        )
        (project.root / link).unlink()
    assert untouched(outside) and not list((project.root / "src").iterdir())


@pytest.mark.parametrize("top", ["tiny", "device"])
def test_a_sets_folder_is_no_link(built: Folder, outside: Path, top: str) -> None:
    shutil.rmtree(built.out / top)
    (built.out / top).symlink_to(outside)
    said = f"generated/{top}: a link to {outside} is in its place; put a folder there\nnothing was written\n"
    for force in ([], ["--force"]):
        assert built.kvgen("build", *force, code=2).stderr == f"error: {said}"
    assert states(built) == {f"generated/{top}": f"edited: a link to {outside} is in its place; put a folder there"}
    assert states(built, "tiny") == states(built), "with a selector too"
    if top == "tiny":
        said = built.kvgen("compile", "tiny", "--record", code=2).stderr
        assert said.endswith(f"tiny: a link to {outside}; nothing is written through a link; put a folder there\n")
    assert untouched(outside)


def test_a_file_replaced_by_a_link(built: Folder, outside: Path) -> None:
    """Even one with the right text behind it, which may be another tomorrow."""
    for path in ("tiny/append.cu", "tiny/resources.json", "device/base/types.cuh"):
        if path == "tiny/resources.json":
            built.kvgen("compile", "tiny", "--record")
        shutil.copy(built.out / path, outside / Path(path).name)
        (built.out / path).unlink()
        (built.out / path).symlink_to(outside / Path(path).name)
    before = {p.name: p.read_bytes() for p in outside.iterdir()}
    assert states(built) == {
        f"generated/{path}": f"edited: a link to {outside / Path(path).name} is in its place"
        for path in ("tiny/append.cu", "tiny/resources.json", "device/base/types.cuh")
    }
    assert built.kvgen("build", code=2).stderr.count("is in its place\n") == 2
    assert "tiny/resources.json: a link to" in built.kvgen("compile", "tiny", "--record", code=2).stderr
    built.spec("tiny", page_size=32)
    built.kvgen("build", "--force")
    built.kvgen("compile", "tiny", "--record", "--force")
    built.kvgen("check")
    assert {p.name: p.read_bytes() for p in outside.iterdir()} == before


def test_a_project_that_is_reached_through_a_link(project: Folder, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(project.root)
    Folder(tmp_path / "way").kvgen("build")
    Folder(tmp_path / "way").kvgen("check")
    assert (project.out / "tiny/append.cu").is_file()


def test_every_name_is_known(built: Folder, outside: Path) -> None:
    """Hidden files, other suffixes, links, FIFOs, empty folders, a folder in a file's place: each found, none touched."""
    out = built.out
    for path in (
        ".hidden.cu",
        "tiny/.secret",
        "tiny/module.py",
        "tiny/sub/deep.txt",
        "wide/append.pyc",
        "tiny/py.typed",
    ):
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_text("x", encoding="utf-8")
    (out / "tiny/empty").mkdir()
    (out / "tiny/link").symlink_to(outside)
    os.mkfifo(out / "tiny/pipe")
    (out / "wide/gather.cu").unlink()
    (out / "wide/gather.cu").mkdir()
    (out / "wide/gather.cu/inside").write_text("", encoding="utf-8")
    (out / "odd\nname").write_text("", encoding="utf-8")
    (out / ".gitignore").mkdir()
    found = states(built)
    foreign = "extra: not written by kvgen; move it out of this folder"
    assert found == {
        **dict.fromkeys(
            (
                *(
                    "generated/.hidden.cu",
                    "generated/tiny/.secret",
                    "generated/tiny/module.py",
                    "generated/tiny/sub/deep.txt",
                ),
                *("generated/wide/append.pyc", "generated/tiny/py.typed", "generated/odd\nname"),
            ),
            foreign,
        ),
        **dict.fromkeys(("generated/tiny/empty", "generated/.gitignore"), "extra: an empty folder"),
        "generated/tiny/link": "extra: a link, not made by kvgen; move it out of this folder",
        "generated/tiny/pipe": "extra: a FIFO, not made by kvgen; move it out of this folder",
        "generated/wide/gather.cu": "edited: a folder is in its place; move it out of this folder",
    }
    said = built.kvgen("check", code=1).stdout
    assert "generated/odd\\nname" in said and said.splitlines()[-1] == "kvgen build"
    before = built.tree()
    built.kvgen("diff")
    (out / "wide/gather.cu/inside").unlink()
    (out / "wide/gather.cu").rmdir()
    built.kvgen("build")
    assert built.tree().keys() - {"wide/gather.cu"} == before.keys() - {"wide/gather.cu/inside"}
    assert not (out / ".gitignore").exists() and not (out / "tiny/empty").exists()
    assert built.kvgen("check", code=1).stdout.splitlines()[-1] == "nothing for kvgen to mend: move these files"


def compiled(source: Path, mode: py_compile.PycInvalidationMode) -> Path:
    path = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source), cfile=str(path), doraise=True, invalidation_mode=mode)
    return path


def test_bytecode_that_is_not_its_source(built: Folder) -> None:
    modes = py_compile.PycInvalidationMode
    tiny, wide = built.out / "tiny/__init__.py", built.out / "wide/__init__.py"
    compiled(tiny, modes.TIMESTAMP)
    compiled(wide, modes.CHECKED_HASH)
    built.kvgen("check")
    unchecked = compiled(wide, modes.UNCHECKED_HASH)
    orphan = unchecked.with_name("gone.cpython-311.pyc")
    shutil.copy(unchecked, orphan)
    link = tiny.parent / "__pycache__/__init__.cpython-399.pyc"
    link.symlink_to(unchecked)
    odd = tiny.parent / "__pycache__/notes.txt"
    odd.write_text("", encoding="utf-8")

    def shown(path: Path) -> str:
        return path.relative_to(built.root).as_posix()

    assert states(built) == {
        shown(unchecked): "extra: bytecode that Python runs without comparing it with the source",
        shown(orphan): "extra: bytecode without a source of kvgen's beside it",
        shown(link): "extra: no bytecode of Python's but something else under its name",
        shown(odd): "extra: not written by kvgen; move it out of this folder",
    }
    said = built.kvgen("build").stdout
    assert all(f"removed  {shown(path)}" in said for path in (unchecked, orphan, link))
    assert states(built).keys() == {shown(odd)}


def test_a_removed_set_leaves_no_bytecode(built: Folder) -> None:
    compiled(built.out / "wide/__init__.py", py_compile.PycInvalidationMode.TIMESTAMP)
    (built.root / "specs/wide.py").unlink()
    built.kvgen("build")
    assert not (built.out / "wide").exists()
    built.kvgen("check")


def test_folders_of_cubins_too(project: Folder, outside: Path) -> None:
    cubins = project.root / "cubins"
    cubins.mkdir()
    (cubins / "tiny").symlink_to(outside)
    said = project.kvgen("compile", "tiny", "-o", "cubins", code=2).stderr
    assert said == f"error: cubins/tiny: a link to {outside}; nothing is written through a link; put a folder there\n"
    assert untouched(outside)

"""`kvgen build`: what it writes and leaves alone, and that its output depends on specs and templates only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen.cli.project import open_project
from kvgen.codegen.emit import banner_digest, body_digest, body_of
from kvgen.codegen.sets_page import sets_page
from kvgen.cycles.device import DEVICES
from tests.compile.test_sass import needs_tool

from .conftest import Folder


def test_build_writes_everything_and_ends_with_the_import_line(project: Folder) -> None:
    said = project.kvgen("build").stdout
    assert said.splitlines()[-1] == "from generated.tiny import Cache, append"
    assert {"tiny/append.cu", "tiny/cache.cuh", "tiny/__init__.py", "wide/gather.cu"} <= project.tree().keys()
    assert "new      generated/tiny/append.cu" in said
    for path, data in project.tree().items():
        text = data.decode()
        assert banner_digest(text) == body_digest(body_of(text)), path


def test_the_first_build_says_what_there_is_to_read(project: Folder) -> None:
    said = project.kvgen("build").stdout
    lines = {path: data.count(b"\n") for path, data in project.tree().items()}
    kernels = [n for path, n in lines.items() if path.endswith(".cu")]
    headers = [n for path, n in lines.items() if path.startswith("device/")]
    assert f"         3 kernels  {sum(kernels):7,} lines  specialised for 2 sets\n" in said
    assert (
        f"{len(headers)} headers  {sum(headers):7,} lines  of the device library: those that the kernels include\n"
        in said
    )
    part = said.partition("to read first:\n")[2].partition("\n\n")[0]
    assert part.splitlines() == [
        "  generated/README.md         the sets, a line each",
        f"  generated/wide/gather.cu    the shortest kernel, {min(kernels)} lines",
        "  generated/wide/cache.cuh    the cache that it reads and writes",
        "  generated/wide/__init__.py  its launcher: arguments, shapes, errors",
    ]
    for line in part.splitlines():
        assert (project.root / line.split()[0]).is_file()
    project.spec("tiny", page_size=32)
    assert "to read first" not in project.kvgen("build").stdout


def device(folder: Folder) -> set[str]:
    """The headers of the device library that the output folder has."""
    return {path for path in folder.tree() if path.startswith("device/")}


def included(folder: Folder) -> set[str]:
    """The headers that its sets include, by the compiler's rule: relative to the file that includes."""
    found: set[str] = set()
    waiting = [p for p in folder.out.rglob("*.cu*") if p.relative_to(folder.out).parts[0] != "device"]
    while waiting:
        path = waiting.pop()
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            target = (path.parent / name).resolve()
            if (at := target.relative_to(folder.out.resolve()).as_posix()) not in found:
                found.add(at)
                waiting.append(target)
    return {path for path in found if path.startswith("device/")}


def test_the_device_library_is_what_the_sets_include(project: Folder) -> None:
    """A set more brings its headers; they go with it; a build of one set takes none from the others."""
    project.kvgen("build", "tiny")
    few = device(project)
    assert few == included(project) and 5 < len(few) < 60
    project.kvgen("build", "wide")
    both = device(project)
    assert both > few and both == included(project)
    project.kvgen("build", "tiny")
    assert device(project) == both and project.kvgen("check", "tiny").stdout
    (project.root / "specs/wide.py").unlink()
    said = project.kvgen("check", code=1).stdout
    extra = {line.split()[1] for line in said.splitlines() if line.startswith("extra") and "/device/" in line}
    assert extra == {f"generated/{path}" for path in both - few}
    project.kvgen("build")
    assert device(project) == few
    project.kvgen("check")


def test_a_stale_header_of_another_set_is_written_anew(built: Folder) -> None:
    """Building one set mends the headers of all, as they belong to one kvgen."""
    (path, *_) = sorted(device(built) - {"device/base/types.cuh"})
    text = (built.out / path).read_text(encoding="utf-8")
    body = body_of(text) + "// older\n"
    (built.out / path).write_text(
        text.replace(body_digest(body_of(text)), body_digest(body)) + "// older\n", encoding="utf-8"
    )
    assert f"stale    generated/{path}" in built.kvgen("check", "wide", code=1).stdout
    built.kvgen("build", "wide")
    assert (built.out / path).read_text(encoding="utf-8") == text


def test_a_broken_spec_s_headers_stay(built: Folder) -> None:
    before = device(built)
    built.change("specs/wide.py", "head_dim=128", "head_dim=0")
    built.kvgen("build", code=2)
    assert device(built) == before


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
    assert changed == {"tiny/cache.cuh", "tiny/__init__.py", "tiny/_table.py", "README.md"}
    assert "changed  generated/tiny/cache.cuh" in said
    assert "4 written" in said


def test_files_of_a_removed_spec_go_and_others_stay(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    (built.out / "wide/notes.txt").write_text("mine\n", encoding="utf-8")
    (built.out / "__init__.py").write_text('"""A package."""\n', encoding="utf-8")
    said = built.kvgen("build").stdout
    assert "removed  generated/wide/append.cu" in said
    assert sorted(p.name for p in (built.out / "wide").iterdir()) == ["notes.txt"]
    assert (built.out / "__init__.py").is_file()


def test_the_list_of_sets(built: Folder) -> None:
    """README.md of the output folder: a row a set, written by any build, known to check, gone with the last set."""
    page = built.out / "README.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!-- Generated by kvgen from the specs; do not edit")
    assert (
        "| [tiny](tiny/), `specs/tiny.py` | A cache for tests. | 8/2 x 64 | bf16 `page kv layer token head dim` | 16 |"
        in text
    )
    built.spec("tiny", q_heads=16)
    assert "README.md" in built.kvgen("check", "tiny", code=1).stdout
    built.kvgen("build", "tiny")
    assert "| 16/2 x 64 |" in page.read_text(encoding="utf-8")
    page.write_text(text.replace("tests.", "mine."), encoding="utf-8")
    assert "README.md" in built.kvgen("build", code=2).stderr, "work by hand is not overwritten"
    built.kvgen("build", "--force")
    for spec in (built.root / "specs").glob("*.py"):
        spec.unlink()
    built.kvgen("build")
    assert not page.exists()


def test_an_emptied_folder_goes(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    built.kvgen("build")
    assert not (built.out / "wide").exists()


def test_a_selector_builds_one_set_and_removes_nothing_else(project: Folder) -> None:
    project.kvgen("build", "tiny")
    assert {path.split("/")[0] for path in project.tree()} == {"device", "tiny", "README.md"}
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


def test_rows_of_sets_that_are_not_loaded_are_kept(built: Folder) -> None:
    sets = {s.kernels.name: s for s in open_project(built.root).sets}
    page = sets_page(list(sets.values()))
    built.spec("tiny", q_heads=16)
    (tiny,) = (s for s in open_project(built.root).sets if s.kernels.name == "tiny")
    again = sets_page([tiny], page)
    assert again == page.replace(*(row_of(p, "tiny") for p in (page, again)))
    assert row_of(again, "wide") == row_of(page, "wide") and "| 16/2 x 64 |" in row_of(again, "tiny")


def row_of(page: str, name: str) -> str:
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [{name}]"))
    return row


SLOW = 'ops.Append(), ops.Decode(), ops.Decode(name="cut", rows=2)'


@pytest.fixture
def slow(empty: Folder) -> Folder:
    """A set whose decodes stay on CUDA cores, and one whose decode does not."""
    empty.spec("exact", q_heads=8, ops=SLOW)
    empty.change("specs/exact.py", 'dtype="bf16"', 'dtype="f32"')
    empty.spec("fast", q_heads=8, ops="ops.Decode()")
    return empty


def test_what_stays_on_cuda_cores_is_said(slow: Folder) -> None:
    said = slow.kvgen("build").stderr.splitlines()
    why = "is on CUDA cores: f32 values would lose bits as operands of tensor cores; `kvgen compile --record` reckons"
    assert len(said) == 2
    assert said[0].startswith(f"warning: exact/decode {why}") and said[1].startswith(f"warning: exact/cut {why}")
    assert slow.kvgen("build", "fast").stderr == slow.kvgen("-q", "build").stderr == ""
    assert len(slow.kvgen("build", "exact/cut").stderr.splitlines()) == 1
    run = slow.kvgen("build", "--json")
    assert run.stderr == "" and [x["kernel"] for x in json.loads(run.stdout)["cuda_cores"]] == [
        "exact/decode",
        "exact/cut",
    ]


@pytest.mark.campaign
@needs_tool
def test_recorded_trips_say_how_slow(slow: Folder) -> None:
    """An interval of percent, between the trips at both latencies; of another text nothing is said."""
    slow.change("specs/exact.py", SLOW, "ops.Decode()")
    slow.change("specs/exact.py", '"sm_80", ', "")
    slow.kvgen("build")
    slow.kvgen("compile", "--record", "exact")
    found = re.search(
        r"exact/decode .*; by the model (\d+) to (\d+) % of what an H200 can read", slow.kvgen("build").stderr
    )
    assert found and 0 < int(found[1]) < int(found[2]) <= 100
    (plan,) = json.loads(slow.kvgen("show", "exact/decode", "--plan", "--json").stdout)
    least, most = plan["kernels"][0]["attention"]["percent_of_reachable"]
    assert (round(least), round(most)) == (int(found[1]), int(found[2]))
    said = slow.kvgen("show", "exact/decode", "--plan").stdout
    assert f"speed    by the model {found[1]} to {found[2]} % of what an H200 can read" in said
    facts = json.loads((slow.out / "exact/resources.json").read_text(encoding="utf-8"))["kernels"]["decode"]["sm_90a"]
    reachable = facts["trip_bytes"] / DEVICES["H200"].budget_rate
    assert (least, most) == pytest.approx([100 * reachable / facts[n] for n in ("trip_cycles_loaded", "trip_cycles")])
    slow.change("specs/exact.py", "q_heads=8", "q_heads=4")
    assert "reckons its share" in slow.kvgen("build").stderr

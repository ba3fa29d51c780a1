"""What holds for every verb: colours, how much is said, the project, usage lines, progress."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import typer

from kvgen.cli.app import VERBS, application
from kvgen.cli.progress import progress
from kvgen.cli.settings import Settings, choose, colour, parted

from .conftest import Folder


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(Settings())
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        ({"NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"NO_COLOR": "", "FORCE_COLOR": "3"}, True),
        ({"NO_COLOR": "", "FORCE_COLOR": ""}, None),
    ],
)
def test_colour(environment: dict[str, str], wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert colour() is wanted


@pytest.mark.parametrize(
    "command", [["doctor"], ["check"], ["diff"], ["list"], ["compile", "tiny"], ["show", "tiny"], ["bench", "nothing"]]
)
def test_every_verb_colours_when_told_to_and_never_with_no_color(
    project: Folder, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {"check": 1, "bench": 2}.get(command[0], 0)
    plain = project.kvgen(*command, code=code)
    assert "\x1b" not in plain.stdout + plain.stderr
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = project.kvgen(*command, code=code)
    assert "\x1b[" in forced.stdout + forced.stderr
    monkeypatch.setenv("NO_COLOR", "1")
    none = project.kvgen(*command, code=code)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", none.stdout + none.stderr), "a colour"


def test_flags_of_every_verb_stand_anywhere() -> None:
    assert parted(["build", "-q", "tiny"]) == (["-q"], ["build", "tiny"])
    assert parted(["-v", "list", "--project", "x", "a"]) == (["-v", "--project", "x"], ["list", "a"])
    assert parted(["list", "--project=x", "--", "-q"]) == (["--project=x"], ["list", "--", "-q"])
    assert parted(["list", "--project"]) == (["--project"], ["list"])
    assert parted([]) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "verbs"),
    [
        (["show", "build"], ["show"]),
        (["-q", "--project", "build", "check"], ["check"]),
        (["biuld", "build"], list(VERBS)),
        (["--help", "build"], list(VERBS)),
        ([], list(VERBS)),
    ],
)
def test_only_the_verb_that_runs_is_made(arguments: list[str], verbs: list[str]) -> None:
    assert [command.name for command in application(arguments).registered_commands] == verbs


def test_quiet(project: Folder) -> None:
    for command in (["build", "-q"], ["-q", "check"], ["build", "--quiet"]):
        result = project.kvgen(*command)
        assert result.stdout + result.stderr == "", command
    (project.out / "tiny/append.cu").unlink()
    assert project.kvgen("check", "-q", code=1).stdout.startswith("missing  generated/tiny/append.cu")
    assert project.kvgen("show", "-q", "tiny/append").stdout
    assert project.kvgen("compile", "-q", "tiny").stdout.startswith("kernel")
    assert "cubins, NVRTC" not in project.kvgen("compile", "-q", "tiny").stdout


def test_verbose(built: Folder) -> None:
    result = built.kvgen("build", "-v", "tiny")
    assert f"project {built.root}" in result.stderr
    assert "specs/tiny.py: tiny, 1 operations" in result.stderr
    assert "same     generated/tiny/append.cu" in result.stderr
    assert re.search(r"^build: \d+\.\d\d s$", result.stderr, re.M)
    assert built.kvgen("build", "tiny").stderr == ""
    assert "give one" in built.kvgen("build", "-q", "-v", code=2).stderr


@pytest.mark.parametrize("place", ["before", "behind"])
def test_project(built: Folder, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    elsewhere, where = Folder(outside), ["--project", str(built.root)]
    for command in (["check"], ["build", "tiny"], ["show", "tiny/append"], ["list"], ["diff"], ["doctor"]):
        result = elsewhere.kvgen(*where, *command) if place == "before" else elsewhere.kvgen(*command, *where)
        assert result.stderr == ""
    assert "no pyproject.toml" in elsewhere.kvgen("check", code=2).stderr
    said = elsewhere.kvgen("--project", "nowhere", "check", code=2).stderr
    assert said == "error: --project: got 'nowhere', where nothing is; give the folder of a project\n"
    (outside / "file").touch()
    assert "where a file is" in elsewhere.kvgen("--project", "file", "check", code=2).stderr
    assert elsewhere.kvgen("list", "--project", f"{built.root}/specs").stdout.startswith("set"), "here or above"


def test_version(empty: Folder) -> None:
    assert empty.kvgen("-V").stdout == empty.kvgen("--version").stdout


@pytest.mark.parametrize("verb", VERBS)
def test_usage_lines_are_plain(empty: Folder, verb: str) -> None:
    said = empty.kvgen(verb, "--help").stdout
    assert not re.search(r"\[\[|<list|\[default: \(|x>=|[{}]", said), said
    usage = said.splitlines()[0].removeprefix(f"Usage: kvgen {verb} [OPTIONS]").strip()
    assert usage in ("", "DIR", "[SELECTOR]", "[SELECTOR]...", "SELECTOR...")
    assert ("SELECTOR is SET or SET/OP" in said) == usage.endswith("...")


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO, total: int = 3) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("counting", total) as done:
            for _ in range(total):
                done()
        return stream.getvalue()

    assert "counting" in shown(Terminal())
    assert shown(io.StringIO()) == ""
    assert shown(Terminal(), total=1) == "", "nothing to wait for"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(io.StringIO()) == "", "a log is no terminal, whatever its colours"
    choose(Settings(quiet=True))
    assert shown(Terminal()) == ""


@pytest.mark.parametrize(
    ("command", "title"),
    [
        (["build"], "rendering"),
        (["check"], "rendering"),
        (["list"], "reading specs"),
        (["compile"], "compiling"),
        (["compile", "--record"], "disassembling"),
        (["bench", "--batch", "1", "--tokens", "16"], "counting"),
        (["demo", "--device", "cpu"], "running"),
    ],
)
@pytest.mark.usefixtures("demo_from_cache")
def test_what_takes_long_has_a_bar(
    built: Folder, command: list[str], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends where its bar begins."""
    begun: list[str] = []

    def noted(of: str, total: int) -> object:
        begun.append(of)
        if of == title:
            raise typer.Exit
        return progress(of, total)

    for module in ("selection", "project", "compile", "bench", "demo", "demo_steps"):
        monkeypatch.setattr(f"kvgen.cli.{module}.progress", noted)
    built.kvgen(*command)
    assert title in begun


def test_build_json(project: Folder) -> None:
    found = json.loads(project.kvgen("build", "--json", "tiny").stdout)
    assert (found["ok"], found["sets"], found["record"], found["broken"]) == (True, ["tiny"], False, [])
    assert {"path": "generated/tiny/append.cu", "state": "new"} in found["touched"]
    assert found["files"] == len(found["touched"])
    project.spec("tiny", page_size=32)
    (project.root / "specs/wide.py").write_text("x = (\n")
    found = json.loads(project.kvgen("build", "--json", code=2).stdout)
    assert not found["ok"]
    assert [t["state"] for t in found["touched"]] == ["changed"] * 4
    assert found["broken"] == [{"spec": "specs/wide.py", "message": "specs/wide.py:1: '(' was never closed"}]


def test_build_in_an_empty_project_says_what_to_do(empty: Folder) -> None:
    (empty.root / "specs").mkdir()
    result = empty.kvgen("build")
    assert "kvgen init --from config.json -o specs/model.py" in result.stdout
    assert not empty.out.exists()
    assert "kvgen init" in empty.kvgen("list").stdout


def test_bench_has_the_largest_byte_counts_first(built: Folder) -> None:
    lines = built.kvgen("bench", "tiny", "--batch", "1", "--tokens", "64").stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("operation"))
    rows = lines[begin + 1 : lines.index("", begin)]
    counts = [int(row.replace(",", "").split()[-4]) for row in rows]
    assert len(counts) > 3
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--tokens", "-1"], ["--new", "0"], ["--lines", "-1"]])
def test_numbers_that_are_too_small(built: Folder, arguments: list[str]) -> None:
    assert f"got {arguments[1]}; it must be at least" in built.kvgen("bench", *arguments, code=2).stderr

"""`kvgen diff`: identical hunks once, the git comparison, and what counts as a difference."""

from __future__ import annotations

import json
import subprocess

import pytest

from .conftest import Folder


def git(folder: Folder, *arguments: str) -> None:
    identity = ["-c", "user.name=kvgen", "-c", "user.email=kvgen@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder.root, check=True, capture_output=True)


@pytest.fixture
def committed(built: Folder) -> Folder:
    git(built, "init", "-q")
    git(built, "add", "-A")
    git(built, "commit", "-qm", "first")
    return built


def test_no_difference(built: Folder) -> None:
    assert built.kvgen("diff").stdout == ""


def test_an_edit_shows_as_what_building_would_undo(built: Folder) -> None:
    built.change("generated/tiny/append.cu", "kThreads = 256", "kThreads = 128")
    said = built.kvgen("diff").stdout
    assert "--- generated/tiny/append.cu" in said
    assert "-constexpr uint32_t kThreads = 128," in said
    assert "+constexpr uint32_t kThreads = 256," in said
    text = (built.out / "tiny/append.cu").read_text(encoding="utf-8").splitlines()
    start = int(said.split("@@ -")[1].split(",")[0])
    shown = next(line for line in said.splitlines() if line.startswith(" "))
    assert text[start - 1] == shown[1:], "the line numbers are the file's own, banner included"


def test_an_edited_banner_is_a_difference(built: Folder) -> None:
    built.change("generated/tiny/append.cu", "do not edit", "edit freely")
    said = built.kvgen("diff").stdout
    assert "edit freely" in said


def test_the_same_hunk_is_shown_once(empty: Folder) -> None:
    for number in range(5):
        empty.spec(f"set{number}")
    empty.kvgen("build")
    for number in range(5):
        empty.change(f"generated/set{number}/append.cu", "kThreads = 256", "kThreads = 128")
    said = empty.kvgen("diff").stdout
    assert said.count("-constexpr uint32_t kThreads = 128,") == 1
    assert "same in 5 files" in said
    content = json.loads(empty.kvgen("diff", "--json").stdout)
    assert [len(hunk["files"]) for hunk in content["hunks"]] == [5]


def test_hunks_that_differ_are_shown_each(empty: Folder) -> None:
    for number, threads in enumerate((64, 128)):
        empty.spec(f"set{number}")
        empty.kvgen("build", f"set{number}")
        empty.change(f"generated/set{number}/append.cu", "kThreads = 256", f"kThreads = {threads}")
    said = empty.kvgen("diff").stdout
    assert "kThreads = 64" in said
    assert "kThreads = 128" in said
    assert "same in" not in said


def test_new_and_removed_files(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    built.spec("third", page_size=64)
    said = built.kvgen("diff").stdout
    assert "--- /dev/null\n+++ generated/third/append.cu" in said
    assert "--- generated/wide/append.cu\n+++ /dev/null" in said


def test_files_of_someone_else_are_no_difference(built: Folder) -> None:
    (built.out / "tiny/mine.cu").write_text("// mine\n", encoding="utf-8")
    assert built.kvgen("diff").stdout == ""


def test_selectors(built: Folder) -> None:
    built.change("generated/tiny/append.cu", "kThreads = 256", "kThreads = 128")
    assert built.kvgen("diff", "wide").stdout == ""
    assert "tiny/append.cu" in built.kvgen("diff", "*/append").stdout


def test_against_a_revision(committed: Folder) -> None:
    assert committed.kvgen("diff", "--against", "HEAD").stdout == ""
    committed.spec("tiny", page_size=32)
    committed.kvgen("build")
    said = committed.kvgen("diff", "--against", "HEAD").stdout
    assert "+++ generated/tiny/cache.cuh" in said
    assert "generated/wide/" not in said
    git(committed, "commit", "-qam", "second")
    assert committed.kvgen("diff", "--against", "HEAD").stdout == ""
    assert "cache.cuh" in committed.kvgen("diff", "--against", "HEAD~1").stdout


def test_exit_code(built: Folder) -> None:
    assert built.kvgen("diff", "--exit-code").stdout == ""
    built.change("generated/tiny/append.cu", "kThreads = 256", "kThreads = 128")
    said = built.kvgen("diff").stdout
    assert said and built.kvgen("diff", "--exit-code", code=1).stdout == said
    assert built.kvgen("diff", "--exit-code", "wide").stdout == ""
    help_text = " ".join(built.kvgen("diff", "--help").stdout.split())
    assert "--exit-code" in help_text and "Exits 0, with --exit-code 1 where anything changed, 2" in help_text


def test_a_project_that_records_nothing(committed: Folder) -> None:
    committed.spec("tiny", page_size=32)
    committed.kvgen("build")
    content = json.loads(committed.kvgen("diff", "--against", "HEAD", "--json", "--exit-code", code=1).stdout)
    assert content.keys() == {"hunks", "resources", "nvrtc"}
    assert content["resources"] == [] and content["nvrtc"] == [[], []], "nothing was recorded"
    assert any("kPageSize" in hunk["text"] for hunk in content["hunks"])


def test_outside_git(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(built.root.parent))
    assert "--against: got 'HEAD'" in built.kvgen("diff", "--against", "HEAD", code=2).stderr


def test_a_revision_is_never_an_option_of_git(committed: Folder) -> None:
    said = committed.kvgen("diff", "--against=--output=stolen", code=2).stderr
    assert "must be a git revision" in said
    assert not (committed.root / "stolen").exists()

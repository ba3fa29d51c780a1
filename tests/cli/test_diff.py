"""`kvgen diff`: fields of specs, the same hunk once, the git comparison, and what counts as a difference."""

from __future__ import annotations

import difflib
import json
import random
import subprocess
from string import ascii_letters

import pytest

from kvgen.cli.hunks import hunks_of

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
    assert "# in 5 files of 5 sets: append.cu x5" in said
    content = json.loads(empty.kvgen("diff", "--json").stdout)
    assert [len(hunk["files"]) for hunk in content["hunks"]] == [5]


def test_hunks_that_differ_in_numbers_are_one(empty: Folder) -> None:
    """Numbers that differ stand below the hunk, with the sets that have them; words that differ make another hunk."""
    for number, threads in enumerate(("64", "128", "64", "kMany")):
        empty.spec(f"set{number}")
        empty.kvgen("build", f"set{number}")
        empty.change(f"generated/set{number}/append.cu", "kThreads = 256", f"kThreads = {threads}")
    said = empty.kvgen("diff").stdout
    assert "-constexpr uint32_t kThreads = 64," in said and "-constexpr uint32_t kThreads = kMany," in said
    assert "kThreads = 128" not in said
    assert "# in 3 files of 3 sets: append.cu x3\n# numbers 64 (x2: set0, set2); 128 (x1: set1)\n" in said
    hunks = json.loads(empty.kvgen("diff", "--json").stdout)["hunks"]
    assert [hunk["numbers"] for hunk in hunks] == [
        [
            {"numbers": ["64"], "files": ["generated/set0/append.cu", "generated/set2/append.cu"]},
            {"numbers": ["128"], "files": ["generated/set1/append.cu"]},
        ],
        [],
    ]


def test_surroundings_make_no_other_hunk(built: Folder) -> None:
    """A line that changed in the same way is one change wherever it stands; neighbours are one hunk where they always are."""
    old = {"a.cu": "1\n2\nx\n3\ny\n4\n", "b.cu": "5\nx\ny\n", "c.cu": "x\n5\n"}
    new = {path: text.replace("x", "X").replace("y", "Y") for path, text in old.items()}
    found = hunks_of(old, new, lambda path: path, [])
    assert [(hunk.files, hunk.lines) for hunk in found] == [
        (["a.cu", "c.cu"], (" 1", " 2", "-x", "+X", " 3", " y", " 4")),
        (["a.cu"], (" 2", " x", " 3", "-y", "+Y", " 4", " ")),
        (["b.cu"], (" 5", "-x", "-y", "+X", "+Y", " ")),
    ]
    del old["b.cu"], new["b.cu"], old["c.cu"], new["c.cu"]
    (hunk,) = hunks_of(old, new, lambda path: path, [])
    assert hunk.header == "@@ -1,7 +1,7 @@"
    assert hunk.lines == (" 1", " 2", "-x", "+X", " 3", "-y", "+Y", " 4", " ") and hunk.new_lines == (3, 5)


def test_a_lone_change_is_a_hunk_as_difflib_writes_it() -> None:
    """Headers, surroundings and changed lines of one file; each line occurs once, so that no two hunks are the same change."""
    draw = random.Random(0)
    for _ in range(100):
        before = [f"line{letter}" for letter in ascii_letters[: draw.randint(0, 40)]]
        after = [line for line in before if draw.random() > 0.1]
        for word in ("more", "other"):
            after.insert(draw.randint(0, len(after)), word)
        old, new = "\n".join(before), "\n".join(after)
        whole = list(difflib.unified_diff(old.split("\n"), new.split("\n"), lineterm=""))[2:]
        found = hunks_of({"a.cu": old}, {"a.cu": new}, lambda path: path, [])
        assert [line for hunk in found for line in (hunk.header, *hunk.lines)] == whole


def test_new_and_removed_files(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    built.spec("third", page_size=64)
    said = built.kvgen("diff").stdout
    assert "--- /dev/null\n+++ generated/third/append.cu" in said
    gone = said.partition("\n+++ /dev/null\n")[2].splitlines()
    assert gone[0].startswith("@@ -1,") and gone[0].endswith(" +0,0 @@") and gone[1].startswith("# in "), "names alone"
    hunks = json.loads(built.kvgen("diff", "--json").stdout)["hunks"]
    (removed,) = (hunk for hunk in hunks if hunk["state"] == "removed")
    assert {"generated/wide/append.cu", "generated/wide/gather.cu"} < set(removed["files"]) and removed["text"] == ""


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
    assert said.startswith("tiny: cache.page_size 16 -> 32\n--- generated/README.md\n")
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
    assert content.keys() == {"fields", "broken", "hunks", "resources", "nvrtc"}
    assert content["fields"] == [{"set": "tiny", "field": "cache.page_size", "before": "16", "after": "32"}]
    assert content["resources"] == [] and content["nvrtc"] == [[], []], "nothing was recorded"
    assert any("kPageSize" in hunk["text"] for hunk in content["hunks"])


def test_outside_git(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(built.root.parent))
    assert "--against: got 'HEAD'" in built.kvgen("diff", "--against", "HEAD", code=2).stderr


def test_a_revision_is_never_an_option_of_git(committed: Folder) -> None:
    said = committed.kvgen("diff", "--against=--output=stolen", code=2).stderr
    assert "must be a git revision" in said
    assert not (committed.root / "stolen").exists()

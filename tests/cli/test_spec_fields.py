"""`kvgen diff`: which fields of specs changed, and the template lines and the page that it shows them in."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from kvgen import paths

from .conftest import Folder
from .test_diff import git


@pytest.fixture
def committed(built: Folder) -> Folder:
    git(built, "init", "-q")
    git(built, "add", "-A")
    git(built, "commit", "-qm", "first")
    return built


def fields(folder: Folder, *arguments: str) -> list[str]:
    """The lines above the first hunk."""
    said = folder.kvgen("diff", *arguments).stdout
    return said.partition("--- ")[0].splitlines()


def test_fields_of_all_kinds(committed: Folder) -> None:
    """Values, operations by name, a model in place of none, a class in place of another, and whole sets."""
    committed.change("specs/tiny.py", "q_heads=8", "q_heads=4")
    committed.change("specs/tiny.py", "ops.Append()", 'ops.Append(rows="slots"), ops.Decode()')
    committed.change("specs/tiny.py", 'dtype="bf16"', 'dtype="f16"')
    committed.change("specs/wide.py", "ops.Append(), ", "")
    committed.change("specs/wide.py", "page_size=16", "page_size=16, table=Ring(window=64)")
    committed.change("specs/wide.py", "import KernelSet, Paged, ops", "import KernelSet, Model, Paged, Ring, ops")
    committed.change("specs/wide.py", "    arch=", "    model=Model(layers=2),\n    arch=")
    committed.spec("third")
    assert fields(committed, "--against", "HEAD") == [
        "third: new",
        "tiny: q_heads 8 -> 4",
        'tiny: cache.dtype "bf16" -> "f16"',
        'tiny: ops.append.rows "ragged" -> "slots"',
        "tiny: ops.decode new: Decode()",
        "wide: cache.table Dense -> Ring",
        "wide: cache.table.window new: 64",
        "wide: ops.append removed: Append()",
        "wide: model None -> Model(layers=2)",
    ]
    (committed.root / "specs/third.py").unlink()
    (committed.root / "specs/tiny.py").unlink()
    assert fields(committed, "--against", "HEAD")[0] == "tiny: removed"
    assert fields(committed, "wide/gather", "--against", "HEAD")[0] == "wide: cache.table Dense -> Ring", (
        "nothing is gone"
    )


def test_the_same_field_of_many_sets_is_one_line(empty: Folder) -> None:
    for number in range(5):
        empty.spec(f"set{number}")
    empty.kvgen("build")
    git(empty, "init", "-q")
    git(empty, "add", "-A")
    git(empty, "commit", "-qm", "first")
    for number in range(5):
        empty.spec(f"set{number}", page_size=32)
    assert fields(empty) == ["set0, set1, set2 and 2 more: cache.page_size 16 -> 32"]


def test_before_building_the_specs_are_those_that_the_folder_was_built_from(committed: Folder) -> None:
    """HEAD's, where the folder has HEAD's files; of other folders nobody can tell."""
    committed.spec("tiny", page_size=32)
    assert fields(committed) == ["tiny: cache.page_size 16 -> 32"]
    committed.change("generated/tiny/append.cu", "kThreads = 256", "kThreads = 128")
    assert fields(committed) == []
    committed.kvgen("build", "--force")
    assert fields(committed) == [] and fields(committed, "--against", "HEAD") == ["tiny: cache.page_size 16 -> 32"]


def test_an_older_spec_that_does_not_load(built: Folder) -> None:
    """It is named, with its first mistake, and stops nothing."""
    good = (built.root / "specs/tiny.py").read_text(encoding="utf-8")
    built.change("specs/tiny.py", "page_size=16", "page_size=0")
    git(built, "init", "-q")
    git(built, "add", "-A")
    git(built, "commit", "-qm", "first")
    (built.root / "specs/tiny.py").write_text(good.replace("page_size=16", "page_size=32"), encoding="utf-8")
    said = " ".join(line.strip() for line in fields(built, "--against", "HEAD"))
    start = "not compared, since the older spec does not load: specs/tiny.py:7: Paged.page_size: got 0; "
    assert said.startswith(start)
    content = json.loads(built.kvgen("diff", "--against", "HEAD", "--json").stdout)
    assert content["fields"] == [] and content["broken"][0]["spec"] == "specs/tiny.py"


def test_template_lines(committed: Folder) -> None:
    """Each hunk's header names them; files that are not as kvgen would write them have none."""
    committed.spec("tiny", page_size=32)
    said = committed.kvgen("diff").stdout
    hunks = [h for h in json.loads(committed.kvgen("diff", "--json").stdout)["hunks"] if h["files"][0].endswith(".cuh")]
    assert hunks
    for hunk in hunks:
        assert f"{hunk['header']} {' '.join(hunk['origins'])}\n" in said
        added = [line[1:].split() for line in hunk["text"].splitlines() if line.startswith("+")]
        path, _, lines = hunk["origins"][0].rpartition(":")
        text = (paths.templates_root() / path.removeprefix("templates/")).read_text(encoding="utf-8").splitlines()
        assert path.startswith("templates/cache/") and added[0][0] in text[int(lines.partition("-")[0]) - 1]
    committed.change("generated/tiny/cache.cuh", "16", "8")
    against = json.loads(committed.kvgen("diff", "--against", "HEAD", "--json").stdout)
    found = [h["origins"] for h in against["hunks"]]
    assert found and not any(found), "the folder's file is nobody's"


class Page(HTMLParser):
    """Addresses that a browser would load, elements that are open at the end, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page(committed: Folder) -> None:
    """It loads nothing, closes what it opens, and has every line of the text form; what is generated stays text."""
    for name in ("tiny", "wide"):
        committed.change(f"generated/{name}/append.cu", "kThreads = 256", "kThreads = <b>128</b>")
    committed.spec("tiny", page_size=32)
    said = committed.kvgen("diff", "--html", "out/diff.html").stdout
    assert said == "wrote out/diff.html\n"
    text = (committed.root / "out/diff.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == [] and page.open == [] and "url(" not in text and "@import" not in text
    assert "<b>" not in text and "prefers-color-scheme: dark" in text
    for line in committed.kvgen("diff").stdout.splitlines():
        if line[:1] in ("-", "+", " ") and line[:3] not in ("---", "+++"):
            assert line in page.text
    assert "In 2 files of 2 sets: append.cu x2" in page.text
    nothing = committed.kvgen("diff", "--against", "HEAD", "wide/gather", "--html", "out/diff.html").stdout
    assert nothing == "wrote out/diff.html\n"
    assert "No change." in (committed.root / "out/diff.html").read_text(encoding="utf-8")


def test_the_page_s_colours_are_legible() -> None:
    """Text on its ground has a contrast of 4.5 and more, in both schemes (WCAG 2.1, 1.4.3)."""
    css = (paths.templates_root().parent / "kvgen/cli/diff.html.j2").read_text(encoding="utf-8")
    schemes = re.findall(r":root \{(.*?)\}", css, re.S)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        pairs = [(t, g) for t in ("text", "quiet", "link") for g in ("page", "code")]
        pairs += [("gone-text", "gone"), ("fresh-text", "fresh"), ("gone-text", "page"), ("fresh-text", "page")]
        assert [(t, g) for t, g in pairs if contrast(colours[t], colours[g]) < 4.5] == []


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, given as #rrggbb."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)

"""What somebody changed under generated/: build and record refuse to lose it, say what it is, and --force loses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.cli.resources_json import installed

from .conftest import Folder

MEND = (
    "changed by hand, so nothing was written; `kvgen diff` shows the changes: make them in the spec or the template, or drop "
    "them with `kvgen build --force`\n"
)
DIGEST = "its text does not match the digest in its banner"


def test_build_names_every_edited_file_and_writes_nothing(built: Folder) -> None:
    built.change("generated/tiny/append.cu", "kThreads", "kMany")
    built.change("generated/device/base/fault.cuh", "uint32_t", "unsigned")
    (built.out / "wide/gather.cu").write_text("// all mine\n", encoding="utf-8")
    (built.out / "wide/cache.cuh").write_bytes(b"\xff")
    (built.out / "wide/append.cu").unlink()
    built.spec("tiny", page_size=32)  # and there is something to write
    before = built.tree()
    said = built.kvgen("build", code=2)
    assert said.stdout == ""
    assert said.stderr == (
        f"error: generated/device/base/fault.cuh: {DIGEST}\n"
        f"generated/tiny/append.cu: {DIGEST}\n"
        "generated/wide/cache.cuh: it is no UTF-8\n"
        "generated/wide/gather.cu: it has no banner of kvgen's\n" + MEND
    )
    assert built.tree() == before
    assert built.kvgen("check", code=1).stdout.splitlines()[-1] == "kvgen build --force"
    built.kvgen("build", "--force")
    built.kvgen("check")


def test_a_selector_asks_about_what_it_writes_only(built: Folder) -> None:
    built.change("generated/tiny/append.cu", "kThreads", "kMany")
    built.change("generated/wide/append.cu", "kThreads", "kMany")
    built.kvgen("build", "wide/gather")
    said = built.kvgen("build", "wide", code=2).stderr
    assert "wide/append.cu" in said and "tiny/append.cu" not in said
    built.kvgen("build", "wide", "--force")
    assert "kMany" not in (built.out / "wide/append.cu").read_text(encoding="utf-8")
    assert "kMany" in (built.out / "tiny/append.cu").read_text(encoding="utf-8"), "a set that was not asked about"


def test_what_build_would_remove_is_as_precious(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    built.change("generated/wide/gather.cu", "kThreads", "kMany")
    before = built.tree()
    said = built.kvgen("build", code=2).stderr
    assert said.startswith(f"error: generated/wide/gather.cu: no spec gives it any more, and {DIGEST}\n")
    assert built.tree() == before
    assert "removed  generated/wide/gather.cu" in built.kvgen("build", "--force").stdout
    assert not (built.out / "wide").exists()


def test_line_ends_are_nobodys_work(built: Folder) -> None:
    """git makes CRLF of a checkout where nothing tells it not to: build mends that without --force, also in a stale file."""
    before = built.tree()
    for path in ("tiny/append.cu", "wide/cache.cuh"):
        (built.out / path).write_bytes(before[path].replace(b"\n", b"\r\n"))
    built.spec("wide", page_size=32, head_dim=128, ops="ops.Append(), ops.Gather()")
    built.kvgen("build")
    assert built.tree()["tiny/append.cu"] == before["tiny/append.cu"]
    built.kvgen("check")


def test_a_folder_in_a_files_place_is_the_users_to_move(built: Folder) -> None:
    path = built.out / "tiny/append.cu"
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("mine\n", encoding="utf-8")
    built.spec("wide", page_size=32)
    before = built.tree()
    for force in ([], ["--force"]):
        said = built.kvgen("build", *force, code=2).stderr
        assert said == (
            "error: generated/tiny/append.cu: a folder is in its place; move it out of this folder\nnothing was written\n"
        )
    assert built.tree() == before


# resources.json -------------------------------------------------------------------------------------------------------


def recorded(built: Folder) -> Path:
    built.kvgen("compile", "tiny", "--record")
    return built.out / "tiny/resources.json"


def test_numbers_edited_by_hand(built: Folder) -> None:
    path = recorded(built)
    built.kvgen("check")
    for old, new in (('"registers": ', '"registers": 1'), ('"nvrtc": "', '"nvrtc": "1'), ("\n", "\n\n")):
        before = path.read_text(encoding="utf-8")
        assert old in before
        path.write_text(before.replace(old, new, 1), encoding="utf-8")
        said = built.kvgen("check", "tiny", code=1).stdout
        assert "edited   generated/tiny/resources.json  its text does not match the digest in it" in said
        assert said.splitlines()[-1] == "kvgen compile --record --force"
        path.write_text(before, encoding="utf-8")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    said = built.kvgen("check", "tiny", code=1).stdout
    assert "CRLF" in said and said.splitlines()[-1] == "kvgen compile --record"
    built.kvgen("compile", "tiny", "--record")
    built.kvgen("check")


def test_recording_over_an_edit(built: Folder) -> None:
    path = recorded(built)
    good = path.read_text(encoding="utf-8")
    bad = good.replace('"registers": ', '"registers": 1', 1)
    path.write_text(bad, encoding="utf-8")
    said = built.kvgen("compile", "--record", code=2).stderr
    assert said == (
        "error: generated/tiny/resources.json: its text does not match the digest in it\n"
        "changed by hand, so nothing was recorded; `kvgen compile --record --force` records anyway\n"
    )
    assert path.read_text(encoding="utf-8") == bad and not (built.out / "wide/resources.json").exists()
    built.kvgen("compile", "tiny", "--record", "--force")
    assert path.read_text(encoding="utf-8") == good
    (built.root / "specs/tiny.py").unlink()
    path.write_text(bad, encoding="utf-8")
    assert "generated/tiny/resources.json: no spec gives it any more, and its" in built.kvgen("build", code=2).stderr


@pytest.mark.parametrize("lacks", ["body", "form"])
def test_a_record_of_an_older_kvgen_is_stale(built: Folder, lacks: str) -> None:
    path = recorded(built)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f' "{lacks}"')), encoding="utf-8")
    said = built.kvgen("check", code=1).stdout
    assert "stale    generated/tiny/resources.json  recorded by an older kvgen" in said
    assert said.splitlines()[-1] == "kvgen compile --record"
    built.kvgen("compile", "tiny", "--record")
    built.kvgen("check")


@pytest.mark.parametrize("value", ['"\\u001b[31m"', "[1]", "null"])
def test_what_a_record_says_reaches_no_terminal(built: Folder, value: str) -> None:
    """An older record has no digest, and one with a digest can be forged: what it holds is shown in ASCII, on one line."""
    from kvgen.cli.resources_json import _text
    from kvgen.json_file import parse_object

    path = recorded(built)
    (built.root / "pyproject.toml").write_text(f'[tool.kvgen]\nnvrtc = "{installed()}"\n', encoding="utf-8")
    content = parse_object(path.read_bytes(), "x")
    content["nvrtc"] = parse_object(f'{{"x": {value}}}'.encode(), "x")["x"]
    path.write_text(_text(content), encoding="utf-8")
    said = built.kvgen("check", "tiny", code=1).stdout
    assert "stale    generated/tiny/resources.json  recorded under NVRTC" in said
    assert all(line.isprintable() for line in said.splitlines())

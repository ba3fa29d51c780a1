"""Paths from outside: whatever lies at one, reading is a ToolError of one line, and writing stays inside its root."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.errors import ToolError
from kvgen.files import kind_of, link_below, named, names_in, read_bytes, read_text, remove_inside, write_inside


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def bound_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


def looped(path: Path) -> Path:
    path.symlink_to(path.name)
    return path


ODD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda p: p, "cannot be read (No such file or directory)"),
    "folder": (lambda p: p.parent, "not a file but a folder"),
    "fifo": (fifo, "not a file but a FIFO"),
    "device": (lambda p: Path("/dev/zero"), "not a file but a device"),
    "socket": (bound_socket, "cannot be read (No such device or address)"),
    "loop": (looped, "cannot be read (Too many levels of symbolic links)"),
    "below_a_file": (lambda p: Path("/etc/passwd/x"), "cannot be read (Not a directory)"),
    "nul": (lambda p: Path(f"{p}\0"), "cannot be read (no file name can have a NUL character)"),
    "surrogate": (lambda p: Path(f"{p}\ud800"), "cannot be read (no file name can have its characters)"),
    "long": (lambda p: Path("x" * 300), "cannot be read (File name too long)"),
    "empty": (lambda p: Path(""), "not a file but a folder"),
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file's path short enough for a socket."""
    monkeypatch.chdir(tmp_path)
    return Path("x")


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_file(name: str, short: Path) -> None:
    make, said = ODD[name]
    path = make(short)
    with pytest.raises(ToolError) as caught:
        read_bytes(path, limit=10)
    assert str(caught.value) == f"{named(path)}: {said}"
    assert str(caught.value).isprintable()
    with pytest.raises(ToolError, match=r"^that: "):
        read_bytes(path, limit=10, name="that")


def test_reading_is_bounded_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a\r\n" * 1000)
    assert read_text(path, limit=3000) == "a\r\n" * 1000
    with pytest.raises(ToolError, match=r"x: larger than 2999 bytes, the most that is read$"):
        read_bytes(path, limit=2999)
    path.write_bytes(b"ab\xff")
    with pytest.raises(ToolError, match=r"x: no UTF-8 \(byte 2\); save it as UTF-8$"):
        read_text(path, limit=10)


@pytest.mark.parametrize(("call", "said"), [("open", "cannot be read"), ("lstat", "cannot be looked at")])
def test_what_may_not_be_read(call: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, who runs many a CI, may read everything, the system's refusal is played."""

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ToolError) as caught:
        read_bytes(tmp_path, limit=1) if call == "open" else kind_of(tmp_path)
    monkeypatch.undo()
    assert str(caught.value) == f"{tmp_path}: {said} (Permission denied)"


def test_an_unreadable_folder_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ToolError, match=r"cannot be read \(Permission denied\)$"):
        names_in(tmp_path)


def test_names_are_shown_on_one_line() -> None:
    assert named("a/b c.py") == "a/b c.py"
    assert named("a\nb\x1b[31m\udcff") == "a\\nb\\x1b[31m\\udcff"


@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(name=st.text(st.characters(), max_size=300))
def test_any_name_is_read_or_refused(name: str) -> None:
    for action in (lambda: read_bytes(name, limit=1), lambda: kind_of(name), lambda: names_in(name)):
        try:
            action()
        except ToolError as error:
            assert str(error).isprintable()


# Writing --------------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_where_it_differs(tmp_path: Path) -> None:
    assert write_inside(tmp_path / "made", "a/b.txt", b"1")
    path = tmp_path / "made/a/b.txt"
    before = path.stat()
    assert not write_inside(tmp_path / "made", "a/b.txt", b"1")
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    other = tmp_path / "other"
    os.link(path, other)
    assert write_inside(tmp_path / "made", "a/b.txt", b"22")
    assert (path.read_bytes(), other.read_bytes()) == (b"22", b"1"), "a hard link from elsewhere keeps its bytes"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~os.umask(os.umask(0o22))
    assert os.listdir(path.parent) == ["b.txt"], "nothing temporary stays"


@pytest.mark.parametrize("link", ["a", "a/b"])
def test_no_folder_is_reached_through_a_link(link: str, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "c.txt").write_text("theirs")
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside / link.partition("/")[2])
    said = f"{root / link}: a link to {os.readlink(root / link)}; nothing is written through a link; put a folder there"
    with pytest.raises(ToolError) as caught:
        write_inside(root, "a/b/c.txt", b"ours")
    assert str(caught.value) == said
    with pytest.raises(ToolError) as caught:
        remove_inside(root, "a/b/c.txt")
    assert str(caught.value) == said
    assert (outside / "b" / "c.txt").read_text() == "theirs"
    assert link_below(root, "a/b/c.txt") == root / link


def test_a_link_in_a_files_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("theirs")
    (tmp_path / "root").mkdir()
    for target in (tmp_path / "outside", tmp_path / "nowhere"):
        link = tmp_path / "root/x"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert write_inside(tmp_path / "root", "x", b"theirs"), "even with the same bytes behind it"
        assert kind_of(link) == "file"
    assert (tmp_path / "outside").read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()


def test_a_root_that_is_a_link_is_the_users_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    assert write_inside(tmp_path / "root", "a/x", b"1")
    assert (tmp_path / "real/a/x").read_bytes() == b"1"
    assert link_below(tmp_path / "root", "a/x") is None


def test_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder/x").mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo")
    for path, said in (
        ("file/x", "/file: cannot be written below: a file is in the folder's place"),
        ("fifo/x", "/fifo: cannot be written below: a FIFO is in the folder's place"),
        ("folder/x", "/folder/x: cannot be written (Is a directory)"),
        ("folder/\0", "/folder/\\x00: cannot be written (no file name can have a NUL character)"),
        ("y" * 300, f"/{'y' * 300}: cannot be written (File name too long)"),
    ):
        with pytest.raises(ToolError) as caught:
            write_inside(tmp_path, path, b"1")
        assert str(caught.value) == f"{tmp_path}{said}"
    assert write_inside(tmp_path, "fifo", b"1"), "a FIFO in a file's place is replaced without being opened"
    with pytest.raises(ToolError, match=r"/nothing: cannot be removed \(No such file or directory\)$"):
        remove_inside(tmp_path, "nothing")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inside(tmp_path, "x", b"old")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ToolError, match=r"x: cannot be written \(No space left on device\)$"):
        write_inside(tmp_path, "x", b"new")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"old"


def test_removing_takes_the_folders_that_it_empties(tmp_path: Path) -> None:
    for path in ("out/a/b/x", "out/a/y"):
        write_inside(tmp_path, path, b"")
    remove_inside(tmp_path, "out/a/b/x", keep="out")
    assert names_in(tmp_path / "out/a") == ["y"]
    remove_inside(tmp_path, "out/a/y", keep="out")
    assert names_in(tmp_path / "out") == []

"""Paths from outside: whatever lies at one, reading is a ToolError of one line, and writing stays inside its root."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.errors import ToolError
from kvgen.files import (
    is_left_over,
    kind_of,
    link_below,
    locked,
    named,
    names_in,
    read_bytes,
    read_text,
    remove_inside,
    remove_left_overs,
    write_inside,
)


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
    (tmp_path / "out/empty").mkdir()
    remove_inside(tmp_path, "out/empty", keep="out")
    assert names_in(tmp_path / "out") == []


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\xef\xbb\xbf")
    assert read_text(tmp_path / "x", limit=10) == "a\ufeff"


LEFT_OVER = ".append.cu.0123456789abcdef"


def test_what_a_stopped_write_leaves(tmp_path: Path) -> None:
    """Known by its name, if it is a file that nobody holds; links and folders of that name are others' work."""
    kept = (
        "append.cu",
        ".append.cu",
        ".append.cu.0123456789abcde",
        ".append.cu.0123456789ABCDEF",
        "append.cu.0123456789abcdef",
    )
    for name in (LEFT_OVER, *kept):
        (tmp_path / name).write_text("half of a ke", encoding="utf-8")
    (tmp_path / ".link.0123456789abcdef").symlink_to("append.cu")
    (tmp_path / ".folder.0123456789abcdef").mkdir()
    assert {name for name in names_in(tmp_path) if is_left_over(tmp_path / name)} == {LEFT_OVER}
    with (tmp_path / LEFT_OVER).open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert not is_left_over(tmp_path / LEFT_OVER)
        remove_left_overs(tmp_path)
        assert kind_of(tmp_path / LEFT_OVER) == "file"
    before = set(names_in(tmp_path))
    remove_left_overs(tmp_path)
    assert set(names_in(tmp_path)) == before - {LEFT_OVER}
    assert not is_left_over(tmp_path / LEFT_OVER)
    remove_left_overs(tmp_path / "missing")


def test_a_write_survives_that_its_temporary_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock another process may take it for a left-over."""
    replace, lost = os.replace, []

    def after_a_removal(new: str, name: str, **folders: int) -> None:
        if len(lost) < 3:
            lost.append(new)
            os.unlink(new, dir_fd=folders["src_dir_fd"])
        replace(new, name, **folders)

    monkeypatch.setattr(os, "replace", after_a_removal)
    assert write_inside(tmp_path, "x", b"new")
    assert len(set(lost)) == 3 and os.listdir(tmp_path) == ["x"]


def test_a_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    """The file of the lock is there while somebody is inside; one that a killed process left is taken over."""
    counter = tmp_path / "folder/count"
    (tmp_path / "folder").mkdir()
    counter.write_text("0", encoding="utf-8")
    (tmp_path / "folder/.lock").write_text("", encoding="utf-8")

    def count() -> None:
        for _ in range(50):
            with locked(tmp_path / "folder", ".lock"):
                counter.write_text(str(int(counter.read_text(encoding="utf-8")) + 1), encoding="utf-8")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text(encoding="utf-8") == "200" and names_in(tmp_path / "folder") == ["count"]
    os.mkfifo(tmp_path / "folder/.lock")
    with pytest.raises(ToolError, match=r"/folder/\.lock: not a file but a FIFO; remove it$"):
        locked(tmp_path / "folder", ".lock").__enter__()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ToolError, match=r"/file/\.lock: cannot be written \(File exists\)$"):
        locked(tmp_path / "file", ".lock").__enter__()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written all the same; what must be alone says that it cannot be."""

    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert write_inside(tmp_path, "x", b"new")
    (tmp_path / LEFT_OVER).write_text("", encoding="utf-8")
    remove_left_overs(tmp_path)
    assert names_in(tmp_path) == ["x"]
    with pytest.raises(
        ToolError, match=r"/\.lock: cannot be locked \(Operation not supported\), so .*; choose a folder on a "
    ):
        locked(tmp_path, ".lock").__enter__()

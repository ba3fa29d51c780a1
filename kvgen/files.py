"""Files and folders that come from outside: read whole and bounded, written in one step, never through a link.

Whatever a path is (a FIFO, a device, a folder, a link that turns in circles, a name with NUL or half a surrogate pair in it)
and whatever the file system answers, what ends here is a `ToolError` of one line that names the path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, Literal

from kvgen.errors import ToolError

FileKind = Literal["missing", "file", "folder", "link", "FIFO", "device", "socket"]
AnyPath = str | os.PathLike[str]

_KINDS: Final[dict[int, FileKind]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
}
_READ: Final = os.O_RDONLY | os.O_CLOEXEC
_FOLDER: Final = _READ | os.O_DIRECTORY | os.O_NOFOLLOW
_MADE: Final = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{16}", re.DOTALL)
_ATTEMPTS: Final = 8  # of a write whose temporary file another process took for a left-over


def named(path: AnyPath) -> str:
    """A path as messages show it: on one line, in characters that every stream takes."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)[1:-1]


def reason(error: OSError | ValueError) -> str:
    """The file system's objection, in a few words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeError):
        return "no file name can have its characters"
    return "no file name can have a NUL character" if "null" in str(error) else str(error)


def kind_of(path: AnyPath) -> FileKind:
    """Kind of the file at a path, a link being a link. Raises ToolError where that cannot be found out."""
    try:
        return _kind(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as error:
        raise ToolError(f"{named(path)}: cannot be looked at ({reason(error)})") from error


def is_folder(path: AnyPath) -> bool:
    """True: a folder is at a path, or where a link there leads. Raises ToolError where that cannot be found out."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise ToolError(f"{named(path)}: cannot be looked at ({reason(error)})") from error


def _kind(mode: int) -> FileKind:
    return _KINDS.get(stat.S_IFMT(mode), "device")


def target_of(link: AnyPath) -> str:
    """Where a link leads, as it is written in it."""
    try:
        return named(os.readlink(link))
    except OSError as error:
        return f"nobody knows where ({reason(error)})"


def opened(path: AnyPath, name: str | None = None) -> BinaryIO:
    """A regular file, open for reading; messages call it `name`, by default its path."""
    shown = name or named(path)
    try:
        handle = os.open(path, _READ | os.O_NONBLOCK)  # a FIFO without a writer would block the open itself
        kind = _kind(os.fstat(handle).st_mode)
    except (OSError, ValueError) as error:
        raise ToolError(f"{shown}: cannot be read ({reason(error)})") from error
    if kind != "file":
        os.close(handle)
        raise ToolError(f"{shown}: not a file but a {kind}")
    return os.fdopen(handle, "rb")


def read_bytes(path: AnyPath, *, limit: int, name: str | None = None) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; messages call it `name`, by default its path."""
    shown = name or named(path)
    with opened(path, name) as file:
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise ToolError(f"{shown}: cannot be read ({reason(error)})") from error
    if len(data) > limit:
        raise ToolError(f"{shown}: larger than {_size(limit)}, the most that is read")
    return data


def read_text(path: AnyPath, *, limit: int, name: str | None = None) -> str:
    """The UTF-8 text of a regular file, its line endings as they are, without a byte order mark."""
    data = read_bytes(path, limit=limit, name=name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ToolError(f"{name or named(path)}: no UTF-8 (byte {error.start}); save it as UTF-8") from None


def _size(count: int) -> str:
    return f"{count} bytes" if count % 2**20 else f"{count >> 20} MiB"


def names_in(folder: AnyPath) -> list[str]:
    """The names in a folder, in order."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        raise ToolError(f"{named(folder)}: cannot be read ({reason(error)})") from error


def link_below(root: Path, path: str) -> Path | None:
    """The first part of `path`, relative to `root`, that is a link; None where there is none. The root itself may be one."""
    at = root
    for part in PurePosixPath(path).parts:
        at = at / part
        if kind_of(at) == "link":
            return at
    return None


def write_inside(root: Path, path: str, data: bytes) -> bool:
    """Replace the file `path` below `root` in one step where its bytes are others; whether they were.

    Missing folders are made. No part of `path` may be a link but the last, which is replaced and not followed.
    Raises ToolError.
    """
    *folders, name = PurePosixPath(path).parts
    shown = named(root / path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _opened(root, folders, make=True) as folder:
            if _same(folder, name, data):
                return False
            _replace(folder, name, data)
            return True
    except (OSError, ValueError) as error:
        raise ToolError(f"{shown}: cannot be written ({reason(error)})") from error


def remove_inside(root: Path, path: str, keep: str = "") -> None:
    """Remove the file or empty folder `path` below `root`, and the folders below `keep` that this empties. Raises ToolError."""
    *folders, name = PurePosixPath(path).parts
    try:
        with _opened(root, folders, make=False) as folder:
            remove = os.rmdir if kind_of(root / path) == "folder" else os.unlink
            remove(name, dir_fd=folder)
        for parent in PurePosixPath(path).parents:
            if parent in (PurePosixPath(keep), PurePosixPath()):
                break
            with contextlib.suppress(OSError):  # it holds something else
                os.rmdir(root / parent)
    except (OSError, ValueError) as error:
        raise ToolError(f"{named(root / path)}: cannot be removed ({reason(error)})") from error


@contextmanager
def _opened(root: Path, folders: list[str], *, make: bool) -> Iterator[int]:
    """A handle of the folder below `root`, each part opened in the one before it, so that no link can come in between."""
    handle = os.open(root, _READ | os.O_DIRECTORY)
    at = root
    try:
        for part in folders:
            at = at / part
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            try:
                inner = os.open(part, _FOLDER, dir_fd=handle)
            except OSError as error:
                kind = kind_of(at)
                if kind == "link":
                    raise ToolError(
                        f"{named(at)}: a link to {target_of(at)}; nothing is written through a link; put a folder there"
                    ) from error
                if kind not in ("folder", "missing"):
                    raise ToolError(
                        f"{named(at)}: cannot be written below: a {kind} is in the folder's place"
                    ) from error
                raise
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _same(folder: int, name: str, data: bytes) -> bool:
    try:
        handle = os.open(name, _READ | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return False
    if _kind(os.fstat(handle).st_mode) != "file":
        os.close(handle)
        return False
    with os.fdopen(handle, "rb") as file:
        return file.read(len(data) + 1) == data


def _replace(folder: int, name: str, data: bytes) -> None:
    """Write a temporary file beside `name`, held by a lock while its writer lives, and rename it."""
    for attempt in range(_ATTEMPTS):
        new = f".{name[:200]}.{secrets.token_hex(8)}"
        handle = os.open(new, os.O_WRONLY | os.O_EXCL | _MADE, 0o666, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                with contextlib.suppress(
                    OSError
                ):  # a file system without locks, or another process that looks at the file
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(data)
                file.flush()
                os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            return
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            # Before it was locked, another process may have removed it as a left-over.
            if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                raise


def is_temporary(path: AnyPath) -> bool:
    """True for the name that a file of kvgen has until it is written: `.<name>.<16 hexadecimal digits>`."""
    return _TEMPORARY.fullmatch(os.path.basename(os.fspath(path))) is not None


def is_left_over(path: AnyPath) -> bool:
    """True for a file that a stopped write left behind: a temporary file by its name, which no process holds."""
    if not is_temporary(path) or kind_of(path) != "file":
        return False
    try:
        handle = os.open(path, _READ | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:  # its writer has just finished
        return False
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks; a writer whose file is removed writes another one
        return True
    finally:
        os.close(handle)
    return True


def remove_left_overs(root: Path, folder: str = "") -> None:
    """Remove the files that stopped writes left behind in the folder `folder` of `root`, not below it. Raises ToolError."""
    place = root / folder
    if link_below(root, folder) is None and kind_of(place) == "folder":
        for name in names_in(place):
            if is_left_over(place / name):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    os.unlink(place / name)


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Let one process or thread at a time in; the others wait. Makes `root` where it is missing. Raises ToolError.

    The lock is on the file `name` of `root`, which is there while somebody is inside. A process that is killed inside leaves the
    file, and no lock.
    """
    path = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = _lock(path)
    except (OSError, ValueError) as error:
        raise ToolError(f"{named(path)}: cannot be written ({reason(error)})") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(handle)


def _lock(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | _MADE, 0o666)
        try:
            if _kind(os.fstat(handle).st_mode) != "file":
                raise ToolError(f"{named(path)}: not a file but a {_kind(os.fstat(handle).st_mode)}; remove it")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                raise ToolError(
                    f"{named(path)}: cannot be locked ({reason(error)}), so another process could write, too; choose a "
                    "folder on a local disk"
                ) from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(path)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # whoever was inside has removed this file: the next one is another

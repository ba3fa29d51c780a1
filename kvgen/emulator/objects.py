"""The cache's files: shared objects that carry their checksum, and the scratch folders of those who make them.

A file is a shared object as the linker made it, then `facts`, what Python must know of it, then the length of the facts (8
bytes) and the SHA-256 of the file's name and of all before it. The dynamic loader does not look behind the object's
segments. What belongs together is thus one file, replaced atomically; one that is damaged, moved to another name or no
regular file is made anew, never loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SIZE_LIMIT: Final = 1 << 30  # bytes of a folder's objects; the least recently used go first
_LENGTH: Final = 8
_CHECKSUM: Final = 32
_YOUNG: Final = 60.0  # seconds: a scratch folder may not be locked yet
_OLD: Final = 24 * 3600.0  # seconds: nobody works that long, whatever became of the lock


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def read_facts(path: Path) -> bytes | None:
    """The facts of the object at `path`, once its checksum is right; None for one that cannot be trusted."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return None
            data = file.read()
    except OSError:
        return None
    content = data[:-_CHECKSUM]
    if len(content) < _LENGTH or data[-_CHECKSUM:] != _checksum(path.name, content):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    end = len(content) - _LENGTH
    return content[end - int.from_bytes(content[end:], "little") : end]


def put(made: Path, facts: bytes, target: Path) -> None:
    """Complete the object `made`, which lies in a scratch folder, and put it in the place of whatever is at `target`."""
    content = made.read_bytes() + facts + len(facts).to_bytes(_LENGTH, "little")
    made.write_bytes(content + _checksum(target.name, content))
    while True:
        try:
            os.replace(made, target)
            break
        except IsADirectoryError:  # it goes with the scratch folder
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, tempfile.mkdtemp(dir=made.parent))
    _evict(target.parent, SIZE_LIMIT)


def _evict(folder: Path, limit: int) -> None:
    """Remove the least recently used objects beyond `limit` bytes. A process that has loaded one keeps it."""
    found = []
    # After each compilation, of a thousand objects: one system call a file. A folder may be writable and not readable.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.endswith(".so") and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, entry.path))
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > limit:
            with contextlib.suppress(OSError):
                os.unlink(path)


# ---------------------------------------------------------------- scratch folders and locks
@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`; without a lock where the file system, or what lies there, allows none."""
    handle = -1
    try:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle >= 0:
            os.close(handle)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, removed at the end; what killed processes have left is removed before.

    Its owner holds a lock in it, which ends with the process, however that ends.
    """
    for path in folder.glob("tmp*"):
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as own, locked(Path(own) / "lock"):
        yield Path(own)


def _abandoned(path: Path) -> bool:
    """Whether nobody works in this scratch folder any more."""
    try:
        status = path.lstat()
        age = time.time() - status.st_mtime
        if not stat.S_ISDIR(status.st_mode) or age < _YOUNG:
            return False
        if age > _OLD:
            return True
        handle = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # its owner lives, or the file system has no locks
        return False
    finally:
        os.close(handle)

"""Compiled kernels kept on disk from one run to the next.

The store is `cuda.core`'s: one file an entry, replaced atomically, shared safely between processes. What is added
here: our own keys, a checksum (an entry that does not match is recompiled, never trusted), counters, and a folder that
cannot be written costs one warning instead of the compile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgen.errors import ToolError
from kvgen.paths import cache_folder

_SIZE_LIMIT: Final = 1 << 30  # bytes; the least recently read entries go first
_CHECKSUM_BYTES: Final = 32


@dataclass(frozen=True)
class CacheStats:
    """`entries` and `nbytes` are on disk now; the counters are this process's. `trouble` says why it is not written."""

    folder: Path
    entries: int
    nbytes: int
    hits: int
    misses: int
    corrupt: int
    trouble: str | None


class Cache:
    """A folder of checksummed entries. Thread-safe; nothing is touched before the first get or put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._store: Any = None
        self._readable = True
        self._trouble: str | None = None
        self._hits = self._misses = self._corrupt = 0

    def get(self, key: bytes, *, again: bool = False) -> bytes | None:
        """The bytes stored under `key`, or None when there are none that can be trusted. `again`: a miss was counted before."""
        store = self._open()
        entry: bytes | None = None
        if store is not None:
            try:
                entry = store.get(key)
            except OSError as error:
                self._give_up(error)
        payload = None if entry is None else entry[_CHECKSUM_BYTES:]
        intact = payload is not None and entry is not None and entry[:_CHECKSUM_BYTES] == _checksum(key, payload)
        with self._lock:
            self._hits += intact
            self._misses += not intact and not again
            self._corrupt += entry is not None and not intact and not again
        return payload if intact else None

    def put(self, key: bytes, payload: bytes) -> None:
        """Store `payload`; a folder that cannot be written gives one warning in the life of this object."""
        store = self._open()
        if store is None or self._trouble is not None:
            return
        try:
            store[key] = _checksum(key, payload) + payload
        except OSError as error:
            self._give_up(error)

    @contextlib.contextmanager
    def alone(self, key: bytes) -> Iterator[None]:
        """While one thread or process is inside for `key`, the others wait; without locks where the system has none."""
        handle = -1
        try:
            with contextlib.suppress(ImportError, OSError):
                fcntl = importlib.import_module("fcntl")
                # 256 locks for all keys: whoever waits for another key's compile waits once.
                path = self.folder / "locks" / hashlib.sha256(key).hexdigest()[:2]
                path.parent.mkdir(exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            if handle >= 0:
                os.close(handle)

    def stats(self) -> CacheStats:
        """Counters of this process and the size on disk. Does not create the folder."""
        sizes = []
        for folder, _, names in os.walk(self.folder / "entries"):
            for name in names:
                try:
                    sizes.append((Path(folder) / name).stat().st_size)
                except OSError:  # another process has just evicted it
                    continue
        with self._lock:
            return CacheStats(
                self.folder, len(sizes), sum(sizes), self._hits, self._misses, self._corrupt, self._trouble
            )

    def _open(self) -> Any:
        with self._lock:
            if self._store is None and self._readable:
                kind = _store_class()
                try:
                    self._store = kind(self.folder, max_size_bytes=_SIZE_LIMIT)
                    return self._store
                except OSError as error:
                    self._readable = False
                    problem = error
            else:
                return self._store
        self._give_up(problem)
        return None

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            if self._trouble is not None:
                return
            self._trouble = f"{error.strerror or error}"
        warnings.warn(
            f"compile cache {self.folder}: {self._trouble}; kernels are compiled anew each time; "
            f"set KVGEN_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )


def _checksum(key: bytes, payload: bytes) -> bytes:
    # With the key, so that an entry moved to another name is as untrusted as a damaged one.
    return hashlib.sha256(key + payload).digest()


def _store_class() -> Any:
    try:
        return importlib.import_module("cuda.core.utils").FileStreamProgramCache
    except (ImportError, AttributeError) as error:
        raise ToolError(
            f"cuda.core: its FileStreamProgramCache cannot be imported ({error}); "
            f"install it with `pip install -U cuda-core`"
        ) from error


def default_cache() -> Cache:
    """The compile cache of this user: the same object for the same folder, so that its counters add up."""
    return _cache_at(cache_folder() / "nvrtc")


@functools.cache
def _cache_at(folder: Path) -> Cache:
    return Cache(folder)

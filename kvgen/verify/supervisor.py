"""Child processes that do work which may hang, crash or lose a GPU's context: such work costs one item, and the run goes on.

The parent sends items to children one at a time and reads their answers. A child that is silent for too long is killed with
all processes that it started, and so is one whose device is lost; another child takes the next item. `kvgen.verify.worker` is
the child's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Self

from kvgen.errors import DeviceError

Key = tuple[str, ...]

CASE_PATIENCE: Final = 8.0  # seconds without an answer: a launch that should take milliseconds, with its copies
TIMING_PATIENCE: Final = 30.0  # a timing, or a probe of the calibration
HOST_PATIENCE: Final = 120.0  # oracles and compilers, which do not hang
ITEMS_EACH: Final = 100  # items that a child does before another takes its place
START_PATIENCE: Final = 60.0  # seconds for imports and a context
GRACE: Final = 5.0  # seconds that running items have when time is up
_REAP: Final = 5.0  # seconds that a killed process may take to end
_STARTS: Final = 3  # children in a row that may fail to start, once one has started
_STDERR: Final = 4096  # bytes kept of each child's last messages
_DIE: Final = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Item:
    """One piece of work. The child gets `key` and `given` (JSON). `patience`: seconds of silence until the child counts as hung.
    An `exclusive` item runs while no other does."""

    key: Key
    patience: float
    given: Mapping[str, Any] = field(default_factory=dict)
    exclusive: bool = False


@dataclass(frozen=True)
class Answer:
    """The result of an item: `wrong` is empty where all is right, `content` is the child's. `ended`: the child ended in it."""

    item: Item
    wrong: tuple[str, ...]
    content: Mapping[str, Any]
    seconds: float
    ended: bool = False


def die_with_parent() -> None:
    """Between fork and exec: let the kernel kill this process when its parent ends, however that ends. Linux only."""
    if _libc is not None:
        _libc.prctl(_DIE, signal.SIGKILL)


class _Child:
    """One process, and the item that it works on."""

    def __init__(self, command: Sequence[str], cwd: Path | None, environment: Mapping[str, str] | None) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that one signal reaches all processes it starts
            preexec_fn=die_with_parent,
        )
        self.item: Item | None = None
        self.ready = False
        self.done = 0
        self.began = self.limit = self.allowed = 0.0
        self._line = b""
        self._said = b""
        for stream in self.streams:
            os.set_blocking(stream.fileno(), False)

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes]]:
        """stdout, which has the answers, and stderr."""
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout, self.process.stderr

    def send(self, message: Mapping[str, Any], seconds: float) -> None:
        """Send a message, whose answer may take so many seconds. A child that has ended says so on its stdout."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Count the seconds of silence from now."""
        self.limit, self.allowed = time.monotonic() + seconds, seconds

    def read(self) -> list[dict[str, Any]] | None:
        """Messages that have come; None where the child has closed its stdout."""
        out, said = self.streams
        self._keep(_available(said)[0])
        data, closed = _available(out)
        *lines, self._line = (self._line + data).split(b"\n")
        return None if closed and not lines else [m for line in lines if (m := self._message(line)) is not None]

    def _message(self, line: bytes) -> dict[str, Any] | None:
        """The message in a line; None if it has none, for a library wrote it before answers had a stream of their own."""
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        self._keep(line + b"\n")
        return None

    def _keep(self, said: bytes) -> None:
        self._said = (self._said + said)[-_STDERR:]

    def leave(self) -> None:
        """Let a process that has closed its stdout end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP)

    def end(self) -> None:
        """Kill it, and all that it started, if that has not ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP)
        self._keep(_available(self.streams[1])[0])
        for stream in (self.process.stdin, *self.streams):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def how_it_ended(self) -> str:
        """Its signal or exit code, and the last line that it wrote."""
        code = self.process.returncode
        how = "and does not end" if code is None else f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"by signal {-code}"
        lines = self._said.decode(errors="replace").strip().splitlines()
        return f"the process ended {how}{f': {lines[-1]}' if lines else ''}"


def _available(stream: IO[bytes]) -> tuple[bytes, bool]:
    """Bytes that can be read without waiting, and whether the other end is closed."""
    found = b""
    while True:
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return found, False
        if not data:
            return found, True
        found += data


class Supervisor:
    """Runs items in up to `jobs` children, which `command` starts in `cwd` with `environment` (None: this process's).

    A context manager: no child outlives it. SIGTERM raises SystemExit inside it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        jobs: int = 1,
        items_each: int = ITEMS_EACH,
        start_patience: float = START_PATIENCE,
        grace: float = GRACE,
    ) -> None:
        self._command, self._cwd, self._environment = list(command), cwd, environment
        self._jobs, self._items_each = jobs, items_each
        self._start_patience, self._grace = start_patience, grace
        self._children: list[_Child] = []
        self._spare: _Child | None = None
        self._selector = selectors.DefaultSelector()
        self._started = False  # a child has been ready once
        self._failures = 0  # children in a row that were not
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(self, *_: object) -> None:
        for child in [*self._children, *([self._spare] if self._spare else [])]:
            child.end()
        self._children, self._spare = [], None
        self._selector.close()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def run(self, items: Iterable[Item], until: float | None = None) -> Iterator[Answer]:
        """Answers as they come. `until` (time.monotonic()): no item begins after it; those that run then have a few seconds
        more, and have no answer where they need longer.

        Raises DeviceError where no child can start.
        """
        waiting = deque(items)
        while waiting or any(child.item for child in self._children):
            now = time.monotonic()
            if until is not None and now >= until:
                waiting.clear()
            while waiting and (child := self._child_for(waiting[0])) is not None:
                self._begin(child, waiting.popleft())
            if not any(child.item for child in self._children):
                continue
            limit = min(child.limit for child in self._children if child.item)
            if until is not None:
                limit = min(limit, until + self._grace)
            self._selector.select(max(0.0, limit - time.monotonic()))
            for child in list(self._children):
                if child.item is None and child.process.poll() is not None:
                    self._retire(child)
                answer = self._heard(child, waiting) if child.item else None
                if answer is not None:
                    self._prepare_spare(child, waiting)
                    yield answer
            if until is not None and time.monotonic() >= until + self._grace:
                for child in [c for c in self._children if c.item]:
                    self._retire(child)

    def _child_for(self, item: Item) -> _Child | None:
        """A child that can take an item now; None where others have to finish before."""
        busy = [c for c in self._children if c.item]
        if busy and (item.exclusive or any(c.item and c.item.exclusive for c in busy)):
            return None
        for child in [c for c in self._children if not c.item]:
            if child.done >= self._items_each or child.process.poll() is not None:
                self._retire(child)
        free = [c for c in self._children if not c.item]
        if free:
            return free[0]
        if len(self._children) >= self._jobs:
            return None
        child = self._spare or self._start()
        self._spare = None
        self._children.append(child)
        for stream in child.streams:
            self._selector.register(stream, selectors.EVENT_READ)
        return child

    def _start(self) -> _Child:
        return _Child(self._command, self._cwd, self._environment)

    def _begin(self, child: _Child, item: Item) -> None:
        child.item = item
        if child.ready:
            self._send(child)
        else:
            child.send({"begin": True}, self._start_patience)

    def _send(self, child: _Child) -> None:
        assert child.item is not None
        child.began = time.monotonic()
        child.send({"key": child.item.key, "given": child.item.given}, child.item.patience)

    def _heard(self, child: _Child, waiting: deque[Item]) -> Answer | None:
        """The answer that a child's messages, or its silence, amount to; None while it works."""
        assert child.item is not None
        item, messages = child.item, child.read()
        for message in messages or ():
            if "more" in message:
                child.wait(message["more"])
            elif "ready" in message:
                child.ready, self._started, self._failures = True, True, 0
                self._send(child)
            elif "refused" in message:
                self._not_started(child, waiting, message["refused"])
                return None
            else:
                return self._answered(child, message)
        if messages is not None and time.monotonic() < child.limit:
            return None
        silent = messages is not None
        began, ready = child.began, child.ready
        if not silent:
            child.leave()
        self._retire(child)
        why = f"no answer after {child.allowed:g} s" if silent else child.how_it_ended()
        if not ready:
            self._not_started(child, waiting, f"the child process did not start: {why}")
            return None
        return Answer(item, (why,), {}, time.monotonic() - began, ended=True)

    def _answered(self, child: _Child, message: Mapping[str, Any]) -> Answer:
        assert child.item is not None
        item, child.item = child.item, None
        child.done += 1
        lost = bool(message["lost"])
        if lost:
            self._retire(child)
        content = message["content"]
        return Answer(item, tuple(message["wrong"]), content, time.monotonic() - child.began, ended=lost)

    def _not_started(self, child: _Child, waiting: deque[Item], why: str) -> None:
        """Give the item to another child. Where others run, there is one child fewer from now on: the device takes no more."""
        item, child.item = child.item, None
        if child in self._children:
            self._retire(child)
        others = [c for c in self._children if c.ready]
        self._failures += 1
        if not self._started or (not others and self._failures >= _STARTS):
            raise DeviceError(why)
        if others:
            self._jobs = len(others)
        assert item is not None
        waiting.appendleft(item)

    def _retire(self, child: _Child) -> None:
        """End a child, which has no answer to give any more."""
        for stream in child.streams:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(stream)
        child.end()
        self._children.remove(child)

    def _prepare_spare(self, child: _Child, waiting: deque[Item]) -> None:
        """Start the next child before it is needed, so that nobody waits for its imports."""
        ends_soon = child not in self._children or 2 * child.done >= self._items_each
        if self._spare is None and ends_soon and len(waiting) > len(self._children):
            self._spare = self._start()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

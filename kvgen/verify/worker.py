"""The child's side of `kvgen.verify.supervisor`: items come on stdin, answers go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from kvgen.errors import KvgenError

Clock = Callable[[float], None]


@dataclass(frozen=True)
class Done:
    """The result of an item: what is wrong, a line each, and its content, which JSON must take."""

    content: Mapping[str, Any] = field(default_factory=dict)
    wrong: Sequence[str] = ()


class Worker(Protocol):
    """The work of a child process."""

    def begin(self) -> None:
        """Take the device. Raises KvgenError where there is none."""
        ...

    def do(self, key: Sequence[str], given: Mapping[str, Any], clock: Clock) -> Done:
        """One item. `clock(seconds)` tells the parent that the next answer may take so long from now on."""
        ...

    def alive(self) -> bool:
        """True while the device takes work."""
        ...


def serve(worker: Worker) -> None:
    """Answer items until stdin ends, or the device is lost."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints of kernels and libraries are no answers

    def clock(seconds: float) -> None:
        _say(answers, {"more": seconds})

    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "begin" in message:
            try:
                worker.begin()
            except KvgenError as error:
                _say(answers, {"refused": str(error)})
                return
            _say(answers, {"ready": True})
            continue
        done = _done(worker, message["key"], message["given"], clock)
        lost = bool(done.wrong) and not worker.alive()
        _say(answers, {"wrong": list(done.wrong), "content": dict(done.content), "lost": lost})
        if lost:
            return


def _done(worker: Worker, key: Sequence[str], given: Mapping[str, Any], clock: Clock) -> Done:
    try:
        return worker.do(key, given, clock)
    except Exception as error:
        return Done({"traceback": traceback.format_exc()}, [f"{type(error).__name__}: {error}"])


def _say(answers: BinaryIO, message: Mapping[str, Any]) -> None:
    data = json.dumps(message, default=_plain).encode() + b"\n"
    while data:
        data = data[answers.write(data) :]


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's."""
    return value.tolist()

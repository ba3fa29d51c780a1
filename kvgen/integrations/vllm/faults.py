"""What kernels met in device memory: one word a device, asked once a step and a last time when the process ends."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Final

from kvgen.errors import KvgenError
from kvgen.runtime.error_word import ErrorWord
from kvgen.runtime.faults import FaultError

_LOG: Final = logging.getLogger("vllm.kvgen")


class StepFaults:
    """The error word that all layers of a device report to."""

    def __init__(self, device: str) -> None:
        self.word = ErrorWord(device)
        self._last = weakref.finalize(self, _last_look, self.word)

    def look(self, stream: object = None) -> None:
        """Raise FaultError if a step before this one met wrong data, as far as it is known; never waits.

        On a GPU a fault shows a step or two later.
        """
        report = self.word.poll(stream)
        if report is not None:
            self._last.detach()
            raise FaultError(report)

    def close(self) -> None:
        """Wait for the last step and log what it met. Runs by itself when the process ends."""
        self._last()


def _last_look(word: ErrorWord) -> None:
    try:
        word.raise_if_set()
    except FaultError as error:
        _LOG.error("kvgen: the last step met wrong data, its tokens are not to be trusted: %s", error)
    except KvgenError as error:  # a device that is gone by now
        _LOG.warning("kvgen: what the last step met cannot be read: %s", error)


@functools.cache
def faults_of(device: str) -> StepFaults:
    """The one of `device`, "cpu" or "cuda:<ordinal>"."""
    return StepFaults(device)

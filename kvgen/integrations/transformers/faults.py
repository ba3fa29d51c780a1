"""Faults of kernels: the error word of a cache, asked once a step without a wait, and when the cache goes."""

from __future__ import annotations

import warnings

import torch

from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime.error_word import ErrorWord
from kvgen.runtime.faults import FaultError


class Faults:
    """The error word of one cache on `device`; `what` is the cache's name in the warning.

    A fault that nobody was told of when the cache goes becomes a RuntimeWarning.
    """

    def __init__(self, device: torch.device, what: str) -> None:
        self.device, self.what, self.told = device, what, False
        self.word = ErrorWord("cpu" if device.type == "cpu" else f"cuda:{device.index or 0}")

    def poll(self) -> None:
        """Raise FaultError for a fault that is known by now; does not wait."""
        report = self.word.poll(stream_of(self.device))
        if report is not None:
            self.told = True
            raise FaultError(report)

    def wait(self) -> None:
        """Wait for the current stream; raise FaultError if a kernel met wrong data."""
        try:
            self.word.raise_if_set(stream_of(self.device))
        except FaultError:
            self.told = True
            raise

    def end(self) -> None:
        """Wait as `wait` does, and forget what was reported; raises FaultError for a fault that was not told."""
        told = self.told
        try:
            self.wait()
        except FaultError:
            if not told:
                raise
        finally:
            self.told = False
            self.word.clear(stream_of(self.device))

    def __del__(self) -> None:
        if getattr(self, "told", True) or not hasattr(self, "word"):
            return
        try:
            self.wait()
        except (ArgumentError, DeviceError):  # a capture is under way, or there is no GPU any more
            return
        except FaultError as fault:
            warnings.warn(
                f"a {self.what} is gone whose kernels met wrong data in its last step: {fault}",
                RuntimeWarning,
                stacklevel=1,
            )


def stream_of(device: torch.device) -> object:
    """The stream that PyTorch launches to on a GPU; None on the CPU, which has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None

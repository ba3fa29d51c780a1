"""An error word that kvgen holds: kernels report to it, the host asks it now and then."""

from __future__ import annotations

import ctypes
from typing import Final

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, Viewed
from kvgen.runtime.faults import NO_FAULT, FaultError, FaultReport, describe
from kvgen.runtime.memory import DeviceMemory, PinnedMemory, ordinal_of
from kvgen.runtime.stream import no_stream, stream_handle

_BYTES: Final = 8


class ErrorWord(Viewed):
    """A u64 on `device`, "cpu" or "cuda:<ordinal>" (`cache.device`), for the `errors` of every operation; it begins cleared.

    Its methods take the stream of the launches, or one that waits for them; on the CPU, where launches are done when they
    return, there is none. One thread at a time may call them. Allocates here and never later. Raises ArgumentError for
    another device, DeviceError where there is no such GPU.
    """

    def __init__(self, device: str) -> None:
        ordinal = ordinal_of(device)
        self.device: Final = "cpu" if ordinal is None else f"cuda:{ordinal}"
        self._held: _HostWord | _DeviceWord = _HostWord() if ordinal is None else _DeviceWord(ordinal)
        self.view = ArrayView(self._held.pointer, (1,), (1,), "u64", self.device, False, self._held)

    def raise_if_set(self, stream: object = None) -> None:
        """Wait for `stream` and raise FaultError, the first fault in its text, if a kernel reported one; it stays reported.

        Raises ArgumentError while `stream` captures a graph, which nothing can wait for.
        """
        report = self._held.wait(stream)
        if report is not None:
            raise FaultError(report)

    def clear(self, stream: object = None) -> None:
        """Forget what was reported, behind the work of `stream`; does not wait.

        In a capture it becomes part of the graph: each replay clears.
        """
        self._held.clear(stream)

    def poll(self, stream: object = None) -> FaultReport | None:
        """The first fault as far as it is known, None if there is none so far; never waits.

        On a GPU a call asks for a copy of the word, behind the work of `stream`, and a later call that finds it arrived
        tells what it says and asks for the next. So a fault shows at the second call after it or later, and polling once a
        step costs no wait. No copy is asked for while `stream` captures a graph, or while the default stream would break
        the capture of another: such a call only tells what is known.
        """
        return self._held.poll(stream)

    def __repr__(self) -> str:
        return f"ErrorWord({self.device!r})"


class _HostWord:
    """The word in host memory, which kernels of the CPU machine write before their launch returns."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint64(NO_FAULT)
        self.pointer = ctypes.addressof(self._word)

    def wait(self, stream: object) -> FaultReport | None:
        no_stream(stream)
        return describe(self._word.value)

    def clear(self, stream: object) -> None:
        no_stream(stream)
        self._word.value = NO_FAULT

    poll = wait


class _DeviceWord:
    """The word in a GPU's memory; two in pinned host memory, a polled copy's and a waited one's; an event behind the former."""

    def __init__(self, device: int) -> None:
        from kvgen.runtime import cuda

        self._driver = cuda.driver()
        self._device = device
        self._memory = DeviceMemory(_BYTES, device)
        self._pinned = PinnedMemory(2 * _BYTES, device)
        self.pointer = self._memory.pointer
        self._copies = (ctypes.c_uint64 * 2).from_address(self._pinned.pointer)
        self._known: FaultReport | None = None
        self._asked = self._outdated = False
        self._event = self._driver.event(device)
        self._driver.write(self.pointer, bytes(_BYTES), device)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._driver.free_event(self._event, self._device)
            # Freeing device memory waits for the copies from it; only then nothing writes the pinned words.
            del self._memory

    def wait(self, stream: object) -> FaultReport | None:
        handle = stream_handle(stream)
        if self._driver.capturing(handle, self._device):
            raise ArgumentError(
                "stream: got one that captures a graph, or the default stream beside one; reading the word waits for it; "
                "pass a stream outside the capture, or ask after a replay"
            )
        self._driver.read_later(self._pinned.pointer + _BYTES, self.pointer, _BYTES, handle, self._device)
        self._driver.synchronize(handle, self._device)
        self._outdated = self._asked
        self._known = describe(self._copies[1])
        return self._known

    def clear(self, stream: object) -> None:
        self._driver.fill_later(self.pointer, NO_FAULT, _BYTES, stream_handle(stream), self._device)
        self._outdated, self._known = self._asked, None

    def poll(self, stream: object) -> FaultReport | None:
        if self._asked and self._driver.reached(self._event, self._device):
            if not self._outdated:
                self._known = describe(self._copies[0])
            self._asked = self._outdated = False
        handle = stream_handle(stream)
        if not self._asked and not self._driver.capturing(handle, self._device):
            self._driver.read_later(self._pinned.pointer, self.pointer, _BYTES, handle, self._device)
            self._driver.record(self._event, handle, self._device)
            self._asked = True
        return self._known

"""The error word, as kvgen.runtime.faults defines it: the smallest (position, request, code) that was reported."""

from __future__ import annotations

from kvgen.runtime.faults import NO_FAULT, Fault

LARGEST_REQUEST = 0xFFFFFF


class FaultLog:
    """Collects faults; `word` is what the device's u64 must hold afterwards."""

    def __init__(self) -> None:
        self._first: tuple[int, int, Fault] | None = None

    def add(self, code: Fault, request: int, position: int) -> None:
        """Report `code`; requests past 2^24 - 1 are all called that."""
        found = (position, min(request, LARGEST_REQUEST), code)
        self._first = found if self._first is None else min(self._first, found)

    @property
    def word(self) -> int:
        """Every bit of position, request and code turned round, 0 if nothing was reported."""
        if self._first is None:
            return NO_FAULT
        position, request, code = self._first
        return 2**64 - 1 - (position << 32 | request << 8 | code)

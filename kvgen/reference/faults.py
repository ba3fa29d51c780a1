"""The error word, as kvgen.runtime.faults defines it: the smallest (position, request, code) that was reported."""

from __future__ import annotations

from kvgen.runtime.faults import NO_FAULT, Fault

LARGEST_REQUEST = 0xFFFFFF


class FaultLog:
    """Collects faults; `word` is what the device's u64 must hold afterwards."""

    def __init__(self) -> None:
        self.word = NO_FAULT

    def add(self, code: Fault, request: int, position: int) -> None:
        """Report `code`; requests past 2^24 - 1 are all called that."""
        self.word = min(self.word, position << 32 | min(request, LARGEST_REQUEST) << 8 | code)

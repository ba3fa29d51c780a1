"""Level "hardware": whether bytes that a launch read, and that could have been others, matter to what it leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvgen.emulator.abi import LaunchInfo
from kvgen.emulator.errors import KernelFault

PROBES: Final = (1, 2)  # numbers of the bytes that stand in; runtime/grid.cpp and padding.cpp hold them
PAGE_BYTES: Final = 4096  # runtime/checker.h has it too
Pages = Mapping[int, bytes]  # by address


class Memory(Protocol):
    """What of launch.Buffer is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...


@dataclass(frozen=True)
class Probing:
    """A launch that may be repeated: the memory that it may write, and `kept`, which gives the pages that it and its repetitions
    have written so far, as they were before it."""

    buffers: Sequence[Memory]
    kept: Callable[[], Pages]

    def consequence(self, done: LaunchInfo, blocks: int, run: Callable[[LaunchInfo], KernelFault | None]) -> str | None:
        """What becomes of the launch just done, of a kernel of so many basic blocks, where its undetermined reads find
        other bytes; None: nothing else. `run` performs a launch. Memory is left as that launch left it.
        """
        before = self.kept()
        after, path = self._read(before), done.executed[: 2 * blocks]
        try:
            for number in PROBES:
                executed = (ctypes.c_uint64 * (2 * blocks))()
                info = LaunchInfo.from_buffer_copy(done)
                info.probe, info.executed = number, executed
                self._write(before)
                fault = run(info)
                before = self.kept()
                after = {**before, **after}  # a page that the probe alone has written is as before the launch
                if fault is not None:
                    return f"the launch ends in {fault.kind} at {fault.source}"
                difference = self._difference(after, self._read(before))
                if difference is not None:
                    return difference
                if path != executed[:]:
                    return "threads take another path"
        finally:
            self._write(after)
        return None

    def _parts(self, pages: Pages) -> Iterator[tuple[Memory, int, int, int]]:
        """What of the pages the launch may write: the buffer, the page, the addresses [low, high)."""
        for b in self.buffers:
            for page in sorted(pages):
                low, high = max(page, b.address), min(page + len(pages[page]), b.address + b.nbytes)
                if low < high:
                    yield b, page, low, high

    def _read(self, pages: Pages) -> dict[int, bytes]:
        return {page: ctypes.string_at(page, len(data)) for page, data in pages.items()}

    def _write(self, pages: Pages) -> None:
        for _, page, low, high in self._parts(pages):
            ctypes.memmove(low, pages[page][low - page : high - page], high - low)

    def _difference(self, mine: Pages, other: Pages) -> str | None:
        for b, page, low, high in self._parts(mine):
            for at in range(low, high) if mine[page] != other[page] else ():
                x, y = mine[page][at - page], other[page][at - page]
                if x != y:
                    return f"byte {at - b.address} of {b.name!r} is {y:#04x} and no longer {x:#04x}"
        return None

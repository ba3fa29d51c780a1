"""Level "hardware": whether bytes that a launch read, and that could have been others, matter to what it leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

from kvgen.emulator.abi import LaunchInfo
from kvgen.emulator.errors import KernelFault

PROBES = (1, 2)  # numbers of the bytes that stand in; runtime/grid.cpp and padding.cpp hold them


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


class Saved:
    """The bytes of all memory that a launch may write, before it."""

    def __init__(self, buffers: Sequence[Memory]) -> None:
        self.buffers = [b for b in buffers if b.writable and b.nbytes]
        self.before = self.read()

    def read(self) -> list[bytes]:
        return [ctypes.string_at(b.address, b.nbytes) for b in self.buffers]

    def write(self, contents: Sequence[bytes]) -> None:
        for b, data in zip(self.buffers, contents, strict=True):
            ctypes.memmove(b.address, data, len(data))

    def consequence(self, done: LaunchInfo, blocks: int, run: Callable[[LaunchInfo], KernelFault | None]) -> str | None:
        """What becomes of the launch just done, of a kernel of so many basic blocks, where its undetermined reads find
        other bytes; None: nothing else. `run` performs a launch. Memory is left as that launch left it.
        """
        after, path = self.read(), done.executed[: 2 * blocks]
        try:
            for number in PROBES:
                executed = (ctypes.c_uint64 * (2 * blocks))()
                info = LaunchInfo.from_buffer_copy(done)
                info.probe, info.executed = number, executed
                self.write(self.before)
                fault = run(info)
                if fault is not None:
                    return f"the launch ends in {fault.kind} at {fault.source}"
                for b, mine, other in zip(self.buffers, after, self.read(), strict=True):
                    if mine != other:
                        at = next(i for i, (x, y) in enumerate(zip(mine, other, strict=True)) if x != y)
                        return f"byte {at} of {b.name!r} is {other[at]:#04x} and no longer {mine[at]:#04x}"
                if path != executed[:]:
                    return "threads take another path"
        finally:
            self.write(after)
        return None

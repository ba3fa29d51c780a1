"""Workspaces: scratch memory that an operation's planner prepares, once per step, for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView

if TYPE_CHECKING:
    from kvgen.runtime.launcher import Kernel


class _DeviceMemory:
    """Device bytes that are given back when the last reference goes."""

    def __init__(self, nbytes: int, device: int) -> None:
        from kvgen.runtime import cuda

        self._driver = cuda.driver()
        self._device = device
        self.pointer = self._driver.allocate(nbytes, device)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.free(self.pointer, self._device)


class Workspace:
    """Memory for calls of up to `max_rows` query rows; `nbytes` of it, allocated here and nowhere later.

    It serves the operation of `kernel` alone, since others divide theirs differently. `plan()` must have prepared it
    before the first call; using it from two streams at once is a race.
    """

    def __init__(self, kernel: Kernel, fixed_bytes: int, row_bytes: int, max_rows: int, device: str) -> None:
        if not isinstance(max_rows, int) or not 1 <= max_rows < 2**31:
            raise ArgumentError(
                f"max_rows: got {max_rows!r}; it must be a whole number of at least 1 and below 2^31; pass the largest batch"
            )
        self.kernel = kernel
        self.max_rows = max_rows
        self.nbytes = fixed_bytes + row_bytes * max_rows
        self.planned = False
        kind, _, ordinal = device.partition(":")
        if device == "cpu":
            import numpy as np

            # As a GPU allocates: kernels then touch the same sectors everywhere.
            raw = np.empty(self.nbytes + 256, np.uint8)
            start = -int(raw.ctypes.data) % 256
            memory = raw[start : start + self.nbytes]
            owner: object = memory
            pointer = int(memory.ctypes.data)
        elif kind == "cuda" and (ordinal.isdigit() or not ordinal):
            device = f"cuda:{ordinal or 0}"
            held = _DeviceMemory(self.nbytes, int(ordinal or 0))
            pointer, owner = held.pointer, held
        else:
            raise ArgumentError(f'device: got {device!r}; it must be "cpu" or "cuda:<ordinal>"; pass cache.device')
        self.view = ArrayView(pointer, (self.nbytes,), (1,), "u8", device, False, owner)


def usable(given: object, kernel: Kernel, rows: int | None) -> Workspace:
    """`given`, if it is a workspace of the operation of `kernel`, planned and large enough for `rows` query rows.

    `rows` is None where the planner asks, which only needs the operation to be right.
    """
    if not isinstance(given, Workspace):
        raise ArgumentError(
            f"workspace: got {type(given).__name__}; it must be a Workspace; pass the operation's workspace(max_rows=...)"
        )
    if given.kernel is not kernel:
        raise ArgumentError(
            f"workspace: got one of {given.kernel.entry}; every operation divides its own differently; "
            f"pass one of {kernel.entry}"
        )
    if rows is not None and not given.planned:
        raise ArgumentError(
            "workspace: got an unplanned one; plan(cache, workspace) prepares it once per step; call it first"
        )
    if rows is not None and rows > given.max_rows:
        raise ArgumentError(
            f"workspace: got one for {given.max_rows} rows and q with {rows}; it must hold every row; "
            f"pass workspace(max_rows={rows})"
        )
    return given

"""What can go wrong between PTX text and a finished launch."""

from __future__ import annotations

from typing import Literal

Level = Literal["hardware", "check"]


class EmulatorError(Exception):
    """Anything the emulator refuses: a launch it cannot perform, or one of the subclasses."""


class TranslateError(EmulatorError):
    """PTX that the emulator does not know; names the PTX line and, where -lineinfo gave one, the CUDA line."""

    def __init__(self, message: str, *, ptx_line: int | None = None, source: str | None = None) -> None:
        self.ptx_line = ptx_line
        self.source = source
        where = f"PTX line {ptx_line}: " if ptx_line is not None else ""
        origin = f" (from {source})" if source else ""
        super().__init__(f"{where}{message}{origin}")


class HostCompilerError(EmulatorError):
    """A compiler of this machine is missing or refused the translated kernel."""


class KernelFault(EmulatorError):
    """A kernel did something wrong while it ran.

    `kind` is one word: global_out_of_bounds, read_only, shared_out_of_bounds, local_out_of_bounds, param_out_of_bounds,
    misaligned, uninitialised, in_flight, race, divergent_barrier, bad_barrier, warp_mask, warp_mismatch, deadlock,
    runaway, trap, assert, bad_call, stack_overflow, arithmetic, bad_copy, bad_mbarrier, bad_tensor_map, proxy_fence,
    missing_fence, bad_descriptor, bad_cluster, exited_block, before_grid_wait, after_trigger, bad_registers or not_constant; the
    emulator's README explains them. `block` and `thread` are (x, y, z), None where no thread is to blame. `level` is
    "hardware" for what hardware can get wrong, "check" where only a rule says so that mode "hardware" does not have.
    `source` is "file:line" of the innermost inlined function, `inlined_at` the call sites outwards, `buffer` a buffer or
    variable.
    """

    def __init__(
        self,
        *,
        kind: str,
        level: Level = "hardware",
        kernel: str,
        block: tuple[int, int, int] | None,
        thread: tuple[int, int, int] | None,
        source: str | None,
        inlined_at: tuple[str, ...] = (),
        operation: str | None = None,
        buffer: str | None = None,
        detail: str = "",
    ) -> None:
        self.kind = kind
        self.level: Level = level
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.source = source
        self.inlined_at = inlined_at
        self.operation = operation
        self.buffer = buffer
        self.detail = detail
        super().__init__(self._text())

    def _text(self) -> str:
        place = f"{self.kernel}, block {self.block}, thread {self.thread}" if self.block is not None else self.kernel
        for where in (self.source, *(f"inlined at {caller}" for caller in self.inlined_at)):
            place += f", {where}" if where else ""
        instruction = f" [{self.operation}]" if self.operation else ""
        return f"{self.kind}: {self.detail}{instruction} ({place}; level {self.level})"

    def because(self, more: str) -> KernelFault:
        """The same fault with more to its detail."""
        self.detail += f"; {more}"
        self.args = (self._text(),)
        return self

"""Workspaces: scratch memory that an operation's planner prepares, once per step, for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.memory import DeviceMemory, ordinal_of

if TYPE_CHECKING:
    from kvgen.runtime.kernel import Kernel
    from kvgen.runtime.layer_cache import LayerCache


@dataclass(frozen=True, slots=True)
class Work:
    """How an operation's workspace is divided (Plan in device/work.cuh).

    `columns` blocks share a piece of work, one a kv head and tile of columns; of `blocks_per_sm` blocks that a
    multiprocessor holds at once each gets one part. A slot has a partial result of `partial_bytes`. `chunk` tokens make a
    piece where they are cut alike in every batch, 0 where the planner balances; `most` tokens of a request are seen at most,
    by a window or in a ring (0: all).
    """

    columns: int
    blocks_per_sm: int
    partial_bytes: int
    chunk: int
    most: int = 0

    def sizes(self, max_rows: int, max_tokens: int | None, multiprocessors: int) -> dict[str, int]:
        """Parts, pieces and slots, as kernels get them, and `bytes`; raises ArgumentError for what it cannot be made for."""
        for name, value, most in (("max_rows", max_rows, 2**31), ("multiprocessors", multiprocessors, 2**16)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < most:
                valid = "the largest batch" if name == "max_rows" else "how many the GPU has"
                raise ArgumentError(
                    f"{name}: got {value!r}; it must be a whole number of at least 1 and below 2^{most.bit_length() - 1}; "
                    f"pass {valid}"
                )
        parts = max(1, multiprocessors * self.blocks_per_sm // self.columns)
        pieces, slots = max_rows + parts, 2 * parts
        if self.chunk:
            if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 0 <= max_tokens < 2**32:
                raise ArgumentError(
                    f"max_tokens: got {max_tokens!r}; requests are cut into pieces of {self.chunk} tokens, so a workspace is as "
                    "large as the longest one asks; pass the most tokens of a request, cache.max_cache_length"
                )
            seen = min(max_tokens, self.most or max_tokens)
            pieces = slots = max_rows * (-(-seen // self.chunk) + 1)
        held = _HEADER + _up(4 * (parts + 1)) + _up(max_rows) + _up(4 * slots * self.columns) + _PIECE * pieces
        return {
            "parts": parts,
            "max_rows": max_rows,
            "max_pieces": pieces,
            "max_slots": slots,
            "bytes": held + self.partial_bytes * slots,
        }


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


_HEADER: Final = 64  # PlanHeader of device/work.cuh
_PIECE: Final = 48  # Piece
_ALIGN: Final = 16
# Multiprocessors that the CPU machine is taken to have.
_CPU_MULTIPROCESSORS: Final = 8


def multiprocessors_of(device: str) -> int:
    """How many multiprocessors a device has."""
    ordinal = ordinal_of(device)
    if ordinal is None:
        return _CPU_MULTIPROCESSORS
    from kvgen.runtime import cuda

    return cuda.driver().multiprocessors(ordinal)


def _sizes(
    work: Work, max_rows: int, device: str, max_tokens: int | None, multiprocessors: int | None
) -> dict[str, int]:
    found = multiprocessors_of(device) if multiprocessors is None else multiprocessors
    return work.sizes(max_rows, max_tokens, found)


class Workspace:
    """Memory for steps of up to `max_rows` query rows: `nbytes` bytes, allocated here and nowhere later, or the caller's
    `memory` (u8 `[>= workspace_bytes(...)]` on `device`, at 16 bytes).

    It serves the operation of `kernel` alone, since others divide theirs differently. All that `plan()` prepares lies in
    that memory, behind a header that says for which operation, batch, rows and sizes; a call that finds another one, or
    requests whose lengths have changed, gives NaN and reports it. So a workspace made anew over the same memory for the same
    numbers is the same workspace. Using one from two streams at once is a race. Where requests are cut alike in every batch,
    it is for requests of up to `max_tokens` tokens.
    """

    def __init__(
        self,
        kernel: Kernel,
        work: Work,
        max_rows: int,
        device: str,
        max_tokens: int | None = None,
        multiprocessors: int | None = None,
        memory: object = None,
    ) -> None:
        ordinal = ordinal_of(device)
        device = "cpu" if ordinal is None else f"cuda:{ordinal}"
        self.sizes = _sizes(work, max_rows, device, max_tokens, multiprocessors)
        self.kernel = kernel
        self.max_rows = max_rows
        # Of windows and rings every request has the pieces that it needs.
        self.max_tokens = max_tokens if work.chunk and not (work.most and work.most <= (max_tokens or 0)) else None
        self.nbytes = self.sizes.pop("bytes")
        self.view = _allocated(self.nbytes, device) if memory is None else _given(memory, self.nbytes, device)

    @staticmethod
    def nbytes_of(
        work: Work, max_rows: int, device: str, max_tokens: int | None = None, multiprocessors: int | None = None
    ) -> int:
        """Bytes of such a workspace, which is not allocated; raises ArgumentError as it would."""
        return _sizes(work, max_rows, device, max_tokens, multiprocessors)["bytes"]


def _allocated(nbytes: int, device: str) -> ArrayView:
    ordinal = ordinal_of(device)
    if ordinal is not None:
        held = DeviceMemory(nbytes, ordinal)
        return ArrayView(held.pointer, (nbytes,), (1,), "u8", device, False, held)
    import numpy as np

    # As a GPU allocates: kernels then touch the same sectors everywhere.
    raw = np.empty(nbytes + 256, np.uint8)
    start = -int(raw.ctypes.data) % 256
    memory = raw[start : start + nbytes]
    return ArrayView(int(memory.ctypes.data), (nbytes,), (1,), "u8", "cpu", False, memory)


def _given(memory: object, nbytes: int, device: str) -> ArrayView:
    """The caller's memory; ArgumentError for what is no workspace's."""
    found = view(memory, "memory")
    check(found, "memory", dtype="u8", shape=(None,), dims=Dims(), writable=True, align=_ALIGN, device=device)
    if found.shape[0] < nbytes:
        raise ArgumentError(
            f"memory: got {found.shape[0]} bytes; this workspace has {nbytes}; pass an array of workspace_bytes(...), called "
            "with the same numbers"
        )
    return found._replace(shape=(nbytes,))


def usable(given: object, kernel: Kernel) -> Workspace:
    """`given`, if it is a workspace of the operation of `kernel`."""
    if not isinstance(given, Workspace):
        raise ArgumentError(
            f"workspace: got {'None' if given is None else type(given).__name__}; it must be a Workspace; pass the operation's "
            "workspace(max_rows=...)"
        )
    if given.kernel is not kernel:
        raise ArgumentError(
            f"workspace: got one of {given.kernel.entry}; every operation divides its own differently; "
            f"pass one of {kernel.entry}"
        )
    return given


def plannable(workspace: Workspace, rows: int | None, cache: LayerCache) -> int:
    """The rows to plan for, `rows` or all that the workspace is for; raises ArgumentError where it is too small."""
    most = workspace.max_rows
    rows = most if rows is None else rows
    if isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows <= most:
        raise ArgumentError(
            f"rows: got {rows!r} for a workspace of {most} rows; it counts the rows of q; pass 0 to {most}, or a workspace made "
            "for more"
        )
    longest = cache.dims["max_cache_length"]
    if workspace.max_tokens is not None and longest > workspace.max_tokens:
        raise ArgumentError(
            f"workspace: got one for requests of up to {workspace.max_tokens} tokens and a cache of requests of up to {longest}; "
            f"all of a request's pieces must fit; make workspace(max_rows={most}, max_tokens={longest}), or give the cache its "
            "max_cache_length"
        )
    return rows


def hold_rows(workspace: Workspace, rows: int) -> None:
    """Raise ArgumentError unless `workspace` is for so many rows."""
    if rows > workspace.max_rows:
        raise ArgumentError(
            f"workspace: got one for {workspace.max_rows} rows and q with {rows}; it must hold every row; "
            f"pass workspace(max_rows={rows})"
        )

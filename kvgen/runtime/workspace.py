"""Workspaces: scratch memory that an operation's planner prepares, once per step, for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvgen.errors import ArgumentError
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime.arrays import ArrayView, Viewed, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.memory import DeviceMemory, ordinal_of

if TYPE_CHECKING:
    from kvgen.runtime.kernel import Kernel
    from kvgen.runtime.layer_cache import LayerCache


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
    split_plan: SplitPlan, max_rows: int, device: str, max_tokens: int | None, multiprocessors: int | None
) -> dict[str, int]:
    found = multiprocessors_of(device) if multiprocessors is None else multiprocessors
    return split_plan.sizes(max_rows, max_tokens, found)


class Workspace(Viewed):
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
        split_plan: SplitPlan,
        max_rows: int,
        device: str,
        max_tokens: int | None = None,
        multiprocessors: int | None = None,
        memory: object = None,
    ) -> None:
        ordinal = ordinal_of(device)
        device = "cpu" if ordinal is None else f"cuda:{ordinal}"
        self.sizes = _sizes(split_plan, max_rows, device, max_tokens, multiprocessors)
        self.kernel = kernel
        self.split_plan = split_plan
        self.max_rows = max_rows
        max_seen = split_plan.max_seen
        # Of windows and rings every request has the chunks that it needs.
        self.max_tokens = (
            max_tokens if split_plan.chunk_tokens and not (max_seen and max_seen <= (max_tokens or 0)) else None
        )
        self.nbytes = self.sizes.pop("bytes")
        self.view = _allocated(self.nbytes, device) if memory is None else _given(memory, self.nbytes, device)
        self._raw = (self.view.pointer, (kernel.entry, max_rows, self.max_tokens, *self.sizes.values(), device))

    def raw(self) -> tuple[int, object]:
        """Its address, and all else that the check of a call looks at."""
        return self._raw

    def __repr__(self) -> str:
        return f"Workspace({self.kernel.entry}, {self.max_rows} rows, {self.nbytes} bytes, {self.view.device!r})"

    @staticmethod
    def nbytes_of(
        split_plan: SplitPlan,
        max_rows: int,
        device: str,
        max_tokens: int | None = None,
        multiprocessors: int | None = None,
    ) -> int:
        """Bytes of such a workspace, which is not allocated; raises ArgumentError as it would."""
        return _sizes(split_plan, max_rows, device, max_tokens, multiprocessors)["bytes"]


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
            f"all of a request's chunks must fit; make workspace(max_rows={most}, max_tokens={longest}), or give the cache its "
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

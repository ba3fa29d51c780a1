"""A set's cache with a workload in it: pool, page tables over scattered pages, and the arguments of its operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen.bench.workload import Workload
from kvgen.dtypes import dtype
from kvgen.errors import ToolError
from kvgen.reference import TableView
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import PerKV, Ring

Raw = NDArray[Any]
Group = Literal["kv", "scales", "tables", "workspace", "input", "output", "errors"]
GROUPS: Final[tuple[Group, ...]] = ("kv", "scales", "tables", "workspace", "input", "output", "errors")
LAYERS: Final = 2
LAYER: Final = 1
ALIGN: Final = 256  # bytes, as GPU allocations are
POISON: Final = 0x7FFFFFFF  # past a request's pages: no page of any pool
_INDICES: Final = ("u32", "i32", "i64")


def aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> Raw:
    """Zeros at an address divisible by 256."""
    size = math.prod(shape) * kind.itemsize
    raw = np.zeros(size + ALIGN, np.uint8)
    start = -int(raw.ctypes.data) % ALIGN
    return raw[start : start + size].view(kind).reshape(shape)


@dataclass(frozen=True)
class Call:
    """One operation's arguments: `arrays` by name; `rows` of new tokens, of gathered ones or of queries."""

    kind: str
    launcher: Any
    arrays: Mapping[str, Raw]
    rows: int


class Scene:
    """A set's cache, `LAYERS` layers of it, holding a workload; operations work on layer `LAYER`.

    The pool's tensors are packed, pages scattered over it in an order that is always the same; scales that the caller
    brings are about 1. `room` are the tokens that requests have pages for, by default those they hold. Raises ToolError where
    the workload does not fit the cache.
    """

    def __init__(
        self, kernels: KernelSet, package: ModuleType, workload: Workload, room: Sequence[int] | None = None
    ) -> None:
        workload.check(kernels.cache, kernels.name)
        self.kernels, self.package, self.workload, self.cache = kernels, package, workload, kernels.cache
        self._room = tuple(room or workload.totals)
        self.tokens = self.cache.page_tokens or max(self._room)
        self._lay_pages()
        self.pools = self._pools()

    def at(self, workload: Workload) -> Scene:
        """The same memory at another step of its requests."""
        found = copy(self)
        found.workload = workload
        return found

    def _lay_pages(self) -> None:
        table = self.cache.page_table
        counts = [-(-n // self.tokens) for n in self._room]
        if isinstance(table, Ring):
            self.columns = -(-(table.window - 1) // self.tokens) + 1
            counts = [min(n, self.columns) for n in counts]
        else:
            self.columns = max(counts)
        per_page = 2 if isinstance(table, PerKV) else 1
        random = np.random.default_rng(0)
        ends = np.cumsum([n * per_page for n in counts])[:-1]

        def scattered() -> list[NDArray[np.int64]]:
            order = random.permutation(sum(counts) * per_page)
            return [part.reshape(-1, per_page) for part in np.split(order, ends)]

        self.ids = scattered()
        self.pages = sum(counts) * per_page * table.id_multiplier
        # Scales with a table of their own lie elsewhere than their values do.
        self.scale_ids = scattered() if self.cache.storage.own_table else self.ids

    def _pools(self) -> dict[str, Raw | list[Raw]]:
        """The tensors of the generated Cache."""
        sizes = {
            "pages": self.pages,
            "scale_pages": self.pages,
            "layers": LAYERS,
            "tokens": self.tokens,
            "B": len(self._room),
        }
        found: dict[str, Raw | list[Raw]] = {}
        each = not any("layer" in t.axes for t in self.package.Cache.TENSORS)
        for tensor in self.package.Cache.TENSORS:
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in tensor.shape)
            kind = dtype(tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0]).numpy()
            copies = [aligned(shape, kind) for _ in range(LAYERS if each else 1)]
            for given in copies if not tensor.writes else ():
                given[...] = np.linspace(0.5, 1.5, given.size).reshape(shape)
            found[tensor.name] = copies if each else copies[0]
        return found

    def tables(self, kind: str) -> dict[str, Raw]:
        """The table arguments of the generated Cache, as an operation of this kind expects them."""
        found = {}
        for spec in self.package.Cache.TABLES:
            values = np.asarray(self._table(spec.name, len(spec.shape), kind))
            found[spec.name] = aligned(values.shape, dtype(spec.dtype).numpy())
            found[spec.name][...] = values
        return found

    def view(self, tables: Mapping[str, Raw]) -> TableView:
        """The oracle's reading of the tables."""
        return TableView(self.cache, tables, self.pages, self.tokens, self.pages)

    def _table(self, name: str, rank: int, kind: str) -> Any:
        totals = self.workload.totals
        if name == "lengths":
            # Tokens that "before" lengths leave out: append's and seal's new ones, decode's newest; gather comes after the step.
            new = {"append": self.workload.new, "seal": self.workload.new, "decode": (1,) * len(totals)}.get(kind)
            return np.subtract(totals, new) if new is not None and self.cache.lengths == "before" else totals
        if name == "page_table":
            matrix = self._matrix(self.ids)
            return matrix[:, 0, 0] if rank == 1 else matrix if rank == 3 else matrix[:, 0]
        if name == "scales_page_table":
            return self._matrix(self.scale_ids)[:, 0]
        if name.endswith("_sealed"):
            # seal comes first in a step: it finds what was full before, all others what is full after it.
            new = self.workload.new if kind == "seal" else (0,) * len(totals)
            return np.subtract(totals, new) // self.cache.storage.residual * self.cache.storage.residual
        if name == "page_indices":
            return np.concatenate([i[:n] for i, n in zip(self.ids, self._counts, strict=True)])[:, 0]
        if name == "page_indptr":
            return np.cumsum([0, *self._counts])
        if name == "last_page_len":
            return [n - (count - 1) * self.tokens for n, count in zip(totals, self._counts, strict=True)]
        if name == "req_to_token":
            return self._matrix(self.ids)[:, 0]
        if name == "request_ids":
            return np.arange(len(totals))
        raise ToolError(f"{self.kernels.name}: got a page table with {name!r}, which kvgen bench cannot build")

    @property
    def _counts(self) -> list[int]:
        """Pages that every request's tokens take."""
        return [-(-n // self.tokens) for n in self.workload.totals]

    def _matrix(self, pages: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """`[B, per page, columns]`; a ring's logical page i stands in column i % columns."""
        found = np.full((len(pages), pages[0].shape[1], self.columns), POISON, np.int64)
        for b, ids in enumerate(pages):
            found[b][:, : len(ids)] = ids.T
        return found

    # Operations --------------------------------------------------------------------------------------------------

    def alive(self, b: int) -> int:
        """Tokens of request b that its table still reaches."""
        table, total = self.cache.page_table, self.workload.totals[b]
        return min(total, table.window) if isinstance(table, Ring) else total

    def call(self, op: Op) -> Call:
        """The operation's arguments: append stores the new tokens (and seal the groups they complete), gather and decode
        read all that are alive.

        Raises ToolError for an operation that kvgen bench does not know.
        """
        launcher = getattr(self.package, op.name)
        alive = [self.alive(b) for b in range(len(self.workload.totals))]
        new = sum(self.workload.new)
        rows = {"append": new, "seal": new, "gather": sum(alive), "decode": len(alive)}.get(op.kind)
        if rows is None:
            raise ToolError(
                f"{self.kernels.name}/{op.name}: got a {op.kind}; kvgen bench knows append, seal, gather and decode"
            )
        arrays = {}
        for spec in launcher.KERNEL.arguments:
            if spec.name == "workspace" or (op.kind == "decode" and spec.name == "row_offsets"):
                continue  # row t is request t's
            if spec.name == "starts" and not isinstance(self.cache.page_table, Ring):
                continue
            sizes: dict[str, int] = {"T": rows, "B": len(alive), "B+1": len(alive) + 1}
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in spec.shape)
            arrays[spec.name] = aligned(shape, dtype(spec.dtype).numpy())
        counts = self.workload.new if op.kind in ("append", "seal") else alive
        if "row_offsets" in arrays:
            arrays["row_offsets"][...] = np.cumsum([0, *counts])
        if "starts" in arrays:
            arrays["starts"][...] = np.subtract(self.workload.totals, alive)
        if "slots" in arrays:
            arrays["slots"][...] = np.concatenate([self._slots(b) for b in range(len(alive))])
        return Call(op.kind, launcher, arrays, rows)

    def _slots(self, b: int) -> NDArray[np.int64]:
        """The places of request b's new tokens."""
        total = self.workload.totals[b]
        positions = np.arange(total - self.workload.new[b], total)
        alive = positions >= (-(-total // self.tokens) - len(self.ids[b])) * self.tokens
        column = (positions // self.tokens) % self.columns
        ids = self._matrix(self.ids)[b, 0, column] * self.cache.page_table.id_multiplier
        return np.where(alive, ids * self.tokens + positions % self.tokens, -1)

    def group(self, name: str, launcher: Any) -> Group:
        """What a launch's buffer is part of; buffers are named after tensors, tables and arguments."""
        tensor = name.partition("[")[0]
        if tensor in self.pools:
            return "scales" if tensor.endswith(("scale", "scales")) else "kv"
        spec = next((a for a in launcher.KERNEL.arguments if a.name == name), None)
        if spec is None or (spec.access == "in" and spec.dtype in _INDICES):
            return "tables"
        if name in ("workspace", "errors"):
            return "workspace" if name == "workspace" else "errors"
        return "input" if spec.access == "in" else "output"

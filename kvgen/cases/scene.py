"""A set's cache with a workload in it: pool, page tables over scattered pages, and the arguments of its operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.workload import Workload
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower_pages
from kvgen.reference import TableView
from kvgen.reference.tables import Laid
from kvgen.runtime.empty_cache import room_strides
from kvgen.runtime.pool_tensors import Tensor
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op

Raw = NDArray[Any]
Group = Literal["kv", "scales", "tables", "workspace", "weights", "input", "output", "errors"]
GROUPS: Final[tuple[Group, ...]] = ("kv", "scales", "tables", "workspace", "weights", "input", "output", "errors")
# The tokens that lengths of "before" leave out, of each request: none, the step's new ones, its newest ones that are query rows.
# "seal" comes first in a step: it finds sealed what was full before its new tokens, all others what is full after them.
Lengths = Literal["all", "step", "rows", "seal"]
LAYERS: Final = 2
LAYER: Final = 1
ALIGN: Final = 256  # bytes, as GPU allocations are
POISON: Final = 0x7FFFFFFF  # past a request's pages: no page of any pool
_INDICES: Final = ("u32", "i32", "i64")
_WEIGHTS: Final = ("cos_sin", "q_scale", "out_scale", "bias", "sinks", "alibi_slopes")


def aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> Raw:
    """Zeros at an address divisible by 256."""
    size = math.prod(shape) * kind.itemsize
    raw = np.zeros(size + ALIGN, np.uint8)
    start = -int(raw.ctypes.data) % ALIGN
    return raw[start : start + size].view(kind).reshape(shape)


def _with_room(tensor: Tensor, shape: tuple[int, ...], kind: np.dtype[Any]) -> Raw:
    """Zeros of a pool, at the strides that its layout has."""
    strides = room_strides(tensor, shape)
    whole = aligned((1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)),), kind)
    return np.ndarray(shape, kind, whole.view(np.uint8), strides=[step * kind.itemsize for step in strides])


class Scene:
    """A set's cache, `LAYERS` layers of it, holding a workload; operations work on layer `LAYER`.

    The pool's tensors are packed, pages scattered over it in an order that is always the same; scales that the caller
    brings are about 1. `room` are the tokens that requests have pages for, by default those they hold; of a cache of
    states they are states, of which a request holds the first. Raises ToolError where the workload does not fit the cache.
    """

    def __init__(
        self, kernels: KernelSet, package: ModuleType, workload: Workload, room: Sequence[int] | None = None
    ) -> None:
        self.cache: AnyCache = kernels.cache
        if self.cache.states:  # of which a request has one, however many tokens it is of
            ones = (1,) * len(workload.totals)
            workload, room = Workload(workload.name, ones, ones), room or ones
        else:
            workload.check(kernels.kv, kernels.name)
        self.kernels, self.package, self.workload = kernels, package, workload
        self._room = tuple(room or workload.totals)
        self.tokens = 1 if self.cache.ragged else self.cache.page_tokens or max(self._room)
        self._lay_pages()
        self.pools = self._pools()
        self._beside = dict[str, Scene]()

    @property
    def kv(self) -> Cache:
        """The cache of operations that know tokens."""
        return self.kernels.kv

    def at(self, workload: Workload) -> Scene:
        """This memory at another step of its requests."""
        found = copy(self)
        found.workload, found._beside = workload, {}
        return found

    def beside(self, class_name: str, cache: AnyCache, op: Op, q_heads: int = 1) -> Scene:
        """A scene of this workload in another cache, whose class the package has; a set of that cache may have operation `op`."""
        if class_name not in self._beside:
            kernels = KernelSet(name=self.kernels.name, q_heads=q_heads, cache=cache, ops=(op,))
            package: Any = SimpleNamespace(Cache=getattr(self.package, class_name))
            self._beside[class_name] = Scene(kernels, package, self.workload)
        return self._beside[class_name]

    def _lay_pages(self) -> None:
        table, form = self.cache.page_table, lower_pages(self.cache).table
        counts = [-(-self.entries(n) // self.tokens) for n in self._room]
        if form.wraps:
            self.columns = -(-(form.window - 1) // self.tokens) + 1
            counts = [min(n, self.columns) for n in counts]
        else:
            self.columns = max(counts)
            for spec in self.package.Cache.TABLES:  # rows that kernels read several entries of at once begin aligned
                if len(spec.shape) > 1:
                    entries = max(1, spec.align // dtype(spec.dtype).bytes)
                    self.columns = -(-self.columns // entries) * entries
        per_page = 2 if table.separate_kv else 1
        random = np.random.default_rng(0)
        ends = np.cumsum([n * per_page for n in counts])[:-1]

        def scattered() -> list[NDArray[np.int64]]:
            order = np.arange(sum(counts)) if self.cache.ragged else random.permutation(sum(counts) * per_page)
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
            "rows": self.pages,
            "layers": LAYERS,
            "tokens": self.tokens,
            "B": len(self._room),
        }
        found: dict[str, Raw | list[Raw]] = {}
        each = not any("layer" in t.axes for t in self.package.Cache.TENSORS)
        for tensor in self.package.Cache.TENSORS:
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in tensor.shape)
            kind = dtype(tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0]).numpy()
            copies = [_with_room(tensor, shape, kind) for _ in range(LAYERS if each else 1)]
            for given in copies if not tensor.writes else ():
                given[...] = np.linspace(0.5, 1.5, given.size).reshape(shape)
            found[tensor.name] = copies if each else copies[0]
        return found

    def tables(self, lengths: Lengths = "all", rows: int = 1) -> dict[str, Raw]:
        """The table arguments of the generated Cache, with the `lengths` that an operation expects; `rows` are a request's query
        rows where these count."""
        found = {}
        for spec in self.package.Cache.TABLES:
            values = np.asarray(self._table(spec.name, lengths, rows))
            values = values[..., 0] if values.ndim > len(spec.shape) else values  # a block's id is a row of one
            found[spec.name] = aligned(values.shape, dtype(spec.dtype).numpy())
            found[spec.name][...] = values
        return found

    def view(self, tables: Mapping[str, Raw]) -> TableView:
        """The oracle's reading of the tables."""
        return TableView(self.cache, tables, self.pages, self.tokens, self.pages)

    def _table(self, name: str, lengths: Lengths, rows: int) -> Any:
        totals, new = self.workload.totals, self.workload.new
        if name == "lengths":
            if self.kv.lengths != "before" or lengths == "all":
                return totals
            return np.subtract(totals, rows if lengths == "rows" else new)
        if name == "scales_page_table":
            return self.matrix(self.scale_ids)[:, 0]
        if name.endswith("_sealed"):
            sealed = np.subtract(totals, new if lengths == "seal" else 0)
            return sealed // self.cache.storage.residual * self.cache.storage.residual
        found = self.view({}).form.written(Laid(self.matrix(self.ids), self._counts, totals))
        if name in found:
            return found[name]
        raise ToolError(f"{self.kernels.name}: got a page table with {name!r}, which kvgen bench cannot build")

    @property
    def _counts(self) -> list[int]:
        """Pages that every request's tokens take."""
        return [-(-self.entries(n) // self.tokens) for n in self.workload.totals]

    def matrix(self, pages: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """`[B, per page, columns]`; a ring's logical page i stands in column i % columns."""
        found = np.full((len(pages), pages[0].shape[1], self.columns), POISON, np.int64)
        for b, ids in enumerate(pages):
            found[b][:, : len(ids)] = ids.T
        return found

    # Operations --------------------------------------------------------------------------------------------------

    def entries(self, tokens: int) -> int:
        """Entries of the cache that so many tokens of a request are: fewer where one stands for several."""
        return tokens // self.cache.entry_tokens

    def alive(self, b: int) -> int:
        """Tokens of request b that its table still reaches, as entries."""
        window, total = lower_pages(self.cache).table.window, self.workload.totals[b]
        return min(total, window) if window else self.entries(total)

    def group(self, name: str, launcher: Any) -> Group:
        """The group of a launch's buffer; buffers are named after tensors, tables and arguments, those of another cache that
        is read behind its argument's name and a point."""
        tensor = name.partition("[")[0].rpartition(".")[2]
        if tensor in self.pools or (tensor.endswith(("pool", "scale", "scales", "tail")) and tensor not in _WEIGHTS):
            return "scales" if tensor.endswith(("scale", "scales")) else "kv"
        spec = next((a for a in launcher.KERNEL.arguments if a.name == name), None)
        if spec is None or (spec.access == "in" and spec.dtype in _INDICES):
            return "tables"
        if name in ("workspace", "errors"):
            return "workspace" if name == "workspace" else "errors"
        if name in _WEIGHTS or name.endswith(("_weight", "_bias")):
            return "weights"
        return "input" if spec.access == "in" else "output"

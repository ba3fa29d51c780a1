"""Large batches on a GPU, for timings: pools of random numbers, and page tables of every form over scattered pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.set_facts import Facts
from kvgen.layout.dtypes import dtype
from kvgen.runtime import cuda, packing
from kvgen.runtime.empty_cache import room_strides
from kvgen.verify.bandwidth import SCALE, THREADS, Fill
from kvgen.verify.device import Gpu
from kvgen.verify.memory import GpuArray, GpuBytes

Node = Callable[[bool], Callable[[int], None]]


def empty_node(gpu: Gpu, cubin: bytes) -> Node:
    """Launches of a kernel that does nothing: one block, with or without PDL."""
    function = cuda.function(cubin, "bandwidth_empty", device=gpu.ordinal)
    params = packing.PackedArgs((), ())
    return lambda pdl: function.bind((1, 1, 1), (THREADS, 1, 1), params, pdl=pdl)


class Workload:
    """A cache with `totals[b]` tokens in request b, `new[b]` of them this step's, in `layers` layers."""

    def __init__(
        self,
        gpu: Gpu,
        package: ModuleType,
        facts: Facts,
        fill: Fill,
        totals: Sequence[int],
        new: Sequence[int],
        layers: int,
    ) -> None:
        self.gpu, self.package, self.facts, self.fill = gpu, package, facts, fill
        self.totals, self.new, self.layers = list(totals), list(new), layers
        self.rng = np.random.default_rng(11)
        self.kind = facts.dtype
        self.page = package.Cache.PAGE_TOKENS or max(totals)
        self._seed = 0
        self._lay_pages()
        pools = self._pools()
        tables = {t.name: self.upload(self._table(t.name, t.dtype, t.shape)) for t in package.Cache.TABLES}
        self.pools, self.tables = pools, dict(tables)
        self.cache = package.Cache(**pools, **tables)
        # What gather reads is there once the step is over: lengths with the step's tokens.
        if "lengths" in tables:
            kind = next(dtype(t.dtype).numpy() for t in package.Cache.TABLES if t.name == "lengths")
            tables["lengths"] = self.upload(np.array(self.totals).astype(kind))
        self.after = package.Cache(**pools, **tables)

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(k or v, elements of a head's row)."""
        both = (("k", self.facts.head_dim), ("v", self.facts.v_dim))
        return both[:1] if self.facts.stores == "k" else both

    def alive(self, b: int) -> int:
        """Tokens of request b that its table still reaches."""
        return min(self.totals[b], self.facts.window) if self.facts.window else self.totals[b]

    @property
    def farthest(self) -> int:
        """The request that has the pool's last page: in large pools, past 2^31 elements."""
        return int(np.argmax([ids.max() for ids in self.ids]))

    def _lay_pages(self) -> None:
        counts = [1 if self.facts.table == "block" else -(-n // self.page) for n in self.totals]
        if self.facts.table == "ring":
            self.columns = -(-(self.facts.window - 1) // self.page) + 2
            counts = [min(n, self.columns) for n in counts]
        else:
            self.columns = max(counts)
            for table in self.package.Cache.TABLES:  # rows that kernels read several entries of at once begin aligned
                if len(table.shape) > 1:
                    entries = max(1, table.align // dtype(table.dtype).bytes)
                    self.columns = -(-self.columns // entries) * entries
        per_page = 2 if self.facts.table == "per_kv" else 1
        entries = sum(counts) * per_page
        ends = np.cumsum([n * per_page for n in counts])[:-1]
        self.ids, self.scale_ids = (
            [part.reshape(-1, per_page) for part in np.split(self.rng.permutation(entries), ends)] for _ in range(2)
        )
        self.pages = entries * self.facts.id_multiplier

    def _pools(self) -> dict[str, object]:
        found: dict[str, object] = {}
        sizes = {"pages": self.pages, "scale_pages": self.pages, "layers": self.layers, "tokens": self.page}
        sizes["B"] = len(self.totals)
        each = not any("layer" in t.axes for t in self.package.Cache.TENSORS)
        for tensor in self.package.Cache.TENSORS:
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in tensor.shape)
            kind = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0]
            scales = tensor.name.endswith(("scale", "scales"))
            # In elements; pages may lie further apart than their rows need.
            strides = room_strides(tensor, shape)
            copies = [self.random(shape, kind, scales, strides) for _ in range(self.layers if each else 1)]
            found[tensor.name] = copies if each else copies[0]
        return found

    def random(
        self,
        shape: tuple[int, ...],
        kind: str | None = None,
        scales: bool = False,
        strides: Sequence[int] | None = None,
    ) -> GpuArray:
        """An array of random numbers, of the cache's type unless said otherwise; `scales` are small. `strides` count elements;
        None: without gaps."""
        kind = kind or self.kind
        size = dtype(kind).bytes
        count = math.prod(shape)
        if strides is not None:
            count = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        # The fill writes words of 4 bytes.
        memory = GpuBytes(-(-count * size // 4) * 4, self.gpu.ordinal)
        self._seed += 1
        self.fill(memory, f"{SCALE}{kind}" if scales else kind, self._seed)
        apart = None if strides is None else tuple(step * size for step in strides)
        return GpuArray(memory, memory.pointer, shape, kind, apart)

    def upload(self, host: NDArray[Any]) -> GpuArray:
        """A device copy of an index array."""
        memory = GpuBytes(host.nbytes, self.gpu.ordinal)
        memory.write(host.tobytes())
        kind = next(n for n in ("u32", "i32", "i64") if dtype(n).numpy() == host.dtype)
        return GpuArray(memory, memory.pointer, host.shape, kind)

    def download(self, array: GpuArray) -> NDArray[Any]:
        """A host copy of a contiguous array."""
        named = {dtype(n).numpy().name: dtype(n).numpy() for n in ("bf16", "e4m3", "e5m2")}
        kind = named[array.dtype] if array.dtype in named else np.dtype(array.dtype)
        self.gpu.wait()
        data = self.gpu.driver.read(array.pointer, math.prod(array.shape) * kind.itemsize, self.gpu.ordinal)
        return np.frombuffer(data, kind).reshape(array.shape)

    def _matrix(self, pages: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
        """`[B, per page, M]`; a ring's ids stand where its newest pages belong."""
        per_page = pages[0].shape[1]
        found = np.zeros((len(pages), per_page, self.columns), kind)
        for b, ids in enumerate(pages):
            first = max(-(-self.totals[b] // self.page) - len(ids), 0) if self.facts.table == "ring" else 0
            places = (first + np.arange(len(ids))) % self.columns
            found[b][:, places] = ids.T
        return found

    def _table(self, name: str, kind_name: str, shape: tuple[int | str, ...]) -> NDArray[Any]:
        kind = dtype(kind_name).numpy()
        requests = len(self.totals)
        if name == "lengths":
            after = np.array(self.totals) - (0 if self.facts.lengths == "after" else np.array(self.new))
            return after.astype(kind)
        if name == "page_table":
            matrix = self._matrix(self.ids, kind)
            return np.ascontiguousarray(
                matrix[:, 0, 0] if len(shape) == 1 else matrix if len(shape) == 3 else matrix[:, 0]
            )
        if name == "scales_page_table":
            return np.ascontiguousarray(self._matrix(self.scale_ids, kind)[:, 0])
        if name.endswith("_sealed"):
            return (np.array(self.totals) // self.facts.residual * self.facts.residual).astype(kind)
        if name == "page_indices":
            return np.concatenate(self.ids).reshape(-1).astype(kind)
        if name == "page_indptr":
            return np.cumsum([0, *(len(i) for i in self.ids)]).astype(kind)
        if name == "last_page_len":
            return np.array([n - (len(i) - 1) * self.page for n, i in zip(self.totals, self.ids, strict=True)], kind)
        if name == "req_to_token":
            return np.ascontiguousarray(self._matrix(self.ids, kind)[:, 0])
        if name in ("request_ids", "idx_mapping"):
            return np.arange(requests).astype(kind)
        raise ValueError(f"{self.facts.name}: no timings for a page table with {name!r}; build it in {__name__}")

    def arguments(self, op: Any, given: dict[str, Any]) -> dict[str, Any]:
        """What an append takes for the step, in a layer: rows and weights of random numbers, where the rows go, the positions
        by which they turn; `given` are arrays that layers share."""
        count, most = sum(self.new), max(self.totals)
        sizes = {"T": count, "B": len(self.new), "B+1": len(self.new) + 1, "S": max(self.new), "P": most}
        found = dict[str, Any]()
        for spec in op.KERNEL.arguments:
            if spec.name == "errors":
                continue
            if spec.name not in given:
                shape = tuple(n if isinstance(n, int) else sizes[n] for n in spec.shape)
                if spec.dtype in ("u32", "i32", "i64"):
                    given[spec.name] = self._indices(op, spec.name, shape, dtype(spec.dtype).numpy())
                else:
                    found[spec.name] = self.random(shape, spec.dtype)
                    if "T" not in spec.shape and "S" not in spec.shape:  # weights, angles: once for all layers
                        given[spec.name] = found[spec.name]
            if spec.name in given:
                found[spec.name] = given[spec.name]
        return found

    def _indices(self, op: Any, name: str, shape: tuple[int, ...], kind: Any) -> GpuArray:
        if name == "row_offsets":
            return self.offsets(op, self.new)
        if name == "slots":
            return self.slots(op)
        if name == "valid_lengths":
            return self.upload(np.array(self.new).astype(kind))
        found = np.zeros(shape, kind)  # positions, of every section the same
        if shape[-1] == sum(self.new):
            pairs = zip(self.totals, self.new, strict=True)
            found[...] = np.concatenate([np.arange(total - new, total) for total, new in pairs])
        else:
            for b, (total, new) in enumerate(zip(self.totals, self.new, strict=True)):
                found[..., b, :new] = np.arange(total - new, total)
        return self.upload(found)

    # Calls -------------------------------------------------------------------------------------------------------

    def offsets(self, op: Any, counts: Sequence[int]) -> GpuArray:
        """row_offsets of an operation."""
        return self.upload(np.cumsum([0, *counts]).astype(self._index(op, "row_offsets")))

    def _index(self, op: Any, name: str) -> Any:
        return dtype(next(p.dtype for p in op.KERNEL.params if p.name == name)).numpy()

    def slots(self, op: Any) -> GpuArray:
        """The place of each new row."""
        found = []
        for ids, total, new in zip(self.ids, self.totals, self.new, strict=True):
            positions = np.arange(total - new, total)
            found.append(ids[positions // self.page, 0] * self.facts.id_multiplier * self.page + positions % self.page)
        return self.upload(np.concatenate(found).astype(self._index(op, "slots")))

    def gathered(self, op: Any, b: int, layer: int) -> list[NDArray[Any]]:
        """K (and V) `[alive, kv_heads, dim]` of request b, through the gather operation."""
        count = self.alive(b)
        outs = {f"{n}_out": self.random((count, self.facts.kv_heads, d)) for n, d in self.roles}
        counts = [count if i == b else 0 for i in range(len(self.totals))]
        starts = np.zeros(len(self.totals), self._index(op, "starts"))
        starts[b] = self.totals[b] - count
        op(
            self.after[layer],
            row_offsets=self.offsets(op, counts),
            starts=self.upload(starts),
            stream=self.gpu.stream,
            **outs,
        )
        return [self.download(o) for o in outs.values()]

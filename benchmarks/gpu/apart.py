"""A fused append's work by kernels of its own for norm, RoPE and store: generated where cases are made, timed beside it.

Norm and RoPE are appends by slots to a cache whose pages, in order, are an array of rows: what engines do in launches before
the one that quantizes and stores.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.gpu.packages import package_in
from kvgen.verify.memory import GpuArray

if TYPE_CHECKING:
    from benchmarks.gpu.workload import Workload
    from kvgen import KernelSet
    from kvgen.ops import Append

PAGE: Final = 16  # tokens of a page of rows
FOLDER: Final = "apart"


# Where cases are made ------------------------------------------------------------------------------------------------


def apart_of(kernels: KernelSet) -> tuple[Append, tuple[KernelSet, ...]] | None:
    """(an append, the sets of the kernels in its place); None where a set has no append that changes K and comes apart so."""
    from kvgen import KernelSet, Layout, Paged, ops

    op = next((op for op in kernels.ops if isinstance(op, ops.Append) and _comes_apart(op, kernels)), None)
    if op is None:
        return None
    cache = kernels.cache
    rows = Paged(
        dtype=cache.dtype,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        page_size=PAGE,
        stores="k",
        layout=Layout(k="page token head dim", layers="pointers"),
    )
    steps = []
    q_out: Any = "none" if op.q_out == "none" else "same"
    if op.q_norm is not None or op.k_norm is not None:
        steps.append(ops.Append(name="norm", rows="slots", q_norm=op.q_norm, k_norm=op.k_norm, q_out=q_out))
    if op.rope is not None:
        fields = {name: getattr(op, name) for name in ("rope", "angles", "angles_dtype", "q_out")}
        steps.append(ops.Append(name="rotate", rows="slots", positions="given", index_dtype="i64", **fields))
    common: dict[str, Any] = {"q_heads": kernels.q_heads, "arch": kernels.arch, "model": kernels.model}
    return op, (
        KernelSet(name=f"{kernels.name}_rows", cache=rows, ops=steps, **common),
        KernelSet(name=f"{kernels.name}_store", cache=cache, ops=[ops.Append(name="store")], **common),
    )


def _comes_apart(op: Append, kernels: KernelSet) -> bool:
    changes = op.rope is not None or op.k_norm is not None
    simple = op.rows == "ragged" and not op.bias and op.positions == "lengths" and op.inputs != "parts"
    saturates = op.q_out == "e4m3" and op.rope is None
    return changes and simple and not saturates and not kernels.cache.rope_part and not kernels.cache.storage.residual


# Where a GPU is ------------------------------------------------------------------------------------------------------


class Apart:
    """The kernels in place of a set's fused append `op`."""

    def __init__(self, folder: Path, name: str, op: str) -> None:
        self.op = op
        self.rows, self.store = (package_in(folder / FOLDER, f"{name}_{part}") for part in ("rows", "store"))
        self.steps = [getattr(self.rows, step) for step in ("norm", "rotate") if hasattr(self.rows, step)]

    def bind(self, work: Workload, given: list[dict[str, Any]]) -> tuple[list[Any], Any]:
        """(launches of every layer, one after the other; the last layer's q as it comes out, None without one). `given` are
        the arguments of the fused append, a layer each."""
        count = sum(work.new)
        positions = np.concatenate([np.arange(t - n, t) for t, n in zip(work.totals, work.new, strict=True)])
        shared: dict[str, Any] = {"slots": work.upload(np.arange(count)), "positions": work.upload(positions)}
        shape = (-(-count // PAGE), PAGE, work.facts.kv_heads, work.facts.head_dim)
        pools = [[work.random(shape) for _ in range(work.layers)] for _ in self.steps]
        caches = [self._rows_cache(work, pool) for pool in pools]
        store = self.store.Cache(**work.pools, **work.tables)
        launches, q = list[Any](), None
        offsets = work.offsets(self.store.store, work.new)
        for i, call in enumerate(given):
            rows = self._inputs(work, call, count)
            for op, cache, pool in zip(self.steps, caches, pools, strict=True):
                launches.append(op.bind(cache[i], **self._arguments(work, op, rows, call | shared)))
                rows["q"] = q = rows.pop("q_out", None)
                rows["k"] = GpuArray(pool[i], pool[i].pointer, (count, *shape[2:]), work.facts.dtype)
            kept = {role: rows[role] for role, _ in work.roles}
            launches.append(self.store.store.bind(store[i], row_offsets=offsets, **kept))
        return launches, q

    def _inputs(self, work: Workload, call: dict[str, Any], count: int) -> dict[str, Any]:
        """q, k and v on their own, of numbers as good as any where they come in one row."""
        facts = work.facts
        shapes = {"q": (facts.q_heads, facts.head_dim), **{r: (facts.kv_heads, dim) for r, dim in work.roles}}
        return {role: call[role] if role in call else work.random((count, *shape)) for role, shape in shapes.items()}

    def _arguments(self, work: Workload, op: Any, rows: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        found = dict[str, Any]()
        for spec in op.KERNEL.arguments:
            if spec.name == "q_out":
                shape = (sum(work.new), work.facts.q_heads, work.facts.head_dim)
                rows["q_out"] = found["q_out"] = work.random(shape, spec.dtype)
            elif spec.name in ("q", "k"):
                found[spec.name] = rows[spec.name]
            elif spec.name != "errors":
                found[spec.name] = given[spec.name]
        return found

    def _rows_cache(self, work: Workload, pool: list[GpuArray]) -> Any:
        """Pages of rows, one a layer; slots say where rows go, so that the page table is nobody's."""
        kinds = {t.name: t for t in self.rows.Cache.TABLES}
        kind = np.dtype({"u32": np.uint32, "i32": np.int32, "i64": np.int64}[kinds["page_table"].dtype])
        length = np.dtype({"u32": np.uint32, "i32": np.int32, "i64": np.int64}[kinds["lengths"].dtype])
        tables = {"page_table": work.upload(np.zeros((1, 1), kind)), "lengths": work.upload(np.zeros(1, length))}
        return self.rows.Cache(k_pool=pool, **tables)

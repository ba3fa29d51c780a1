"""The arguments of every operation that kvgen bench knows, for a scene's workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench.synthetic_batch import ATTENDING, LAYER, LAYERS, NEW_ROWS, STEP, Scene, aligned
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.ops import Convert, Gather
from kvgen.plan.params import Array, Scalar
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.keys import class_of_keys

Raw = NDArray[Any]
# Operations on whole pages of all layers: the list of ids that each takes.
LISTS: Final = {"copy_pages": "pairs", "zero_pages": "page_ids", "gather_states": "ids", "scatter_states": "ids"}
KNOWN: Final = tuple(
    sorted(
        (
            *(
                "append",
                "convert",
                "decode",
                "extend",
                "gather",
                "gather_rows",
                "gather_states",
                "indexer_scores",
                "scatter_states",
                "lora_add",
                "mla_decode",
                "norm_cache",
                "rotate_cache",
            ),
            *("scatter", "seal", *LISTS),
        )
    )
)
SELECTED_PAGES: Final = 16  # pages that a kv head's list of decode names, at most: MiniMax-M3's
CANDIDATES: Final = 2048  # blocks that a list of indexer_scores names, at most: DeepSeek V4.1's


@dataclass(frozen=True)
class Call:
    """One operation's arguments: `arrays` by name, and `numbers`; `rows` of new tokens, of copied ones, of queries, or of
    ids or pairs of pages. The arrays have `total` rows, padding included; those of request b begin at `begins[b]`. `source`
    is the cache that convert reads, `keys` are those besides the set's own that lists name rows of, by argument."""

    op: Op
    launcher: Any
    arrays: Mapping[str, Raw]
    rows: int
    total: int = 0
    begins: tuple[int, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    source: Scene | None = None
    keys: Mapping[str, Scene] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The operation's kind."""
        return self.op.kind

    @property
    def counted_as(self) -> str:
        """The kind that lengths are those of: rows that are no tokens come over what has been stored, as gather does."""
        return "gather" if getattr(self.op, "cross", False) else self.kind

    @property
    def rows_each(self) -> int:
        """Query rows of a request."""
        return rows_each(self.op)

    @property
    def sparse(self) -> bool:
        """Whether every row of q has a list of tokens."""
        return bool(getattr(self.op, "sparse", False))

    def arguments(self) -> dict[str, Any]:
        """What the launcher takes behind the cache, but for the error word and a workspace."""
        found = {**self.arrays, **self.numbers}
        if self.source is not None:
            found["source"] = self.source.package.Cache(**self.source.pools, **self.source.tables(self.kind))[LAYER]
        return found | {name: scene.package.Cache(**scene.pools)[LAYER] for name, scene in self.keys.items()}


def rows_each(op: Op) -> int:
    """Query rows that an operation has of a request."""
    return int(getattr(op, "rows", 1)) if op.kind in ATTENDING else 1


def call_of(scene: Scene, op: Op) -> Call:
    """An operation's call: append stores the new tokens (seal the groups they complete; norms, RoPE and lora_add change them),
    gather, decode and extend read all that are alive (and visible), scatter and convert store them, gather_rows takes some of
    each request, copy_pages copies half of the pages onto the other half, zero_pages zeroes all of them,
    gather_states and scatter_states copy all of them, of one layer.

    Raises ToolError for an operation that kvgen bench does not know.
    """
    launcher = getattr(scene.package, op.name)
    if op.kind not in KNOWN:
        raise ToolError(
            f"{scene.kernels.name}/{op.name}: got a {op.kind}; kvgen bench knows {', '.join(KNOWN[:-1])} and {KNOWN[-1]}"
        )
    alive = [scene.alive(b) for b in range(len(scene.workload.totals))]
    new, batch = scene.workload.new, len(alive)
    rows = rows_each(op)
    if min(scene.workload.totals) < rows:
        raise ToolError(
            f"{scene.kernels.name}/{op.name}: got a request of {min(scene.workload.totals)} tokens; {rows} rows of q are as many "
            "new tokens; give more"
        )
    counts: Sequence[int] = new if op.kind in (*STEP, *NEW_ROWS) else alive
    if op.kind in (*ATTENDING, "gather_rows"):
        counts = [rows] * batch
    padded = getattr(op, "rows", "") == "padded"
    begins = np.arange(batch + 1) * max(new) if padded else np.cumsum([0, *counts])
    listed, keys = _listed(scene, op), _keys(scene, op)
    entries = [len(ids) for ids in listed.values()]
    sizes: dict[str, int] = {
        "T": (2 if op.kind == "lora_add" else 1) * int(begins[-1]),
        **{"B": batch, "B+1": batch + 1, "S": max(new), **dict.fromkeys("NP", max(scene.workload.totals))},
        **{"J": selected(scene), **dict(zip(("N", "NS"), entries, strict=False))},
        "all_layers": LAYERS,
        "K": selected(scene) if getattr(op, "sparse", False) else max(scene.workload.totals),
        **({"P": selected_pages(scene)} if getattr(op, "pages", "") == "per_head" else {}),
        **_blocks(scene, op),
        **{name.removesuffix("cache") + "K": selected(its) for name, its in keys.items()},
    }
    arrays, numbers = dict[str, Raw](), dict[str, int]()
    given = [*launcher.KERNEL.arguments, *(launcher.PLAN.arguments if op.kind in NEW_ROWS else ())]
    for spec in given:
        if spec.name in ("workspace", "errors") or (op.kind in ATTENDING and spec.name == "row_offsets"):
            continue  # there a request has `rows` rows
        if any(spec.name == f"num_{name}" for name in listed):
            continue  # all of them count
        if spec.name == "starts" and not scene.cache.page_table.drops_tokens:
            continue
        if isinstance(spec, Array):
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in spec.shape)
            arrays[spec.name] = aligned(shape, dtype(spec.dtype).numpy())
        elif spec.name in ("num_rows", "lora_end_idx"):
            numbers[spec.name] = int(begins[-1])
        elif op.kind in (*ATTENDING, *NEW_ROWS) and isinstance(spec, Scalar):  # of a score function
            numbers[spec.name] = 1
        elif isinstance(spec, Scalar) and spec.most is not None:  # the first head that convert moves
            numbers[spec.name] = spec.most
    for name, array in arrays.items():
        _fill(scene, op, name, array, begins, listed)
    for name, its in keys.items():
        prefix = name.removesuffix("cache")
        _fill_list(its, arrays[f"{prefix}indices"], arrays[f"{prefix}topk_lengths"])
    moved = batch * sizes["J"] if op.kind == "gather_rows" else sum(entries) if listed else sum(counts)
    source = _source(scene, op) if isinstance(op, Convert) else None
    return Call(op, launcher, arrays, moved, int(begins[-1]), tuple(int(n) for n in begins[:-1]), numbers, source, keys)


def _fill(scene: Scene, op: Op, name: str, array: Raw, begins: Raw, listed: Mapping[str, Raw]) -> None:
    """Index arrays as the workload has them; a scale of 1; everything else stays 0."""
    totals, new = np.array(scene.workload.totals), np.array(scene.workload.new)
    if name == "row_offsets":
        array[...] = begins
    elif name == "row_begins":
        array[...] = begins[:-1]
    elif name == "row_counts":
        array[...] = np.diff(begins)
    elif name == "starts":
        array[...] = [scene.entries(total) - scene.alive(b) for b, total in enumerate(scene.workload.totals)]
    elif name == "valid_lengths":
        array[...] = new
    elif name == "slots" and op.kind == "gather_rows":
        for b, row in enumerate(array):
            row[...] = tokens_of_query(scene, b, len(row))
    elif name == "slots":
        if op.kind in ("gather", "scatter"):
            whole = [(scene.entries(int(total)), scene.alive(b)) for b, total in enumerate(totals)]
            places = [_places(scene, b, np.arange(end - count, end)) for b, (end, count) in enumerate(whole)]
        else:
            places = [_new_places(scene, b) for b in range(len(totals))]
        array[...] = np.concatenate(places)
    elif name == "positions":
        rows = array.reshape(-1, *array.shape[-2:]) if getattr(op, "rows", "") == "padded" else array
        for b, begin in enumerate(begins[:-1]):
            found = np.arange(totals[b] - new[b], totals[b])
            if getattr(op, "rows", "") == "padded":
                rows[:, b, : new[b]] = found
            else:
                array[..., begin : begin + new[b]] = found
    elif name == "lora_end_idx":
        array[...] = begins[-1]
    elif name == "q_scale":
        array[...] = 1
    elif name in listed:
        array[...] = listed[name]
    elif name == "candidates":
        for row, blocks in enumerate(array):
            found = candidate_blocks(scene, op, row // rows_each(op))
            blocks[: len(found)], blocks[len(found) :] = found, -1
    elif name == "indices":
        _fill_list(scene, array, None)
    elif name == "topk_lengths":
        array[...] = selected(scene)
    elif name == "page_lists":
        for b, lists in enumerate(array):
            for head, pages in enumerate(lists):
                pages[...] = pages_of_head(scene, b, head, len(pages))
    elif name == "page_counts":
        array[...] = selected_pages(scene)
    elif name == "valid_tokens":
        array[...] = totals
    elif name in ("mask", "tree_mask"):  # all is visible
        array[...] = np.iinfo(array.dtype).max


def _fill_list(scene: Scene, lists: Raw, counts: Raw | None) -> None:
    """Rows of a cache that each query row attends to, all of them counted."""
    for row, at in enumerate(lists):
        at[...] = _places(scene, row, tokens_of_query(scene, row, len(at)))
    if counts is not None:
        counts[...] = lists.shape[1]


def selected(scene: Scene) -> int:
    """Tokens that a query or a list names."""
    return min(scene.workload.listed, *(scene.alive(b) for b in range(len(scene.workload.totals))))


def _blocks(scene: Scene, op: Op) -> dict[str, int]:
    """Blocks of keys that indexer_scores has a maximum of, and numbers in its lists."""
    if op.kind != "indexer_scores":
        return {}
    blocks = [len(candidate_blocks(scene, op, b)) for b in range(len(scene.workload.totals))]
    return {"C": max(blocks), "NB": -(-max(scene.workload.totals) // (getattr(op, "block_max", None) or 1))}


def candidate_blocks(scene: Scene, op: Op, b: int) -> NDArray[np.int64]:
    """The blocks that a list of indexer_scores names for request b: the newest one, others in no order, sorted."""
    size, alive = getattr(op, "candidates", None), scene.alive(b)
    if size is None or not alive:
        return np.zeros(0, np.int64)
    older = np.random.default_rng(b).permutation((alive - 1) // size)[: CANDIDATES - 1]
    return np.sort(np.append(older, (alive - 1) // size))


def selected_pages(scene: Scene) -> int:
    """Pages that a list of decode names for a kv head."""
    return min(SELECTED_PAGES, *(-(-scene.alive(b) // scene.tokens) for b in range(len(scene.workload.totals))))


def pages_of_head(scene: Scene, b: int, head: int, count: int) -> NDArray[np.int64]:
    """The pages of request b, its newest one first, that a kv head's list names."""
    last = (scene.workload.totals[b] - 1) // scene.tokens
    first = (scene.workload.totals[b] - scene.alive(b)) // scene.tokens
    older = np.random.default_rng((b, head)).permutation(np.arange(first, last))
    return np.array([last, *older[: count - 1]])


def tokens_of_query(scene: Scene, b: int, count: int) -> NDArray[np.int64]:
    """The tokens of request b that its query of gather_rows, or its list, names, in no order."""
    first = scene.entries(scene.workload.totals[b]) - scene.alive(b)
    return first + np.random.default_rng(b).permutation(scene.alive(b))[:count]


def _new_places(scene: Scene, b: int) -> NDArray[np.int64]:
    """The places of the new tokens of request b; -1 for those that end no entry, where one stands for several tokens."""
    total, rate = scene.workload.totals[b], scene.cache.entry_tokens
    tokens = np.arange(total - scene.workload.new[b], total)
    return np.where((tokens + 1) % rate == 0, _places(scene, b, tokens // rate), -1)


def _places(scene: Scene, b: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where tokens (entries) of request b lie in the pool, counted in them; -1 for those that a ring has lost."""
    alive = (
        positions >= (-(-scene.entries(scene.workload.totals[b]) // scene.tokens) - len(scene.ids[b])) * scene.tokens
    )
    column = (positions // scene.tokens) % scene.columns
    ids = scene.matrix(scene.ids)[b, 0, column] * scene.cache.page_table.id_multiplier
    return np.where(alive, ids * scene.tokens + positions % scene.tokens, -1)


def _listed(scene: Scene, op: Op) -> dict[str, Raw]:
    """The ids of all pages, entries of the page table in no order; in pairs one half of the pages onto the other half."""
    name, entries = LISTS.get(op.kind), sum(ids.size for ids in scene.ids)
    if name is None:
        return {}
    if name == "pairs" and entries < 2:
        raise ToolError(
            f"{scene.kernels.name}: got a workload of one page; copy_pages copies one onto another; give more"
        )
    order = np.random.default_rng(1)

    def ids() -> Raw:
        found = order.permutation(entries)
        return found[: entries // 2 * 2].reshape(-1, 2) if name == "pairs" else found

    own = scene.cache.storage.own_table and not scene.cache.page_table.separate_kv
    return {name: ids()} | ({f"scale_{name}": ids()} if own else {})


def _source(scene: Scene, op: Convert) -> Scene:
    """The same workload in the cache that is converted."""
    kernels = KernelSet(name=scene.kernels.name, q_heads=op.source.kv_heads, cache=op.source, ops=(Gather(),))
    found: Any = SimpleNamespace(Cache=getattr(scene.package, op.source_class))
    return Scene(kernels, found, scene.workload)


def _keys(scene: Scene, op: Op) -> dict[str, Scene]:
    """The same workload in each of the caches that lists name rows of, besides the set's own, by argument."""
    found = {}
    for keys in getattr(op, "sources", ()):
        kernels = KernelSet(name=scene.kernels.name, q_heads=1, cache=keys.cache, ops=(Gather(),))
        package: Any = SimpleNamespace(Cache=getattr(scene.package, class_of_keys(op.name, keys.name)))
        found[f"{keys.name}_cache"] = Scene(kernels, package, scene.workload)
    return found

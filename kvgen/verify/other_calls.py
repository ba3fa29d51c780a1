"""The arguments of operations that `kvgen bench` does not count: on tables, lengths, lists of pages, states of attention."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench import KNOWN, Call, Scene, call_of
from kvgen.bench.synthetic_batch import aligned
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower_pages
from kvgen.ops import Custom, Pool, Reorder
from kvgen.plan.params import Array, Scalar
from kvgen.reference import mla_plan
from kvgen.schema.kernel_set import Op
from kvgen.verify.custom_calls import custom_call
from kvgen.verify.pooled import place_states, state_sizes

Raw = NDArray[Any]
OTHERS: Final = (
    *("advance", "attention_output", "combine_lists", "compact", "indexer_query", "list_keys", "merge_states"),
    *(
        "mla_decompress",
        "mla_plan",
        "move_tokens",
        "pool_tokens",
        "remap_indices",
        "reorder",
        "row_offsets",
        "rows_add",
    ),
    *("sliced_add", "slot_mapping", "store_scales", "swap_pages", "to_csr", "to_dense"),
)
# Those that work between steps: lengths count all tokens.
_BETWEEN: Final = (
    "attention_output",
    "compact",
    "indexer_query",
    "move_tokens",
    "remap_indices",
    "reorder",
    "swap_pages",
    "merge_states",
    "sliced_add",
)
STATES: Final = 3
LISTED: Final = 6  # tokens that a row of remap_indices names
CHUNKS: Final = 2


def prepared(scene: Scene, op: Op) -> tuple[Call, dict[str, Raw]]:
    """An operation's call, and the cache's tables as it expects them. Raises ToolError where there is no batch for it."""
    if op.kind in KNOWN:
        call = call_of(scene, op)
        return call, scene.tables(call.counted_as, call.rows_each)
    if isinstance(op, Custom):
        return custom_call(scene, op), scene.tables("gather")
    if op.kind not in OTHERS:
        raise ToolError(f"kvgen verify has no batches for {op.kind}")
    tables = scene.tables("gather" if op.kind in _BETWEEN else "append")
    return _call(scene, op, tables), tables


def alignment_of(scene: Scene, op: Op) -> int:
    """The tokens that a request's keys are padded to, of mla_plan and mla_decompress."""
    return int(getattr(op, "alignment", None) or scene.cache.page_tokens or 1)


def _call(scene: Scene, op: Op, tables: dict[str, Raw]) -> Call:
    launcher, new = getattr(scene.package, op.name), scene.workload.new
    rows, batch = sum(new), len(new)
    offsets = np.cumsum([0, *new])
    chunk = _chunk(scene, op, tables, offsets) if op.kind == "mla_decompress" else {}
    pages = [-(-n // scene.tokens) for n in scene.workload.totals]
    sizes = {
        **{"T": len(chunk["rows"]) if chunk else rows, "A": rows, "A+1": batch + 1, "B": batch, "B+1": batch + 1},
        **{"J": LISTED if op.kind == "remap_indices" else sum(pages) + 2, "C": CHUNKS, "S": STATES, "Q": sum(pages)},
        **{"P": -(-scene.pages // scene.cache.page_table.id_multiplier), "M": scene.columns, "N": max(batch, 2)},
        "K": max(scene.workload.totals) + LISTED,
    }
    if op.kind == "combine_lists":
        sizes |= {"J": LISTED, "K": max(scene.workload.totals) + scene.entries(max(scene.workload.totals))}
    if op.kind == "to_dense":
        sizes["C"] = scene.columns
    if isinstance(op, Pool):
        sizes |= state_sizes(scene, op)
    arrays, numbers = dict[str, Raw](), dict[str, int]()
    plan = getattr(launcher, "PLAN", None) if op.kind == "compact" else None
    arguments = launcher.KERNEL.arguments + (plan.arguments if plan is not None else ())
    for spec in arguments:
        if spec.name in ("errors", "other", "kept", "num_pairs", "num_scale_pairs") or spec.name in arrays:
            continue
        if spec.name == "row_offsets" and spec.optional and scene.kv.lengths == "after":
            continue
        if isinstance(spec, Array):
            if any(n not in sizes for n in spec.shape if isinstance(n, str)):
                raise _no_batch(op)
            shape = tuple(n if isinstance(n, int) else sizes[n] for n in spec.shape)
            arrays[spec.name] = aligned(shape, dtype(spec.dtype).numpy())
        elif isinstance(spec, Scalar):
            numbers[spec.name] = {"lora_end_idx": rows, "buffer_rows": _buffer(scene)[1]}.get(spec.name, 0)
    entries_begin, _ = _buffer(scene)
    tokens_begin = [begin + scene.entries(n) for begin, n in zip(entries_begin, scene.workload.totals, strict=True)]
    places = {"entries_begin": np.array(entries_begin), "tokens_begin": np.array(tokens_begin)}
    places |= {"row_offsets": offsets, "new_tokens": np.array(new), "lora_end_idx": np.array([rows // 2])}
    places |= {name: chunk[name] for name in ("buffer_row_offsets", "cache_offsets") if chunk}
    for name, array in arrays.items():
        if name.startswith("new_") and name.removeprefix("new_") in tables:
            array[...] = 0 if name == "new_lengths" else tables[name.removeprefix("new_")]
        elif name in places:
            array[...] = places[name]
        elif name == "positions":
            array[...] = np.arange(array.size) % sizes["P"]
    _lists(scene, op, arrays)
    place_states(arrays)
    return Call(op, launcher, arrays, rows, sizes["T"], tuple(int(n) for n in offsets[:-1]), numbers)


def _buffer(scene: Scene) -> tuple[list[int], int]:
    """Where each request's entries begin in a buffer of its entries and then its tokens, request by request; its rows."""
    ends = np.cumsum([0, *(scene.entries(n) + n for n in scene.workload.totals)]).tolist()
    return ends[:-1], ends[-1]


def _no_batch(op: Op) -> ToolError:
    return ToolError(f"kvgen verify has no batches for {op.kind} over such a page table")


def _chunk(scene: Scene, op: Op, tables: dict[str, Raw], offsets: Raw) -> dict[str, Raw]:
    """One buffer with the keys of all requests, as mla_plan lays them; `rows` is as long as it."""
    to = alignment_of(scene, op)
    size = sum(-(-n // to) * to for n in scene.workload.totals)
    own = offsets if scene.kv.lengths == "before" else None
    plan = mla_plan(scene.view(tables), 1, size, to, np.dtype(np.int64), own)
    return {
        "rows": np.zeros(size),
        "buffer_row_offsets": plan.buffer_row_offsets[0],
        "cache_offsets": plan.cache_offsets[0],
    }


def _lists(scene: Scene, op: Op, arrays: dict[str, Raw]) -> None:
    """Lists of ids, pairs and tokens: in no order, none twice among those that are written."""
    rng, entries = np.random.default_rng(2), sum(ids.size for ids in scene.ids)
    for name in ("pairs", "scale_pairs"):
        if name in arrays:
            count = len(arrays[name])
            arrays[name][...] = np.stack([rng.permutation(entries)[:count], rng.permutation(entries)[:count]], axis=1)
    if "indices" in arrays:
        begins, block = np.cumsum([0, *scene.workload.new]), getattr(op, "candidates", None) or 1
        for b, entries in enumerate(scene.entries(total) for total in scene.workload.totals):
            rows = arrays["indices"][begins[b] : begins[b + 1]]
            if "candidates" in arrays:  # of blocks, whose columns rows count
                named = arrays["candidates"][begins[b] : begins[b + 1]]
                named[...] = rng.integers(0, max(entries // block, 1), named.shape)
                rows[...] = rng.integers(0, named.shape[1] * block, rows.shape)
            else:
                rows[...] = rng.integers(entries - scene.alive(b), entries, rows.shape) if scene.alive(b) else -1
            rows[:, -1] = -1
    if op.kind == "move_tokens":  # none is read that another one writes; where there is no room, none
        slots, count = rng.permutation(scene.pages * scene.tokens), len(arrays["src"])
        for name, at in (("src", slots[:count]), ("dst", slots[count : 2 * count])):
            arrays[name][...] = [*at, *[-1] * (count - len(at))]
    if isinstance(op, Reorder):
        whole = lower_pages(scene.cache).table.copied_whole and not scene.cache.states
        if arrays["fresh"].ndim > 1 or "fresh_scales" in arrays or whole or scene.cache.ragged:
            raise _no_batch(op)
        batch = len(scene.workload.totals)
        # Two requests go on from the same one; the page behind each request's own is free.
        arrays["parents"][...] = [(b + 1) % max(batch - 1, 1) for b in range(batch)]
        arrays["fresh"][...] = [int(ids[-1, 0]) for ids in scene.ids]

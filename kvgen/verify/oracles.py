"""What every operation must leave of a case: the oracles of kvgen.reference, in float64, over the memory before the launch.

Each function changes `wanted`, a copy of that memory, into what the launch must have left, and returns the error word. Where
a kernel computes in f32, what it left must be near enough, and is then taken over into `wanted`: so that in the end all memory
is compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen import reference
from kvgen.bench.step import Step
from kvgen.bench.synthetic_batch import LAYER, LAYERS, Scene
from kvgen.bench.tolerance import Distance, compare_rows, take_row
from kvgen.layout.dtypes import dtype
from kvgen.lowering.new_rows_rules import resolve_rope
from kvgen.ops import (
    AttentionOutput,
    CombineLists,
    Convert,
    Decode,
    Extend,
    IndexerQuery,
    IndexerScores,
    ListKeys,
    MergeStates,
    MlaDecode,
    MlaPlan,
    NormCache,
    Pool,
    RemapIndices,
    RotateCache,
    SlotMapping,
    StoreScales,
    SwapPages,
)
from kvgen.reference import Decoded, Rows, Scored
from kvgen.reference.append import Changed, NewRow, locate
from kvgen.reference.attention_output import Output, blocks_of, read_blocks, scales_of
from kvgen.reference.gather import Runs
from kvgen.reference.indexer_query import Query, e2m1_half_step, head_scales
from kvgen.reference.indexer_scores import e8m0_scales, unpacked
from kvgen.reference.mla_decode import Listed
from kvgen.reference.pool_tokens import latent_error
from kvgen.reference.rope import Table
from kvgen.reference.rounding import ulp
from kvgen.reference.tables import LIMIT
from kvgen.schema.mask import TREE_ROWS
from kvgen.verify.batches import Contents, Pools
from kvgen.verify.closeness import HALF_ULP, TINY, Terms, limits, terms
from kvgen.verify.custom_oracle import judge_custom
from kvgen.verify.judged import At, Judged
from kvgen.verify.other_calls import alignment_of
from kvgen.verify.pooled import pooled_step, state_of

Raw = NDArray[Any]
Oracle = Callable[[Judged], int]


def _append(j: Judged) -> int:
    scene, given = j.case.scene, j.arrays
    step = Step.of(j.case.call.op, scene.kernels)
    assert step is not None
    found, word = locate(
        j.view,
        j.case.call.total,
        row_offsets=given.get("row_offsets"),
        slots=given.get("slots"),
        valid_lengths=given.get("valid_lengths"),
        position_out_of_range=lambda row, at: step.position_out_of_range(given, row, at),
        stored=step.op.inputs != "q",
    )
    change = step.changed(given, np.array([at.position or 0 for at in found], np.int64))
    rows, far = step.rows(given), {"k": Distance(), "v": Distance()}
    mine, theirs = j.got.rows(scene), j.wanted.rows(scene)
    for row, at in enumerate(found):
        for role, kept, pool, place in zip("kv", mine, theirs, at.places or (), strict=False):
            if step.changes(role):
                _furthest(far[role], take_row(kept, pool, place, at.token, change[role], row))
            elif at.position is None:
                pool.write(place.page, at.token, rows[role][row])
            else:
                pool.put(at.b, at.position // scene.cache.entry_tokens, place, rows[role][row], at.after)
    for role, distance in far.items():
        j.meet(f"rows of {role}", distance)
    if "q_out" in given:
        scale = float(given["q_scale"][0]) if "q_scale" in given else 1.0
        _rotated_q(j, found, change["q"], scale)
    return word


def _furthest(so_far: Distance, more: Distance) -> None:
    so_far.error, so_far.share = max(so_far.error, more.error), max(so_far.share, more.share)


def _rotated_q(j: Judged, found: list[NewRow], change: Changed, scale: float = 1.0) -> None:
    """q_out: near enough in rows that are known, NaN where the position is not, as it was in padding."""
    got = j.got.arrays["q_out"].reshape(len(found), *j.got.arrays["q_out"].shape[-2:])
    wanted = j.wanted.arrays["q_out"].reshape(got.shape)
    heads = change.rows.shape[1]
    behind = np.array([at.state != "padding" for at in found], np.bool_)
    wanted[behind, heads:] = 0
    got, wanted = got[:, :heads], wanted[:, :heads]
    known = np.array([at.state == "known" for at in found], np.bool_)
    unknown = np.array([at.state == "unknown" for at in found], np.bool_)
    j.meet("q_out", compare_rows(got, change, known, scale))
    if not np.isnan(got[unknown].astype(np.float32)).all():
        j.wrong.append("q_out: rows without a position must be NaN, and are not")
    wanted[known | unknown] = got[known | unknown]


def _seal(j: Judged) -> int:
    rows = j.wanted.rows(j.case.scene)
    return reference.seal(j.view, rows, [j.arrays["k"]], row_offsets=j.arrays["row_offsets"])


_RUNS: Final = ("row_begins", "row_counts")


def _gather(j: Judged) -> int:
    where, word = dict[str, Any](j.places("row_offsets", "starts", "slots")), 0
    if "row_begins" in j.arrays:
        where["row_offsets"] = Runs(j.arrays["row_begins"], j.arrays["row_counts"])
    names = [n for n in ("k_out", "v_out") if n in j.arrays]
    for pools, at in j.copied():
        if getattr(j.case.call.op, "raw", False):
            word = _gather_raw(j, pools, at, where)
            continue
        gathered = reference.gather(j.view, pools, [j.wanted.arrays[n][at] for n in names], **where)
        word = _gathered(j, names, gathered, at)
    return word


def _gather_raw(j: Judged, pools: Sequence[Rows], at: At, where: dict[str, Any]) -> int:
    outputs = {n: a[at] for n, a in j.wanted.arrays.items() if n not in (*where, *_RUNS, "errors")}
    # The oracle names what it gives without the ending of an output.
    short = {n.removesuffix("_out"): a for n, a in outputs.items()}
    found, failed, word = reference.gather_raw(j.view, pools, short, **where)
    for name, array in found.items():
        full = name if name in outputs else f"{name}_out"
        outputs[full][...] = array
        if array.dtype.kind not in "iu":
            j.take_nan(full, failed, at)
    return word


def _gather_rows(j: Judged) -> int:
    names = [n for n in ("k_out", "v_out") if n in j.arrays]
    before = [j.wanted.arrays[n] for n in names]
    where = j.places("row_offsets", "slots")
    return _gathered(j, names, reference.gather_rows(j.view, j.wanted.rows(j.case.scene), before, **where))


def _gathered(j: Judged, names: Sequence[str], gathered: reference.Gathered, at: At = slice(None)) -> int:
    for name, right in zip(names, gathered.outputs, strict=False):
        wanted, got = j.wanted.arrays[name][at], j.got.arrays[name][at]
        wanted[...] = right
        j.take_nan(name, gathered.failed, at)
        # A NaN that was stored is one in the output, of any bits where it was dequantized.
        both = np.isnan(right.astype(np.float32)) & np.isnan(got.astype(np.float32))
        wanted[both] = got[both]
    return gathered.errors


def _scatter(j: Judged) -> int:
    where, word = j.places("row_offsets", "starts", "slots"), 0
    for pools, at in j.copied():
        if getattr(j.case.call.op, "raw", False):
            given = {n: a[at] for n, a in j.arrays.items() if n not in (*where, "errors")}
            word = reference.scatter_raw(j.view, pools, given, **where)
        else:
            new = [j.arrays[name][at] for name in "kv" if name in j.arrays]
            word = reference.scatter(j.view, pools, new, **where)
    return word


def _decode(j: Judged) -> int:
    op = j.case.call.op
    assert isinstance(op, Decode)
    given = terms(j.case.scene.kernels, op, {**j.arrays, **j.case.numbers})
    q, rows = j.arrays["q"], j.wanted.rows(j.case.scene)
    how: dict[str, Any] = {"row_offsets": j.arrays.get("row_offsets"), **given.oracle()}
    if op.pages == "all":
        return _attended(j, reference.decode(j.view, rows, q, **how), given)
    how |= {"page_lists": j.arrays["page_lists"], "page_counts": j.arrays.get("page_counts")}
    heads = np.arange(q.shape[1]) // j.case.scene.kernels.group
    wanted = reference.decode_per_head(j.view, rows, q, **how)
    return max(_attended(j, its, given, heads == head) for head, its in enumerate(wanted))


def _extend(j: Judged) -> int:
    op = j.case.call.op
    assert isinstance(op, Extend)
    given = terms(j.case.scene.kernels, op, {**j.arrays, **j.case.numbers})
    how = {name: value for name, value in given.oracle().items() if name != "rows"}
    most = TREE_ROWS if op.mask.tree == "packed" else LIMIT
    rows, offsets = j.wanted.rows(j.case.scene), j.arrays.get("row_offsets")
    wanted = reference.extend(j.view, rows, j.arrays["q"], row_offsets=offsets, most_rows=most, **how)
    # Near a row that sees a page that is not there others may be NaN as well.
    lost = wanted.doubtful & np.isnan(j.got.arrays["out"].astype(np.float64)).all(axis=(1, 2))
    seen = tuple(None if gone else one for gone, one in zip(lost, wanted.seen, strict=True))
    return _attended(j, replace(wanted, seen=seen), given)


def _mla_decode(j: Judged) -> int:
    op, kernels = j.case.call.op, j.case.scene.kernels
    assert isinstance(op, MlaDecode)
    kind, (keys,) = kernels.kv.dtype, j.wanted.rows(j.case.scene)
    given = Terms(
        op.softmax_scale(kernels),
        kind,
        op.out_dtype or kind,
        op.rows,
        sinks=j.arrays.get("sinks"),
        sinks_in_lse=op.sinks == "lse",
        lse_base=op.lse_base,
        lse_empty=op.lse_empty,
    )
    how: dict[str, Any] = {"scale": given.scale, "lse_base": op.lse_base, "lse_empty": op.lse_empty}
    how |= {"sinks": given.sinks, "sinks_in_lse": given.sinks_in_lse}
    if op.sparse:
        lists = [_listed(j, j.case.scene, keys, ""), *(_listed(j, its, None, n) for n, its in j.case.call.keys.items())]
        wanted = reference.mla_decode_sparse(lists, j.arrays["q"], v_dim=j.arrays["out"].shape[2], **how)
    else:
        offsets = j.arrays.get("row_offsets")
        wanted = reference.mla_decode(j.view, keys, j.arrays["q"], rows=op.rows, row_offsets=offsets, **how)
    return _attended(j, wanted, given)


def _indexer_query(j: Judged) -> int:
    """Weights between those of rows that have lost what f32 may lose, codes within half a step of the rows."""
    op, given, kernels = j.case.call.op, j.arrays, j.case.scene.kernels
    assert isinstance(op, IndexerQuery)
    found = reference.indexer_query(
        given["q"],
        rope=resolve_rope(op.rope, kernels),
        local=op.rope == "local",
        positions=given.get("positions"),
        table=Table(given["cos_sin"], op.angles) if op.angles != "computed" else None,
        hadamard=op.hadamard,
    )
    rows, lost = found.change.rows[found.known], found.change.lost[found.known]
    if "q_scales" in given:
        return _packed_query(j, op, found)
    codes, got = (j.got.arrays[name][found.known].astype(np.float64) for name in ("q_out", "weights_out"))
    weights = given["weights"][found.known].astype(np.float64) * op.weight_factor(kernels)
    ends = [
        weights * head_scales(np.maximum(np.abs(rows) + by, 0), op.recipe, op.least(kernels)) for by in (-lost, lost)
    ]
    low, high = np.minimum(*ends), np.maximum(*ends)
    far = Distance()  # a scale, two products and the factor are rounded, and so are the ends
    far.meet(np.abs(got - np.clip(got, low, high)), 5 * 2.0**-24 * np.maximum(np.abs(low), np.abs(high)))
    j.meet("weights_out", far)
    with np.errstate(all="ignore"):
        scale = (got / weights)[..., None]
        half = np.maximum(np.abs(rows) * 2.0**-4, scale * 2.0**-10) * 1.001 + lost
        far = Distance()
        far.meet(np.abs(codes * scale - rows), np.where(weights[..., None] == 0, np.inf, half))
    j.meet("q_out", far)
    for name in ("q_out", "weights_out"):
        if not np.isnan(j.got.arrays[name][~found.known].astype(np.float32)).all():
            j.wrong.append(f"{name}: rows without a position must be NaN, and are not")
        j.wanted.arrays[name][...] = j.got.arrays[name]
    return found.word


def _listed(j: Judged, scene: Scene, rows: Rows | None, argument: str) -> Listed:
    """The lists of rows of a cache: the set's, whose `rows` are given, or that of `argument`."""
    prefix = argument.removesuffix("cache")
    if rows is None:
        (rows,) = Contents(j.wanted.keys[argument], {}, {}).rows(scene)
    lists = j.arrays[f"{prefix}indices"], j.arrays.get(f"{prefix}topk_lengths")
    return Listed(rows, scene.pages, scene.tokens, *lists)


def _packed_query(j: Judged, op: IndexerQuery, found: Query) -> int:
    """The same of e2m1 codes, whose numbers are within half a step of the rows."""
    kernels, far = j.case.scene.kernels, Distance()
    names = ("q_out", "q_scales", "weights_out")
    codes, words, got = (np.ascontiguousarray(j.got.arrays[name][found.known]) for name in names)
    rows, lost = found.change.rows[found.known], found.change.lost[found.known]
    numbers, scales = unpacked(codes, words), np.repeat(e8m0_scales(words), 32, axis=-1)
    far.meet(np.abs(numbers - rows), e2m1_half_step(rows, scales) * 1.001 + lost)
    j.meet("q_out", far)
    weights = j.arrays["weights"][found.known].astype(np.float64) * op.weight_factor(kernels)
    far = Distance()
    far.meet(np.abs(got - weights), 2.0**-22 * np.abs(weights))
    j.meet("weights_out", far)
    if not np.isnan(j.got.arrays["weights_out"][~found.known]).all():
        j.wrong.append("weights_out: rows without a position must be NaN, and are not")
    for name in names:
        j.wanted.arrays[name][...] = j.got.arrays[name]
    return found.word


def _indexer_scores(j: Judged) -> int:
    """Scores within the roundings of their sums."""
    op, given, wanted = j.case.call.op, j.arrays, j.wanted.arrays
    assert isinstance(op, IndexerScores)
    (keys,) = j.wanted.rows(j.case.scene)
    how: dict[str, Any] = {"rows": op.rows, "row_offsets": given.get("row_offsets"), "q_scales": given.get("q_scales")}
    if op.candidates is not None:
        lists = given["candidates"]
        found = reference.candidate_scores(j.view, keys, given["q"], given["weights"], lists, op.candidates, **how)
        return _held_scores(j, "logits", found, op)
    block = op.block_max or 1
    rooms = {
        name: wanted[name].shape[1] * (block if name == "block_max" else 1)
        for name in ("logits", "block_max")
        if name in wanted
    }
    found = reference.indexer_scores(j.view, keys, given["q"], given["weights"], min(rooms.values()), **how)
    if op.logits:
        _held_scores(j, "logits", found.first(rooms["logits"]), op)
    if op.block_max is not None:
        maxima = found.first(rooms["block_max"]).block_max(block, pin_newest=op.pin_newest)
        _held_scores(j, "block_max", maxima, op)
    return found.errors


def indexer_slack(wanted: Scored, dims: int, *, codes: bool) -> NDArray[np.float64]:
    """How far scores of `dims` products a head may be off.

    `codes`: products of e4m3 by Hopper's tensor cores, which add 32 of them to a sum at a time: all are cut to 13 bits behind the
    largest one's first. So each product and each sum loses at most 2^-13 of `largest`.
    """
    cut: NDArray[np.float64] = 2.0**-20 * wanted.terms + 1e-30
    return cut + (dims + -(-dims // 32)) * 2.0**-13 * wanted.largest if codes else cut


def _held_scores(j: Judged, name: str, wanted: Scored, op: IndexerScores) -> int:
    """One array of scores held to the oracle's."""
    got, to = j.got.arrays[name], j.wanted.arrays[name]
    to[wanted.seen | op.fill] = wanted.logits[wanted.seen | op.fill]
    known, far, q = np.isfinite(wanted.logits), Distance(), j.arrays["q"]
    allowed = indexer_slack(wanted, q.shape[2] * (2 if q.dtype == np.uint8 else 1), codes=q.dtype.itemsize == 1)
    far.meet(np.abs(got[known] - wanted.logits[known]), allowed[known])
    j.meet(name, far)
    taken = known | np.isnan(wanted.logits) & np.isnan(got)
    to[taken] = got[taken]
    return wanted.errors


def _attended(j: Judged, wanted: Decoded, given: Terms, heads: NDArray[np.bool_] | None = None) -> int:
    """out and lse of these query heads (None: all), row by row: NaN where the oracle has NaN, exactly 0 and the empty log-sum-exp
    where a row sees nothing, else within the bounds of kvgen.verify.closeness."""
    out, lse = j.got.arrays["out"].astype(np.float64), j.got.arrays.get("lse")
    if heads is not None:
        out = np.where(heads[:, None], out, wanted.out)
        lse = None if lse is None else np.where(heads, lse, wanted.lse)
    empty_lse = float(given.lse_empty)
    for row, seen in enumerate(wanted.seen):
        if seen is None:
            if not np.isnan(out[row]).all() or (lse is not None and not np.isnan(lse[row]).all()):
                j.wrong.append(f"out: row {row} is of a request with wrong data; it must be NaN, and is not")
            continue
        empty = wanted.lse[row] == empty_lse
        if out[row][empty].any() or (lse is not None and (lse[row][empty] != empty_lse).any()):
            j.wrong.append(f"out: row {row} sees no token; it must be 0, and lse {given.lse_empty}")
        if empty.all():
            continue
        allowed, lse_allowed = limits(wanted, given, j.arrays["q"], row)
        far, far_lse = Distance(), Distance()
        far.meet(np.abs(out[row] - wanted.out[row]), allowed)
        j.meet(f"out, row {row}", far)
        if lse is not None:
            far_lse.meet(np.abs(lse[row][~empty] - wanted.lse[row][~empty]), lse_allowed[~empty])
            if not far_lse.share <= 1:
                j.wrong.append(f"lse, row {row}: off by {far_lse.error:.3g}, {far_lse.share:.3g} times its bound")
    for name in ("out", "lse"):
        if name in j.arrays:
            j.wanted.arrays[name][...] = j.got.arrays[name]
    return wanted.errors


def _convert(j: Judged) -> int:
    op, source = j.case.call.op, j.case.call.source
    assert isinstance(op, Convert) and source is not None
    read = Contents(j.wanted.source_pools, j.wanted.source_tables, {})
    table = source.view(j.case.before.source_tables)
    pools = j.wanted.rows(j.case.scene)
    first = {name: int(j.case.numbers.get(name, 0)) for name in ("source_head", "target_head")}
    return reference.convert(
        j.view, pools, table, read.rows(source), same_scales=op.same_scales, heads=op.heads, **first
    )


def _copy_pages(j: Judged) -> int:
    given = j.places("pairs", "scale_pairs")
    return reference.copy_pages(j.case.scene.cache, j.wanted.pools, given.pop("pairs"), **given)  # type: ignore[arg-type]


def _move_tokens(j: Judged) -> int:
    layers = [j.wanted.rows(j.case.scene, layer) for layer in range(LAYERS)]
    return reference.move_tokens(j.view, layers, **j.places("src", "dst", "row_offsets"))


def _zero_pages(j: Judged) -> int:
    given = j.places("page_ids", "scale_page_ids")
    return reference.zero_pages(j.case.scene.cache, j.wanted.pools, given.pop("page_ids"), **given)  # type: ignore[arg-type]


def _gather_states(j: Judged) -> int:
    return reference.gather_states(_states(j), j.arrays["ids"], j.wanted.arrays["states_out"])


def _scatter_states(j: Judged) -> int:
    return reference.scatter_states(_states(j), j.arrays["ids"], j.arrays["states"])


def _states(j: Judged) -> Raw:
    """The layer's states."""
    pools = j.wanted.pools["state_pool"]
    assert isinstance(pools, list)
    return pools[LAYER]


def _norm_cache(j: Judged) -> int:
    op, cache = j.case.call.op, j.case.scene.kv
    assert isinstance(op, NormCache)
    which = "kv".index(op.role)
    mine, theirs = j.got.rows(j.case.scene)[which], j.wanted.rows(j.case.scene)[which]
    found, change, word = reference.norm_cache(
        j.view,
        theirs,
        which,
        _rows_of_step(j),
        row_offsets=j.arrays["row_offsets"],
        norm=op.norm,
        weight=j.arrays[f"{op.role}_weight"],
        kind=dtype(cache.dtype).numpy(),
        latent=theirs.dim - cache.rope_part if cache.rope_part else 0,
    )
    _in_place(j, found, change, which, mine, theirs)
    return word


def _rotate_cache(j: Judged) -> int:
    op, scene = j.case.call.op, j.case.scene
    assert isinstance(op, RotateCache)
    step = Step.of(op, scene.kernels)
    assert step is not None and step.rope is not None
    mine, theirs = j.got.rows(scene)[0], j.wanted.rows(scene)[0]
    latent = theirs.dim - scene.kv.rope_part if scene.kv.rope_part else 0
    found, change, q, word = reference.rotate_cache(
        j.view,
        theirs,
        _rows_of_step(j),
        j.arrays.get("q"),
        row_offsets=j.arrays["row_offsets"],
        rope=step.rope,
        latent=latent,
    )
    _in_place(j, found, change, 0, mine, theirs)
    if q is not None:
        _rotated_q(j, found, q)
    return word


def _rows_of_step(j: Judged) -> int:
    """The rows that the launch is for."""
    return j.case.numbers.get("num_rows", j.case.call.total)


def _in_place(j: Judged, found: list[NewRow], change: Changed, which: int, mine: Any, theirs: Any) -> None:
    far = Distance()
    for row, at in enumerate(found):
        if at.places is not None:
            _furthest(far, take_row(mine, theirs, at.places[which], at.token, change, row))
    j.meet(f"rows of {'kv'[which]}", far)


def _lora_add(j: Judged) -> int:
    end = j.case.numbers.get("lora_end_idx")
    if end is None:
        end = int(j.arrays["lora_end_idx"][0])
    pools = j.wanted.rows(j.case.scene)
    return reference.lora_add(j.view, pools, j.arrays["kv"], row_offsets=j.arrays["row_offsets"], lora_end_idx=end)


def _slot_mapping(j: Judged) -> int:
    op, wanted = j.case.call.op, j.wanted.arrays
    assert isinstance(op, SlotMapping)
    return reference.slot_mapping(
        j.view,
        j.arrays["row_offsets"],
        wanted["slots"],
        interleave=op.interleave,
        rank=j.case.numbers.get("rank", 0),
        local_lengths=wanted.get("local_lengths"),
    )


def _remap_indices(j: Judged) -> int:
    op = j.case.call.op
    assert isinstance(op, RemapIndices)
    return reference.remap_indices(
        j.view,
        j.arrays["row_offsets"],
        j.arrays["indices"],
        j.wanted.arrays["out"],
        counts=j.wanted.arrays.get("counts"),
        drop_unseen=op.unseen == "drop",
        candidates=j.arrays.get("candidates"),
        block=op.candidates or 1,
    )


def _list_keys(j: Judged) -> int:
    op, arrays = j.case.call.op, j.wanted.arrays
    assert isinstance(op, ListKeys)
    return reference.list_keys(j.view, j.arrays["row_offsets"], arrays["keys"], arrays["counts"], op.window)


def _combine_lists(j: Judged) -> int:
    op, arrays = j.case.call.op, j.wanted.arrays
    assert isinstance(op, CombineLists)
    return reference.combine_lists(
        j.view,
        j.arrays["row_offsets"],
        j.arrays["entries_begin"],
        j.arrays["tokens_begin"],
        j.case.numbers["buffer_rows"],
        arrays["keys"],
        arrays["counts"],
        window=op.window,
        indices=j.arrays.get("indices"),
    )


def _row_offsets(j: Judged) -> int:
    out = j.wanted.arrays["out"]
    out[...], word = reference.row_offsets(j.view, out.dtype, j.arrays.get("row_offsets"))
    return word


def _advance(j: Judged) -> int:
    j.wanted.arrays["new_lengths"][...], word = reference.advance(j.view, **j.places("row_offsets", "new_tokens"))
    return word


def _to_csr(j: Judged) -> int:
    found = j.wanted.arrays
    return reference.to_csr(
        j.view,
        found["page_indices"],
        found["page_indptr"],
        found.get("last_page_len"),
        fill=getattr(j.case.call.op, "fill", None),
        row_offsets=j.arrays.get("row_offsets"),
    )


def _to_dense(j: Judged) -> int:
    return reference.to_dense(
        j.view,
        j.wanted.arrays["page_table"],
        fill=getattr(j.case.call.op, "fill", None),
        row_offsets=j.arrays.get("row_offsets"),
        lengths=j.wanted.arrays.get("lengths"),
        page_tokens=getattr(j.case.call.op, "page_tokens", 1),
    )


def _reorder(j: Judged) -> int:
    found = j.wanted.arrays
    fresh = {"page_table": j.arrays["fresh"]}
    new = {name: found[f"new_{name}"] for name in j.case.before.tables if name != "lengths" and f"new_{name}" in found}
    fresh |= {name: j.arrays["fresh"] for name in new}
    return reference.reorder(j.view, j.wanted.pools, j.arrays["parents"], fresh, new, found.get("new_lengths"))


def _compact(j: Judged) -> int:
    found = j.wanted.arrays
    count, used, word = reference.compact_plan(j.view, found["new_ids"], found["moves"])
    found["num_moves"][0] = count
    if "num_used" in found:
        found["num_used"][0] = used
    new = {name: found[f"new_{name}"] for name in j.case.before.tables if name != "lengths" and f"new_{name}" in found}
    moved = reference.compact(j.view, j.wanted.pools, found["moves"], found["new_ids"], new, count)
    return max(word, moved)


def _swap_pages(j: Judged) -> int:
    op = j.case.call.op
    assert isinstance(op, SwapPages)
    pools = {name: pool for name, pool in j.wanted.pools.items() if name in j.wanted.source_pools}
    given = j.places("pairs", "scale_pairs")
    return reference.swap_pages(
        j.case.scene.cache,
        _as_bits(pools),
        _as_bits(j.wanted.source_pools),
        op.direction,
        given.pop("pairs"),
        **given,  # type: ignore[arg-type]
    )


def _as_bits(pools: Pools) -> Any:
    """The same memory as integers, whose copies keep every bit of a NaN."""

    def bits(array: Raw) -> Raw:
        return array.view(f"u{array.itemsize}")

    return {name: [bits(a) for a in pool] if isinstance(pool, list) else bits(pool) for name, pool in pools.items()}


def _rows_add(j: Judged) -> int:
    pools = j.wanted.rows(j.case.scene)
    offsets, first = j.arrays["row_offsets"], j.case.numbers["batch_offset"]
    return reference.rows_add(j.view, pools, j.arrays["a"], row_offsets=offsets, batch_offset=first)


def _sliced_add(j: Judged) -> int:
    end = j.case.numbers.get("lora_end_idx")
    end = int(j.arrays["lora_end_idx"][0]) if end is None else end
    j.wanted.arrays["c"][...], word = reference.sliced_add(j.arrays["a"], j.arrays["b"], lora_end_idx=end)
    return word


def _store_scales(j: Judged) -> int:
    op = j.case.call.op
    assert isinstance(op, StoreScales)
    pools = j.wanted.rows(j.case.scene)
    return reference.store_scales(
        j.view, pools, j.arrays["new_scales"], row_offsets=j.arrays["row_offsets"], role="kv".index(op.role)
    )


def _merge_states(j: Judged) -> int:
    """Within half an ulp of the output and what f32 loses of weights: an exponent of at most 128, rounded, and 2^-21."""
    op, given = j.case.call.op, j.arrays
    assert isinstance(op, MergeStates)
    if "outs" in given:
        outs, lses = given["outs"], given["lses"]
        if op.first == "rows":
            outs, lses = outs.swapaxes(0, 1), lses.swapaxes(0, 1)
    else:
        outs, lses = (np.stack([given[f"{n}_a"], given[f"{n}_b"]]) for n in ("out", "lse"))
    wanted, sums = reference.merge_states(outs, lses, base=op.lse_base, empty=op.lse_empty)
    kind = op.out_dtype or op.dtype or j.case.scene.kv.dtype
    bound = HALF_ULP[kind] * np.abs(wanted) + TINY[kind] + 2.0**-15 * np.abs(outs.astype(np.float64)).max(axis=0)
    far, far_lse = Distance(), Distance()
    far.meet(np.abs(j.got.arrays["out"].astype(np.float64) - wanted), bound)
    j.meet("out", far)
    lse, finite = j.got.arrays["lse"].astype(np.float64), np.isfinite(sums)
    far_lse.meet(np.abs(lse[finite] - sums[finite]), 2.0**-19 * (1 + np.abs(sums[finite])))
    if not far_lse.share <= 1 or (lse[~finite] != sums[~finite]).any():
        j.wrong.append(f"lse: off by {far_lse.error:.3g}, {far_lse.share:.3g} times its bound")
    for name in ("out", "lse"):
        j.wanted.arrays[name][...] = j.got.arrays[name]
    return 0


def _attention_output(j: Judged) -> int:
    op, given, cache = j.case.call.op, j.arrays, j.case.scene.kernels.kv
    assert isinstance(op, AttentionOutput)
    found = reference.attention_output(
        given["o"],
        hadamard=op.hadamard,
        rope=resolve_rope(op.rope, j.case.scene.kernels),
        local=op.rope == "local",
        positions=given.get("positions"),
        table=Table(given["cos_sin"], op.angles) if op.angles != "computed" else None,
        dims=cache.rope_part or None,
        part="last" if cache.rope_part else None,
    )
    out = j.got.arrays["out"]
    if op.block is None:
        j.meet("out", compare_rows(out, found.change, found.known))
    else:
        _blocks(j, op, found)
    if not np.isnan((out if op.block is None else out.swapaxes(0, 1))[~found.known].astype(np.float32)).all():
        j.wrong.append("out: rows without a position must be NaN, and are not")
    for name in ("out", "out_scales"):
        if name in given:
            j.wanted.arrays[name][...] = j.got.arrays[name]
    return found.word


def _blocks(j: Judged, op: AttentionOutput, found: Output) -> None:
    """Codes and scales: scales between those of rows that have lost what f32 may lose, codes within half a step of the rows."""
    assert op.block is not None
    out, heads = j.got.arrays["out"].swapaxes(0, 1), j.case.scene.kernels.q_heads
    rows, lost = found.change.rows[found.known], found.change.lost[found.known]
    codes = np.ascontiguousarray(out).view(np.uint8).reshape(found.change.rows.shape)[found.known]
    scales = scales_of(j.got.arrays["out_scales"], heads)[found.known]
    low, high = (
        blocks_of(np.maximum(np.abs(rows) + by, 0), op.block, op.recipe, op.amax_min)[0] for by in (-lost, lost)
    )
    far = Distance()
    far.meet(np.abs(scales - np.clip(scales, low, high)), ulp(high, np.dtype(np.float32)))
    j.meet("scales", far)
    half = np.maximum(np.abs(rows) * 2.0**-4, np.repeat(scales, op.block, axis=-1) * 2.0**-10) * 1.001 + lost
    far = Distance()
    far.meet(np.abs(read_blocks(codes, scales) - rows), half)
    j.meet("out", far)


def _pool_tokens(j: Judged) -> int:
    op, scene, found = j.case.call.op, j.case.scene, j.wanted.arrays
    assert isinstance(op, Pool)
    step = pooled_step(op, scene.kernels, j.view, j.arrays, state_of(op, scene.kernels, found))
    (mine,), (theirs,), far = j.got.rows(scene), j.wanted.rows(scene), Distance()
    for row, at in enumerate(step.found):
        if at.places is not None:
            _furthest(far, take_row(mine, theirs, at.places[0], at.token, step.stored, row))
    j.meet("entries", far)
    if "latent_out" in found:
        emitted = np.array([at.state != "padding" for at in step.found], bool)
        unknown = np.isin(np.arange(len(emitted)), step.unknown)
        got, far = j.got.arrays["latent_out"], Distance()
        known = emitted & ~unknown
        far.meet(np.abs(got[known] - step.latent.rows[known, 0]), latent_error(step.latent, got.dtype)[known, 0])
        j.meet("latent_out", far)
        j.take_nan("latent_out", unknown)
        found["latent_out"][known] = got[known]
    return step.word


def _mla_plan(j: Judged) -> int:
    op, found = j.case.call.op, j.wanted.arrays
    assert isinstance(op, MlaPlan)
    offsets = found["buffer_row_offsets"]
    to, size = alignment_of(j.case.scene, op), op.buffer_token_size
    plan = reference.mla_plan(j.view, len(offsets), size, to, offsets.dtype, j.arrays.get("row_offsets"))
    for name in ("buffer_row_offsets", "cache_offsets", "buffer_lengths"):
        found[name][...] = getattr(plan, name)
    return plan.errors


def _mla_decompress(j: Judged) -> int:
    name = next(n for n in ("k_latent", "k") if n in j.arrays)
    pools, to = j.wanted.rows(j.case.scene), alignment_of(j.case.scene, j.case.call.op)
    where = j.places("buffer_row_offsets", "cache_offsets", "row_offsets")
    return _gathered(j, [name], reference.mla_decompress(j.view, pools, j.wanted.arrays[name], to, **where))


ORACLES: Final[dict[str, Oracle]] = {
    "advance": _advance,
    "append": _append,
    "combine_lists": _combine_lists,
    "attention_output": _attention_output,
    "compact": _compact,
    "convert": _convert,
    "copy_pages": _copy_pages,
    "custom": judge_custom,
    "decode": _decode,
    "extend": _extend,
    "gather": _gather,
    "gather_rows": _gather_rows,
    "gather_states": _gather_states,
    "indexer_query": _indexer_query,
    "list_keys": _list_keys,
    "indexer_scores": _indexer_scores,
    "lora_add": _lora_add,
    "merge_states": _merge_states,
    "mla_decode": _mla_decode,
    "mla_decompress": _mla_decompress,
    "mla_plan": _mla_plan,
    "move_tokens": _move_tokens,
    "norm_cache": _norm_cache,
    "pool_tokens": _pool_tokens,
    "remap_indices": _remap_indices,
    "reorder": _reorder,
    "rotate_cache": _rotate_cache,
    "row_offsets": _row_offsets,
    "rows_add": _rows_add,
    "scatter": _scatter,
    "scatter_states": _scatter_states,
    "seal": _seal,
    "sliced_add": _sliced_add,
    "slot_mapping": _slot_mapping,
    "store_scales": _store_scales,
    "swap_pages": _swap_pages,
    "to_csr": _to_csr,
    "to_dense": _to_dense,
    "zero_pages": _zero_pages,
}

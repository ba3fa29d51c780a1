"""The fewest 32-byte sectors an operation can touch: those that hold what it must read or write, by its semantics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvgen.bench.calls import LISTS, Call, candidate_blocks, pages_of_head, selected, selected_pages, tokens_of_query
from kvgen.bench.step import Step
from kvgen.bench.synthetic_batch import ATTENDING, LAYER, NEW_ROWS, STEP, Scene
from kvgen.bench.touched_bytes import SECTOR, WHOLE, Marked, Marks, Token, sectors_of
from kvgen.ops import Convert, NormCache
from kvgen.reference import Place
from kvgen.schema.mask import Mask

IN_PLACE = ("lora_add", "norm_cache", "rotate_cache")


def minimum_sectors(scene: Scene, call: Call) -> dict[str, int]:
    """By the name of a launch's buffer, the sectors that `call` must touch; a buffer that it need not touch is left out.

    Tables count the entries that say where the tokens are: a page's entry once, a request's length and offsets once; a
    table of angles the entries of the positions by which rows are rotated. What changes in place is read once and written once.
    """
    every_layer = call.kind in ("gather", "scatter") and call.launcher.KERNEL.all_layers
    raw = bool(getattr(call.op, "raw", False))
    marked = Marked(scene, scene.tables(call.counted_as, call.rows_each), raw=raw, every_layer=every_layer)
    if call.kind in LISTS:
        layers = WHOLE if call.launcher.KERNEL.all_layers else slice(LAYER, LAYER + 1)
        for name, ids in call.arrays.items():
            if name.endswith(LISTS[call.kind]):
                marked.pages(ids.reshape(-1), scales=name != LISTS[call.kind], layers=layers)
        found = marked.sectors()
    elif call.source is not None:
        found = _converted(scene, call, marked)
    else:
        found = _rows(scene, call, marked)
    found |= {name: -(-a.nbytes // SECTOR) for name, a in call.arrays.items() if name not in found and name != "errors"}
    return {name: n for name, n in found.items() if n}


def planning_sectors(scene: Scene, call: Call) -> dict[str, int]:
    """What a planner must read to divide the work: every request's length, or those of lists."""
    if call.sparse:
        planned = {p.name for p in call.launcher.PLAN.arguments}
        return {name: -(-a.nbytes // SECTOR) for name, a in call.arrays.items() if name in planned}
    marked = Marked(scene, scene.tables("decode"))
    marked.lengths()
    return {name: n for name, n in marked.sectors().items() if n}


def _rows(scene: Scene, call: Call, marked: Marked) -> dict[str, int]:
    """What copies or changes tokens row by row: the cache's sectors, and those of rows that are only partly needed."""
    kind = call.kind
    stored = {role: np.zeros(call.total, np.bool_) for role in "kv"}
    live = np.zeros(call.total, np.bool_)  # rows that are somebody's, stored or not
    slots = call.arrays.get("slots") if kind in ("append", "gather", "scatter") else None
    roles, dims = _touched(scene, call)
    alone, by_head = getattr(call.op, "inputs", "") == "q", getattr(call.op, "pages", "") == "per_head"
    if slots is not None:
        live[:] = True
        stored = {role: slots >= 0 for role in "kv"}
        for slot in slots[slots >= 0].tolist():
            page, token = divmod(slot, scene.tokens)
            marked.row((Place(page, page),) * 2, token)
    else:
        for b, new in enumerate(scene.workload.new if kind in STEP else ()):
            live[call.begins[b] : call.begins[b] + new] = True
        for head, b in np.ndindex(scene.kv.kv_heads, len(scene.workload.totals)) if by_head else ():
            for token in _listed_tokens(scene, call, b, head):
                marked.token(token, kind, heads=slice(head, head + 1))
        for token in () if alone or by_head else _tokens(scene, call):
            for role in marked.token(token, kind, roles, dims):
                if token.row is not None and kind in STEP:
                    stored[role][token.row] = True
        if _asks_lengths(scene, call):
            marked.lengths()
    found = marked.sectors()
    if call.sparse:  # lists name tokens by their places
        found = {name: n for name, n in found.items() if scene.group(name, call.launcher) in ("kv", "scales")}
        for name, its in call.keys.items():
            found |= {f"{name}.{tensor}": n for tensor, n in _listed_rows(its).items()}
    if kind in IN_PLACE:
        written = {t.name for t in scene.package.Cache.TENSORS if t.writes}
        found = {name: (2 if name.partition("[")[0] in written else 1) * n for name, n in found.items()}
    return found | (_arrays(scene, call, live, stored) if kind in ("append", "seal", "rotate_cache") else {})


def _listed_rows(scene: Scene) -> dict[str, int]:
    """Sectors of the rows that lists name in another cache than the set's."""
    marked = Marked(scene, scene.tables("gather"))
    for b, total in enumerate(scene.workload.totals):
        for position in tokens_of_query(scene, b, selected(scene)).tolist():
            marked.token(Token(b, position, None, total), "gather")
    return {name: n for name, n in marked.sectors().items() if name.partition("[")[0] in scene.pools}


def _asks_lengths(scene: Scene, call: Call) -> bool:
    """Whether the operation must know how many tokens requests have; where a planner has asked, the list of chunks says it."""
    if call.kind in (*ATTENDING, *NEW_ROWS):
        return call.op.plan(scene.kernels)[0].split is None
    return call.kind in ("append", "seal", *IN_PLACE) or scene.cache.page_table.drops_tokens


def _touched(scene: Scene, call: Call) -> tuple[str, slice]:
    """The roles that an operation touches, and the dims of a head."""
    step, op, cache = Step.of(call.op, scene.kernels), call.op, scene.kv
    if isinstance(op, NormCache):
        part = op.norm.dim or cache.head_dim - cache.rope_part
        return op.role, slice(0, part) if op.role == "k" else WHOLE
    if call.kind == "rotate_cache" and step is not None:
        return "k", slice(*step.rotated(cache.head_dim))
    return getattr(op, "roles", "kv"), WHOLE


def _arrays(scene: Scene, call: Call, live: Marks, stored: dict[str, Marks]) -> dict[str, int]:
    """Sectors of the rows that an operation takes, q's of every row, K's and V's of those that are stored; of positions and
    angles those of rows that are rotated."""
    step, found = Step.of(call.op, scene.kernels), dict[str, int]()
    padded = getattr(call.op, "rows", "") == "padded"
    rotated = live if "q_out" in call.arrays else stored["k"]
    for name, array in call.arrays.items():
        rows = array.reshape(-1, *array.shape[2:]) if padded and array.ndim > 2 else array
        taken = np.zeros(rows.shape, np.bool_)
        if name == "qkv" and step is not None:
            for role, columns in step.columns().items():
                taken[:, columns] = (live if role == "q" else stored[role])[:, None]
        elif name in ("q", "q_out"):
            taken[live] = True
        elif name in ("k", "v", "k_latent", "k_rope"):
            taken[stored[name[0]]] = True
        elif name == "positions":
            taken.reshape(-1, call.total)[:] = rotated
        elif name == "cos_sin" and step is not None:
            _mark_angles(scene, call, step, rotated, taken)
        else:
            continue
        found[name] = sectors_of(np.repeat(taken.reshape(-1), array.itemsize))
    return found


def _mark_angles(scene: Scene, call: Call, step: Step, rotated: Marks, taken: Marks) -> None:
    """The entries of a table of angles by which rows are rotated: of each section those of its pairs."""
    half = taken.shape[1] // 2
    ends = np.cumsum(step.op.sections or (step.rotary_dim // 2,))
    for section, end in enumerate(ends):
        pairs = np.arange(0 if section == 0 else ends[section - 1], end)
        columns = np.concatenate([pairs, half + pairs] if step.op.angles == "halves" else [2 * pairs, 2 * pairs + 1])
        taken[np.ix_(_positions(scene, call)[rotated], columns)] = True


def _positions(scene: Scene, call: Call) -> NDArray[np.int64]:
    """The position by which every row of the step turns, 0 of padding."""
    found, rate = np.zeros(call.total, np.int64), scene.cache.entry_tokens
    for begin, total, new in zip(call.begins, scene.workload.totals, scene.workload.new, strict=True):
        found[begin : begin + new] = np.arange(total - new, total) // rate * rate
    return found


def _converted(scene: Scene, call: Call, marked: Marked) -> dict[str, int]:
    """Every token that both caches can hold, in the one that is read and in the one that is written: of each the heads that
    move."""
    source, op = call.source, call.op
    assert source is not None and isinstance(op, Convert)
    moved = [_heads(op, call.numbers.get(name, 0)) for name in ("target_head", "source_head")]
    other = Marked(source, source.tables("convert"))
    for b, total in enumerate(scene.workload.totals):
        for position in range(total - min(scene.alive(b), source.alive(b)), total):
            token = Token(b, position, None, total)
            marked.token(token, "convert", heads=moved[0])
            other.token(token, "gather", heads=moved[1])
    other.lengths()
    return marked.sectors() | {f"source.{name}": n for name, n in other.sectors().items()}


def _heads(op: Convert, first: int) -> slice:
    """The heads that move, of which this is the first."""
    return WHOLE if op.heads is None else slice(first, first + op.heads)


def _first_seen(call: Call, total: int, rows: int) -> int:
    """The first token that a row of a request sees: of all rows the first one sees furthest back."""
    mask, position = getattr(call.op, "mask", Mask()), total - rows
    window = position - mask.window + 1 if mask.window is not None else 0
    return max(window, position // mask.chunk * mask.chunk if mask.chunk is not None else 0)


def _tokens(scene: Scene, call: Call) -> Iterator[Token]:
    """Every token that is read or written."""
    residual = scene.cache.storage.residual
    for b, (total, new) in enumerate(zip(scene.workload.totals, scene.workload.new, strict=True)):
        first, last = scene.entries(total) - scene.alive(b), scene.entries(total)
        begin = call.begins[b]
        if call.kind == "gather_rows" or call.sparse:
            for position in tokens_of_query(scene, b, selected(scene)).tolist():
                yield Token(b, position, None, total)
            continue
        block = getattr(call.op, "candidates", None) if call.kind == "indexer_scores" else None
        if block is not None:
            for number in candidate_blocks(scene, call.op, b).tolist():
                for position in range(number * block, min((number + 1) * block, last)):
                    yield Token(b, position, None, total)
            continue
        if scene.cache.entry_tokens > 1 and call.kind in STEP:
            yield from _new_entries(scene, b, begin)
            continue
        if call.kind in STEP:
            # In a ring, pages that later rows of the same step take over are not written.
            first = max(total - new, (-(-total // scene.tokens) - len(scene.ids[b])) * scene.tokens)
        if call.kind in ("decode", *NEW_ROWS):
            first = max(first, _first_seen(call, total, new if call.kind in NEW_ROWS else call.rows_each))
        if call.kind == "seal":
            first, last = first // residual * residual, total // residual * residual
        for position in range(first, last):
            yield Token(b, position, begin + position - total + new if position >= total - new else None, total)


def _listed_tokens(scene: Scene, call: Call, b: int, head: int) -> Iterator[Token]:
    """What a kv head's list of request b's only row shows it: tokens of pages that are alive."""
    total = scene.workload.totals[b]
    first = max(total - scene.alive(b), _first_seen(call, total, 1))
    for page in pages_of_head(scene, b, head, selected_pages(scene)).tolist():
        for position in range(max(first, page * scene.tokens), min(total, (page + 1) * scene.tokens)):
            yield Token(b, position, None, total)


def _new_entries(scene: Scene, b: int, begin: int) -> Iterator[Token]:
    """The entries that new tokens of request b end; its rows begin at `begin`."""
    total, new, rate = scene.workload.totals[b], scene.workload.new[b], scene.cache.entry_tokens
    for position in range(total - new, total):
        if (position + 1) % rate == 0:
            yield Token(b, position // rate, begin + position - total + new, total)

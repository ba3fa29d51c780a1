"""A planner's list in a workspace, read back, and the chunks that its rules ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen import KernelSet
from kvgen.lowering.attention.split_kv import LEAST_TILES, OVERHEAD
from kvgen.reference import TableView
from kvgen.reference.attention import Arguments, RowPosition, span
from kvgen.reference.tables import LIMIT, bad_total, request_of_row
from kvgen.runtime.faults import Fault
from kvgen.runtime.workspace import Workspace
from tests.support.memory import CANARY, GUARD, Raw, aligned
from tests.support.sets import archs_of

_NAMES = ("b", "row", "rows", "tokens", "begin", "end", "index", "num_chunks", "slot", "fault")
KV_CHUNK = np.dtype([*((name, "<u4") for name in (*_NAMES, "stamp", "unused"))])
IDLE = 0x72746E63  # a counter's value between launches
FAN_IN = 32  # partial results that are merged at once
EMPTY, ORPHAN = 1, 3  # rows of nobody, and of nobody because the last offset is wrong


_WORDS = (
    "magic",
    "batch",
    "digest_low",
    "digest_high",
    "rows",
    "num_sm_parts",
    "max_rows",
    "max_chunks",
    "max_slots",
    "num_chunks",
)
HEADER = np.dtype([*((name, "<u4") for name in (*_WORDS, "others", "wrong", "stamp")), ("unused", "<u4", 3)])


@dataclass(frozen=True)
class ChunkList:
    """A workspace's memory: `starts` of each SM part's chunks, the chunks, what rows are, counters a slot, and whether some
    rows are nobody's and the last offset is wrong."""

    header: Any
    starts: NDArray[np.uint32]
    chunks: NDArray[Any]
    row_kinds: NDArray[np.uint8]
    counters: NDArray[np.uint32]
    others: bool
    wrong: bool

    def sm_parts(self) -> Iterator[NDArray[Any]]:
        """The chunks of each SM part."""
        for begin, end in itertools.pairwise(self.starts):
            yield self.chunks[begin:end]


def guarded(launcher: Any, max_rows: int, **sizes: Any) -> Workspace:
    """A workspace full of garbage, canaries around it."""
    found: Workspace = launcher.workspace(max_rows, **sizes)
    memory = aligned(found.nbytes + 2 * GUARD)
    found.view = found.view._replace(pointer=memory.ctypes.data + GUARD, owner=memory)
    return found


def read(workspace: Workspace, columns: int) -> ChunkList:
    """The list in a workspace of `columns` blocks a chunk, which has to lie where the kernels look for it."""
    sizes, memory = workspace.sizes, workspace.view.owner
    assert isinstance(memory, np.ndarray)
    inside = memory[GUARD : GUARD + workspace.nbytes]
    at = 64

    def take(count: int, kind: Any, end: int = 16) -> Raw:
        nonlocal at
        found = inside[at : at + count * np.dtype(kind).itemsize].view(kind)
        at += -(-found.nbytes // end) * end
        return found

    header = inside[:64].view(HEADER)[0]

    def stamps(count: int) -> Raw:
        """The plan's list at each place."""
        at = np.arange(1, count + 1, dtype=np.uint64) * 0x85EBCA6B + int(header["stamp"])
        return (at & 0xFFFFFFFF).astype(np.uint32)

    starts = take(sizes["num_sm_parts"] + 1, np.uint32) - stamps(sizes["num_sm_parts"] + 1)
    kinds = take(sizes["max_rows"], np.uint8)
    counters = take(sizes["max_slots"] * columns, np.uint32)
    chunks = take(sizes["max_chunks"], KV_CHUNK)
    assert at <= workspace.nbytes
    assert header["num_chunks"] == starts[-1] and all(header[name] == sizes[name] for name in sizes)
    assert (chunks["stamp"][: int(starts[-1])] == stamps(int(starts[-1]))).all()
    return ChunkList(
        header, starts, chunks[: int(starts[-1])], kinds, counters, bool(header["others"]), bool(header["wrong"])
    )


def hold_clean(workspace: Workspace, columns: int) -> None:
    """Nothing was written around a workspace, and its counters are as the plan left them."""
    memory = workspace.view.owner
    assert isinstance(memory, np.ndarray)
    assert (memory[:GUARD] == CANARY).all() and (memory[-GUARD:] == CANARY).all(), "written beside the workspace"
    assert (read(workspace, columns).counters == IDLE).all(), "counters are not what they were"


# What the list must be ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The tokens [begin, end) that rows of a request look at; in chunk `index` of `num_chunks`."""

    b: int
    row: int
    rows: int
    tokens: int
    begin: int
    end: int
    fault: int = 0
    index: int = 0
    num_chunks: int = 1

    @property
    def key(self) -> tuple[int, ...]:
        """All but the tokens of what looks at none."""
        tokens = (0, 0) if self.begin >= self.end else (self.begin, self.end)
        return (self.b, self.row, self.rows, self.tokens, *tokens, self.fault, self.index, self.num_chunks)

    def tiles(self, tile: int) -> range:
        """The tiles that they lie in; one where there are none."""
        return range(self.begin // tile, max(-(-self.end // tile), self.begin // tile + 1))


def of_chunk(chunk: Any) -> Span:
    """A chunk as it was read."""
    names = ("b", "row", "rows", "tokens", "begin", "end", "fault", "index", "num_chunks")
    return Span(*(int(chunk[name]) for name in names))


def spans(
    view: TableView, rows: int, total: int, offsets: Raw | None, mask: Any, arguments: dict[str, Any]
) -> tuple[list[Span], list[int]]:
    """The requests of a step of `total` rows in order, one Span each, and the kind of every row: 0, EMPTY or ORPHAN."""
    found: list[Span] = []
    kinds = [0] * total
    nobody = ORPHAN if offsets is not None and bad_total(offsets, total) else EMPTY
    for row in range(total):
        if offsets is None:
            b, begin, end = row // rows, row // rows * rows, row // rows * rows + rows
            if b >= view.requests:
                kinds[row] = EMPTY
            elif row == begin:
                broken = Span(b, begin, total - begin, begin, 0, 0, Fault.ROW_OFFSETS)
                found.append(broken if end > total else _span(view, b, begin, rows, mask, arguments))
            continue
        whose = request_of_row(offsets, row, total)
        if whose is None:
            kinds[row] = nobody
            continue
        own = [request_of_row(offsets, r, total) for r in range(whose.begin, whose.end)] if whose.valid else []
        if not whose.valid or len(own) > rows or any(o is None or o.b != whose.b for o in own):
            found.append(Span(whose.b, row, 1, row, 0, 0, Fault.ROW_OFFSETS))
        elif row == whose.begin:
            found.append(_span(view, whose.b, row, len(own), mask, arguments))
    return found, kinds


def _span(view: TableView, b: int, row: int, rows: int, mask: Any, arguments: dict[str, Any]) -> Span:
    length = view.length(b)
    tokens = LIMIT if length is None else min(LIMIT, length + (rows if view.cache.lengths == "before" else 0))
    whole = Span(b, row, rows, tokens, 0, 0)
    seen = span(mask, RowPosition(b, row, np.arange(rows), rows, tokens), Arguments(arguments, 1, 1))
    if tokens == LIMIT or seen is None or not view.holds(b, tokens):
        return replace(whole, fault=Fault.LENGTH)
    return replace(whole, begin=max(seen[0], view.first_token(tokens)), end=seen[1])


def balanced(requests: Sequence[Span], sm_parts: int, tile: int) -> list[list[Span]]:
    """The chunks of each SM part: all costs on one line, cut into equal shares. A request costs OVERHEAD and its tiles.

    Where there are few more SM parts than one merge takes, shares are large enough for one merge. A request's last tiles that
    are fewer than OVERHEAD are the SM part's before, if that has tiles of it.
    """
    line: list[tuple[int, int | None]] = []
    for n, request in enumerate(requests):
        line += [(n, None)] * OVERHEAD + [(n, t) for t in request.tiles(tile)]
    share = max(OVERHEAD + LEAST_TILES, -(-len(line) // sm_parts))
    if sm_parts <= FAN_IN * 5 // 4:
        longest = max((len(r.tiles(tile)) for r in requests), default=0)
        share = max(share, -(-len(line) // FAN_IN) if len(requests) == 1 else -(-longest // (FAN_IN - 1)))
    cuts = [[u for u in line[p * share : (p + 1) * share] if u[1] is not None] for p in range(sm_parts)]
    for own, following in itertools.pairwise(cuts):
        last = [u for u in following if own and u[0] == own[-1][0]]
        if last and len(last) < OVERHEAD and last[-1][1] == requests[last[0][0]].tiles(tile)[-1]:
            own += last
            del following[: len(last)]
    runs = [
        [(n, [t for _, t in group if t is not None]) for n, group in itertools.groupby(cut, lambda u: u[0])]
        for cut in cuts
    ]
    counts = np.bincount([n for run in runs for n, _ in run], minlength=len(requests))
    before = [0] * len(requests)
    found: list[list[Span]] = []
    for run in runs:
        found.append([])
        for n, tiles in run:
            found[-1].append(_cut(requests[n], tiles[0] * tile, (tiles[-1] + 1) * tile, before[n], int(counts[n])))
            before[n] += 1
    return found


def invariant(requests: Sequence[Span], sm_parts: int, tile: int, chunk: int) -> list[list[Span]]:
    """The list where a request is cut into `chunk` tokens from its first tile on, and SM parts have as many of these each."""
    found = []
    for request in requests:
        first, last = request.tiles(tile)[0] * tile, request.tiles(tile)[-1] * tile + 1
        begins = range(first, last, chunk)
        found += [_cut(request, t, t + chunk, i, len(begins)) for i, t in enumerate(begins)]
    cuts = [len(found) * p // sm_parts for p in range(sm_parts + 1)]
    return [found[a:b] for a, b in itertools.pairwise(cuts)]


def _cut(request: Span, begin: int, end: int, index: int, num_chunks: int) -> Span:
    begin, end = max(begin, request.begin), min(end, request.end)
    return replace(request, begin=begin, end=end, index=index, num_chunks=num_chunks)


def hold_list(found: ChunkList, wanted: Sequence[Sequence[Span]], kinds: Sequence[int], max_slots: int) -> None:
    """The list is the wanted one, and the slots of its partial results are nobody else's."""
    got = [[of_chunk(chunk) for chunk in own] for own in found.sm_parts()]
    assert [[s.key for s in own] for own in got] == [[s.key for s in own] for own in wanted]
    assert found.row_kinds[: len(kinds)].tolist() == list(kinds)
    assert found.others == any(kinds)
    shared: dict[tuple[int, int], set[int]] = {}
    for chunk in found.chunks[found.chunks["num_chunks"] > 1]:
        shared.setdefault((int(chunk["b"]), int(chunk["row"])), set()).add(int(chunk["slot"]))
    taken: set[int] = set()
    for (b, row), slots in shared.items():
        assert len(slots) == 1, f"request {b} has several first slots"
        count = int(found.chunks[(found.chunks["b"] == b) & (found.chunks["row"] == row)]["num_chunks"][0])
        mine = set(range(min(slots), min(slots) + count))
        assert not mine & taken and max(mine) < max_slots
        taken |= mine


def hold_whole(requests: Sequence[Span], chunks: Sequence[Span]) -> None:
    """Every token of every request is in one chunk, and a request's chunks follow each other."""
    for request in requests:
        mine = [c for c in chunks if (c.b, c.row) == (request.b, request.row)]
        assert [c.index for c in mine] == list(range(len(mine))) and all(c.num_chunks == len(mine) for c in mine)
        assert mine, f"request {request.b} has no chunk"
        if request.begin < request.end:
            ends = [request.begin, *(c.end for c in mine)]
            assert [c.begin for c in mine] == ends[:-1] and ends[-1] == request.end
    assert len(chunks) == sum(1 for r in requests for c in chunks if (c.b, c.row) == (r.b, r.row))


def columns_of(kernels: KernelSet, op: str) -> int:
    """Blocks that share a chunk, on the last architecture that tests build the set for: launches are of that one unless they name
    another."""
    plan = next(o for o in kernels.ops if o.name == op).plan(kernels)[0].on(archs_of(kernels)[-1]).split
    assert plan is not None
    return plan.columns

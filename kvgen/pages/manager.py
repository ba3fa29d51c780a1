"""Pages of requests, by Modular MAX's verbs: claim a request, alloc pages for its next tokens, step, release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgen.pages.arguments import I32_MAX, PageError, of_the_step, token_ids, whole
from kvgen.pages.group import Group, groups_of
from kvgen.pages.inputs import GroupInputs, Slots, StepInputs
from kvgen.pages.pool import OutOfPages, Pool
from kvgen.pages.prefix import Block, PrefixTree


@dataclass
class _Request:
    """Where the tokens of a request lie: `tables` has its pages, a list a group, None where it has none.

    `tokens` are those written and those of the next step, None where only their number is known; `length` of them are
    written. `block` is that of its last full page in the tree; None once a page before it has unknown tokens.
    """

    salt: str
    tables: list[list[int | None]]
    block: Block | None = None
    tokens: list[int | None] = field(default_factory=list)
    length: int = 0
    blocks: int = 0
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    swapped: bool = False


class PageManager:
    """Page tables for requests over one pool a group.

    A step: `alloc` for every request in it, `inputs` for the launches, `step` once they are queued. Full pages are kept when
    requests are released, and shared with requests that begin with the same tokens; of a page that only begins alike a copy
    is made. All of it is host memory: nothing is launched here.

    With several groups a prefix is shared where all groups have what the next row sees. `page_size` is that of all groups.
    """

    def __init__(self, groups: int | Sequence[Group], page_size: int, *, prefix_cache: bool = True) -> None:
        self.page_size = whole("page_size", page_size, "a page holds at least 1 token", least=1)
        self.groups = groups_of(groups)
        self.prefix_cache = prefix_cache
        self.tree = PrefixTree()
        self._blocks: list[dict[int, Block]] = [{} for _ in self.groups]  # of pages, by group
        self._copied_from: list[Counter[int]] = [
            Counter() for _ in self.groups
        ]  # pages held until their copies are made
        self.pools = tuple(self._pool(number, group) for number, group in enumerate(self.groups))
        self.host_pools = tuple(Pool(g.host_pages) if g.host_pages else None for g in self.groups)
        self._requests: dict[Hashable, _Request] = {}

    def _pool(self, number: int, group: Group) -> Pool:
        reserved = [group.null_page] if 0 <= group.null_page < group.pages else []
        return Pool(group.pages, reserved=reserved, evicted=lambda page: self._evict(number, page))

    def _evict(self, group: int, page: int) -> None:
        block = self._blocks[group].pop(page)
        del block.pages[group]
        self.tree.prune(block)

    def _of(self, request: Hashable, *, swapped: bool = False) -> _Request:
        found = self._requests.get(request)
        if found is None:
            raise PageError(f"request: got {request!r}, which is not claimed; claim() it first")
        if found.swapped != swapped:
            where = (
                "lies in host memory; swap_in() it first" if found.swapped else "has its pages; swap_out() comes first"
            )
            raise PageError(f"request: got {request!r}, which {where}")
        return found

    def _of_all(self, requests: Sequence[Hashable]) -> list[_Request]:
        """The requests of a step, each of which is in it once."""
        states = [self._of(request) for request in requests]
        if len(set(requests)) < len(states):
            raise PageError(f"requests: got {list(requests)!r}; a request is in a step once")
        return states

    def __contains__(self, request: Hashable) -> bool:
        return request in self._requests

    def length(self, request: Hashable) -> int:
        """Tokens of the request in the cache, wherever its pages are."""
        found = self._requests.get(request)
        return (self._of(request) if found is None else found).length

    def claim(self, request: Hashable, *, salt: str = "") -> None:
        """A new request. Only those with the same `salt` share pages: put LoRA adapters and tenants into it."""
        if not isinstance(salt, str):
            raise PageError(f"salt: got {salt!r}; pass text, the same for requests that may share pages")
        if request in self._requests:
            raise PageError(f"request: got {request!r}, which is claimed already; release() it first")
        state = _Request(salt, [[] for _ in self.groups], copies=[[] for _ in self.groups])
        self._stand_at(state, self.tree.root(salt))
        self._requests[request] = state

    def _stand_at(self, state: _Request, block: Block | None) -> None:
        """`block` is that of the request's last full page."""
        left, state.block = state.block, block
        if block is not None:
            block.requests += 1
        if left is not None:
            left.requests -= 1
            self.tree.prune(left)

    def alloc(self, request: Hashable, tokens: Sequence[int] | int) -> int:
        """Pages for the next `tokens` of a request: a prompt or a piece of one, a token, drafts. Or for so many unknown ones.

        Returns how many of them the cache has already, which the step leaves out: at most all but the last one, and only at
        a request's first tokens. Raises OutOfPages where pages are too few, PageError for what is neither token ids nor a
        count, and for more tokens than a length of 32 bits counts; nothing has changed then.
        """
        state = self._of(request)
        known: list[int] | None = None
        if isinstance(tokens, (int, np.integer)):
            rule = "a step has at least 0 tokens of a request"
            count = whole("tokens", tokens, rule, least=0, most=I32_MAX - len(state.tokens))
        else:
            known = token_ids("tokens", tokens)
            count = len(known)
        if not count:
            return 0
        hit: list[Block] = []
        begun: Block | None = None
        shared = 0  # tokens of the page that begins alike
        if self.prefix_cache and not state.tokens and known is not None:
            hit, begun, shared = self._match(state.salt, known[:-1])
        cached = len(hit) * self.page_size + shared
        end = len(state.tokens) + count
        # Per group: pages to take, then what is there already.
        plans: list[tuple[int, list[int | None], int | None]] = []
        for number, pool in enumerate(self.pools):
            if hit or begun is not None:
                first = self._first_seen(number, cached) // self.page_size
                found = [block.pages[number] if i >= first else None for i, block in enumerate(hit)]
                source = None if begun is None else begun.pages[number]
                held = len(found)
            else:
                found, held = [], len(state.tables[number])
                source = self._shared_page(number, state)
            needed = -(-end // self.page_size) - held + (source is not None and begun is None)
            free = pool.free - sum(pool.references(p) == 0 for p in (*found, source) if p is not None)
            if needed > free:
                raise OutOfPages(f"alloc({request!r})" + (f", group {number}" if number else ""), needed, free)
            plans.append((needed, found, source))
        if hit:  # before pages are taken: that may evict the last page that holds this block
            self._stand_at(state, hit[-1])
            state.blocks = len(hit)
        for number, (needed, found, source) in enumerate(plans):
            pool, table = self.pools[number], state.tables[number]
            for page in (*found, source):
                if page is not None:
                    pool.retain(page)
            table += found
            taken = pool.take(needed)
            if source is not None:
                self._copied_from[number][source] += 1
                state.copies[number].append((source, taken[0]))
                if begun is None:  # a page of its own in the place of the shared one
                    table[-1] = taken.pop(0)
                    pool.release(source)
            table += taken
        state.tokens += [None] * count if known is None else known
        state.length += cached
        return cached

    def _first_seen(self, number: int, length: int) -> int:
        """The first token that the row behind `length` tokens sees."""
        window = self.groups[number].window
        return 0 if window is None else max(0, length - window + 1)

    def _match(self, salt: str, tokens: Sequence[int]) -> tuple[list[Block], Block | None, int]:
        """The blocks that all groups have of a prompt's beginning, and the one that begins like what follows, with how much."""
        size, found, block = self.page_size, [], self.tree.root(salt)
        for first in range(0, len(tokens) - size + 1, size):
            behind = self.tree.find(block, tuple(tokens[first : first + size]))
            if behind is None:
                break
            found.append(behind)
            block = behind
        begun, shared = self.tree.partial(block, tuple(tokens[len(found) * size : (len(found) + 1) * size]))
        while True:
            length = len(found) * size + shared
            if all(self._has(number, length, found, begun) for number in range(len(self.groups))):
                return found, begun, shared
            if begun is not None:
                begun, shared = None, 0
            else:
                found.pop()

    def _has(self, number: int, length: int, found: list[Block], begun: Block | None) -> bool:
        """Whether a group has all that the row behind `length` tokens sees."""
        first = self._first_seen(number, length) // self.page_size
        return all(number in b.pages for b in found[first:]) and (begun is None or number in begun.pages)

    def _shared_page(self, number: int, state: _Request) -> int | None:
        """The page that the next token is written to, if another request holds it too."""
        at = len(state.tokens)
        if at % self.page_size == 0:
            return None
        page = state.tables[number][at // self.page_size]
        assert page is not None
        return page if self.pools[number].references(page) - self._copied_from[number][page] > 1 else None

    def inputs(self, requests: Sequence[Hashable], *, batch: int | None = None, width: int | None = None) -> StepInputs:
        """What the launches of a step take, a row a request in this order.

        `batch` and `width` pad tables to fixed sizes, for CUDA graphs: with requests of no tokens, and with null pages.
        """
        states = self._of_all(requests)
        most = max((len(s.tables[0]) for s in states), default=0)
        rows, columns = len(states), max(1, most)
        if batch is not None:
            rows = whole("batch", batch, f"the step needs {rows}; pass at least that", least=rows)
        if width is not None:
            columns = whole("width", width, f"the step needs {most}; pass at least that", least=most)
        if rows * columns > I32_MAX:
            raise PageError(
                f"batch, width: got {rows} and {columns}; a page table has at most {I32_MAX} entries; pass fewer"
            )
        lengths, offsets = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        lengths[: len(states)] = [s.length for s in states]
        offsets[1 : len(states) + 1] = np.cumsum([len(s.tokens) - s.length for s in states])
        offsets[len(states) + 1 :] = offsets[len(states)]
        return StepInputs(
            lengths, offsets, tuple(self._group(n, states, rows, columns) for n in range(len(self.groups)))
        )

    def _group(self, number: int, states: Sequence[_Request], rows: int, columns: int) -> GroupInputs:
        null = self.groups[number].null_page
        table = np.full((rows, columns), null, np.int32)
        slots = []
        for row, state in enumerate(states):
            pages = np.array([null if p is None else p for p in state.tables[number]], np.int64)
            table[row, : len(pages)] = pages
            at = np.arange(state.length, len(state.tokens))
            slots.append(pages[at // self.page_size] * self.page_size + at % self.page_size if len(at) else at)
        copies = [pair for state in states for pair in state.copies[number]]
        return GroupInputs(table, np.concatenate([np.zeros(0, np.int64), *slots]), _pairs(copies))

    def step(
        self,
        requests: Iterable[Hashable],
        *,
        accepted: Mapping[Hashable, int] | None = None,
        tokens: Mapping[Hashable, Sequence[int]] | None = None,
    ) -> None:
        """The step's tokens are in the cache: lengths grow, full pages can be shared, pages in front of windows are free.

        `accepted`: of a request's tokens only the first so many stay, as of drafts; the others' pages are given back.
        `tokens`: what tokens are that `alloc` had only the number of; their pages cannot be shared without.
        Raises PageError for a request that is not there or is there twice, for names in `accepted` and `tokens` that the step
        does not have, and for counts that are not the step's; nothing has changed then, for no request.
        """
        requests = list(requests)
        states = self._of_all(requests)
        accepted, tokens = of_the_step("accepted", accepted, requests), of_the_step("tokens", tokens, requests)
        told: list[list[int] | None] = []
        kept: list[int] = []
        for request, state in zip(requests, states, strict=True):
            pending = len(state.tokens) - state.length
            known = None if tokens.get(request) is None else token_ids(f"tokens[{request!r}]", tokens[request])
            if known is not None and len(known) != pending:
                raise PageError(f"tokens[{request!r}]: got {len(known)}; the step has {pending} of this request")
            told.append(known)
            name, rule = f"accepted[{request!r}]", f"the step has {pending} tokens of this request"
            stay = whole(name, accepted.get(request, pending), rule, least=0)
            if stay > pending:
                raise PageError(f"{name}: got {stay}; {rule}")
            kept.append(stay)
        for state, known, stay in zip(states, told, kept, strict=True):
            if known is not None:
                state.tokens[state.length :] = known
            self._drop_copies(state)
            del state.tokens[state.length + stay :]
            state.length += stay
            for number, pool in enumerate(self.pools):
                table = state.tables[number]
                while len(table) > -(-state.length // self.page_size):
                    page = table.pop()
                    assert page is not None  # it held tokens of this step
                    pool.release(page)
            self._share(state)
            for number, pool in enumerate(self.pools):
                table = state.tables[number]
                for i in range(min(len(table), self._first_seen(number, state.length) // self.page_size) - 1, -1, -1):
                    front = table[i]
                    if front is None:
                        break
                    pool.release(front)
                    table[i] = None

    def _drop_copies(self, state: _Request) -> None:
        """The copies are made, or needed no more."""
        for number, pool in enumerate(self.pools):
            for source, _ in state.copies[number]:
                self._copied_from[number][source] -= 1
                pool.release(source)
            state.copies[number].clear()

    def _share(self, state: _Request) -> None:
        """Full pages of known tokens enter the tree; where it has the same ones, the request's own stay its own."""
        size = self.page_size
        while self.prefix_cache and state.block is not None and (state.blocks + 1) * size <= state.length:
            tokens = state.tokens[state.blocks * size : (state.blocks + 1) * size]
            known = tuple(t for t in tokens if t is not None)
            if len(known) < size:
                self._stand_at(state, None)
                return
            block = self.tree.insert(state.block, known)
            for number, pool in enumerate(self.pools):
                page = state.tables[number][state.blocks]
                if page is not None and number not in block.pages:
                    block.pages[number] = page
                    self._blocks[number][page] = block
                    pool.keep(page)
            self._stand_at(state, block)
            state.blocks += 1

    def fork(self, request: Hashable, into: Hashable) -> None:
        """A new request with the tokens of another one, and its pages; who writes first to a page that is not full copies it."""
        state = self._of(request)
        if len(state.tokens) != state.length:
            raise PageError(f"request: got {request!r} in the middle of a step; fork() it after step()")
        self.claim(into, salt=state.salt)
        other = self._requests[into]
        other.tokens, other.length = list(state.tokens), state.length
        self._stand_at(other, state.block)
        other.blocks = state.blocks
        for number, pool in enumerate(self.pools):
            other.tables[number] = list(state.tables[number])
            for page in other.tables[number]:
                if page is not None:
                    pool.retain(page)

    def release(self, request: Hashable) -> None:
        """The request is over, or will begin anew. Pages that can be shared stay until pages are needed, the last ones least."""
        state = self._requests.get(request)
        if state is None:
            self._of(request)
            return
        self._drop_copies(state)
        self._stand_at(state, None)
        for number, pool in enumerate(self.host_pools if state.swapped else self.pools):
            for page in reversed(state.tables[number]):
                if page is not None and pool is not None:
                    pool.release(page)
        del self._requests[request]

    def swap_out(self, request: Hashable) -> tuple[Slots, ...]:
        """The request moves to host memory: pairs (page, host page) for `SwapPages`, i64 `[N, 2]`, an array a group.

        Launch it before the next step writes. Raises OutOfPages where host pages are too few; nothing has changed then.
        """
        state = self._of(request)
        if len(state.tokens) != state.length:
            raise PageError(f"request: got {request!r} in the middle of a step; swap_out() it after step()")
        for number, table in enumerate(state.tables):
            host, needed = self.host_pools[number], sum(p is not None for p in table)
            free = 0 if host is None else host.free
            if needed > free:
                raise OutOfPages(
                    f"swap_out({request!r}), host pages" + (f" of group {number}" if number else ""), needed, free
                )
        return self._move(state, self.pools, self.host_pools, swapped=True)

    def swap_in(self, request: Hashable) -> tuple[Slots, ...]:
        """The request comes back: pairs (host page, page) for `SwapPages`, i64 `[N, 2]`, an array a group.

        Raises OutOfPages where pages are too few; nothing has changed then.
        """
        state = self._of(request, swapped=True)
        for number, (table, pool) in enumerate(zip(state.tables, self.pools, strict=True)):
            needed = sum(p is not None for p in table)
            if needed > pool.free:
                raise OutOfPages(f"swap_in({request!r})" + (f", group {number}" if number else ""), needed, pool.free)
        return self._move(state, self.host_pools, self.pools, swapped=False)

    def _move(
        self, state: _Request, source: Sequence[Pool | None], target: Sequence[Pool | None], *, swapped: bool
    ) -> tuple[Slots, ...]:
        moved = []
        for number, table in enumerate(state.tables):
            pairs = []
            come_from, go_to = source[number], target[number]
            for i, page in enumerate(table):
                if page is not None:
                    assert come_from is not None and go_to is not None  # both have pages: counted before
                    (other,) = go_to.take(1)
                    pairs.append((page, other))
                    come_from.release(page)
                    table[i] = other
            moved.append(_pairs(pairs))
        state.swapped = swapped
        return tuple(moved)


def _pairs(pairs: Sequence[tuple[int, int]]) -> Slots:
    return np.array(pairs, np.int64).reshape(-1, 2)

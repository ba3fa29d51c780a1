"""The page manager against a model of memory: what a request reads through its table is what it wrote, or a request like it."""

from __future__ import annotations

import copy
import os
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvgen.pages import Group, OutOfPages, PageManager, prefix

SIZE = 4
# Prompts that begin alike: pieces of a few tokens each.
PROMPTS = st.lists(
    st.sampled_from([(1, 2, 3, 4), (1, 2, 3), (5,), (1, 2, 9, 9, 9), (7, 7, 7, 7)]), min_size=1, max_size=6
).map(lambda pieces: [t for piece in pieces for t in piece])


def keys(salt: str, tokens: list[int]) -> list[int]:
    """The contents of the cache for each token: they depend on all tokens before it."""
    found, before = [], hash(salt)
    for token in tokens:
        before = hash((before, token))
        found.append(before)
    return found


class Machine(RuleBasedStateMachine):
    """Requests that begin alike, fork, draft, move to the host and come back, over pools that are too small for them."""

    @initialize(
        pages=st.sampled_from([16, 24, 9, 40]),
        window=st.sampled_from([9, 4, 3, 1]),
        host=st.sampled_from([12, 4, 0]),
        null=st.booleans(),
        alone=st.sampled_from([False, False, True]),
    )
    def make(self, pages: int, window: int, host: int, null: bool, alone: bool) -> None:
        groups = (
            Group(pages, host_pages=host, null_page=0 if null else -1),
            Group(pages, window=window, host_pages=host),
        )[alone:]  # alone: no group has all of a prefix
        self.manager = PageManager(groups, SIZE)
        self.memory = [np.zeros((pages + 1, SIZE), object) for _ in groups]
        self.host = [np.zeros((host, SIZE), object) for _ in groups]
        self.tokens: dict[int, list[int]] = {}  # in the cache
        self.pending: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.swapped: set[int] = set()
        self.number = 0

    def unchanged_where_full(self, call: Any, *args: Any) -> Any:
        """The call's result, or None where pages are too few, and then nothing has changed."""
        before = self.state()
        try:
            return call(*args)
        except OutOfPages as error:
            assert error.needed > error.free and self.state() == before
            return None

    def state(self) -> Any:
        pools = [*self.manager.pools, *(p for p in self.manager.host_pools if p is not None)]
        return copy.deepcopy(
            (
                [(list(p._free), p._references, p._kept) for p in pools],
                {r: (s.tables, s.tokens, s.length, s.copies, s.swapped) for r, s in self.manager._requests.items()},
                sorted(b.hash for found in self.manager.tree._by_hash.values() for b in found),
            )
        )

    def pick(self, data: st.DataObject, *, idle: bool = False, swapped: bool = False) -> int | None:
        found = [r for r in self.tokens if (r in self.swapped) == swapped and not (idle and self.pending[r])]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "", "lora"]))
    def claim(self, prompt: list[int], salt: str) -> None:
        request, self.number = self.number, self.number + 1
        self.manager.claim(request, salt=salt)
        cached = self.unchanged_where_full(self.manager.alloc, request, prompt)
        if cached is None:
            self.manager.release(request)
            return
        assert 0 <= cached < len(prompt) and self.manager.length(request) == cached
        self.tokens[request], self.pending[request], self.salts[request] = prompt[:cached], prompt[cached:], salt

    @precondition(lambda self: len(self.tokens) > len(self.swapped))
    @rule(data=st.data(), more=PROMPTS, unknown=st.booleans())
    def alloc(self, data: st.DataObject, more: list[int], unknown: bool) -> None:
        request = self.pick(data)
        assert request is not None
        given: Any = len(more) if unknown and not self.pending[request] else more
        cached = self.unchanged_where_full(self.manager.alloc, request, given)
        if cached is not None:  # above 0 where all that the request had was taken back
            self.tokens[request] += more[:cached]
            self.pending[request] += more[cached:]

    @precondition(lambda self: any(self.pending.values()))
    @rule(
        leave=st.integers(0, 63),
        reject=st.lists(st.integers(0, 5), max_size=6),
        told=st.integers(0, 63),
        padding=st.integers(0, 2),
    )
    def step(self, leave: int, reject: list[int], told: int, padding: int) -> None:
        """Requests whose bits `leave` has wait; of the i-th one's tokens `reject[i]` are taken back."""
        ready = [r for r in self.tokens if self.pending[r]]
        chosen = [r for i, r in enumerate(ready) if not leave >> i & 1]
        inputs = self.manager.inputs(chosen, batch=len(chosen) + padding)
        rows = np.diff(inputs.row_offsets)
        assert rows[len(chosen) :].sum() == 0 and inputs.lengths[: len(chosen)].tolist() == [
            len(self.tokens[r]) for r in chosen
        ]
        for memory, group in zip(self.memory, inputs.groups, strict=True):
            memory[group.copies[:, 1]] = memory[group.copies[:, 0]]  # all at once, before anything writes
            assert len(set(group.slot_mapping.tolist())) == len(group.slot_mapping), "two tokens in one place"
            assert not set(group.copies[:, 1].tolist()) & set(group.copies[:, 0].tolist())
            new = [
                k for r in chosen for k in keys(self.salts[r], self.tokens[r] + self.pending[r])[len(self.tokens[r]) :]
            ]
            memory.reshape(-1)[group.slot_mapping] = new
            for row, request in enumerate(chosen):
                self.compare(request, memory, group.page_table[row], self.tokens[request] + self.pending[request])
        accepted = {r: max(0, len(self.pending[r]) - n) for r, n in zip(chosen, reject, strict=False)}
        known = {r: self.pending[r] for i, r in enumerate(chosen) if not told >> i & 1}
        self.manager.step(chosen, accepted=accepted, tokens=known)
        for r in chosen:
            self.tokens[r] += self.pending[r][: accepted.get(r, len(self.pending[r]))]
            self.pending[r] = []

    def compare(self, request: int, memory: Any, table: Any, tokens: list[int]) -> None:
        """The tokens that the request's next row, the first of `tokens` that is new, sees through its table."""
        number = next(n for n, m in enumerate(self.memory) if m is memory)
        window = self.manager.groups[number].window or 2**31
        first = max(0, len(self.tokens[request]) - window + 1)
        at = np.arange(first, len(tokens))
        pages = np.asarray(table, np.int64)[at // SIZE]
        assert (pages >= 0).all() and self.manager.groups[number].null_page not in pages
        assert memory[pages, at % SIZE].tolist() == keys(self.salts[request], tokens)[first:]

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = self.pick(data, idle=True)
        if request is None:
            return
        into, self.number = self.number, self.number + 1
        self.manager.fork(request, into)
        self.tokens[into], self.pending[into] = list(self.tokens[request]), []
        self.salts[into] = self.salts[request]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.tokens)))
        self.manager.release(request)
        self.swapped.discard(request)
        del self.tokens[request], self.pending[request], self.salts[request]

    @precondition(lambda self: len(self.tokens) > len(self.swapped))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = self.pick(data, idle=True)
        pairs = None if request is None else self.unchanged_where_full(self.manager.swap_out, request)
        if request is not None and pairs is not None:
            self.swapped.add(request)
            for memory, host, moved in zip(self.memory, self.host, pairs, strict=True):
                host[moved[:, 1]] = memory[moved[:, 0]]

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = self.pick(data, swapped=True)
        pairs = None if request is None else self.unchanged_where_full(self.manager.swap_in, request)
        if request is not None and pairs is not None:
            self.swapped.remove(request)
            for memory, host, moved in zip(self.memory, self.host, pairs, strict=True):
                memory[moved[:, 1]] = host[moved[:, 0]]

    @invariant()
    def nothing_lost_and_nothing_twice(self) -> None:
        if not hasattr(self, "manager"):
            return
        requests = self.manager._requests
        for number, pool in enumerate(self.manager.pools):
            held = [p for s in requests.values() if not s.swapped for p in s.tables[number] if p is not None]
            held += [source for s in requests.values() for source, _ in s.copies[number]]
            assert [pool.references(p) for p in range(pool.pages) if p not in pool._reserved] == [
                held.count(p) for p in range(pool.pages) if p not in pool._reserved
            ]
            assert sorted(pool._free) == [p for p in range(pool.pages) if p not in pool._reserved and p not in held]
            assert set(self.manager._blocks[number]) == pool._kept
        for number, host in enumerate(self.manager.host_pools):
            if host is not None:
                held = [p for s in requests.values() if s.swapped for p in s.tables[number] if p is not None]
                assert len(held) == len(set(held)) == host.pages - host.free
        for request in self.tokens:
            if request not in self.swapped and not self.pending[request]:
                for number, memory in enumerate(self.memory):
                    null = self.manager.groups[number].null_page
                    table = [null if p is None else p for p in requests[request].tables[number]]
                    self.compare(request, memory, table, self.tokens[request])

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for request in list(self.tokens):
                self.manager.release(request)
            for pool in self.manager.pools:
                assert pool.free == pool.pages - len(pool._reserved)
                pool.take(pool.free)  # all that was kept is evicted
            assert len(self.manager.tree) == 0 and not self.manager.tree._roots


@pytest.mark.parametrize("collide", [False, True], ids=["sha256", "four_hashes"])
def test_runs_of_sixty_steps(collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 runs; with four hashes in all, which most blocks of a tree share, 20. In the campaign 250 of each."""
    if collide:
        monkeypatch.setattr(prefix, "block_hash", lambda parent, tokens: bytes([(sum(parent) + sum(tokens)) % 4]))
    runs = 250 if "KVGEN_DRAWN" in os.environ else 20 if collide else 60
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=runs, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )

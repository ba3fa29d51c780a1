"""The page pool and its manager, verb by verb: what is shared, copied, given back and refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kvgen.pages import Group, OutOfPages, PageError, PageManager, Pool, block_hash


def written(manager: PageManager, request: str, tokens: list[int]) -> int:
    """A request and its first step; how many tokens the cache had."""
    manager.claim(request)
    cached = manager.alloc(request, tokens)
    manager.step([request])
    return cached


def table(manager: PageManager, *requests: str, group: int = 0) -> list[list[int]]:
    return manager.inputs(requests).groups[group].page_table.tolist()  # type: ignore[no-any-return]


def test_free_pages_in_the_order_in_which_they_are_taken() -> None:
    evicted: list[int] = []
    pool = Pool(6, reserved=[0], evicted=evicted.append)
    assert pool.take(4) == [1, 2, 3, 4]
    for page in (3, 1):
        pool.keep(page)
    for page in (3, 2, 1, 4):
        pool.release(page)
    assert pool.free == 5 and pool.kept == 2
    assert pool.take(4) == [4, 2, 5, 3] and evicted == [3]  # what holds nothing, then what was used longest ago
    pool.retain(1)  # still kept
    assert pool.references(1) == 1 and pool.free == 0
    pool.release(1)
    pool.forget(1)
    assert pool.take(1) == [1] and evicted == [3]


def test_the_hash_of_a_page() -> None:
    """Chained SHA-256 over little-endian words of 64 bits, as other processes compute it."""
    import hashlib

    root = hashlib.sha256(b"lora").digest()
    one = hashlib.sha256(root + np.array([1, -2], "<i8").tobytes()).digest()
    assert block_hash(block_hash(b"lora", ()), [1, -2]) == one


def test_only_full_pages_are_found() -> None:
    manager = PageManager(16, 4)
    written(manager, "a", list(range(10)))
    manager.claim("b")
    assert manager.alloc("b", list(range(10))) == 8  # tokens 8 and 9 lie in a page that is not full
    step = manager.inputs(["b"])
    assert step.groups[0].page_table.tolist() == [[0, 1, 3]] and step.groups[0].slot_mapping.tolist() == [12, 13]
    assert step.lengths.tolist() == [8] and step.row_offsets.tolist() == [0, 2] and len(step.groups[0].copies) == 0


def test_a_page_that_begins_alike_is_copied() -> None:
    manager = PageManager(16, 4)
    written(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    manager.claim("b")
    assert manager.alloc("b", [1, 2, 3, 4, 5, 6, 9, 9]) == 6
    group = manager.inputs(["b"]).groups[0]
    assert (
        group.page_table.tolist() == [[0, 2]]
        and group.copies.tolist() == [[1, 2]]
        and group.slot_mapping.tolist() == [10, 11]
    )
    manager.release("a")
    assert manager.pools[0].references(1) == 1  # until the copy is made
    manager.step(["b"])
    assert manager.pools[0].references(1) == 0 and len(manager.inputs(["b"]).groups[0].copies) == 0


def test_forks_write_to_pages_of_their_own() -> None:
    manager = PageManager(16, 4)
    written(manager, "a", [1, 2, 3, 4, 5])
    manager.fork("a", "b")
    manager.alloc("a", [6])
    manager.alloc("b", [7])
    group = manager.inputs(["a", "b"]).groups[0]
    assert group.copies.tolist() == [[1, 2]] and group.page_table.tolist() == [
        [0, 2],
        [0, 1],
    ]  # one of them keeps the page


def test_salts_share_nothing() -> None:
    manager = PageManager(16, 4)
    for salt in ("", "lora"):
        manager.claim(salt, salt=salt)
        assert manager.alloc(salt, [1, 2, 3, 4, 5]) == 0
        manager.step([salt])


def test_a_window_gives_pages_back_and_shares_what_its_rows_see() -> None:
    manager = PageManager([Group(16), Group(16, window=5)], 4)
    written(manager, "a", list(range(12)))
    assert table(manager, "a", group=1) == [[-1, -1, 2]]  # the row behind 12 tokens sees 8 to 12
    manager.claim("b")
    assert manager.alloc("b", [*range(12), 50]) == 12
    assert table(manager, "b", group=0) == [[0, 1, 2, 3]] and table(manager, "b", group=1)[0][:3] == [-1, -1, 2]
    manager.step(["b"])
    for page in manager.pools[1].take(14)[
        -3:
    ]:  # all free ones; the last of them were pages 1 and 0, whose tokens are gone
        manager.pools[1].release(page)
    manager.claim("c")
    assert manager.alloc("c", list(range(9))) == 0  # behind 8 tokens a row sees 4 to 8: the window lacks tokens 4 to 7


def test_rejected_drafts_give_their_pages_back() -> None:
    manager = PageManager(8, 4)
    written(manager, "a", [1, 2, 3])
    manager.alloc("a", [4, 5, 6, 7, 8, 9])
    manager.step(["a"], accepted={"a": 2})
    assert manager.length("a") == 5 and len(table(manager, "a")[0]) == 2 and manager.pools[0].free == 6


def test_unknown_tokens_are_shared_once_they_are_told() -> None:
    for told, found in (([4], 4), (None, 3)):
        manager = PageManager(8, 4)
        written(manager, "a", [1, 2, 3])
        manager.alloc("a", np.int64(1))
        manager.step(["a"], tokens=None if told is None else {"a": told})
        manager.claim("b")
        assert manager.alloc("b", [1, 2, 3, 4, 5]) == (found if told else 0)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    manager = PageManager(8, 4, prefix_cache=False)
    written(manager, "a", list(range(8)))
    manager.release("a")
    assert written(manager, "b", list(range(8))) == 0 and manager.pools[0].kept == 0


def test_padding_for_graphs() -> None:
    manager = PageManager([Group(8, null_page=0)], 4)
    written(manager, "a", [1, 2, 3])
    manager.alloc("a", [4, 5])
    step = manager.inputs(["a"], batch=3, width=4)
    assert step.groups[0].page_table.tolist() == [[1, 2, 0, 0], [0] * 4, [0] * 4]
    assert step.lengths.tolist() == [3, 0, 0] and step.row_offsets.tolist() == [0, 2, 2, 2]


def manager_with(*requests: str) -> PageManager:
    manager = PageManager([Group(4, host_pages=1)], 4)
    for request in requests:
        written(manager, request, [ord(request)] * 3)
    return manager


def twice(manager: PageManager, verb: str, *args: object) -> None:
    getattr(manager, verb)(*args)
    getattr(manager, verb)(*args)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Pool(0), "pages: got 0; a pool has at least 1 page"),
        (lambda: Pool(4, reserved=[4]), "reserved: got page 4; the pool has the pages 0 to 3"),
        (lambda: Pool(4).retain(1), "page: got 1, which is free and holds nothing; take() gives pages out"),
        (lambda: Pool(4).release(1), "page: got 1, which is free already; every reference is released once"),
        (lambda: Pool(4).release(4), "page: got 4; the pool has the pages 0 to 3"),
        (lambda: Pool(4).release(True), "page: got True; the pool has the pages 0 to 3"),
        (lambda: Pool(4, reserved=[0]).release(0), "page: got 0, which is reserved; it is no request's"),
        (lambda: Pool(4).keep(1), "page: got 1, which is free; tokens are kept of pages that are held"),
        (lambda: PageManager(4, 0), "page_size: got 0; a page holds at least 1 token"),
        (lambda: PageManager([], 4), "groups: got none; layers of at least one group have pages"),
        (
            lambda: PageManager([Group(4), Group(4, window=0)], 4),
            "groups[1].window: got 0; a row sees at least 1 token; None is all",
        ),
        (lambda: manager_with("a").claim("a"), "request: got 'a', which is claimed already; release() it first"),
        (lambda: twice(manager_with("a"), "release", "a"), "request: got 'a', which is not claimed; claim() it first"),
        (lambda: manager_with().length("a"), "request: got 'a', which is not claimed; claim() it first"),
        (lambda: twice(manager_with("a"), "swap_out", "a"), "request: got 'a', which lies in host memory; swap_in() it first"),
        (lambda: manager_with("a").swap_in("a"), "request: got 'a', which has its pages; swap_out() comes first"),
        (lambda: manager_with("a").alloc("a", [2**63]), f"tokens[0]: got {2**63}; token ids are whole numbers of 64 bits"),
        (lambda: manager_with("a").alloc("a", [1, 1.5]), "tokens[1]: got 1.5; token ids are whole numbers of 64 bits"),  # type: ignore[list-item]
        (lambda: manager_with("a").alloc("a", -2), "tokens: got -2; a step has at least 0 tokens of a request"),
        (lambda: manager_with("a").inputs(["a", "a"]), "requests: got ['a', 'a']; a request is in a step once"),
        (lambda: manager_with("a").inputs(["a"], batch=0), "batch: got 0; the step needs 1; pass at least that"),
        (lambda: manager_with("a").inputs(["a"], width=0), "width: got 0; the step needs 1; pass at least that"),
        (
            lambda: manager_with("a").step(["a"], accepted={"a": 1}),
            "accepted['a']: got 1; the step has 0 tokens of this request",
        ),
        (
            lambda: manager_with("a").step(["a"], tokens={"a": [1]}),
            "tokens['a']: got 1; the step has 0 of this request",
        ),
        (
            lambda: manager_with("a").step(["a"], accepted={"b": 0}),
            "accepted['b']: the step has no such request; its requests are ['a']",
        ),
        (
            lambda: manager_with("a").step(["a"], tokens={"b": []}),
            "tokens['b']: the step has no such request; its requests are ['a']",
        ),
        (lambda: manager_with("a").step(["a"], accepted=1), "accepted: got 1; pass a mapping from requests of the step"),  # type: ignore[arg-type]
        (
            lambda: manager_with("a").step(["a"], accepted={"a": 0.5}),  # type: ignore[dict-item]
            "accepted['a']: got 0.5; the step has 0 tokens of this request; pass a whole number",
        ),
        (lambda: manager_with("a").step(["a", "a"]), "requests: got ['a', 'a']; a request is in a step once"),
        (
            lambda: manager_with("a").alloc("a", 10**12),
            "tokens: got 1000000000000; at most 2147483644 fit into the 32 bits that kernels read",
        ),
        (
            lambda: manager_with("a").alloc("a", None),  # type: ignore[arg-type]
            "tokens: got None; pass the ids of the tokens, or how many there are",
        ),
        (
            lambda: manager_with("a").alloc("a", math.nan),  # type: ignore[arg-type]
            "tokens: got nan; pass the ids of the tokens, or how many there are",
        ),
        (
            lambda: manager_with("a").alloc("a", True),
            "tokens: got True; a step has at least 0 tokens of a request; pass a whole number",
        ),
        (lambda: manager_with("a").alloc("a", [math.nan]), "tokens[0]: got nan; token ids are whole numbers of 64 bits"),  # type: ignore[list-item]
        (lambda: manager_with("a").alloc("a", [1, math.inf]), "tokens[1]: got inf; token ids are whole numbers of 64 bits"),  # type: ignore[list-item]
        (lambda: manager_with("a").alloc("a", [None]), "tokens[0]: got None; token ids are whole numbers of 64 bits"),  # type: ignore[list-item]
        (lambda: Pool(4).take(-1), "count: got -1; at least 0 pages are taken"),
        (lambda: Pool(2.5), "pages: got 2.5; a pool has at least 1 page; pass a whole number"),  # type: ignore[arg-type]
        (lambda: PageManager(10**12, 4), "groups: got 1000000000000; at most 2147483647 fit into the 32 bits that kernels read"),
        (
            lambda: PageManager(None, 4),  # type: ignore[arg-type]
            "groups: got None; pass a number of pages, or a sequence of Group(...)",
        ),
        (
            lambda: PageManager([8, 8], 4),  # type: ignore[list-item]
            "groups: got [8, 8]; pass a number of pages, or a sequence of Group(...)",
        ),
        (lambda: PageManager(4, math.inf), "page_size: got inf; a page holds at least 1 token; pass a whole number"),  # type: ignore[arg-type]
        (
            lambda: PageManager([Group(4, host_pages=-1)], 4),
            "groups[0].host_pages: got -1; 0 is no pool in host memory",
        ),
        (
            lambda: PageManager([Group(4, null_page=2**31)], 4),
            "groups[0].null_page: got 2147483648; at most 2147483647 fit into the 32 bits that kernels read",
        ),
        (
            lambda: PageManager([Group(4, window=1.5)], 4),  # type: ignore[arg-type]
            "groups[0].window: got 1.5; a row sees at least 1 token; None is all; pass a whole number",
        ),
        (lambda: manager_with().claim("a", salt=5), "salt: got 5; pass text, the same for requests that may share pages"),  # type: ignore[arg-type]
        (
            lambda: manager_with("a").inputs(["a"], batch=2**16, width=2**16),
            "batch, width: got 65536 and 65536; a page table has at most 2147483647 entries; pass fewer",
        ),
        (
            lambda: manager_with("a").inputs(["a"], width=10**12),
            "width: got 1000000000000; at most 2147483647 fit into the 32 bits that kernels read",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(PageError) as error:
        call()
    assert str(error.value) == says


def test_a_step_is_all_or_nothing() -> None:
    """A mistake about the last request leaves those before it as they were; without the mistake the same step is made."""
    for wrong in (
        {"accepted": {"a": 3, "b": 99}},
        {"accepted": {"a": 3, "c": 1}},
        {"tokens": {"b": [1]}},
        {"tokens": {"b": [1, 2.5]}},
        {"requests": ["a", "b", "c"]},
        {"requests": ["a", "b", "a"]},
    ):
        manager = PageManager(10, 4)
        for request, count in (("a", 5), ("b", 2)):
            manager.claim(request)
            manager.alloc(request, count)
        with pytest.raises(PageError):
            manager.step(**{"requests": ["a", "b"], **wrong})  # type: ignore[arg-type]
        assert [manager.length(r) for r in "ab"] == [0, 0] and manager.pools[0].free == 7
        manager.step(["a", "b"], accepted={"a": 3}, tokens={"a": [1, 2, 3, 4, 5]})
        assert [manager.length(r) for r in "ab"] == [3, 2] and manager.pools[0].free == 8


def test_a_count_is_compared_with_the_pool_before_any_work() -> None:
    manager = manager_with("a")
    for count in (10**9, np.int64(10**9)):
        with pytest.raises(OutOfPages, match=r"needs 250000000 more pages, 3 are free"):
            manager.alloc("a", count)
    assert manager.length("a") == 3 and table(manager, "a") == [[0]]


def test_a_prefix_whose_page_is_taken_for_what_follows_it() -> None:
    """One group with a window: the next row does not see the page of the prefix, so that alloc takes it."""
    manager = PageManager([Group(3, window=1)], 2)
    written(manager, "a", [1, 2])
    manager.release("a")
    manager.claim("b")
    assert manager.alloc("b", [1, 2, 3, 4, 5, 6, 7]) == 2
    assert table(manager, "b") == [[-1, 1, 2, 0]]
    manager.step(["b"])
    manager.release("b")
    manager.claim("c")
    assert manager.alloc("c", [1, 2, 3, 4, 5, 6, 8]) == 6  # behind 6 tokens a row sees itself alone
    manager.step(["c"])
    manager.release("c")
    assert written(manager, "d", [9] * 6) == 0


def test_in_the_middle_of_a_step() -> None:
    for verb, args in (("fork", ("b",)), ("swap_out", ())):
        manager = manager_with("a")
        manager.alloc("a", [5])
        with pytest.raises(PageError, match=rf"got 'a' in the middle of a step; {verb}\(\) it after step\(\)"):
            getattr(manager, verb)("a", *args)


def test_too_few_pages() -> None:
    manager = manager_with("a")
    manager.alloc("a", [5, 6])
    manager.step(["a"])
    manager.claim("b")
    for call, says in (
        (lambda: Pool(2).take(3), "take: needs 3 more pages, 2 are free"),
        (lambda: manager.alloc("b", [9] * 13), "alloc('b'): needs 4 more pages, 2 are free"),
        (lambda: manager.swap_out("a"), "swap_out('a'), host pages: needs 2 more pages, 1 are free"),
    ):
        with pytest.raises(OutOfPages) as error:
            call()
        assert str(error.value) == f"{says}; release or swap out a request, or make the pool larger"
        assert error.value.needed > error.value.free == (1 if "swap" in says else 2)

"""Operations over caches of states against the oracles: all memory of all layers, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Paged, State, ops
from kvgen.codegen.emit import set_plans
from kvgen.config import find_config
from kvgen.errors import ArgumentError, SpecError
from kvgen.layout.dtypes import dtype
from kvgen.lowering.page_runs import TILE, page_runs, units
from kvgen.reference import (
    TableView,
    compact,
    compact_plan,
    copy_pages,
    reorder,
    swap_pages,
    zero_pages,
)
from kvgen.runtime.cpu import machine
from kvgen.schema.loader import LoadedSet, load_folder
from tests.support.harness import package
from tests.support.memory import GUARD, Raw, aligned, rows_array
from tests.support.page_moves import vector
from tests.support.sets import archs_of

LAYERS, PAGES = 2, 9
# Multiples of 16 and what is none; states that share a tile, and states of several tiles.
SIZES = (1, 30, 36, 1000, 48, 16 * TILE + 16, 20011)
ROWS = ops.GatherStates(), ops.ScatterStates(index_dtype="i64")
MOVES = ops.CopyPages(), ops.ZeroPages(index_dtype="i32")
TABLES = ops.Compact(), ops.Reorder(), ops.SwapPages(direction="out"), ops.SwapPages(direction="in")
SETS = {
    n: KernelSet(
        name=f"states_{n}",
        cache=State(bytes=n, table_dtype=kind),
        ops=[*ROWS, *(MOVES if n in (30, 1000, 20011) else ()), *(TABLES if n in (36, 20011) else ())],
    )
    for n, kind in zip(SIZES, ("i32", "i64", "u32", "i32", "u32", "i64", "i32"), strict=True)
}
HOSTILE = (-1, -1, -2, PAGES, PAGES + 7, 2**31 - 1, -(2**31))
COUNTS = (-1, -(2**31), 2**31 - 1)


def having(kind: str) -> list[int]:
    return [n for n, kernels in SETS.items() if any(op.kind == kind for op in kernels.ops)]


class Pools:
    """Layers of states full of random bytes, `gap` bytes between states, canaries there and around; `empty` begin in it."""

    def __init__(self, nbytes: int, seed: int, gap: int = 0, pages: int = PAGES) -> None:
        random = np.random.default_rng(seed)
        align = State(bytes=nbytes).align
        self.stride = nbytes + gap * align
        self.memory = [aligned(2 * GUARD + pages * self.stride) for _ in range(LAYERS)]
        self.layers = self.views(self.memory, nbytes, pages)
        for layer in self.layers:
            layer[...] = random.integers(0, 256, layer.shape, np.uint8)

    def views(self, memory: list[Raw], nbytes: int, pages: int) -> list[Raw]:
        return [np.ndarray((pages, nbytes), np.uint8, m.data, GUARD, (self.stride, 1)) for m in memory]

    def copy(self) -> tuple[list[Raw], list[Raw]]:
        """Other memory with the same bytes, and the layers in it."""
        memory = []
        for mine in self.memory:
            other = aligned(len(mine))
            other[...] = mine
            memory.append(other)
        return memory, self.views(memory, self.layers[0].shape[1], len(self.layers[0]))


def launch(nbytes: int, op: str, cache: Any, *arguments: Any, step: str = "", **named: Any) -> int:
    """Launch in check mode; the error word."""
    call = getattr(package(SETS[nbytes]), op)
    word = np.zeros(1, np.uint64)
    with machine(arch=archs_of(SETS[nbytes])[0], mode="check"):
        (getattr(call, step) if step else call)(cache, *arguments, errors=word, **named)
    return int(word[0])


def hold(pools: Pools, wanted: list[Raw]) -> None:
    for layer, (got, right) in enumerate(zip(pools.memory, wanted, strict=True)):
        np.testing.assert_array_equal(got, right, err_msg=f"layer {layer}")


def ids_of(draw: Any, kind: str, most: int = 6) -> list[int]:
    """Ids apart from one another where they are good, hostile ones between them."""
    ids = list(draw(st.permutations(range(PAGES))))[: draw(st.integers(0, most))]
    wide = (2**32, 2**40, -(2**63)) if kind == "i64" else ()
    for _ in range(draw(st.integers(0, 3))):
        ids.insert(draw(st.integers(0, len(ids))), draw(st.sampled_from((*HOSTILE, *wide))))
    return ids


def count_of(draw: Any, n: int) -> int | None:
    return draw(st.none() | st.sampled_from((*COUNTS, *range(n + 2))))


def test_the_sizes_meet_every_way_to_copy() -> None:
    runs = {n: page_runs(kernels.cache) for n, kernels in SETS.items()}
    assert {run.align for (run,) in runs.values()} == {1, 2, 4, 8, 16}
    assert {units(r) > 1 for r in runs.values()} == {True, False}


def check_rows(op: str, oracle: Callable[..., int], index: str, nbytes: int, draw: Any) -> None:
    """Run gather_states or scatter_states by ids of type `index` on drawn states and rows; all memory is compared."""
    pools = Pools(nbytes, draw(st.integers(0, 9)), draw(st.integers(0, 3)))
    cache, layer = package(SETS[nbytes]).Cache(pools.layers), draw(st.integers(0, LAYERS - 1))
    ids = ids_of(draw, index)
    count, strided = count_of(draw, len(ids)), draw(st.booleans())
    rows, around = rows_array(len(ids), (nbytes,), "u8", strided=strided)
    rows[...] = np.random.default_rng(len(ids)).integers(0, 256, rows.shape, np.uint8)
    right, wanted = rows_array(len(ids), (nbytes,), "u8", strided=strided)
    wanted[...] = around
    memory, layers = pools.copy()
    array, before = vector(ids, index)
    kept = before.copy()
    word = oracle(layers[layer], array, right, num_ids=count)
    named = {} if count is None else {"num_ids": vector([count], index)[0]}
    assert launch(nbytes, op, cache[layer], array, rows, **named) == word
    np.testing.assert_array_equal(around, wanted)
    np.testing.assert_array_equal(before, kept)
    hold(pools, memory)


@pytest.mark.parametrize("nbytes", having("copy_pages"))
@settings(max_examples=5)
@given(data=st.data())
def test_copy_and_zero(nbytes: int, data: Any) -> None:
    draw = data.draw
    pools = Pools(nbytes, draw(st.integers(0, 9)), draw(st.integers(0, 3)))
    cache, spec = package(SETS[nbytes]).Cache(pools.layers), SETS[nbytes].cache
    memory, layers = pools.copy()
    ids = ids_of(draw, "i64", 8)
    pairs = [ids[i : i + 2] for i in range(0, len(ids) - 1, 2)]
    count = count_of(draw, len(pairs))
    named = {} if count is None else {"num_pairs": vector([count], "i64")[0]}
    listed = np.array(pairs, np.int64).reshape(-1, 2)
    word = copy_pages(spec, {"state_pool": layers}, listed, num_pairs=count)
    assert launch(nbytes, "copy_pages", cache, listed, **named) == word
    hold(pools, memory)
    ids = ids_of(draw, "i32")
    count = count_of(draw, len(ids))
    named = {} if count is None else {"num_page_ids": vector([count], "i32")[0]}
    word = zero_pages(spec, {"state_pool": layers}, np.array(ids, np.int32), num_page_ids=count)
    assert launch(nbytes, "zero_pages", cache, np.array(ids, np.int32), **named) == word
    hold(pools, memory)


@pytest.mark.parametrize("nbytes", having("swap_pages"))
@settings(max_examples=4)
@given(data=st.data())
def test_swaps(nbytes: int, data: Any) -> None:
    """Out and in, to pools of other sizes with other strides."""
    draw = data.draw
    pools, other = Pools(nbytes, 1, draw(st.integers(0, 3))), Pools(nbytes, 2, draw(st.integers(0, 3)), pages=4)
    generated = package(SETS[nbytes])
    for direction in ("out", "in"):
        mine, theirs = draw(st.permutations(range(PAGES))), draw(st.permutations(range(4)))
        pairs = [[a, b] if direction == "out" else [b, a] for a, b in zip(mine[:3], theirs[:3], strict=True)]
        pairs.insert(draw(st.integers(0, 3)), draw(st.sampled_from([[-1, 0], [PAGES, PAGES], [0, -2], [-(2**31), 2]])))
        memory, layers = pools.copy()
        outside, others = other.copy()
        listed = np.array(pairs, np.int64)
        word = swap_pages(SETS[nbytes].cache, {"state_pool": layers}, {"state_pool": others}, direction, listed)
        cache, rest = generated.Cache(pools.layers), generated.Pages(other.layers)
        assert launch(nbytes, f"swap_{direction}", cache, rest, listed) == word
        hold(pools, memory)
        hold(other, outside)


def table(kernels: KernelSet, entries: list[int]) -> Raw:
    """`state_ids` of the set's type; u32 has no -2."""
    kind = dtype(kernels.cache.page_table.dtype).numpy()
    return np.array([e if kind.kind == "i" or e >= 0 else 2**32 + e for e in entries]).astype(kind)


@pytest.mark.parametrize("nbytes", having("compact"))
@settings(max_examples=5)
@given(data=st.data())
def test_compact(nbytes: int, data: Any) -> None:
    """The plan and the moves; requests without a state, shared and bad ids, kept states; too little room for the moves."""
    draw, kernels = data.draw, SETS[nbytes]
    pools, entries = Pools(nbytes, 3, 1), ids_of(draw, "i32")
    ids = table(kernels, entries)
    kept = np.array(draw(st.lists(st.integers(-1, PAGES - 1), max_size=2)), np.int64)
    room, in_place = draw(st.sampled_from((PAGES, 1))), draw(st.booleans())
    cache = package(kernels).Cache(pools.layers, state_ids=ids)
    view = TableView(kernels.cache, {"state_ids": ids.copy()}, PAGES, 1)
    new_ids, moves = np.zeros(PAGES, ids.dtype), np.zeros((room, 2), np.int64)
    wanted_ids, wanted_moves = new_ids.copy(), moves.copy()
    num_moves, num_used = np.zeros(1, np.int64), np.zeros(1, np.int64)
    planned, used, word = compact_plan(view, wanted_ids, wanted_moves, kept)
    given = {"num_used": num_used, "kept": kept}
    assert launch(nbytes, "compact", cache, new_ids, moves, num_moves, step="plan", **given) == word
    assert (int(num_moves[0]), int(num_used[0])) == (planned, used)
    np.testing.assert_array_equal(new_ids, wanted_ids)
    np.testing.assert_array_equal(moves, wanted_moves)
    memory, layers = pools.copy()
    right = ids.copy()
    word = compact(view, {"state_pool": layers}, moves, new_ids, {"state_ids": right}, planned)
    target = ids if in_place else ids.copy()
    assert launch(nbytes, "compact", cache, moves, num_moves, new_ids, target) == word
    np.testing.assert_array_equal(target, right)
    hold(pools, memory)


@pytest.mark.parametrize("nbytes", having("reorder"))
@settings(max_examples=5)
@given(data=st.data())
def test_reorder(nbytes: int, data: Any) -> None:
    """The first child has its parent's state, others a copy in a free one; of a parent without one no child has one."""
    draw, kernels = data.draw, SETS[nbytes]
    pools = Pools(nbytes, 4)
    order, batch = draw(st.permutations(range(PAGES))), 4
    ids = table(kernels, [*order[:3], draw(st.sampled_from((order[3], -1, PAGES)))])
    fresh = table(kernels, [*order[4:7], draw(st.sampled_from((order[7], -2, PAGES)))])
    parents = table(kernels, [draw(st.sampled_from((-1, 0, 1, 2, 3, 3, batch))) for _ in range(batch)])
    new, right = np.full_like(ids, 7), np.full_like(ids, 7)
    cache = package(kernels).Cache(pools.layers, state_ids=ids)
    memory, layers = pools.copy()
    view = TableView(kernels.cache, {"state_ids": ids}, PAGES, 1)
    word = reorder(view, {"state_pool": layers}, parents, {"page_table": fresh}, {"state_ids": right})
    assert launch(nbytes, "reorder", cache, parents, fresh, new) == word
    np.testing.assert_array_equal(new, right)
    hold(pools, memory)


@pytest.mark.parametrize(("nbytes", "offset", "extra", "said"), [
    (48, 8, 0, "multiple of 16"), (48, 0, 8, "multiple of 16"), (1000, 4, 0, "multiple of 8"), (36, 0, 2, "multiple of 4"),
])  # fmt: skip
def test_states_begin_at_multiples(nbytes: int, offset: int, extra: int, said: str) -> None:
    memory = aligned(4096)
    pool = np.ndarray((3, nbytes), np.uint8, memory.data, offset, (nbytes + extra, 1))
    with pytest.raises(ArgumentError, match=said):
        package(SETS[nbytes]).Cache([pool])


def test_odd_states_take_any_address() -> None:
    """Nothing divides an odd number of bytes but 1."""
    memory = aligned(4096)
    pool = np.ndarray((3, 1), np.uint8, memory.data, 5, (7, 1))
    cache = package(SETS[1]).Cache([pool])
    memory[...] = np.arange(4096) % 251
    out = np.zeros((2, 1), np.uint8)
    assert launch(1, "gather_states", cache[0], np.array([2, 0], np.int32), out) == 0
    assert out[:, 0].tolist() == [19, 5]


def test_other_tensors_are_refused() -> None:
    generated = package(SETS[48])
    with pytest.raises(ArgumentError, match="takes a list of tensors"):
        generated.Cache(np.zeros((3, 48), np.uint8))
    with pytest.raises(ArgumentError, match=r"bytes"):
        generated.Cache([np.zeros((3, 47), np.uint8)])
    with pytest.raises(ArgumentError, match="u8"):
        generated.Cache([np.zeros((3, 48), np.float16)])
    mine, theirs = package(SETS[36]), package(SETS[20011])
    other = theirs.Pages([np.zeros((2, 20011), np.uint8)])
    with pytest.raises(ArgumentError, match=r"states_36\.Pages"):
        mine.swap_out(mine.Cache([aligned(72).reshape(2, 36)]), other, np.zeros((1, 2), np.int64))


TOKENS = Paged(dtype="bf16", kv_heads=2, head_dim=256, page_size=544, layout="page kv layer token head dim")


@pytest.mark.parametrize(
    "op",
    [
        *(ops.Append(), ops.Decode(), ops.Gather(), ops.Scatter(), ops.Advance(), ops.SlotMapping(), ops.RowOffsets()),
        *(ops.Seal(), ops.ToCsr(table_dtype="i32"), ops.MergeStates(), ops.Convert(source=TOKENS)),
    ],
    ids=lambda op: op.kind,
)
def test_operations_on_tokens_are_refused(op: Any) -> None:
    with pytest.raises(SpecError, match=rf"ops: got {op.name} with a State cache.*it has compact, copy_pages"):
        KernelSet(name="x", cache=State(bytes=64), ops=[op])


def test_every_operation_is_either_refused_or_tested() -> None:
    """State's error lists the operations that say of themselves that they move states."""
    moving = {op.model_fields["name"].default or op.kind for op in ops.ALL if op.moves_states}
    assert moving == {op.kind for kernels in SETS.values() for op in kernels.ops}
    with pytest.raises(SpecError) as error:
        KernelSet(name="x", cache=State(bytes=64), ops=[ops.Append()])
    assert all(kind in str(error.value) for kind in moving)


def hybrid(name: str) -> LoadedSet:
    config = find_config()
    return next(s for s in load_folder(config.specs, config.root) if s.kernels.name == name)


@pytest.mark.parametrize(
    ("value_heads", "kv_heads", "state_element", "tokens"), [(32, 2, 2, 544), (48, 4, 4, 784)], ids=["544", "784"]
)
def test_pages_as_large_as_a_state(value_heads: int, kv_heads: int, state_element: int, tokens: int) -> None:
    """The page sizes that vLLM gives Qwen3-Next and Qwen3.5-27B: the first multiple of 16 tokens that a state fits."""
    convolution = (2 * 16 * 128 + value_heads * 128) * 3 * 2
    nbytes = convolution + value_heads * 128 * 128 * state_element
    a_token = kv_heads * 256 * 2 * 2
    assert -(-nbytes // a_token // 16) * 16 == tokens
    attention = Paged(dtype="bf16", kv_heads=kv_heads, head_dim=256, page_size=tokens)
    kernels = KernelSet(
        name=f"hybrid_{tokens}",
        q_heads=8 * kv_heads,
        cache=attention,
        ops=[ops.Append(), ops.Decode(), ops.CopyPages()],
    )
    assert set_plans(LoadedSet(kernels, "x.py", ""))
    (page,) = {sum(r.nbytes for r in page_runs(attention))}
    assert page == tokens * a_token >= nbytes
    if tokens == 544:
        assert page_runs(hybrid("state_qwen3_next").kernels.cache)[0].nbytes == nbytes

"""Operators over caches of states: against NumPy byte for byte, eagerly and compiled, and in a model that is exported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvgen
from kvgen.errors import ArgumentError
from kvgen.runtime import Fault, describe
from kvgen.torch import register

states = register("generated.state_qwen3_next")
SIZE = 1_097_728  # bytes of a state: 3 rows of 8,192 channels, and 32 matrices of 128 x 128, in bf16
CONVOLUTION = 2 * 3 * 8192
GAP = 16_384  # bytes behind a state in an engine's page
LAYERS, PAGES = 2, 6

Pools = list[torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


def memory(seed: int, pages: int = PAGES) -> Pools:
    """An engine's pages for each layer, every byte drawn; a state is the first bytes of a page."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (pages, SIZE + GAP), generator=generator, dtype=torch.uint8) for _ in range(LAYERS)]


def i32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def i64(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# --- operations, and what NumPy makes of the same bytes ---------------------------------------------------------------------
# Each takes the pools, those of a swap, the requests' states (4, 1, 0) and the error word; it returns what it made besides.

Given = tuple[Pools, Pools, torch.Tensor, torch.Tensor]


def copy(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> None:
    states.copy_pages(pool, ids, i64([3, 1], [-1, 0], [0, 2]), errors=errors)


def swap(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> None:
    states.swap_out(pool, ids, other, i64([5, 0], [2, 1]), errors=errors)
    states.swap_in(pool, ids, other, i64([2, 3]), errors=errors)


def zero(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> None:
    states.zero_pages(pool, ids, i64(2, -1, 5, 0), num_page_ids=i64(3), errors=errors)


def compact(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> None:
    new_ids, moves, num_moves = states.compact.plan.returning(pool, ids, num_ids=PAGES, max_moves=PAGES, errors=errors)
    states.compact(pool, ids, moves, num_moves, new_ids, ids, errors=errors)


def reorder(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    after = torch.full_like(ids, 7)
    states.reorder(pool, ids, i32(1, 1, -1), i32(3, 5, 2), after, errors=errors)
    return after


def gather(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> list[torch.Tensor]:
    mixed, own = torch.full((4, SIZE), 7, dtype=torch.uint8), []
    for layer in pool:
        states.gather_states(layer, ids, i32(3, -1, 5, 2), mixed, num_ids=i32(3), errors=errors)
        own += [mixed.clone(), states.gather_states.returning(layer, ids, ids, errors=errors)]
    return own


def scatter(pool: Pools, other: Pools, ids: torch.Tensor, errors: torch.Tensor) -> None:
    for layer, rows in zip(pool, other, strict=True):
        states.scatter_states(layer, ids, i32(5, -1, 0), rows, errors=errors)


def expected(name: str, pool: list[np.ndarray], other: list[np.ndarray], ids: np.ndarray) -> list[np.ndarray]:
    """Do the same to `pool`, `other` and `ids`; what the operation returns."""
    made = []
    for layer, there in zip(pool, other, strict=True):
        old = layer.copy()
        if name == "copy":
            layer[[1, 2]] = old[[3, 0]]
        elif name == "swap":
            there[[0, 1]] = old[[5, 2]]
            layer[3] = there[2]
        elif name == "zero":
            layer[[2, 5]] = 0
        elif name == "compact":  # 0, 1 and 4 are held: 4 moves to 2
            layer[2] = old[4]
        elif name == "reorder":  # requests 0 and 1 go on with the state of 1, the second one with a copy
            layer[5] = old[1]
        elif name == "gather":
            zeros, kept = np.zeros((1, SIZE), np.uint8), np.full((1, SIZE), 7, np.uint8)
            made += [np.concatenate([old[3:4], zeros, old[5:6], kept]), old[[4, 1, 0]]]
        elif name == "scatter":
            layer[[5, 0]] = there[[0, 2]]
    if name == "compact":
        ids[:] = [2, 1, 0]
    return [np.array([1, 5, 7])] if name == "reorder" else made


OPERATIONS: list[Callable[..., Any]] = [copy, swap, zero, compact, reorder, gather, scatter]


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.__name__)
def test_what_operators_write(operation: Callable[..., Any], backend: str) -> None:
    """Every byte of every layer, in pages that are larger than a state; `compact` writes the ids it reads."""
    run = operation if backend == "none" else torch.compile(operation, fullgraph=True, backend=backend)
    here, there = memory(1), memory(2, pages=3)
    ids, errors = i32(4, 1, 0), torch.zeros(1, dtype=torch.uint64)
    wanted_here, wanted_there = [m.numpy().copy() for m in here], [m.numpy().copy() for m in there]
    wanted_ids = ids.numpy().copy()
    views = [[m[:, :SIZE] for m in each] for each in (wanted_here, wanted_there)]
    wanted = expected(operation.__name__, *views, wanted_ids)
    found = run([m[:, :SIZE] for m in here], [m[:, :SIZE] for m in there], ids, errors)
    returned = [] if found is None else [found] if isinstance(found, torch.Tensor) else found
    assert describe(errors) is None
    for ours, theirs in zip(
        [*here, *there, ids, *returned], [*wanted_here, *wanted_there, wanted_ids, *wanted], strict=True
    ):
        assert np.array_equal(ours.numpy(), theirs)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_bad_ids_are_reported_and_give_nan() -> None:
    pool, errors = [m[:, :SIZE].contiguous() for m in memory(1)], torch.zeros(1, dtype=torch.uint64)
    rows = states.gather_states.returning(pool[1], i32(0), i32(2, PAGES), errors=errors)
    report = describe(errors)
    assert report is not None and report.code is Fault.PAIR
    assert torch.equal(rows[0], pool[1][2]) and bool((rows[1] == 0xFF).all())
    assert rows[1].view(torch.bfloat16).isnan().all()


def test_pairs_that_overlap_are_reported() -> None:
    pool, errors = [m[:, :SIZE].contiguous() for m in memory(1)], torch.zeros(1, dtype=torch.uint64)
    with kvgen.cpu_machine(mode="fast"):  # behind the check the copies of such pairs race, which other modes report
        states.copy_pages(pool, i32(0), i64([3, 1], [1, 2]), errors=errors, check=True)
    report = describe(errors)
    assert report is not None and report.code is Fault.OVERLAP


# --- a model ------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A convolution's last three inputs and the matrices of a linear attention, both in a request's state."""

    def forward(self, x: torch.Tensor, pool: torch.Tensor, ids: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
        rows = states.gather_states.returning(pool, ids, ids, errors=errors)
        inputs = rows[:, :CONVOLUTION].view(torch.bfloat16).view(-1, 3, 8192)
        matrices = rows[:, CONVOLUTION:].view(torch.bfloat16).view(-1, 32, 128, 128)
        mixed = x + inputs.sum(dim=1)
        q, k, v = mixed[:, :2048].view(-1, 16, 128), mixed[:, 2048:4096].view(-1, 16, 128), mixed[:, 4096:]
        q, k, v = q.repeat_interleave(2, dim=1), k.repeat_interleave(2, dim=1), v.view(-1, 32, 128)
        matrices = 0.5 * matrices + k[..., None] * v[..., None, :]
        inputs = torch.cat([inputs[:, 1:], x[:, None]], dim=1)
        after = torch.cat([part.flatten(1).view(torch.uint8) for part in (inputs, matrices)], dim=1)
        states.scatter_states(pool, ids, ids, after, errors=errors)
        return x + torch.cat([(q[..., None, :] @ matrices).flatten(1)] * 2, dim=1)


class Model(torch.nn.Module):
    """A step that begins with copies of shared states, as an engine's prefix cache asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(
        self, x: torch.Tensor, pages: Pools, ids: torch.Tensor, pairs: torch.Tensor, errors: torch.Tensor
    ) -> torch.Tensor:
        pool = [page[:, :SIZE] for page in pages]
        states.copy_pages(pool, ids, pairs, errors=errors)
        for layer, own in zip(self.layers, pool, strict=True):
            x = layer(x, own, ids, errors)
        return x


def step_of(requests: int) -> tuple[Any, ...]:
    """The model's arguments for up to 4 requests; equal for equal numbers. Request 1 begins with a copy of state 2."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).div(8).to(torch.bfloat16)

    pages = [drawn(PAGES, (SIZE + GAP) // 2).view(torch.uint8) for _ in range(LAYERS)]
    errors = torch.zeros(1, dtype=torch.uint64)
    return drawn(requests, 8192), pages, i32(4, 1, 0, 5)[:requests].clone(), i64([2, 1]), errors


def assert_same(found: torch.Tensor, arguments: tuple[Any, ...], requests: int) -> None:
    """That a run on `arguments` gave and wrote what eager PyTorch gives and writes."""
    wanted_of = step_of(requests)
    before = [page.clone() for page in wanted_of[1]]
    wanted = Model()(*wanted_of)
    assert describe(wanted_of[4]) is None and wanted.isfinite().all() and wanted.abs().max() > 0.1
    for old, new in zip(before, wanted_of[1], strict=True):
        written = {page for page in range(PAGES) if not torch.equal(old[page], new[page])}
        assert written == set(wanted_of[2].tolist()) and torch.equal(old[:, SIZE:], new[:, SIZE:])
    assert torch.equal(found, wanted)
    for ours, theirs in zip([*arguments[1], *arguments[2:]], [*wanted_of[1], *wanted_of[2:]], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(backend: str) -> None:
    compiled = torch.compile(Model(), fullgraph=True, backend=backend)
    for requests in (2, 3, 4):
        arguments = step_of(requests)
        assert_same(compiled(*arguments), arguments, requests)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "the second batch size makes it dynamic"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_inductor_copies_no_pool() -> None:
    from torch._inductor.utils import run_and_get_code

    def moved(pages: Pools, ids: torch.Tensor, pairs: torch.Tensor, rows: torch.Tensor) -> None:
        pool = [page[:, :SIZE] for page in pages]
        states.copy_pages(pool, ids, pairs)
        for layer in pool:
            states.scatter_states(layer, ids, ids, rows)

    pages, rows = memory(1), torch.full((2, SIZE), 7, dtype=torch.uint8)
    _, (code,) = run_and_get_code(torch.compile(moved, fullgraph=True), pages, i32(4, 1), i64([2, 3]), rows)
    assert code.count("torch.ops.kvgen_state_qwen3_next.") == 1 + LAYERS and "reinterpret_tensor(arg" in code
    assert not re.search(r"empty_strided\w*\(|copy_\(", code.partition("def call(")[2].partition("runner =")[0])
    for page, old in zip(pages, memory(1), strict=True):
        assert torch.equal(page[3, :SIZE], old[2, :SIZE]) and bool((page[[1, 4], :SIZE] == 7).all())


def test_exported_and_loaded_and_made_functional(tmp_path: Path) -> None:
    program = torch.export.export(Model(), step_of(3))
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2")
    functional = program.run_decompositions()
    for form in (program, loaded, functional):
        arguments = step_of(3)
        assert_same(form.module()(*arguments), arguments, 3)
    assert any("auto_functionalized" in str(node.target) for node in functional.graph.nodes)


def test_kv_and_states_in_the_same_memory() -> None:
    """Views of both dtypes inside the graph; as inputs PyTorch refuses them, which docs/torch.md says."""
    llama = register("generated.llama3_8b")
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, n, 128, generator=generator).bfloat16() for n in (32, 8, 8))

    def views(page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = page[:, : 2 * 2 * 2 * 16 * 8 * 128].view(torch.bfloat16).unflatten(1, (2, 2, 16, 8, 128))
        return kv, page[:, :SIZE]

    def over(kv: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        def append(length: int) -> None:
            llama.append.returning(kv, i32(length), i32(4, 1)[None], 1, q, k, v, i32(0, 1))

        append(17)  # to row 1 of page 1
        states.copy_pages([pool], i32(0), i64([1, 5]))
        append(18)
        return states.gather_states.returning(pool, i32(0), i32(1, 5))

    ours, theirs = memory(5)[0], memory(5)[0]
    wanted = over(*views(theirs))
    found = torch.compile(lambda page: over(*views(page)), fullgraph=True, backend="aot_eager")(ours)
    assert torch.equal(found, wanted) and torch.equal(ours, theirs)
    of_v = views(ours)[0][:, 1, 1]
    assert all(torch.equal(of_v[page, row], v[0]) for page, row in ((1, 1), (5, 1), (1, 2)))
    assert not torch.equal(of_v[5, 2], v[0]), "copied between the appends"
    with pytest.raises(Exception, match="input mutations on views with different dtypes"):
        torch.compile(over, fullgraph=True, backend="aot_eager")(*views(ours))


# --- what is refused ------------------------------------------------------------------------------------------------------


def test_states_are_bytes() -> None:
    pool = torch.zeros(PAGES, SIZE // 2, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"^state_pool\[0\]: got dtype bf16; it must be u8"):
        states.gather_states.returning(pool, i32(0), i32(0))
    with pytest.raises(ArgumentError, match=r"^state_pool\[1\]: got shape \(6, 1097712\)"):
        states.zero_pages([m[:, : SIZE - 16 * i] for i, m in enumerate(memory(1))], i32(0), i64(0))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (torch.zeros(1, SIZE // 2, dtype=torch.bfloat16), "states: got dtype torch.bfloat16; it must be torch.uint8"),
        (torch.zeros(1, 64, dtype=torch.uint8), "states: got shape (1, 64); the spec fixes"),
    ],
)
def test_a_trace_refuses_rows_that_are_no_states(rows: torch.Tensor, said: str) -> None:
    pool = memory(1)[0][:, :SIZE]
    compiled = torch.compile(lambda *given: states.scatter_states(*given), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=re.escape(said)):
        compiled(pool, i32(0), i32(0), rows)
    with pytest.raises(ArgumentError, match=r"^states: got "):
        states.scatter_states(pool, i32(0), i32(0), rows)


def test_there_are_no_lengths_to_bound() -> None:
    with pytest.raises(RuntimeError, match="max_cache_length"):
        states.zero_pages(memory(1), i32(0), i64(0), max_cache_length=1)

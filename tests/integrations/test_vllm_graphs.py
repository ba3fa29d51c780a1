"""CUDA graphs under vLLM: a captured forward of kvgen's core, replayed for other steps, has the bits of the eager step.

What holds here is what `_cudagraph_support` of the adapter says; the tests at the end show what would break it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvgen.integrations.vllm import faults
from kvgen.integrations.vllm.shard import Shard
from kvgen.integrations.vllm.step import Batch, GroupStep
from kvgen.runtime import FaultError
from kvgen.runtime.cpu import machine
from tests.support.graph_driver import GraphDriver, graphs
from tests.support.launching import Raw
from tests.support.vllm_graphs import BLOCKS, REQUESTS, ROWS, WIDTH, Padded, Runner, batch_of, host_buffers, write
from tests.support.vllm_steps import FULL, PAGE, SLIDING, quick

Request = tuple[int, int]  # tokens that it has in the cache, and its rows in the step


@dataclass
class Ranks:
    """The same rank three times, with the same data: the GPU's, which replays graphs; one that runs each step eagerly, padded
    as the graph is; and one that runs it without padding."""

    driver: GraphDriver
    shard: Shard
    rng: np.random.Generator

    def __post_init__(self) -> None:
        host = host_buffers(self.rng)
        there = {name: self.driver.place(array) for name, array in host.items()}
        self.gpu = Runner(self.shard, there, "cuda:0")
        self.padded = Runner(self.shard, host, "cpu")
        self.plain = Runner(self.shard, {name: array.copy() for name, array in host.items()}, "cpu")

    def write(self, size: Padded, requests: Sequence[Request], ahead: int = 0) -> None:
        """The data of a step into all three: new pages, also for `ahead` more tokens, rows of NaN where no request has them, ids
        of no page behind each request's own."""
        counts = [rows for _, rows in requests] + [0] * (REQUESTS - len(requests))
        lengths = [before + rows for before, rows in requests]
        table, slots = np.zeros((REQUESTS, WIDTH), np.int32), []
        pages = iter(self.rng.permutation(np.arange(1, BLOCKS)))
        for b, (before, rows) in enumerate(requests):
            own = [next(pages) for _ in range(-(-(lengths[b] + ahead) // PAGE))]
            table[b] = [*own, *self.rng.choice([-1, BLOCKS, 2**30], WIDTH - len(own))]
            slots += [own[at // PAGE] * PAGE + at % PAGE for at in range(before, before + rows)]
        new = {n: self.rng.standard_normal(self.padded.buffers[n].shape).astype(np.float32) for n in "qkv"}
        for array in new.values():
            array[:, len(slots) :] = np.nan
        for runner in (self.gpu, self.padded, self.plain):
            write(runner.buffers, "seq_lens", [*lengths, *[0] * (REQUESTS - len(lengths))])
            write(runner.buffers, "query_start_loc", np.cumsum([0, *counts]))
            write(runner.buffers, "block_table", table)
            write(runner.buffers, "slot_mapping", [*slots, *[-1] * (ROWS - len(slots))])
            write(runner.buffers, "out", np.nan)
            for name, array in new.items():
                write(runner.buffers, name, array)

    def run_eager(self, size: Padded, requests: Sequence[Request]) -> None:
        counts = [rows for _, rows in requests]
        with machine(mode="check"):
            self.padded.step(size)
            self.plain.step(Padded(len(requests), sum(counts), max(counts)))

    def differ(self) -> list[str]:
        """The buffers of the GPU that differ in a bit from the eager step's."""
        there, host = self.gpu.buffers, self.padded.buffers
        return [name for name in host if there[name].elements.tobytes() != host[name].tobytes()]

    def out(self, rows: int) -> tuple[Raw, Raw]:
        """The rows' outputs, of the GPU and of the step without padding."""
        return self.gpu.buffers["out"].elements[:, :rows], self.plain.buffers["out"][:, :rows]


@pytest.fixture
def driver() -> Iterator[GraphDriver]:
    quick()
    with graphs() as driver:
        faults.faults_of.cache_clear()
        yield driver
        for device in ("cpu", "cuda:0"):
            faults.faults_of(device).word.clear()  # what a test met is not the next one's, nor the process's
        faults.faults_of.cache_clear()


def held(ranks: Ranks, size: Padded, requests: Sequence[Request], graph: Any) -> None:
    """A step of the engine with a graph of `size`: the builder runs, the graph is replayed; it equals the eager steps."""
    most = max(rows for _, rows in requests)
    now = replace(size, most_rows=most)  # what the engine knows of the step, beside the graph's padding
    ranks.write(size, requests)
    ranks.run_eager(now, requests)
    ranks.gpu.build(now)
    graph.replay()
    assert not ranks.differ(), requests
    rows = sum(rows for _, rows in requests)
    got, plain = ranks.out(rows)
    assert np.isfinite(got).all() and got.tobytes() == plain.tobytes(), requests
    assert not ranks.gpu.buffers["out"].elements[:, rows : size.rows].any()
    assert np.isnan(ranks.gpu.buffers["out"].elements[:, size.rows :]).all()


def test_graphs_of_one_token_a_request(driver: GraphDriver) -> None:
    """Graphs of two sizes over the same workspaces, by turns, with an eager prompt between them: lengths on both sides of
    pages, the longest request first and last, padded requests."""
    ranks = Ranks(driver, FULL, np.random.default_rng(1))
    large, small = Padded(4, 4, 1), Padded(2, 2, 1)
    captured = {size: ranks.gpu.capture(driver, size) for size in (large, small)}
    for graph in captured.values():
        assert [node.what.split("_")[-1] for node in graph.nodes] == ["append", "decode"] * 2
    assert ranks.gpu.buffers["memory"].elements.tobytes() == ranks.padded.buffers["memory"].tobytes()  # slots were -1
    held(ranks, large, [(n, 1) for n in (31, 32, 0, 170)], captured[large])
    held(ranks, small, [(191, 1), (1, 1)], captured[small])
    prompt = Padded(1, 12, 12)
    ranks.write(prompt, [(20, 12)])
    ranks.run_eager(prompt, [(20, 12)])
    ranks.gpu.step(prompt)
    assert not ranks.differ()
    held(ranks, large, [(n, 1) for n in (5, 63, 64)], captured[large])
    held(ranks, small, [(100, 1)], captured[small])
    assert ranks.gpu.group.faults.word.poll(ranks.gpu.stream) is None


def test_graphs_of_layers_with_a_window(driver: GraphDriver) -> None:
    """Of 40 tokens: lengths on both sides of it."""
    ranks, size = Ranks(driver, SLIDING, np.random.default_rng(9)), Padded(4, 4, 1)
    graph = ranks.gpu.capture(driver, size)
    for lengths in ((38, 39, 40, 160), (170, 2)):
        held(ranks, size, [(n, 1) for n in lengths], graph)


def test_graphs_of_windows_of_drafts(driver: GraphDriver) -> None:
    """A token and three drafts a request; requests that the graph has room for and the step has not."""
    ranks = Ranks(driver, FULL, np.random.default_rng(2))
    size = Padded(4, 16, 4)
    graph = ranks.gpu.capture(driver, size)
    assert [node.what.split("_")[-1] for node in graph.nodes] == ["append", "verify"] * 2
    for lengths in ((29, 60, 0, 150), (188, 3), (1,)):
        held(ranks, size, [(n, 4) for n in lengths], graph)


def test_a_graph_of_several_drafts(driver: GraphDriver) -> None:
    """A drafter's loop in one graph: vLLM's kernels raise the lengths and say the next slots, then the plan is made again."""
    ranks, size = Ranks(driver, FULL, np.random.default_rng(10)), Padded(4, 4, 1)

    def advance(runner: Runner) -> None:
        buffers = {name: getattr(array, "elements", array) for name, array in runner.buffers.items()}
        live = buffers["seq_lens"] > 0
        buffers["seq_lens"][live] += 1
        at = buffers["seq_lens"] - 1
        pages = buffers["block_table"][np.arange(REQUESTS), at // PAGE]
        buffers["slot_mapping"][:REQUESTS] = np.where(live, pages * PAGE + at % PAGE, -1)
        buffers["q"] *= np.float32(-0.5)

    def loop(runner: Runner, metadata: GroupStep) -> None:
        runner.forward(metadata, size)
        for _ in range(2):
            if runner.device == "cpu":
                advance(runner)
            else:
                driver.other_kernel("advance", lambda: advance(runner))
            metadata.plan_again(runner.stream)
            runner.forward(metadata, size)

    ranks.write(size, [(3, 1)], ahead=2)
    metadata = ranks.gpu.build(size)
    loop(ranks.gpu, metadata)
    ranks.gpu.buffers["memory"].elements[...] = ranks.padded.buffers["memory"]
    with driver.capture() as graph:
        loop(ranks.gpu, metadata)
    for lengths in ((29, 30, 31, 150), (62, 5)):
        ranks.write(size, [(n, 1) for n in lengths], ahead=2)
        with machine(mode="check"):
            loop(ranks.padded, ranks.padded.build(size))
        ranks.gpu.build(size)
        graph.replay()
        assert not ranks.differ() and np.isfinite(ranks.gpu.buffers["out"].elements[:, :4]).all()
    ranks.gpu.group.faults.word.raise_if_set(ranks.gpu.stream)


def test_graphs_of_any_rows(driver: GraphDriver) -> None:
    """Prompts beside requests that decode, as long as each step has a request of more rows than a window of drafts."""
    ranks = Ranks(driver, FULL, np.random.default_rng(3))
    size = Padded(4, 16, 16)
    graph = ranks.gpu.capture(driver, size)
    assert [node.what.split("_")[-1] for node in graph.nodes] == ["append", "extend"] * 2
    for requests in ([(0, 9), (31, 1), (120, 1), (63, 5)], [(170, 16)], [(5, 1), (0, 6)]):
        held(ranks, size, requests, graph)


# What would break it ---------------------------------------------------------------------------------------------------


def test_a_table_cut_to_the_lengths_of_a_step_shows(driver: GraphDriver) -> None:
    """A count that the host takes from a step (here the pages of its longest request) is the capture's in every replay."""

    def cut(buffers: Any, size: Padded) -> Batch:
        batch = batch_of(buffers, size)
        return replace(batch, block_table=batch.block_table[:, :1])

    ranks, size = Ranks(driver, FULL, np.random.default_rng(4)), Padded(4, 4, 1)
    graph = ranks.gpu.capture(driver, size, cut)
    held(ranks, size, [(3, 1), (31, 1)], graph)
    with pytest.raises(AssertionError):
        held(ranks, size, [(3, 1), (32, 1)], graph)


def test_a_replay_without_the_builder_shows(driver: GraphDriver) -> None:
    ranks, size = Ranks(driver, FULL, np.random.default_rng(5)), Padded(2, 2, 1)
    graph = ranks.gpu.capture(driver, size)
    ranks.write(size, [(40, 1), (7, 1)])
    ranks.run_eager(size, [(40, 1), (7, 1)])
    graph.replay()
    assert ranks.differ() == ["out"]
    with pytest.raises(FaultError, match="STALE: request 1 has 8 tokens now"):
        ranks.gpu.group.faults.word.raise_if_set(ranks.gpu.stream)


def test_a_graph_of_another_operation_than_the_builder_chose_shows(driver: GraphDriver) -> None:
    """Why the adapter says UNIFORM_BATCH and not ALWAYS, and names no length for windows of any length: which operation attends
    follows from the step's longest request, which the host knows and a graph has fixed."""
    ranks, size = Ranks(driver, FULL, np.random.default_rng(6)), Padded(4, 4, 4)
    graph = ranks.gpu.capture(driver, size)
    held(ranks, size, [(40, 2), (7, 1)], graph)
    with pytest.raises(AssertionError):
        held(ranks, size, [(40, 1), (7, 1)], graph)
    with pytest.raises(FaultError, match="STALE"):
        ranks.gpu.group.faults.word.raise_if_set(ranks.gpu.stream)


# Wrong data ------------------------------------------------------------------------------------------------------------


def test_a_bad_page_in_a_replay_shows_in_a_later_step(driver: GraphDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Its request gets NaN, the others what they would; the builder raises when the copy of the word has arrived. What was
    raised is not logged again."""
    ranks, size = Ranks(driver, FULL, np.random.default_rng(7)), Padded(4, 4, 1)
    graph = ranks.gpu.capture(driver, size)
    ranks.write(size, [(40, 1), (70, 1), (7, 1)])
    write(
        ranks.gpu.buffers,
        "block_table",
        np.where(
            np.arange(REQUESTS * WIDTH).reshape(REQUESTS, WIDTH) == WIDTH + 1,
            BLOCKS,
            ranks.padded.buffers["block_table"],
        ),
    )
    ranks.run_eager(size, [(40, 1), (70, 1), (7, 1)])
    ranks.gpu.build(size)
    graph.replay()
    got, plain = ranks.out(3)
    assert np.isnan(got[:, 1]).all() and got[:, [0, 2]].tobytes() == plain[:, [0, 2]].tobytes()
    ranks.write(size, [(41, 1)])
    with pytest.raises(FaultError, match=r"^PAGE_ID: a page id outside the pool, at token 32 of request 1"):
        for _ in range(2):  # the first asks for the copy
            ranks.gpu.build(size)
            graph.replay()
    ranks.gpu.group.faults.close()
    assert not caplog.records


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_bad_page_of_the_last_step_is_logged_at_the_end(
    driver: GraphDriver, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, size = Ranks(driver, FULL, np.random.default_rng(8)), Padded(1, 1, 1)
    runner = ranks.gpu if device == "cuda:0" else ranks.padded
    ranks.write(size, [(40, 1)])
    write(runner.buffers, "block_table", -1)
    with machine(mode="check"):
        runner.step(size)
    with caplog.at_level(logging.ERROR, "vllm.kvgen"):
        runner.group.faults.close()
    assert "PAGE_ID: a page id outside the pool, at token 0 of request 0" in caplog.text
    assert np.isnan(getattr(runner.buffers["out"], "elements", runner.buffers["out"])[:, :1]).all()

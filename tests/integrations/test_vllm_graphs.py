"""CUDA graphs under vLLM: a captured forward of kvgen's core, replayed for other steps, has the bits of the eager step.

What holds here is what `_cudagraph_support` of the adapter says; the tests at the end show what would break it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen.integrations.vllm.step import Batch
from kvgen.runtime import FaultError
from kvgen.runtime.cpu import machine
from tests.support.graph_driver import GraphDriver
from tests.support.vllm_graphs import (
    BLOCKS,
    REQUESTS,
    Heads,
    Padded,
    Ranks,
    Runner,
    batch_of,
    elements,
    gpu,
    write,
)
from tests.support.vllm_steps import FULL, PAGE, SLIDING


class Full(Heads):
    shard = FULL


class Sliding(Heads):
    shard = SLIDING


@pytest.fixture
def driver() -> Iterator[GraphDriver]:
    with gpu() as driver:
        yield driver


def test_graphs_of_one_token_a_request(driver: GraphDriver) -> None:
    """Graphs of two sizes over the same workspaces, by turns, with an eager prompt between them: lengths on both sides of
    pages, the longest request first and last, padded requests."""
    ranks = Ranks(driver, Full, 1)
    large, small = Padded(4, 4, 1), Padded(2, 2, 1)
    captured = {size: ranks.gpu.capture(driver, size) for size in (large, small)}
    for graph in captured.values():
        assert [node.what.split("_")[-1] for node in graph.nodes] == ["append", "decode"] * 2
    assert elements(ranks.gpu.buffers["memory"]).tobytes() == ranks.padded.buffers["memory"].tobytes()  # slots were -1
    ranks.replayed(large, [(n, 1) for n in (31, 32, 0, 170)], captured[large])
    ranks.replayed(small, [(191, 1), (1, 1)], captured[small])
    prompt = Padded(1, 12, 12)
    ranks.write([(20, 12)])
    ranks.run_eager(prompt, [(20, 12)])
    ranks.gpu.step(prompt)
    assert not ranks.differ()
    ranks.replayed(large, [(n, 1) for n in (5, 63, 64)], captured[large])
    ranks.replayed(small, [(100, 1)], captured[small])
    assert ranks.gpu.faults.word.poll(ranks.gpu.stream) is None


def test_graphs_of_layers_with_a_window(driver: GraphDriver) -> None:
    """Of 40 tokens: lengths on both sides of it."""
    ranks, size = Ranks(driver, Sliding, 9), Padded(4, 4, 1)
    graph = ranks.gpu.capture(driver, size)
    for lengths in ((38, 39, 40, 160), (170, 2)):
        ranks.replayed(size, [(n, 1) for n in lengths], graph)


def test_graphs_of_windows_of_drafts(driver: GraphDriver) -> None:
    """A token and three drafts a request; requests that the graph has room for and the step has not."""
    ranks, size = Ranks(driver, Full, 2), Padded(4, 16, 4)
    graph = ranks.gpu.capture(driver, size)
    assert [node.what.split("_")[-1] for node in graph.nodes] == ["append", "verify"] * 2
    for lengths in ((29, 60, 0, 150), (188, 3), (1,)):
        ranks.replayed(size, [(n, 4) for n in lengths], graph)


def test_a_graph_of_several_drafts(driver: GraphDriver) -> None:
    """A drafter's loop in one graph: vLLM's kernels raise the lengths and say the next slots, then the plan is made again."""
    ranks, size = Ranks(driver, Full, 10), Padded(4, 4, 1)

    def advance(runner: Runner) -> None:
        lengths, table, slots, q = (
            elements(runner.buffers[n]) for n in ("seq_lens", "block_table", "slot_mapping", "q")
        )
        live = lengths > 0
        lengths[live] += 1
        at = lengths - 1
        slots[:REQUESTS] = np.where(live, table[np.arange(REQUESTS), at // PAGE] * PAGE + at % PAGE, -1)
        q *= np.float32(-0.5)

    def loop(runner: Runner, metadata: Any) -> None:
        runner.forward(metadata, size)
        for _ in range(2):
            if runner.device == "cpu":
                advance(runner)
            else:
                driver.other_kernel("advance", lambda: advance(runner))
            metadata.plan_again(runner.stream)
            runner.forward(metadata, size)

    ranks.write([(3, 1)], ahead=2)
    metadata = ranks.gpu.build(size)
    loop(ranks.gpu, metadata)
    elements(ranks.gpu.buffers["memory"])[...] = ranks.padded.buffers["memory"]
    with driver.capture() as graph:
        loop(ranks.gpu, metadata)
    for lengths in ((29, 30, 31, 150), (62, 5)):
        ranks.write([(n, 1) for n in lengths], ahead=2)
        with machine(mode="check"):
            loop(ranks.padded, ranks.padded.build(size))
        ranks.gpu.build(size)
        graph.replay()
        assert not ranks.differ() and np.isfinite(elements(ranks.gpu.buffers["out"])[:, :4]).all()
    ranks.gpu.faults.word.raise_if_set(ranks.gpu.stream)


def test_graphs_of_any_rows(driver: GraphDriver) -> None:
    """Prompts beside requests that decode, as long as each step has a request of more rows than a window of drafts."""
    ranks, size = Ranks(driver, Full, 3), Padded(4, 16, 16)
    graph = ranks.gpu.capture(driver, size)
    assert [node.what.split("_")[-1] for node in graph.nodes] == ["append", "extend"] * 2
    for requests in ([(0, 9), (31, 1), (120, 1), (63, 5)], [(170, 16)], [(5, 1), (0, 6)]):
        ranks.replayed(size, requests, graph)


# What would break it ---------------------------------------------------------------------------------------------------


def test_a_table_cut_to_the_lengths_of_a_step_shows(driver: GraphDriver) -> None:
    """A count that the host takes from a step (here the pages of its longest request) is the capture's in every replay."""

    def cut(buffers: Any, size: Padded) -> Batch:
        batch = batch_of(buffers, size)
        return replace(batch, block_table=batch.block_table[:, :1])

    ranks, size = Ranks(driver, Full, 4), Padded(4, 4, 1)
    graph = ranks.gpu.capture(driver, size, cut)
    ranks.replayed(size, [(3, 1), (31, 1)], graph)
    with pytest.raises(AssertionError):
        ranks.replayed(size, [(3, 1), (32, 1)], graph)


def test_a_replay_without_the_builder_shows(driver: GraphDriver) -> None:
    ranks, size = Ranks(driver, Full, 5), Padded(2, 2, 1)
    graph = ranks.gpu.capture(driver, size)
    ranks.write([(40, 1), (7, 1)])
    ranks.run_eager(size, [(40, 1), (7, 1)])
    graph.replay()
    assert ranks.differ() == ["out"]
    with pytest.raises(FaultError, match=r"STALE: request 1 \(over lists: row 1\) has 8 tokens now"):
        ranks.gpu.faults.word.raise_if_set(ranks.gpu.stream)


def test_a_graph_of_another_operation_than_the_builder_chose_shows(driver: GraphDriver) -> None:
    """Why the adapter says UNIFORM_BATCH and not ALWAYS, and names no length for windows of any length: which operation attends
    follows from the step's longest request, which the host knows and a graph has fixed."""
    ranks, size = Ranks(driver, Full, 6), Padded(4, 4, 4)
    graph = ranks.gpu.capture(driver, size)
    ranks.replayed(size, [(40, 2), (7, 1)], graph)
    with pytest.raises(AssertionError):
        ranks.replayed(size, [(40, 1), (7, 1)], graph)
    with pytest.raises(FaultError, match="STALE"):
        ranks.gpu.faults.word.raise_if_set(ranks.gpu.stream)


# Wrong data ------------------------------------------------------------------------------------------------------------


def test_a_bad_page_in_a_replay_shows_in_a_later_step(driver: GraphDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Its request gets NaN, the others what they would; the builder raises when the copy of the word has arrived. What was
    raised is not logged again."""
    ranks, size = Ranks(driver, Full, 7), Padded(4, 4, 1)
    graph = ranks.gpu.capture(driver, size)
    requests = [(40, 1), (70, 1), (7, 1)]
    ranks.write(requests)
    elements(ranks.gpu.buffers["block_table"])[1, 1] = BLOCKS
    ranks.run_eager(size, requests)
    ranks.gpu.build(size)
    graph.replay()
    got, plain = ranks.out(3)
    assert np.isnan(got[:, 1]).all() and got[:, [0, 2]].tobytes() == plain[:, [0, 2]].tobytes()
    ranks.write([(41, 1)])
    with pytest.raises(FaultError, match=r"^PAGE_ID: a page id outside the pool, at token 32 of request 1"):
        for _ in range(2):  # the first asks for the copy
            ranks.gpu.build(size)
            graph.replay()
    ranks.gpu.faults.close()
    assert not caplog.records


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_bad_page_of_the_last_step_is_logged_at_the_end(
    driver: GraphDriver, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, size = Ranks(driver, Full, 8), Padded(1, 1, 1)
    runner = ranks.gpu if device == "cuda:0" else ranks.padded
    ranks.write([(40, 1)])
    write(runner.buffers, "block_table", -1)
    with machine(mode="check"):
        runner.step(size)
    with caplog.at_level(logging.ERROR, "vllm.kvgen"):
        runner.faults.close()
    assert "PAGE_ID: a page id outside the pool, at token 0 of request 0" in caplog.text
    assert np.isnan(elements(runner.buffers["out"])[:, :1]).all()

"""CUDA graphs: a captured step keeps its launch sizes and argument bytes, and replays right for other data in the same arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvgen.emulator import KernelFault
from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import ErrorWord, FaultError
from kvgen.runtime.cpu import machine
from tests.support.graph_driver import STREAM, GraphDriver, graphs
from tests.support.launching import BF16, Raw, package

REQUESTS, LAYERS, PAGES = 3, 2, 12
PACKAGE = package("paged")


@dataclass
class Step:
    """What a step of one new row a request reads and writes: the set's pool, tables, rows, outputs, and its workspace."""

    pool: Any
    lengths: Any
    page_table: Any
    row_offsets: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    workspace: Any
    errors: Any

    def plan(self, stream: Any = None) -> None:
        cache = PACKAGE.Cache(self.pool, lengths=self.lengths, page_table=self.page_table)
        PACKAGE.decode.plan(cache, self.workspace, row_offsets=self.row_offsets, stream=stream)

    def attend(self, stream: Any = None) -> None:
        cache = PACKAGE.Cache(self.pool, lengths=self.lengths, page_table=self.page_table)
        for i in range(LAYERS):
            more = {"errors": self.errors, "stream": stream}
            PACKAGE.append(cache[i], self.k[i], self.v[i], row_offsets=self.row_offsets, **more)
            PACKAGE.decode(cache[i], self.q[i], self.out[i], self.workspace, lse=self.lse[i], **more)


def arrays(rng: np.random.Generator) -> dict[str, Raw]:
    """Arrays of a step, on the host: requests and rows of the batch that a graph is made for."""

    def rows(*shape: int) -> Raw:
        return rng.standard_normal(shape).astype(BF16)

    return {
        "pool": rows(PAGES, 2, LAYERS, 4, 2, 16),
        "lengths": np.zeros(REQUESTS, np.int32),
        "page_table": np.zeros((REQUESTS, 4), np.int32),
        "row_offsets": np.arange(REQUESTS + 1, dtype=np.int32),
        "q": rows(LAYERS, REQUESTS, 4, 16),
        "k": rows(LAYERS, REQUESTS, 2, 16),
        "v": rows(LAYERS, REQUESTS, 2, 16),
        "out": np.full((LAYERS, REQUESTS, 4, 16), np.nan, BF16),
        "lse": np.full((LAYERS, REQUESTS, 4), np.nan, np.float32),
    }


# Lengths before the step, pages, and how many requests have a row. Behind a request's pages lie ids of no page.
STEPS = (
    ((0, 0, 0), ((0,), (1,), (2,)), 3),
    ((15, 3, 4), ((5, 3, 1, 9), (2,), (4, 0)), 3),
    ((1, 0, 12), ((7,), (8,), (6, 11, 10, 2)), 3),  # shorter requests, the longest last
    ((9, 0, 0), ((1, 2, 3), (), ()), 1),  # a graph for three requests runs a batch of one
)


def fill(into: dict[str, Raw], rng: np.random.Generator, step: int) -> None:
    """Write a step's data into the arrays."""
    lengths, pages, requests = STEPS[step]
    into["lengths"][:] = lengths
    into["page_table"][:] = -1
    for b, ids in enumerate(pages):
        into["page_table"][b, : len(ids)] = ids
    into["row_offsets"][:] = np.minimum(np.arange(REQUESTS + 1), requests)
    for name in "qkv":
        into[name][:] = rng.standard_normal(into[name].shape).astype(BF16)


class Both:
    """The same step twice: eager on host arrays, and on the GPU's for captures; steps write the same data into both."""

    def __init__(self, driver: GraphDriver) -> None:
        self.rng = np.random.default_rng(0)
        self.driver, self.host = driver, arrays(self.rng)
        fill(self.host, self.rng, 0)
        self.there = {name: driver.place(array) for name, array in self.host.items()}
        self.workspace = PACKAGE.decode.workspace(REQUESTS, device="cuda:0")
        self.words = {device: ErrorWord(device) for device in ("cpu", "cuda:0")}
        self.eager = Step(**self.host, workspace=PACKAGE.decode.workspace(REQUESTS), errors=self.words["cpu"])
        self.device = Step(**self.there, workspace=self.workspace, errors=self.words["cuda:0"])

    def warm_up(self) -> None:
        """Run the step once, as before every capture: its kernels are loaded."""
        self.device.plan(STREAM)
        self.device.attend(STREAM)
        self.there["pool"].elements[...] = self.host["pool"]

    def write(self, step: int) -> None:
        fill(self.host, self.rng, step)
        for name in ("lengths", "page_table", "row_offsets", "q", "k", "v"):
            self.there[name].elements[...] = self.host[name]

    def run_eager(self) -> None:
        with machine(mode="check"):
            self.eager.plan()
            self.eager.attend()

    def differ(self) -> list[str]:
        """The arrays that differ in a bit."""
        return [name for name, array in self.host.items() if self.there[name].elements.tobytes() != array.tobytes()]


@pytest.fixture
def both() -> Iterator[Both]:
    with graphs() as driver:
        yield Both(driver)


@pytest.mark.parametrize("planned", ["inside", "outside"])
def test_a_replay_is_the_eager_step_on_the_data_of_that_moment(both: Both, planned: str) -> None:
    """Bit for bit: outputs, LSE, the pool and the error word, over steps that share nothing but the arrays; with the plan in
    the graph, and made before each replay."""
    both.warm_up()
    with both.driver.capture() as graph:
        if planned == "inside":
            both.device.plan(STREAM)
        both.device.attend(STREAM)
    plan = ["paged_decode_plan"] if planned == "inside" else []
    assert [node.what for node in graph.nodes] == [*plan, *["paged_append", "paged_decode"] * LAYERS]
    if planned == "inside":
        del both.device  # the graph needs the memory alone
    for step in range(len(STEPS)):
        both.write(step)
        both.run_eager()
        if planned == "outside":
            both.device.plan(STREAM)
        graph.replay()
        assert not both.differ(), step
        assert np.isfinite(both.host["out"].astype(float)).all()
    for word in both.words.values():
        word.raise_if_set()


def test_a_plan_of_other_lengths_shows(both: Both) -> None:
    """What stays frozen by mistake: a graph without the plan, replayed for lengths that nobody planned."""
    both.warm_up()
    with both.driver.capture() as graph:
        both.device.attend(STREAM)
    both.write(1)
    both.run_eager()
    graph.replay()
    assert both.differ() == ["out", "lse"]
    with pytest.raises(FaultError, match=r"STALE: request 1 \(over lists: row 1\) has 4 tokens now"):
        both.words["cuda:0"].raise_if_set(STREAM)


def test_a_graph_of_freed_memory_shows(both: Both) -> None:
    both.warm_up()
    with both.driver.capture() as graph:
        both.device.plan(STREAM)
    del both.device, both.workspace
    with pytest.raises(KernelFault, match="lies in no buffer"):
        graph.replay()


def test_a_capture_refuses_what_a_gpu_would(both: Both) -> None:
    """Kernels that are not loaded, allocation, waiting, and reading device memory from the host."""
    with both.driver.capture() as graph:
        for attempt in (
            lambda: both.device.plan(STREAM),
            lambda: PACKAGE.decode.workspace(REQUESTS, device="cuda:0"),
            lambda: both.device.plan(),  # the default stream waits for the one that captures
        ):
            with pytest.raises(DeviceError, match="CUDA_ERROR_STREAM_CAPTURE"):
                attempt()
        with pytest.raises(ArgumentError, match="got one that captures a graph"):
            both.words["cuda:0"].raise_if_set(STREAM)
    assert not graph.nodes
    for read in (int, np.asarray, list):
        with pytest.raises(AssertionError, match="the host reads device memory"):
            read(both.there["lengths"][:1])

"""vLLM's model runner in small: arrays that stay where they are, batches padded to a graph's size, a forward over two layers.

As vllm/v1/worker/gpu_model_runner.py has it: slices of the same buffers go to the metadata builder in every step; padded
requests have a length of 0, tables of the null block and no rows, padded rows the slot -1. A graph is captured with lengths of as
many tokens as rows, slots of -1 and tables of zeros, after a step that only warms up; before a replay the builder runs, outside
the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvgen.integrations.vllm import attention, faults
from kvgen.integrations.vllm.pools import LayerPool, module_of, open_cache
from kvgen.integrations.vllm.shard import Shard
from kvgen.integrations.vllm.step import Batch, Group
from kvgen.runtime.cpu import machine
from tests.support.graph_driver import STREAM, Graph, GraphDriver, graphs
from tests.support.launching import Raw
from tests.support.vllm_steps import ARCH, DIM, KV_HEADS, ORDER, PAGE, Q_HEADS

LAYERS: Final = ("layers.0", "layers.1")
REQUESTS, ROWS, BLOCKS, WIDTH = 4, 16, 24, 6  # at most; blocks of the cache, and ids of blocks a request
Request = tuple[int, int]  # tokens that it has in the cache, and its rows in the step


@dataclass(frozen=True)
class Padded:
    """The size of a batch, padding included, and its longest request's rows: what a graph is captured for."""

    requests: int
    rows: int
    most_rows: int


def buffers_of(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> dict[str, Raw]:
    """The runner's buffers: metadata, and arrays of random numbers of these shapes; "out" of NaN."""
    numbers = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    numbers["out"][...] = np.nan
    return {
        "query_start_loc": np.zeros(REQUESTS + 1, np.int32),
        "seq_lens": np.zeros(REQUESTS, np.int32),
        "block_table": np.zeros((REQUESTS, WIDTH), np.int32),
        "slot_mapping": np.full(ROWS, -1, np.int64),
        **numbers,
    }


def batch_of(buffers: Any, size: Padded) -> Batch:
    """What the builder gets in every step of this size: the same slices of the same buffers."""
    return Batch(
        query_start_loc=buffers["query_start_loc"][: size.requests + 1],
        seq_lens=buffers["seq_lens"][: size.requests],
        block_table=buffers["block_table"][: size.requests],
        rows=size.rows,
        most_rows=size.most_rows,
    )


class Runner(ABC):
    """A rank: a group of layers over `buffers`, of NumPy or on the GPU."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: Any

    def __init__(self, buffers: Any, device: str) -> None:
        self.buffers, self.device = buffers, device
        self.stream = None if device == "cpu" else STREAM
        self.faults = faults.faults_of(device)

    @abstractmethod
    def begin(self, batch: Batch) -> Any:
        """The metadata of a step."""

    @abstractmethod
    def layer(self, number: int, metadata: Any, rows: int) -> None:
        """A layer's part of a forward over so many rows."""

    def build(self, size: Padded, of: Callable[[Any, Padded], Batch] = batch_of) -> Any:
        """The metadata builder's part of a step."""
        return self.begin(of(self.buffers, size))

    def forward(self, metadata: Any, size: Padded) -> None:
        """The model's part."""
        for number in range(len(LAYERS)):
            self.layer(number, metadata, size.rows)

    def step(self, size: Padded) -> None:
        """A step without a graph."""
        self.forward(self.build(size), size)

    def capture(self, driver: GraphDriver, size: Padded, of: Callable[[Any, Padded], Batch] = batch_of) -> Graph:
        """The graph of a forward of this size, over dummy data."""
        dummy(self.buffers, size)
        self.forward(self.build(size, of), size)  # warms up: loads the kernels
        metadata = self.build(size, of)
        with driver.capture() as graph:
            self.forward(metadata, size)
        return graph


class Heads(Runner):
    """Layers with K and V of heads, by `step` and `attention`."""

    shapes: Mapping[str, tuple[int, ...]] = {
        "memory": (len(LAYERS), BLOCKS, KV_HEADS, PAGE, 2 * DIM),
        "q": (len(LAYERS), ROWS, Q_HEADS, DIM),
        "k": (len(LAYERS), ROWS, KV_HEADS, DIM),
        "v": (len(LAYERS), ROWS, KV_HEADS, DIM),
        "out": (len(LAYERS), ROWS, Q_HEADS, DIM),
    }
    dtype = np.float32
    shard: Shard

    def __init__(self, buffers: Any, device: str) -> None:
        super().__init__(buffers, device)
        pools = {layer: LayerPool(self.shard, buffers["memory"][i]) for i, layer in enumerate(LAYERS)}
        self.group = Group(pools, ORDER, max_rows=ROWS, arch=ARCH, device=device)
        module = module_of(self.shard, buffers["memory"][0], ORDER, ARCH)
        self.writers = [(module, open_cache(module, self.shard, [pool], ORDER)[0]) for pool in pools.values()]

    def begin(self, batch: Batch) -> Any:
        return self.group.begin(batch, self.stream)

    def layer(self, number: int, metadata: Any, rows: int) -> None:
        q, k, v, out = (self.buffers[name][number] for name in ("q", "k", "v", "out"))
        slots = self.buffers["slot_mapping"][:rows]
        attention.append(*self.writers[number], k, v, slots, self.faults.word, self.stream)
        attention.attend(metadata, LAYERS[number], q, out, None, self.stream)


def dummy(buffers: Any, size: Padded) -> None:
    """What vLLM has in its buffers when it captures."""
    each, rest = divmod(size.rows, size.requests)
    counts = np.full(size.requests, each)
    counts[-1] += rest
    write(buffers, "seq_lens", np.where(np.arange(REQUESTS) < size.requests, size.most_rows, 0))
    write(buffers, "query_start_loc", np.cumsum([0, *counts]))
    write(buffers, "block_table", 0)
    write(buffers, "slot_mapping", -1)


def elements(array: Any) -> Raw:
    """The numbers of a buffer, which the test may read and write wherever it lies."""
    found: Raw = getattr(array, "elements", array)
    return found


def write(buffers: Any, name: str, values: Any) -> None:
    """What a copy to the device or a kernel of vLLM's does: the buffer gets `values`, from its beginning on."""
    into = elements(buffers[name])
    if np.ndim(values):
        into = into[: len(values)]
    into[...] = values


class Ranks:
    """The same rank three times, with the same data: the GPU's, which replays graphs; one that runs each step eagerly, padded
    as the graph is; and one that runs it without padding."""

    def __init__(self, driver: GraphDriver, kind: type[Runner], seed: int) -> None:
        self.driver, self.rng = driver, np.random.default_rng(seed)
        host = buffers_of(self.rng, kind.shapes, kind.dtype)
        self.gpu = kind({name: driver.place(array) for name, array in host.items()}, "cuda:0")
        self.padded = kind(host, "cpu")
        self.plain = kind({name: array.copy() for name, array in host.items()}, "cpu")

    def write(self, requests: Sequence[Request], ahead: int = 0) -> None:
        """The data of a step into all three: new pages, also for `ahead` more tokens, rows of NaN where no request has them,
        ids of no page behind each request's own."""
        counts = [rows for _, rows in requests] + [0] * (REQUESTS - len(requests))
        lengths = [before + rows for before, rows in requests]
        table, slots = np.zeros((REQUESTS, WIDTH), np.int32), []
        pages = iter(self.rng.permutation(np.arange(1, BLOCKS)))
        for b, (before, rows) in enumerate(requests):
            own = [next(pages) for _ in range(-(-(lengths[b] + ahead) // PAGE))]
            table[b] = [*own, *self.rng.choice([-1, BLOCKS, 2**30], WIDTH - len(own))]
            slots += [own[at // PAGE] * PAGE + at % PAGE for at in range(before, before + rows)]
        new = {n: self.rng.standard_normal(array.shape) for n, array in self.padded.buffers.items() if n in "qkv"}
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
        """The step on the other two."""
        counts = [rows for _, rows in requests]
        with machine(mode="check"):
            self.padded.step(size)
            self.plain.step(Padded(len(requests), sum(counts), max(counts)))

    def differ(self) -> list[str]:
        """The buffers of the GPU that differ in a bit from the eager step's."""
        there, host = self.gpu.buffers, self.padded.buffers
        return [name for name in host if elements(there[name]).tobytes() != host[name].tobytes()]

    def out(self, rows: int) -> tuple[Raw, Raw]:
        """The rows' outputs, of the GPU and of the step without padding."""
        return elements(self.gpu.buffers["out"])[:, :rows], self.plain.buffers["out"][:, :rows]

    def replayed(self, size: Padded, requests: Sequence[Request], graph: Graph) -> None:
        """A step of the engine with a graph of `size`: the builder runs, the graph is replayed; it equals the eager steps."""
        now = replace(
            size, most_rows=max(rows for _, rows in requests)
        )  # what the engine knows, beside the graph's padding
        self.write(requests)
        self.run_eager(now, requests)
        self.gpu.build(now)
        graph.replay()
        assert not self.differ(), requests
        rows = sum(rows for _, rows in requests)
        got, plain = self.out(rows)
        assert np.isfinite(got.astype(np.float32)).all() and got.tobytes() == plain.tobytes(), requests
        out = elements(self.gpu.buffers["out"]).astype(np.float32)
        assert not out[:, rows : size.rows].any() and np.isnan(out[:, size.rows :]).all()


@contextmanager
def gpu() -> Iterator[GraphDriver]:
    """A GPU for runners, and error words of their own."""
    with graphs() as driver:
        faults.faults_of.cache_clear()
        yield driver
        for device in ("cpu", "cuda:0"):
            faults.faults_of(device).word.clear()  # what a test met is not the next one's, nor the process's
        faults.faults_of.cache_clear()

"""vLLM's model runner in small: arrays that stay where they are, batches padded to a graph's size, a forward over two layers.

As vllm/v1/worker/gpu_model_runner.py has it: slices of the same buffers go to the metadata builder in every step; padded
requests have a length of 0, tables of the null block and no rows, padded rows the slot -1. A graph is captured with lengths of as
many tokens as rows, slots of -1 and tables of zeros, after a step that only warms up; before a replay the builder runs, outside
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvgen.integrations.vllm import attention
from kvgen.integrations.vllm.pools import LayerPool, module_of, open_cache
from kvgen.integrations.vllm.shard import Shard
from kvgen.integrations.vllm.step import Batch, Group, GroupStep
from tests.support.graph_driver import STREAM, Graph, GraphDriver
from tests.support.launching import Raw
from tests.support.vllm_steps import ARCH, DIM, KV_HEADS, ORDER, PAGE, Q_HEADS

LAYERS: Final = ("layers.0", "layers.1")
REQUESTS, ROWS, BLOCKS, WIDTH = 4, 16, 24, 6  # at most; ids of blocks a request
MODEL_LEN: Final = WIDTH * PAGE


@dataclass(frozen=True)
class Padded:
    """The size of a batch, padding included, and its longest request's rows: what a graph is captured for."""

    requests: int
    rows: int
    most_rows: int


def host_buffers(rng: np.random.Generator) -> dict[str, Raw]:
    """The runner's buffers, and the layers' cache, its blocks of random numbers."""

    def numbers(*shape: int) -> Raw:
        return rng.standard_normal(shape).astype(np.float32)

    layers = len(LAYERS)
    return {
        "query_start_loc": np.zeros(REQUESTS + 1, np.int32),
        "seq_lens": np.zeros(REQUESTS, np.int32),
        "block_table": np.zeros((REQUESTS, WIDTH), np.int32),
        "slot_mapping": np.full(ROWS, -1, np.int64),
        "memory": numbers(layers, BLOCKS, KV_HEADS, PAGE, 2 * DIM),
        "q": numbers(layers, ROWS, Q_HEADS, DIM),
        "k": numbers(layers, ROWS, KV_HEADS, DIM),
        "v": numbers(layers, ROWS, KV_HEADS, DIM),
        "out": np.full((layers, ROWS, Q_HEADS, DIM), np.nan, np.float32),
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


class Runner:
    """A rank: a group of layers over `buffers`, of NumPy or on the GPU."""

    def __init__(self, shard: Shard, buffers: Any, device: str) -> None:
        self.buffers, self.device = buffers, device
        self.stream = None if device == "cpu" else STREAM
        pools = {layer: LayerPool(shard, buffers["memory"][i]) for i, layer in enumerate(LAYERS)}
        self.group = Group(pools, ORDER, max_rows=ROWS, max_requests=REQUESTS, arch=ARCH, device=device)
        module = module_of(shard, buffers["memory"][0], ORDER, ARCH)
        self.writers = [(module, open_cache(module, shard, [pool], ORDER)[0]) for pool in pools.values()]

    def build(self, size: Padded, of: Callable[[Any, Padded], Batch] = batch_of) -> GroupStep:
        """The metadata builder's part of a step."""
        return self.group.begin(of(self.buffers, size), self.stream)

    def forward(self, metadata: GroupStep, size: Padded) -> None:
        """The model's part."""
        given = self.buffers
        for i, layer in enumerate(LAYERS):
            k, v, slots = given["k"][i], given["v"][i], given["slot_mapping"][: size.rows]
            attention.append(*self.writers[i], k, v, slots, self.group.faults.word, self.stream)
            attention.attend(metadata, layer, given["q"][i], given["out"][i], None, self.stream)

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


def dummy(buffers: Any, size: Padded) -> None:
    """What vLLM has in its buffers when it captures."""
    each, rest = divmod(size.rows, size.requests)
    counts = np.full(size.requests, each)
    counts[-1] += rest
    write(buffers, "seq_lens", np.where(np.arange(REQUESTS) < size.requests, size.most_rows, 0))
    write(buffers, "query_start_loc", np.cumsum([0, *counts]))
    write(buffers, "block_table", 0)
    write(buffers, "slot_mapping", -1)


def write(buffers: Any, name: str, values: Any) -> None:
    """What a copy to the device or a kernel of vLLM's does: the buffer gets `values`, from its beginning on."""
    elements = getattr(buffers[name], "elements", buffers[name])
    if np.ndim(values):
        elements = elements[: len(values)]
    elements[...] = values

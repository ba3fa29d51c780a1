"""CUDA graphs of MLA layers: as tests/integrations/test_vllm_graphs.py for K and V, with nothing of vLLM or torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen.integrations.vllm import mla
from kvgen.integrations.vllm.mla_shard import MlaShard
from kvgen.integrations.vllm.step import Batch
from tests.support.graph_driver import GraphDriver
from tests.support.vllm_graphs import BLOCKS, LAYERS, REQUESTS, ROWS, Padded, Ranks, Runner, elements, gpu
from tests.support.vllm_steps import ARCH, PAGE

HEADS, LATENT, ROPE = 4, 64, 16


class Latent(Runner):
    """MLA layers, by `mla`: append of latent rows, and attention in the absorbed form."""

    shapes: Mapping[str, tuple[int, ...]] = {
        "memory": (len(LAYERS), BLOCKS, PAGE, LATENT + ROPE),
        "q": (len(LAYERS), ROWS, HEADS, LATENT + ROPE),
        "k": (len(LAYERS), ROWS, LATENT),
        "v": (len(LAYERS), ROWS, ROPE),
        "out": (len(LAYERS), ROWS, HEADS, LATENT),
    }
    dtype = ml_dtypes.bfloat16
    shard = MlaShard(HEADS, LATENT, ROPE, 32, 32, "bf16", 0.1)

    def __init__(self, buffers: Any, device: str) -> None:
        super().__init__(buffers, device)
        modules = mla.MlaModules.of(self.shard, PAGE, ARCH)
        for module in (modules.stored, modules.attended):
            module.Cache.MODULE.quick = True
        pools = {layer: mla.LatentPool(self.shard, buffers["memory"][i]) for i, layer in enumerate(LAYERS)}
        self.group = mla.MlaGroup(pools, self.faults, max_rows=ROWS, max_requests=REQUESTS, arch=ARCH)
        self.modules, self.writers = modules, [modules.open_stored([pool])[0] for pool in pools.values()]

    def begin(self, batch: Batch) -> Any:
        return self.group.begin(batch, None, self.stream)

    def layer(self, number: int, metadata: Any, rows: int) -> None:
        q, latent, rope, out = (self.buffers[name][number] for name in ("q", "k", "v", "out"))
        slots, cache = self.buffers["slot_mapping"][:rows], self.writers[number]
        mla.append_latent(self.modules, cache, latent, rope, slots, self.faults.word, self.stream)
        step, place = metadata.of(LAYERS[number])
        step.decode(place, q[:rows], out[:rows], None, self.stream)


@pytest.fixture
def driver() -> Iterator[GraphDriver]:
    with gpu() as driver:
        yield driver


def test_graphs_of_one_token_a_request(driver: GraphDriver) -> None:
    """Of two sizes over the same workspace, by turns; padded requests."""
    ranks, large, small = Ranks(driver, Latent, 1), Padded(4, 4, 1), Padded(2, 2, 1)
    captured = {size: ranks.gpu.capture(driver, size) for size in (large, small)}
    for graph in captured.values():
        assert [node.what.split("_", 2)[-1] for node in graph.nodes] == ["append", "mla_decode"] * 2
    assert elements(ranks.gpu.buffers["memory"]).tobytes() == ranks.padded.buffers["memory"].tobytes()
    ranks.replayed(large, [(n, 1) for n in (31, 32, 0, 170)], captured[large])
    ranks.replayed(small, [(191, 1)], captured[small])
    ranks.replayed(large, [(n, 1) for n in (5, 63, 160)], captured[large])
    assert ranks.gpu.faults.word.poll(ranks.gpu.stream) is None


def test_graphs_of_windows_of_drafts(driver: GraphDriver) -> None:
    """A token and three drafts a request."""
    ranks, size = Ranks(driver, Latent, 2), Padded(4, 16, 4)
    graph = ranks.gpu.capture(driver, size)
    assert [node.what.split("_", 2)[-1] for node in graph.nodes] == ["append", "mla_window"] * 2
    for lengths in ((29, 60, 0, 150), (188, 3), (1,)):
        ranks.replayed(size, [(n, 4) for n in lengths], graph)


def test_a_replay_without_the_builder_shows(driver: GraphDriver) -> None:
    ranks, size = Ranks(driver, Latent, 3), Padded(2, 2, 1)
    graph = ranks.gpu.capture(driver, size)
    ranks.write([(40, 1), (7, 1)])
    ranks.run_eager(size, [(40, 1), (7, 1)])
    graph.replay()
    assert ranks.differ() == ["out"]
    assert np.isnan(elements(ranks.gpu.buffers["out"])[:, :2].astype(np.float32)).all()

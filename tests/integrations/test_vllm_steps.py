"""kvgen's core for vLLM over recorded steps of its engine, on the CPU machine: every output and every byte of the cache."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvgen.integrations.vllm import attention
from kvgen.integrations.vllm.pools import LayerPool, module_of, open_cache
from kvgen.integrations.vllm.step import Batch, Group
from kvgen.runtime.cpu import machine
from tests.support.launching import Raw
from tests.support.vllm_steps import (
    ARCH,
    DIM,
    KV_HEADS,
    NAMES,
    ORDER,
    PAGE,
    Model,
    Recorded,
    Recording,
    recording,
)

ADAPTER = Path(__file__).resolve().parents[2] / "kvgen/integrations/vllm/v0_32.py"
MOST_ROWS = 128


@pytest.fixture(autouse=True)
def checking() -> Iterator[None]:
    with machine(mode="check"):
        yield


class Engine:
    """The layers of a recording. As in vLLM the first layers of all groups share one tensor, the second ones the next: ids of
    pages are a group's own."""

    def __init__(self, run: Recording) -> None:
        self.run, self.model = run, Model(sum(map(len, run.groups.values())))
        self.names = [layer for layers in run.groups.values() for layer in layers]
        each = max(map(len, run.groups.values()))
        shape = (each, run.blocks, KV_HEADS, PAGE, 2 * DIM)
        self.memory = np.full(shape, np.nan, np.float32)  # whoever reads what nobody wrote shows
        self.expected = self.memory.copy()
        self.groups, self.writers = {}, {}
        for group, layers in run.groups.items():
            pools = {layer: LayerPool(run.shard(group), self.memory[i]) for i, layer in enumerate(layers)}
            self.groups[group] = Group(pools, ORDER, max_rows=MOST_ROWS, arch=ARCH, device="cpu")
            for layer, pool in pools.items():
                module = module_of(pool.shard, pool.memory, ORDER, ARCH)
                self.writers[layer] = module, open_cache(module, pool.shard, [pool], ORDER)[0]
        self.tokens: list[Raw] = [np.full(Model.POSITIONS, -1) for _ in run.prompts]
        for tokens, prompt in zip(self.tokens, run.prompts, strict=True):
            tokens[: len(prompt)] = prompt
        self.operations: set[str] = set()

    def step(self, recorded: Recorded) -> dict[str, Raw]:
        """Every layer's output of a step."""
        rows = len(recorded.tokens)
        for request, token, position in zip(recorded.owners(), recorded.tokens, recorded.positions, strict=True):
            self.tokens[request][position] = token
        found = {}
        for group, metadata in recorded.groups.items():
            begun = self.groups[group].begin(metadata.batch)
            self.operations |= {each.operation for each in begun.steps}
            for i, layer in enumerate(self.run.groups[group]):
                number = self.names.index(layer)
                kv = self.model.keys_values(number, recorded.tokens, recorded.positions)
                out = found[layer] = np.full(
                    (rows, *self.model.queries(number, recorded.tokens).shape[1:]), np.nan, np.float32
                )
                module, cache = self.writers[layer]
                attention.append(module, cache, kv[0], kv[1], metadata.slot_mapping, self.groups[group].faults.word)
                self._store(i, kv, metadata.slot_mapping)
                attention.attend(begun, layer, self.model.queries(number, recorded.tokens), out)
        return found

    def _store(self, memory: int, kv: Raw, slots: Raw) -> None:
        for row, slot in enumerate(slots):
            self.expected[memory, slot // PAGE, :, slot % PAGE] = np.concatenate(kv[:, row], axis=-1)

    def wanted(self, layer: str, recorded: Recorded) -> Raw:
        """What the rows of a step get, in float64, from the tokens of their requests alone."""
        group = next(g for g, layers in self.run.groups.items() if layer in layers)
        window, number = self.run.windows[group], self.names.index(layer)
        rows = zip(recorded.owners(), recorded.positions, strict=True)
        return np.stack([self.model.attended(number, self.tokens[r][: p + 1], window) for r, p in rows])


# Which operations a recording is to reach.
OPERATIONS = {
    "chunked": {"extend", "decode"},
    "drafted": {"extend", "verify", "decode"},
    "hybrid": {"extend", "decode"},
    "preempted": {"extend", "decode"},
}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps(name: str) -> None:
    """Prefix hits, chunks of prompts beside decoding requests, preemption, drafts, groups with null blocks."""
    run = recording(name)
    engine = Engine(run)
    for recorded in run.steps:
        for layer, out in engine.step(recorded).items():
            np.testing.assert_allclose(out, engine.wanted(layer, recorded), rtol=0, atol=2e-5)
        assert engine.memory.tobytes() == engine.expected.tobytes()
    assert engine.operations == OPERATIONS[name]
    for group in engine.groups.values():
        group.faults.word.raise_if_set()


def test_what_is_recorded() -> None:
    """Each recording has what it is named after."""
    runs = {name: recording(name) for name in NAMES}
    assert any(_cached(run) for run in runs.values())
    assert _mixed(runs["chunked"]) and _mixed(runs["hybrid"])
    assert any(batch.rows < 3 * len(batch.seq_lens) < 3 * batch.rows for batch in _batches(runs["drafted"]))
    again = [p for s in runs["preempted"].steps for r, p in zip(s.owners(), s.positions, strict=True) if r == 2]
    assert sorted(again) != again  # it begins anew
    sliding = [g for g, window in runs["hybrid"].windows.items() if window]
    assert any((b.block_table[:, 0] == 0).any() for b in _batches(runs["hybrid"], sliding[0]))


def _batches(run: Recording, group: str | None = None) -> list[Batch]:
    return [m.batch for s in run.steps for g, m in s.groups.items() if group in (None, g)]


def _cached(run: Recording) -> bool:
    """Whether a request begins behind tokens that another one has stored."""
    begun: dict[int, int] = {}
    for recorded in run.steps:
        for request, position in zip(recorded.owners(), recorded.positions, strict=True):
            begun.setdefault(request, position)
    return any(position > 0 for position in begun.values())


def _mixed(run: Recording) -> bool:
    """Whether a step has a chunk of a prompt beside a request that decodes."""
    return any({1} < set(np.diff(b.query_start_loc)) for b in _batches(run))


def test_recordings_have_every_field_that_the_adapter_reads() -> None:
    """Of CommonAttentionMetadata, by name, in the adapter's text."""
    run = recording("chunked")
    read = {
        node.attr
        for node in ast.walk(ast.parse(ADAPTER.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    asked = read & set(run.fields)
    assert asked >= {"query_start_loc", "seq_lens", "block_table_tensor", "num_actual_tokens"}
    assert asked <= run.metadata | {"causal"}

"""Every variant's memory byte for byte: what the accessor stores and loads, the oracle's way."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvgen import CSR, Dense, Paged, PerKV, Ring, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import gather
from tests.accessor.grid import Config, configs, full_grid
from tests.accessor.kernels import BY_POINTER, LOAD, STORE, Trial, accessor, kernel_set, same
from tests.accessor.places import DEVICES, build, session
from tests.accessor.scene import LAYER, REQUESTS, Scene, aligned

# Grouped keys: their pairs are for the campaign.
RESIDUAL = (
    ("pointers", "residual", "paged", "ring", "f32"),
    ("hnd", "residual", "paged", "csr", "f16"),
    ("own_table", "residual", "paged", "dense", "bf16"),
)
CONFIGS = configs(more=RESIDUAL)


def fewer(found: list[Config]) -> list[Config]:
    """Those that between them have each value of each factor twice, where two have it."""
    possible = Counter(value for one in found for value in enumerate(one.choice))
    met: Counter[tuple[int, str]] = Counter()

    def gain(one: Config) -> int:
        return sum(met[value] < min(2, possible[value]) for value in enumerate(one.choice))

    chosen, left = [], list(found)
    while left and gain(best := max(left, key=gain)):
        chosen.append(best)
        left.remove(best)
        met.update(enumerate(best.choice))
    return chosen


# The campaign has all pairs.
RUN = CONFIGS if "KVGEN_FAMILY" in os.environ or full_grid() else fewer(CONFIGS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one", RUN, ids=lambda c: c.name)
def test_stores_and_loads(one: Config, device: str) -> None:
    """All memory of all tensors after stores of every width and after stores by pointer, then loads of every width."""
    check_bytes(one, device)


def check_bytes(config: Config, device: str, of: type[Scene] = Scene) -> None:
    """The same of any scene of a configuration: stores by pointer where its pages lie one way, the others where they lie the
    other."""
    package = build(kernel_set(config, accessor(config), *([ops.Gather()] if config.gathers else [])))
    for mode, pad in ((BY_POINTER, config.other_pad), (STORE, config.pad)):
        scene = of(replace(config, pad=pad))
        wanted = scene.snapshot()
        trials = [Trial(scene, role, wanted) for role in range(len(config.cache.storage.roles)) if config.widths[role]]
        runs = [(t, t.arguments()) for t in trials]
        for trial in trials:
            trial.write(rope=mode == STORE)
        with session(device, package, scene.arrays(), scene.tables) as run:
            for trial, arguments in runs:
                run.launch("accessor", LAYER, **arguments, tokens=scene.tokens, mode=mode, value=trial.role)
                if mode == STORE:
                    run.launch("accessor", LAYER, **arguments, tokens=scene.tokens, mode=LOAD, value=trial.role)
        for name, tensors in scene.tensors.items():
            for tensor, memory in zip(tensors, wanted[name], strict=True):
                assert bytes(tensor.memory) == bytes(memory), name
        if mode == STORE:
            for trial, arguments in runs:
                trial.check_loads(arguments)
            if config.gathers:
                check_gather(scene, package, device)


def check_gather(scene: Scene, package: ModuleType, device: str) -> None:
    """The gather operation reads the same; rows without a page are NaN."""
    view, rows, kind = scene.view, scene.rows(), dtype(scene.cache.lengths_dtype).numpy()
    starts = [view.first_token(n) for n in scene.lengths]
    offsets = np.cumsum([0, *(n - s for n, s in zip(scene.lengths, starts, strict=True))]).astype(kind)
    value = dtype(scene.cache.dtype).numpy()
    outs = [aligned(int(offsets[-1]) * r.heads * r.dim * value.itemsize).view(value) for r in rows]
    outs = [o.reshape(int(offsets[-1]), r.heads, r.dim) for o, r in zip(outs, rows, strict=True)]
    firsts = np.array(starts, kind)
    with np.errstate(all="ignore"):
        wanted = gather(view, rows, outs, row_offsets=offsets, starts=firsts)
    named = dict(zip(("k_out", "v_out"), outs, strict=False))
    with session(device, package, scene.arrays(), scene.tables) as run:
        run.launch("gather", LAYER, **named, row_offsets=offsets, starts=firsts)
    for out, right in zip(outs, wanted.outputs, strict=True):
        same(out, right, "gather", nan=True)


@pytest.mark.parametrize("table", [Dense(), Dense(align=4), CSR(), PerKV(), Ring(window=5)], ids=lambda t: t.kind)
def test_no_pages_at_all(table: Any) -> None:
    """A table without columns: loads are 0, pointers null, stores dropped."""
    layout = "page layer token head dim" if isinstance(table, PerKV) else "page kv layer token head dim"
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=16, page_size=4, table=table, layout=layout)
    config = Config(f"no_pages_{table.kind}_{table.model_dump().get('align', 1)}", cache, "tight")
    check_bytes(config, "cpu", Empty)


class Empty(Scene):
    """Requests of no pages."""

    def _tables(self) -> None:
        super()._tables()
        if "page_indptr" in self.tables:
            self.tables["page_indptr"][:] = 0
            self.tables["page_indices"] = self.tables["page_indices"][:0]
        else:
            self.tables["page_table"] = self.tables["page_table"][..., :0].copy()
        self.lengths = [0] * REQUESTS
        self.tables["lengths"][:] = 0

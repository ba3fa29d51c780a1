"""pool_tokens: entries that stand for several tokens, and the state of those that are not full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.operation import Cases
from kvgen.cases.scene import Scene
from kvgen.cases.tolerance import Distance, take_row
from kvgen.layout.dtypes import dtype
from kvgen.lowering.new_rows_rules import resolve_rope
from kvgen.ops import PoolTokens
from kvgen.reference import TableView, pool_tokens
from kvgen.reference.pool_tokens import PooledStep, Pooling, PoolState, latent_error
from kvgen.reference.rope import Table
from kvgen.schema.kernel_set import KernelSet

Raw = NDArray[Any]


class PoolTokensCases(Cases[PoolTokens]):
    """The step's new tokens, some of which end an entry; pages of the state in no order, two of them nobody's."""

    lengths = "step"
    served = "new entries"

    def sizes(self, scene: Scene) -> dict[str, int]:
        """As many columns of the state as the longest request needs."""
        pooled, longest = self.op.pooled(scene.kernels), max(scene.workload.totals)
        columns = -(-longest // pooled.state_tokens) if pooled.paged else 1
        return {"C": columns, "N": columns * len(scene.workload.totals) + 2, "P": longest}

    def fill(self, scene: Scene, arrays: dict[str, Raw], tables: Mapping[str, Raw]) -> None:
        super().fill(scene, arrays, tables)
        rng = np.random.default_rng(3)
        for places in (arrays[name] for name in ("state_ids", "state_table") if name in arrays):
            places[...] = rng.permutation(places.size + 2)[: places.size].reshape(places.shape)

    def compare(self, j: Comparison) -> int:
        op, scene, found = self.op, j.case.scene, j.wanted.arrays
        step = pooled_step(op, scene.kernels, j.view, j.arrays, state_of(op, scene.kernels, found))
        (mine,), (theirs,), far = j.got.rows(scene), j.wanted.rows(scene), Distance()
        for row, at in enumerate(step.found):
            if at.places is not None:
                far.add(take_row(mine, theirs, at.places[0], at.token, step.stored, row))
        j.record("entries", far)
        if "latent_out" in found:
            emitted = np.array([at.state != "padding" for at in step.found], bool)
            unknown = np.isin(np.arange(len(emitted)), step.unknown)
            got, far = j.got.arrays["latent_out"], Distance()
            known = emitted & ~unknown
            far.record(np.abs(got[known] - step.latent.rows[known, 0]), latent_error(step.latent, got.dtype)[known, 0])
            j.record("latent_out", far)
            j.take_nan("latent_out", unknown)
            found["latent_out"][known] = got[known]
        return step.word


def pooling_of(op: PoolTokens, kernels: KernelSet) -> Pooling:
    """The rule by which tokens become an entry, for the oracle."""
    return Pooling(
        rate=kernels.kv.entry_tokens,
        overlap=op.overlap,
        drafts=op.drafts,
        norm=op.norm,
        rope=resolve_rope(op.rope, kernels),
        local=op.rope == "local",
        pooled_dtype=op.pooled_dtype,
        normed_dtype=op.normed_dtype,
        rotated_dtype=op.rotated_dtype,
        hadamard=op.hadamard is not None,
    )


def state_of(op: PoolTokens, kernels: KernelSet, arrays: dict[str, Raw]) -> PoolState | None:
    """The state among a call's arrays, for the oracle to write to; None where there is none."""
    if not op.pooled(kernels).gated:
        return None
    columns = op.pooled(kernels).columns
    if "state" in arrays:
        kv, score = arrays["state"][..., :columns], arrays["state"][..., columns:]
    else:
        kv, score = arrays["kv_state"], arrays["score_state"]
    return PoolState(kv, score, arrays.get("state_ids"), arrays.get("state_table"))


def pooled_step(
    op: PoolTokens, kernels: KernelSet, view: TableView, arrays: dict[str, Raw], state: PoolState | None
) -> PooledStep:
    """The result of a call; `state` is changed to what the call leaves of it."""
    pooled, cache = op.pooled(kernels), kernels.kv
    x, columns = arrays["x"], pooled.columns
    fused = pooled.gated and pooled.inputs == "fused"
    return pool_tokens(
        view,
        x[:, :columns],
        x[:, columns:] if fused else arrays.get("gate"),
        pooling_of(op, kernels),
        row_offsets=arrays["row_offsets"],
        state=state,
        ape=arrays.get("ape"),
        weight=arrays.get("k_weight"),
        kind=dtype(cache.dtype).numpy(),
        latent=cache.head_dim - cache.rope_part if cache.rope_part else 0,
        angles=Table(arrays["cos_sin"], op.angles) if op.angles != "computed" else None,
        limit=len(arrays["cos_sin"]) if op.angles != "computed" else 2**24,
    )

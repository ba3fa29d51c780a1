"""pool_tokens in a case: where the state's rows are, and what its oracle says of the call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.bench import Scene
from kvgen.layout.dtypes import dtype
from kvgen.lowering.new_rows_rules import resolve_rope
from kvgen.ops import Pool
from kvgen.reference import TableView, pool_tokens
from kvgen.reference.pool_tokens import PooledStep, Pooling, PoolState
from kvgen.reference.rope import Table
from kvgen.schema.kernel_set import KernelSet

Raw = NDArray[Any]


def state_sizes(scene: Scene, op: Pool) -> dict[str, int]:
    """Dimensions of the state: as many columns as the longest request needs, two pages that are nobody's."""
    pooled, longest = op.pooled(scene.kernels), max(scene.workload.totals)
    columns = -(-longest // pooled.state_tokens) if pooled.paged else 1
    return {"C": columns, "N": columns * len(scene.workload.totals) + 2, "P": longest}


def place_states(arrays: dict[str, Raw]) -> None:
    """A page of the state for every entry of the list or table that a call brings, in no order."""
    rng = np.random.default_rng(3)
    for name in ("state_ids", "state_table"):
        if name in arrays:
            places = arrays[name]
            places[...] = rng.permutation(places.size + 2)[: places.size].reshape(places.shape)


def pooling_of(op: Pool, kernels: KernelSet) -> Pooling:
    """What makes an entry, as the oracle is told."""
    return Pooling(
        rate=kernels.kv.entry_tokens,
        overlap=op.overlap,
        drafts=op.drafts,
        norm=op.norm,
        rope=resolve_rope(op.rope, kernels),
        local=op.rope == "local",
        pooled_dtype=op.pooled_dtype,
        normed_dtype=op.normed_dtype,
        turned_dtype=op.turned_dtype,
        hadamard=op.hadamard is not None,
    )


def state_of(op: Pool, kernels: KernelSet, arrays: dict[str, Raw]) -> PoolState | None:
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
    op: Pool, kernels: KernelSet, view: TableView, arrays: dict[str, Raw], state: PoolState | None
) -> PooledStep:
    """What a call leaves; `state` becomes what it leaves of it."""
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

"""Steps of vLLM's engine as an attention backend gets them, recorded by tests_vllm/record_steps.py; and their attention.

K and V of a token are functions of the token, its position and the layer, as in a model: so requests that share a prefix may
share its pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.integrations.vllm.shard import Shard
from kvgen.integrations.vllm.step import Batch
from tests.support.launching import Raw

FOLDER: Final = Path(__file__).resolve().parents[1] / "integrations" / "vllm_steps"
NAMES: Final = ("chunked", "drafted", "hybrid", "preempted")
ORDER: Final = "LBHNC"
ARCH: Final = ("sm_90a",)
PAGE: Final = 32  # tokens
Q_HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE: Final = 0.25
FULL: Final = Shard(Q_HEADS, KV_HEADS, DIM, "f32", SCALE, draft_tokens=3)
SLIDING: Final = Shard(Q_HEADS, KV_HEADS, DIM, "f32", SCALE, window=40)


@dataclass(frozen=True)
class GroupMetadata:
    """What the builder of one group of layers got in a step: arrays as vLLM has them, and its counts."""

    batch: Batch
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True)
class Recorded:
    """One step. Row t is token `tokens[t]` at `positions[t]` of the request `requests[b]` that `query_start_loc` says."""

    requests: Sequence[int]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    groups: Mapping[str, GroupMetadata]

    def owners(self) -> list[int]:
        """The request of each row."""
        starts = next(iter(self.groups.values())).batch.query_start_loc
        return [r for r, n in zip(self.requests, np.diff(starts), strict=True) for _ in range(n)]


@dataclass(frozen=True)
class Recording:
    """`groups`: layers of each group, by its name, in vLLM's order; `windows` the tokens that they see, None for all."""

    prompts: Sequence[Sequence[int]]
    groups: Mapping[str, Sequence[str]]
    windows: Mapping[str, int | None]
    blocks: int
    fields: Sequence[str]
    metadata: frozenset[str]
    steps: Sequence[Recorded]

    def shard(self, group: str) -> Shard:
        return FULL if self.windows[group] is None else SLIDING


def recording(name: str) -> Recording:
    """A recorded run of the engine."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    groups = found["groups"]
    assert {g["block_size"] for g in groups.values()} == {PAGE}
    assert {g["sliding_window"] for g in groups.values()} <= {None, SLIDING.window}
    return Recording(
        found["prompts"],
        {n: g["layers"] for n, g in groups.items()},
        {n: g["sliding_window"] for n, g in groups.items()},
        found["blocks"],
        found["fields"],
        frozenset(field for g in found["steps"][0]["groups"].values() for field in g),
        [_step(s) for s in found["steps"]],
    )


def _step(found: dict[str, Any]) -> Recorded:
    groups = {}
    for name, given in found["groups"].items():
        arrays = {n: np.array(v[1], v[0]) for n, v in given.items() if isinstance(v, list)}
        batch = Batch(
            query_start_loc=arrays["query_start_loc"],
            seq_lens=arrays["seq_lens"],
            block_table=arrays["block_table_tensor"],
            rows=given["num_actual_tokens"],
            most_rows=given["max_query_len"],
        )
        groups[name] = GroupMetadata(batch, arrays["slot_mapping"])
    return Recorded(found["requests"], np.array(found["tokens"]), np.array(found["positions"]), groups)


class Model:
    """K, V and q of `layers` layers."""

    VOCABULARY, POSITIONS = 128, 160

    def __init__(self, layers: int) -> None:
        rng = np.random.default_rng(3)
        shape = (2, layers, self.VOCABULARY, KV_HEADS, DIM)
        self._tokens = rng.standard_normal(shape).astype(np.float32)
        self._places = rng.standard_normal((2, layers, self.POSITIONS, KV_HEADS, DIM)).astype(np.float32)
        self._queries = rng.standard_normal((layers, self.VOCABULARY, Q_HEADS, DIM)).astype(np.float32)

    def keys_values(self, layer: int, tokens: Raw, positions: Raw) -> NDArray[np.float32]:
        """f32 `[2, T, kv heads, dim]`."""
        found: NDArray[np.float32] = self._tokens[:, layer, tokens] + self._places[:, layer, positions]
        return found

    def queries(self, layer: int, tokens: Raw) -> NDArray[np.float32]:
        """f32 `[T, q heads, dim]`."""
        found: NDArray[np.float32] = self._queries[layer, tokens]
        return found

    def attended(self, layer: int, tokens: Raw, window: int | None) -> NDArray[np.float64]:
        """What the last of a request's tokens gets of all of them, in float64: `[q heads, dim]`."""
        end = len(tokens)
        seen = slice(0 if window is None else max(end - window, 0), end)
        places = np.arange(end)[seen]
        k, v = self.keys_values(layer, tokens[seen], places).astype(np.float64).repeat(Q_HEADS // KV_HEADS, axis=2)
        scores = np.einsum("hd,nhd->hn", self.queries(layer, tokens[-1:])[0].astype(np.float64), k) * SCALE
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: NDArray[np.float64] = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
        return found

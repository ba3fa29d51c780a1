"""The two launches of a layer: its new rows to their slots, and their attention over everything cached."""

from __future__ import annotations

from typing import Any

from kvgen.integrations.vllm.step import LAUNCHES, GroupStep


def append(module: Any, cache: Any, k: Any, v: Any, slots: Any, errors: Any, stream: object = None) -> None:
    """Store k and v, `[>= T, kv heads, head_dim]`, in the slots of a layer, i64 `[T]`; -1 skips a row."""
    rows = slots.shape[0]
    module.append(cache, k[:rows], v[:rows], slots, errors=errors, stream=stream)
    LAUNCHES["append"] += 1


def attend(step: GroupStep, layer: str, q: Any, out: Any, sinks: Any = None, stream: object = None) -> None:
    """Attention of q, `[>= T, q heads, head_dim]`, into `out`, of the same shape, for the T rows of the step.

    `sinks`: f32 `[q heads]`, where the layer has them.
    """
    found, cache = step.of(layer)
    more = {} if sinks is None else {"sinks": sinks}
    found.launcher(
        cache,
        q[: found.rows],
        out[: found.rows],
        workspace=found.workspace,
        errors=found.layers.faults.word,
        stream=stream,
        **more,
    )
    LAUNCHES[found.operation] += 1

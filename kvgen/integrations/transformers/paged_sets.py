"""Kernel sets over the memory of transformers' own paged cache, for continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.architectures import Arch
from kvgen.integrations.transformers.sets import Attention, DtypeName
from kvgen.ops.append import Append
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.ops.merge_states import MergeStates
from kvgen.schema.cache import Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask
from kvgen.schema.ragged import Ragged
from kvgen.schema.tables import CSR

_LAYOUT = Layout(k="page token head dim", v="page token head dim", layers="pointers")


def store_set(attention: Attention, dtype: DtypeName, page_size: int, arch: Sequence[Arch]) -> KernelSet:
    """Storing rows at places of pages of `page_size`."""
    cache = Paged(page_size=page_size, **_fields(attention, dtype))
    return KernelSet(q_heads=attention.q_heads, cache=cache, ops=(Append(rows="slots"),), arch=tuple(arch))


def full_set(attention: Attention, dtype: DtypeName, page_size: int, arch: Sequence[Arch]) -> KernelSet:
    """Layers whose requests keep all tokens, in pages of `page_size`."""
    cache = Paged(page_size=page_size, **_fields(attention, dtype))
    made = attention.options
    return KernelSet(
        q_heads=attention.q_heads,
        cache=cache,
        ops=(Decode(split="balanced", **made), Extend(**made)),
        arch=tuple(arch),
    )


def ring_set(attention: Attention, dtype: DtypeName, arch: Sequence[Arch]) -> KernelSet:
    """Layers whose requests keep the last tokens of a window, anywhere: token by token, as transformers lists them.

    `decode` sees what is listed, its own token included. `extend_cached` leaves out the step's own tokens, which may stand
    where tokens of the window stood: `rows_set` attends to them, and merges both.
    """
    cache = Paged(page_size=1, table=CSR(dtype="i64"), **_fields(attention, dtype))
    cached: dict[str, Any] = {**attention.options, "mask": Mask(window=attention.window, padding=True), "sinks": None}
    return KernelSet(
        q_heads=attention.q_heads,
        cache=cache,
        ops=(
            Decode(split="balanced", **attention.unmasked),
            Extend(name="extend_cached", out_dtype="f32", **cached),
        ),
        arch=tuple(arch),
    )


def rows_set(attention: Attention, dtype: DtypeName, arch: Sequence[Arch]) -> KernelSet:
    """Attention of a step's rows to the step's own keys and values, and its merging with what `ring_set` found."""
    cache = Ragged(dtype=dtype, kv_heads=attention.kv_heads, head_dim=attention.head_dim)
    made = {**attention.options, "sinks": "lse" if attention.sinks else None}
    return KernelSet(
        q_heads=attention.q_heads,
        cache=cache,
        ops=(Extend(name="extend_rows", out_dtype="f32", **made), MergeStates(dtype="f32", out_dtype=dtype)),
        arch=tuple(arch),
    )


def _fields(attention: Attention, dtype: DtypeName) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "layout": _LAYOUT,
        "lengths": "after",
    }

"""What kernels take of a step: page tables, lengths, row offsets, slots, and pages to be copied first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupInputs:
    """One group's part of a step.

    - `page_table`: i32 `[B, W]`, the ids of each request's pages; the null page where it has none.
    - `slot_mapping`: i64 `[T]`, page * page_size + place of each new token, for `Append(rows="slots")`.
    - `copies`: i64 `[N, 2]`, pairs (from, onto) for `CopyPages`, which is launched before anything writes.
    """

    page_table: Ids
    slot_mapping: Slots
    copies: Slots


@dataclass(frozen=True)
class StepInputs:
    """A step of B requests with T new tokens.

    - `lengths`: i32 `[B]`, tokens in the cache before the step.
    - `row_offsets`: i32 `[B + 1]`: request b has the rows [row_offsets[b], row_offsets[b + 1]).
    - `groups`: what differs from group to group, in their order.
    """

    lengths: Ids
    row_offsets: Ids
    groups: tuple[GroupInputs, ...]

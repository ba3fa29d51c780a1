"""Operations of one set that hand something to each other: fields that speak of one thing must say the same.

An operation without a partner in its set has one elsewhere, and nothing is asked. Of several partners one that agrees is enough,
as they serve other layers. A partner whose field is given as None takes rows that somebody else has changed, and is no partner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.lowering.lowered import lower
from kvgen.schema.base import as_written
from kvgen.schema.kernel_set import KernelSet, Op


def check_partners(op: Op, field: str, mine: Any, partners: Sequence[tuple[Op, str, Any]], rule: str) -> None:
    """Raise ValueError where no partner, (operation, field, value), has the value of `field`."""
    asked = [p for p in partners if p[1] not in p[0].model_fields_set or getattr(p[0], p[1]) is not None]
    if not asked or any(theirs == mine for _, _, theirs in asked):
        return
    other, their_field, theirs = asked[0]
    none = f", or {their_field}=None in {other.name} where it was done before" if theirs in (None, False) else ""
    raise ValueError(
        f"{field}: got {as_written(mine)} in {op.name} beside {their_field}={as_written(theirs)} in {other.name}; {rule}; give "
        f"both the same{none}"
    )


def check_window(op: Op, field: str, tokens: int | None, kernels: KernelSet) -> None:
    """Raise ValueError where a row would see more tokens than a ring keeps."""
    kept = lower(kernels.kv).table.window  # 0: all
    if kept and tokens is not None and tokens > kept:
        raise ValueError(
            f"{field}: got {tokens} in {op.name} with table=Ring(window={kept}), which keeps the newest {kept} tokens of a "
            f"request; give at most {kept}, or a ring of {tokens}"
        )

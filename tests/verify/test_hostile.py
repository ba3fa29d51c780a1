"""Wrong data of every index argument that a kernel must not trust."""

from __future__ import annotations

from kvgen.codegen.emit import set_plans
from kvgen.plan.params import Array
from kvgen.verify.hostile import LISTED
from tests import sets

# Damaged together with what belongs to them, or by a damage of their own.
ELSEWHERE = {"row_offsets", "lora_end_idx"}


def test_every_index_argument_is_damaged() -> None:
    """An untrusted argument of any operation of any set is in LISTED, under its own name."""
    plans = (plan for item in sets.every() for plans in set_plans(item).values() for plan in plans)
    untrusted = {
        p.name for plan in plans for p in plan.params if isinstance(p, Array) and p.untrusted and p.access == "in"
    }
    assert len(untrusted) > 20
    untrusted = {
        n for n in untrusted if not n.endswith(("_indices", "_topk_lengths"))
    }  # lists of other caches: damages()
    assert untrusted <= {*LISTED, *ELSEWHERE}, (
        "kvgen.verify never damages these: add them to LISTED of kvgen/verify/hostile.py"
    )

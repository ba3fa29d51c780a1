"""Values of an operation's fields and where each comes from, for `kvgen show --plan`: the spec, the model, a default."""

from __future__ import annotations

from typing import Final

from kvgen.lowering.model_facts import rope_source, scale_source
from kvgen.lowering.new_rows_rules import resolve_rope
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.ops.mla_decode import MlaDecode
from kvgen.schema.base import as_written
from kvgen.schema.kernel_set import KernelSet, Op

# Fields that say what attention computes: they are shown as defaults, too.
_ATTENTION: Final = ("mask", "score", "sinks")


def op_fields(kernels: KernelSet, op: Op) -> list[dict[str, str]]:
    """{"field", "value", "from"} of each field that the spec or the model says, and of what attention computes by default."""
    found: dict[str, tuple[str, str]] = {}
    if isinstance(op, Decode | Extend | MlaDecode):
        found["scale"] = (f"{op.softmax_scale(kernels):.8g}", scale_source(op.name, op.scale, kernels))
    for name in type(op).model_fields:
        value = getattr(op, name)
        if name == "rope" and value is not None:
            found[name] = (as_written(resolve_rope(value, kernels)), rope_source(value))
        elif name in op.model_fields_set and name != "name":
            found.setdefault(name, (as_written(value), "spec"))
        elif name in _ATTENTION:
            found[name] = (as_written(value), "default")
    return [{"field": name, "value": value, "from": source} for name, (value, source) in found.items()]

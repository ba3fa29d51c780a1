"""What the comments of an exported header say of a member: text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvgen.layout.dtypes import dtype
from kvgen.plan.params import Array, Count, Field, OtherCache, PagePool, Param, Scalar, Size, TensorMap

LAYER: Final = "the layer that the kernel works on: layer_of() makes it."
LAYER_0: Final = "layer 0 of the cache: layer_of() makes it."
# The launcher's docstring speaks of Python objects.
_ERRORS: Final = "sticky error word, 0 if nothing happened: report_of() of kvgen.h decodes it"
_WORKSPACE: Final = "memory that `use()` sets together with the workspace's sizes"


def packed_row(array: Array) -> int:
    """Elements of a packed row; 0 where a size of the call decides."""
    axes = array.shape[1:]
    return 0 if any(isinstance(n, str) for n in axes) else math.prod(n for n in axes if isinstance(n, int))


def described(p: Param, params: Sequence[Param | Field]) -> str:
    """What a member is for whoever fills it in: shape, type, alignment, then the text of the operation."""
    match p:
        case Array():
            doc = _array(p, params)
        case Size():
            doc = _size(p, params)
        case TensorMap():
            doc = "a tensor map: assign the CUtensorMap that cuTensorMapEncodeTiled made"
        case PagePool():
            of = "another pool" if p.argument else "the pool of `cache`"
            doc = f"pages of every layer of {of}, at most {p.layers} layers: pages_of() makes it"
        case OtherCache():
            return f"a layer of a {p.cache}, which is read: layer_of() makes it."
        case Count():
            doc = f"{p.dtype}: a count, which sizes the grid"
        case Scalar():
            doc = p.dtype
    more = {"errors": _ERRORS, "workspace": _WORKSPACE}.get(p.name, p.doc).strip().removesuffix(".")
    return f"{doc}. {more[:1].upper()}{more[1:]}." if more else f"{doc}."


def _array(p: Array, params: Sequence[Param | Field]) -> str:
    shape = ", ".join(str(n).replace("+", " + ") for n in p.shape)
    notes = [f"{p.dtype}[{shape}]"]
    stride = next((q.name for q in params if isinstance(q, Size) and q.value == f"{p.name}.stride"), "")
    if p.strided and stride:
        notes.append(f"rows {stride} elements apart")
    if p.access != "in":
        notes.append("written" if p.access == "out" else "read and written")
    if p.in_place:
        notes.append(f"may be {' or '.join(p.in_place)} itself")
    align = max(p.align, dtype(p.dtype).bytes)
    if align > dtype(p.dtype).bytes:
        notes.append(f"at a multiple of {align} bytes")
    if p.optional:
        notes.append("optional: null leaves it out")
    return ", ".join(notes)


def _size(p: Size, params: Sequence[Param | Field]) -> str:
    arrays = [q for q in params if isinstance(q, Array)]
    if p.value.endswith(".stride"):
        array = next((a for a in arrays if a.name == p.value.removesuffix(".stride")), None)
        name, unit = p.value.removesuffix(".stride"), 1
        packed = ""
        if array is not None:
            unit = array.align // dtype(array.dtype).bytes
            packed = (
                f", {packed_row(array)} where rows are packed"
                if packed_row(array)
                else ", as many as a row has where rows are packed"
            )
        many = f", a multiple of {unit}" if unit > 1 else ""
        return f"elements from one row of {name} to the next{many}{packed}"
    if p.value == "planned_rows":
        return "rows of q in this step"
    if p.value in ("num_sm_parts", "max_rows", "max_chunks", "max_slots"):
        return "of the workspace"
    if p.value.endswith("_tokens"):
        name = p.value.removesuffix("_tokens")
        window = next((q.window for q in params if isinstance(q, OtherCache) and q.name == name), 0)
        return (
            f"most tokens that a request has in {name}: its max_cache_length{f', at most {window}' if window else ''}"
        )
    having = [a.name for a in arrays if any(str(n).partition("+")[0] == p.value for n in a.shape)]
    where = f", as in the shape of {', '.join(having)}" if having else ", of the cache"
    return f"{p.value.replace('*', ' * ')}{where if '*' not in p.value else ''}"

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


def stride_of(size: Size, arrays: Sequence[Array]) -> tuple[Array, int] | None:
    """The array and the axis whose stride this number is: "k.stride" of the first one, "k.row_stride" of the second; None for
    another number."""
    name, _, which = size.value.partition(".")
    axis = {"stride": 0, "row_stride": 1}.get(which)
    return next(((a, axis) for a in arrays if a.name == name and axis is not None), None)


def packed_step(array: Array, axis: int = 0) -> int:
    """Elements from one index of this axis to the next where all is packed; 0 where a size of the call decides."""
    axes = array.shape[axis + 1 :]
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
    strides = {q.value.partition(".")[2]: q.name for q in params if isinstance(q, Size) and stride_of(q, [p])}
    if p.strided == 2:
        outer = _step_of(p, 0)
        notes.append(f"{outer}s {strides['stride']} and rows {strides['row_stride']} elements apart")
    elif p.strided and strides:
        notes.append(f"rows {strides['stride']} elements apart")
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


def _step_of(array: Array, axis: int) -> str:
    """What an axis counts whose stride is free: rows, and outside of them layers or other slices."""
    if array.strided != 2 or axis == 1:
        return "row"
    return "layer" if array.shape[0] == "all_layers" else "slice"


def _size(p: Size, params: Sequence[Param | Field]) -> str:
    arrays = [q for q in params if isinstance(q, Array)]
    if p.value.endswith("stride") and "." in p.value:
        found, name, unit, packed = stride_of(p, arrays), p.value.partition(".")[0], 1, ""
        what = "row"
        if found is not None:
            array, axis = found
            what = _step_of(array, axis)
            unit = array.align // dtype(array.dtype).bytes
            step = packed_step(array, axis)
            packed = f", {step or f'as many as a {what} has'} where {what}s are packed"
        many = f", a multiple of {unit}" if unit > 1 else ""
        return f"elements from one {what} of {name} to the next{many}{packed}"
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

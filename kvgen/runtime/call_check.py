"""The check of a call: its arguments against the kernel's parameters, against each other and against the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, PoolMap, Size
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.checks import Dims
from kvgen.runtime.device_arch import arch_on
from kvgen.runtime.kernel import Grid, Kernel, own_pages
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.overlap import Memory, Taken, refuse_aliases
from kvgen.runtime.packing import Value
from kvgen.runtime.page_pool import layers_of
from kvgen.runtime.params import Call, check_array, size_of, take
from kvgen.runtime.pool_cache import PoolCache
from kvgen.runtime.pool_map import pool_map
from kvgen.runtime.workspace import hold_rows, usable


class Checked(NamedTuple):
    """A call that may be launched: its layer, the arrays of its arguments by name, other `memory` that they lead to, the
    kernel's values in the order of its parameters, the struct first, and the grid."""

    kernel: Kernel
    cache: LayerCache
    views: dict[str, ArrayView]
    memory: Sequence[Memory]
    values: list[Value]
    grid: Grid


def check_call(
    kernel: Kernel,
    given: LayerCache | PoolCache,
    arguments: Sequence[object],
    planned_rows: int | None,
    operation: Kernel,
) -> Checked:
    """Check `arguments`, in the order of `Kernel.arguments`; raises ArgumentError for the first that does not fit.

    `planned_rows` are those that a planner plans for; None where the kernel plans nothing. A workspace must be of `operation`.
    """
    cache, others = _layers(kernel, given)
    if kernel.tables and not cache.tables:
        raise ArgumentError(
            f"cache: got one without page tables and lengths; {kernel.file.removesuffix('.cu')} reads them; pass "
            "cache.step(...)[layer] with this step's"
        )
    dims = Dims(cache.dims)
    dims.origin = dict(cache.dims.origin)
    dims["all_layers"] = 1 + len(others)
    known_names = {name for name, _, _ in cache.memory}
    more = [(n, a, w and kernel.writes) for x in others for n, a, w in x.memory if n not in known_names]
    call = Call(dims, cache.device, list(more), kernel.module)
    views: dict[str, ArrayView] = {}
    arrays: list[Taken] = []
    taken: dict[str, Value] = {}
    for spec, argument in zip(kernel.arguments, arguments, strict=True):
        if not isinstance(spec, Array):
            taken[spec.name] = take(spec, argument, call)
            continue
        if spec.rows and dims[spec.rows] == 0:
            continue
        if argument is None:
            if not spec.optional:
                kind = "workspace" if spec.name == "workspace" else f"{spec.dtype} array"
                raise ArgumentError(f"{spec.name}: got None; the operation needs it; pass a {kind}")
            if spec.strided:
                dims[f"{spec.name}.stride"] = 0
            continue
        if spec.name == "workspace":
            held = usable(argument, operation)
            if planned_rows is None:
                hold_rows(held, dims["T"])
            dims.update(held.sizes, planned_rows=planned_rows or 0)
            dims.origin["planned_rows"] = "the plan"
            found = held.view
        else:
            found = view(argument, spec.name)
        low, high = check_array(spec, found, dims, cache.device)
        views[spec.name] = found
        if low < high:
            arrays.append((low, high, spec, found))
        if spec.strided:
            dims[f"{spec.name}.stride"] = found.strides[0]
        if spec.strided == 2:
            dims[f"{spec.name}.row_stride"] = found.strides[1]
    own = given if isinstance(given, PoolCache) else cache
    refuse_aliases(arrays, own.footprint, call.memory[len(more) :], kernel.writes)
    for spec in kernel.arguments:  # what is left out has no rows
        for name in spec.shape if isinstance(spec, Array) and spec.optional else ():
            if isinstance(name, str) and name not in dims:
                dims[name] = 0
    for name, memory, writes in (*(cache.memory if kernel.writes else ()), *call.memory):
        if writes and memory.readonly:
            raise ArgumentError(f"{name}: got a read-only array; this operation writes to it; pass a writable one")
    values: list[Value] = [cache.struct]
    for p in kernel.params:
        if isinstance(p, Size):
            values.append(size_of(p, dims))
        elif isinstance(p, Array):
            found_view = views.get(p.name)
            values.append(found_view.pointer if found_view is not None else 0)
        elif own_pages(p) and isinstance(given, PoolCache):
            values.append(p.pack(layers_of(given)))
        elif isinstance(p, PoolMap):
            values.append(pool_map(p, cache))
        else:
            values.append(taken[p.name])
    return Checked(kernel, cache, views, call.memory, values, _grid(kernel, dims, cache.device))


def layer_of(kernel: Kernel, given: object) -> LayerCache:
    """`given`, if it is a layer of the kernel's set; raises ArgumentError for anything else."""
    if isinstance(given, LayerCache) and given.module is kernel.module:
        return given
    raise _no_cache(given, "it must be a layer of this set's Cache", f"{kernel.module.name}.Cache(...)[layer]")


def _layers(kernel: Kernel, given: object) -> tuple[LayerCache, tuple[LayerCache, ...]]:
    """The layer whose struct the kernel gets, and the other ones it works on."""
    if not kernel.all_layers:
        return layer_of(kernel, given), ()
    if isinstance(given, PoolCache) and given.MODULE is kernel.module and len(given):
        return given[0], tuple(given)[1:]
    raise _no_cache(given, "it must be this set's Cache, all of its layers", f"{kernel.module.name}.Cache(...)")


def _no_cache(given: object, rule: str, valid: str) -> ArgumentError:
    got = type(given).__name__
    if isinstance(given, LayerCache):
        got = f"a layer of a cache of {given.module.name}"
    elif isinstance(given, PoolCache):
        got = f"a cache of {given.MODULE.name}"
    return ArgumentError(f"cache: got {got}; {rule}; pass {valid}")


def _grid(kernel: Kernel, dims: Dims, device: str) -> Grid:
    """The kernel's grid on a device for these sizes; raises ArgumentError for one that cannot be launched."""
    rule = kernel.grid
    if kernel.grid_by_arch:
        rule = kernel.grid_by_arch.get(arch_on(kernel.module, device), rule)
    try:
        grid = rule(dims)
    except ZeroDivisionError:
        raise ArgumentError(
            f"{kernel.entry}: its grid divides by a size that is 0 in this call; pass larger arrays"
        ) from None
    if grid[0] >= 2**31:
        raise ArgumentError(
            f"{kernel.entry}: got a grid of {grid[0]} blocks; a grid holds at most 2^31 - 1; pass fewer rows a call"
        )
    if min(grid) < 0 or max(grid[1:]) >= 2**16:
        raise ArgumentError(
            f"{kernel.entry}: got a grid of {grid}; its second and third size are at most 65535, and none is negative; "
            "pass other sizes, or change the rule in the spec"
        )
    return grid

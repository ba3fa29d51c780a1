"""Launchers: check the arguments against the spec, pack them, hand them to the backend of their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import ClassVar, ParamSpec

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Size
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.checks import Dims
from kvgen.runtime.kernel import Extra, Grid, Kernel, own_pages
from kvgen.runtime.kv_cache import BaseCache
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.overlap import Taken, refuse_aliases
from kvgen.runtime.packing import PackedArgs, Value
from kvgen.runtime.page_pool import layers_of
from kvgen.runtime.params import Call, check_array, size_of, take
from kvgen.runtime.workspace import Workspace, hold_rows, plannable, usable

P = ParamSpec("P")


class Bound:
    """A launch whose arguments are checked: `bound(stream)` is all that is left.

    It keeps its arrays alive and reads nothing of them. One thread at a time may call it.
    """

    __slots__ = ("_go", "_keep", "_stream")

    def __init__(self, go: Callable[[object], None], keep: object, stream: object = None) -> None:
        self._go = go
        self._keep = keep
        self._stream = stream

    def __call__(self, stream: object = None) -> None:
        """Launch on `stream`, else on the one given to `bind`, else on the legacy default stream.

        NumPy arrays run to completion on the CPU machine.
        """
        self._go(self._stream if stream is None else stream)

    def after(self, first: Bound) -> Bound:
        """Both launches in one, `first` before this one and on the same stream."""

        def go(stream: object) -> None:
            first._go(stream)
            self._go(stream)

        return Bound(go, (first, self), self._stream)


def at_once(bind: Callable[P, Bound]) -> Callable[P, None]:
    """The method that takes what `bind` takes, checks it and launches."""

    @wraps(bind)
    def launch(*arguments: P.args, **named: P.kwargs) -> None:
        bind(*arguments, **named)()

    return launch


def _nothing(stream: object) -> None:
    """An empty batch: there is nothing to launch."""


class Launcher:
    """What generated operations share; they give `KERNEL` and a typed `bind`, of which `__call__` is made."""

    KERNEL: ClassVar[Kernel]

    def __init_subclass__(cls) -> None:
        """Python tells of arguments that are missing or unknown by the name that users write: `append()`, `decode.plan()`."""
        if "KERNEL" not in vars(cls):
            return
        for name, method in vars(cls).items():
            if name.startswith("bind") and isinstance(method, FunctionType):
                method.__qualname__ = cls.KERNEL.file.removesuffix(".cu") + name[4:].replace("_", ".", 1)

    def prepare(
        self,
        given: LayerCache | BaseCache,
        arguments: Sequence[object],
        stream: object = None,
        which: Kernel | None = None,
        planned_rows: int | None = None,
    ) -> Bound:
        """Check the arguments, in the order of `Kernel.arguments`, and decide everything but the stream."""
        kernel = which or self.KERNEL
        cache, others = _layers(kernel, given)
        dims = Dims(cache.dims)
        dims.origin = dict(cache.dims.origin)
        dims["all_layers"] = 1 + len(others)
        known = {name for name, _, _ in cache.memory}
        more = [(n, a, w and kernel.writes) for x in others for n, a, w in x.memory if n not in known]
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
                held = usable(argument, self.KERNEL)
                if planned_rows is None:
                    hold_rows(held, dims["T"])
                dims.update(held.sizes, planned_rows=planned_rows or 0)
                found = held.view
            else:
                found = view(argument, spec.name)
            low, high = check_array(spec, found, dims, cache.device)
            views[spec.name] = found
            if low < high:
                arrays.append((low, high, spec, found))
            if spec.strided:
                dims[f"{spec.name}.stride"] = found.strides[0]
        own = given if isinstance(given, BaseCache) else cache
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
            elif own_pages(p) and isinstance(given, BaseCache):
                values.append(p.pack(layers_of(given)))
            else:
                values.append(taken[p.name])
        grid = _grid(kernel, dims)
        if 0 in grid:
            return Bound(_nothing, None, stream)
        args = PackedArgs((cache.kind, *kernel.kinds), values)
        go = _backend(cache.device)(kernel, cache, views, call.memory, args, grid)
        return Bound(go, (given, views, call.memory, arguments), stream)


class PlannedLauncher(Launcher):
    """An operation whose blocks divide a step's tokens among them: `plan` says how, in a workspace, before the launch."""

    PLAN: ClassVar[Kernel]
    SPLIT_PLAN: ClassVar[SplitPlan]

    def workspace_bytes(
        self, max_rows: int, *, device: str = "cpu", max_tokens: int | None = None, multiprocessors: int | None = None
    ) -> int:
        """What `workspace` would allocate, in bytes."""
        return Workspace.nbytes_of(self.SPLIT_PLAN, max_rows, device, max_tokens, multiprocessors)

    def workspace(
        self,
        max_rows: int,
        *,
        device: str = "cpu",
        max_tokens: int | None = None,
        multiprocessors: int | None = None,
        memory: object = None,
    ) -> Workspace:
        """Memory for steps of at most `max_rows` query rows on `device` ("cpu", "cuda:0"); one per stream.

        memory: the caller's, u8 `[workspace_bytes(...)]` for the same numbers; None allocates it here.
        max_tokens: a request's most tokens, which `split="invariant"` needs. multiprocessors: those to divide work among;
        by default all of the device's.
        """
        return Workspace(self.KERNEL, self.SPLIT_PLAN, max_rows, device, max_tokens, multiprocessors, memory)

    def prepare_plan(
        self, cache: LayerCache, arguments: Sequence[object], stream: object = None, rows: int | None = None
    ) -> Bound:
        """The operation's planner on a workspace, the first of its arguments, bound; launching it makes that usable."""
        workspace = usable(arguments[0], self.KERNEL)
        return self.prepare(cache, arguments, stream, self.PLAN, plannable(workspace, rows, cache))


def _layers(kernel: Kernel, given: object) -> tuple[LayerCache, tuple[LayerCache, ...]]:
    """The layer whose struct the kernel gets, and the other ones it works on."""
    if kernel.all_layers:
        if isinstance(given, BaseCache) and given.MODULE is kernel.module and len(given):
            return given[0], tuple(given)[1:]
        rule, valid = "it must be this set's Cache, all of its layers", f"{kernel.module.name}.Cache(...)"
    else:
        if isinstance(given, LayerCache) and given.module is kernel.module:
            return given, ()
        rule, valid = "it must be a layer of this set's Cache", f"{kernel.module.name}.Cache(...)[layer]"
    got = type(given).__name__
    if isinstance(given, LayerCache):
        got = f"a layer of a cache of {given.module.name}"
    elif isinstance(given, BaseCache):
        got = f"a cache of {given.MODULE.name}"
    raise ArgumentError(f"cache: got {got}; {rule}; pass {valid}")


def _grid(kernel: Kernel, dims: Dims) -> Grid:
    """The kernel's grid for these sizes; raises ArgumentError for one that cannot be launched."""
    try:
        grid = kernel.grid(dims)
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


Binder = Callable[[Kernel, LayerCache, dict[str, ArrayView], Extra, PackedArgs, Grid], Callable[[object], None]]


def _backend(device: str) -> Binder:
    if device == "cpu":
        from kvgen.runtime.cpu import bind
    else:
        from kvgen.runtime.gpu import bind
    return bind

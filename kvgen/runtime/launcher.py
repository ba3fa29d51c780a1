"""Launchers: check the arguments against the spec, pack them, hand them to the backend of their device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar, Self

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime.arrays import view
from kvgen.runtime.bound import AtOnce, Bound, Replaceable
from kvgen.runtime.call_check import Checked, check_call, layer_of
from kvgen.runtime.device_arch import arch_on
from kvgen.runtime.kernel import Kernel
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.packing import PackedArgs
from kvgen.runtime.pool_cache import PoolCache
from kvgen.runtime.repeated_call import MOST, RepeatedCall, repeated_call
from kvgen.runtime.stream import stream_handle
from kvgen.runtime.workspace import Workspace, plannable, usable
from kvgen.runtime.wrong_call import explained


def _launch(checked: Checked, args: PackedArgs) -> Callable[[Any], None]:
    """The launch of `args` on the device of the call: it takes a stream's handle, None on the CPU."""
    kernel, cache, grid = checked.kernel, checked.cache, checked.grid
    if cache.device == "cpu":
        from kvgen.runtime.cpu import CpuLaunch

        return CpuLaunch(kernel, cache, checked.views, checked.memory, args, grid)
    from kvgen.runtime.gpu import launch_on

    return launch_on(kernel, cache.device, args, grid)


def _handles(device: str, bound: object) -> Callable[[object], Any]:
    """What a launch on `device` takes for the stream of a call, None for `bound`: its handle, None on the CPU."""
    if device == "cpu":
        return lambda stream: bound if stream is None else stream
    default = stream_handle(bound)
    return lambda stream: default if stream is None else stream_handle(stream)


def _nothing(stream: object) -> None:
    """An empty batch: there is nothing to launch."""


class Launcher:
    """What generated operations share; they give `KERNEL` and a typed `bind`, of which `__call__` is made."""

    KERNEL: ClassVar[Kernel]
    _at_once = False
    _calls: dict[str, list[RepeatedCall]]

    def __init_subclass__(cls) -> None:
        """Python tells of arguments that are missing or unknown by the name that users write: `append()`, `decode.plan()`."""
        if "bind" not in vars(cls) or not hasattr(cls, "KERNEL"):
            return
        for name, method in list(vars(cls).items()):
            if name.startswith("bind") and isinstance(method, FunctionType):
                method.__qualname__ = cls.KERNEL.file.removesuffix(".cu") + name[4:].replace("_", ".", 1)
                setattr(cls, name, explained(method, cls.__doc__))
        for name in ("workspace", "workspace_bytes"):
            if (method := getattr(cls, name, None)) is not None and not hasattr(method, "__wrapped__"):
                method.__qualname__ = name
                setattr(cls, name, explained(method, method.__doc__))

    @cached_property
    def now(self) -> Self:
        """The same operation, whose `bind` launches at once and keeps nothing: what calls go through."""
        twin = copy.copy(self)
        twin._at_once, twin._calls = True, {}
        return twin

    def __repr__(self) -> str:
        return f"{self.KERNEL.module.name}.{self.KERNEL.file.removesuffix('.cu')}"

    def prepare(
        self,
        given: LayerCache | PoolCache,
        arguments: Sequence[object],
        stream: object = None,
        which: Kernel | None = None,
        planned_rows: int | None = None,
    ) -> Bound:
        """Check the arguments, in the order of `Kernel.arguments`, and decide everything but the stream."""
        kernel = which or self.KERNEL
        if self._at_once and isinstance(given, LayerCache) and given.module is kernel.module:
            for call in self._calls.get(kernel.entry, ()):
                addresses = call.addresses(given, arguments, planned_rows)
                if addresses is not None:
                    call.launch(
                        given, addresses, stream if type(stream) is int and stream >= 0 else stream_handle(stream)
                    )
                    return AtOnce(arguments)
        checked = check_call(kernel, given, arguments, planned_rows, self.KERNEL)
        if 0 in checked.grid:
            return AtOnce(arguments) if self._at_once else Bound(_nothing, None, arguments)
        args = PackedArgs((checked.cache.kind, *kernel.kinds), checked.values)
        go, handle = _launch(checked, args), _handles(checked.cache.device, stream)
        if self._at_once:
            go(handle(None))
            if isinstance(given, LayerCache) and given.device != "cpu":
                kept = self._calls.get(kernel.entry, [])
                self._calls[kernel.entry] = [*repeated_call(checked, arguments, planned_rows), *kept[: MOST - 1]]
            return AtOnce(arguments)
        swap = Replaceable(checked, arguments, args, go) if isinstance(given, LayerCache) else None
        return Bound(go, checked, arguments, handle, swap)


class PlannedLauncher(Launcher):
    """An operation whose blocks divide a step's tokens among them: `plan` says how, in a workspace, before the launch."""

    PLAN: ClassVar[Kernel]
    SPLIT_PLAN: ClassVar[SplitPlan]
    SPLIT_PLANS: ClassVar[tuple[tuple[str, SplitPlan], ...]] = ()
    """Of architectures whose workspace is divided differently."""
    DECODE_ROWS: ClassVar[int] = 0
    """Of extend: a request with up to so many new rows costs the set's decode no more; 0: all are extend's."""

    def workspace_bytes(
        self, max_rows: int, *, device: str = "cpu", max_tokens: int | None = None, multiprocessors: int | None = None
    ) -> int:
        """What `workspace` would allocate, in bytes."""
        return Workspace.nbytes_of(self.split_plan(device), max_rows, device, max_tokens, multiprocessors)

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
        return Workspace(self.KERNEL, self.split_plan(device), max_rows, device, max_tokens, multiprocessors, memory)

    def split_plan(self, device: str = "cpu") -> SplitPlan:
        """How a workspace is divided on a device."""
        if not self.SPLIT_PLANS:
            return self.SPLIT_PLAN
        return dict(self.SPLIT_PLANS).get(arch_on(self.KERNEL.module, device), self.SPLIT_PLAN)

    def prepare_plan(
        self, cache: LayerCache | PoolCache, arguments: Sequence[object], stream: object = None, rows: int | None = None
    ) -> Bound:
        """The operation's planner on a workspace, the first of its arguments, bound; launching it makes that usable.

        A plan serves every layer: of a whole cache the first one is taken.
        """
        if isinstance(cache, PoolCache) and cache.MODULE is self.PLAN.module:
            cache = cache[0]
        cache = layer_of(self.PLAN, cache)
        workspace = usable(arguments[0], self.KERNEL)
        if workspace.split_plan != self.split_plan(cache.device):
            raise ArgumentError(
                f"workspace: got one of {workspace.kernel.entry} that is divided for another architecture; make it on the "
                "device, or under the CPU machine's settings, that the plan runs on"
            )
        if rows is None:
            rows = _planned_rows(self.PLAN, arguments)
        return self.prepare(cache, arguments, stream, self.PLAN, plannable(workspace, rows, cache))


def _planned_rows(planner: Kernel, arguments: Sequence[object]) -> int | None:
    """How many rows the planner's arrays are for; None where none of them says."""
    for spec, argument in zip(planner.arguments, arguments, strict=True):
        if isinstance(spec, Array) and spec.shape == ("planned_rows",) and argument is not None:
            shape = view(argument, spec.name).shape
            return shape[0] if len(shape) == 1 else None
    return None

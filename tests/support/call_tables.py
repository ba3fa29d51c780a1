"""Right calls of every operation, made from the generated tables alone: arrays without memory, at addresses far apart."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from kvgen.plan.params import Array, Count, Scalar
from kvgen.runtime import BaseCache, BasePages, Kernel, Launcher, Workspace
from kvgen.runtime.arrays import ArrayView, contiguous_strides
from kvgen.runtime.other_cache import OtherCache
from kvgen.runtime.page_pool import PagePool
from kvgen.runtime.pool_tensors import Tensor

GENERATED = Path(__file__).parents[2] / "generated"
SETS = tuple(sorted(p.parent.name for p in GENERATED.glob("*/__init__.py")))
DEVICE = "cuda:0"
_APART = 1 << 32  # bytes between arrays
_SIZES = {"T": 3, "B": 2, "P": 9, "pages": 5, "scale_pages": 5, "layers": 2, "tokens": 8, "rows": 40, "request": 2}


def module(name: str) -> ModuleType:
    """A checked-in set."""
    return importlib.import_module(f"generated.{name}")


@dataclass
class Memory:
    """Where the next array goes, and what dimensions the arrays so far have."""

    next: int = _APART
    sizes: dict[str, int] = field(default_factory=lambda: dict(_SIZES))

    def array(self, dtype: str, shape: tuple[int | str, ...]) -> ArrayView:
        found = tuple(self.size(n) for n in shape)
        self.next += _APART
        return ArrayView(self.next, found, contiguous_strides(found), dtype, DEVICE, False, None)

    def size(self, axis: int | str) -> int:
        if isinstance(axis, int):
            return axis
        name, _, more = axis.partition("+")
        return self.sizes.setdefault(name, 8) + int(more or 0)

    def tensor(self, tensor: Tensor) -> ArrayView:
        dtype = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0]
        found = self.array(dtype, tensor.shape)
        strides, dense = list(found.strides), 1
        for axis in reversed(range(len(strides))):  # what the spec leaves open lies behind what it fixes
            fixed = tensor.strides[axis]
            strides[axis] = fixed if fixed is not None else dense
            dense = max(dense, strides[axis] * found.shape[axis])
        for axis in reversed(range(len(strides))):
            if tensor.strides[axis] is None:
                if tensor.axes[axis] == "page":  # of u8 where pages are aligned
                    dense = -(-dense // tensor.page_align) * tensor.page_align
                strides[axis], dense = dense, dense * found.shape[axis]
        return found._replace(strides=tuple(strides))

    def pools(self, kind: type[BaseCache | BasePages]) -> dict[str, Any]:
        per_layer = not any("layer" in t.axes for t in kind.TENSORS)
        layers = range(self.sizes["layers"])
        return {t.name: [self.tensor(t) for _ in layers] if per_layer else self.tensor(t) for t in kind.TENSORS}

    def tables(self, kind: type[BaseCache]) -> dict[str, Any]:
        return {t.name: self.array(t.dtype, t.shape) for t in kind.TABLES}


@dataclass
class Call:
    """One kernel of one operation and right arguments for it, by name; `pools` and `tables` are the cache's."""

    set: ModuleType
    op: Launcher
    kernel: Kernel
    pools: dict[str, Any]
    tables: dict[str, Any]
    arguments: dict[str, Any]

    def cache(self) -> BaseCache:
        return self.set.Cache(**self.pools, **self.tables)  # type: ignore[no-any-return]

    def bind(self) -> None:
        """Check all of it."""
        cache = self.cache()
        given = [self.arguments[p.name] for p in self.kernel.arguments]
        self.op.prepare(cache if self.kernel.all_layers else cache[1], given, None, self.kernel, self.planned_rows)

    @property
    def planned_rows(self) -> int:
        """How many rows a planner's arrays are for."""
        of_rows = [p.name for p in self.arrays if p.shape == ("planned_rows",)]
        return int(self.arguments[of_rows[0]].shape[0]) if of_rows else 0

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the call, as the kernel's table has them."""
        return [p for p in self.kernel.arguments if isinstance(p, Array)]

    def memory(self) -> Iterator[tuple[str, ArrayView, bool]]:
        """The cache's own arrays that the kernel reaches: name, array, whether the kernel may write to it."""
        for layer in self.cache() if self.kernel.all_layers else [self.cache()[1]]:
            yield from ((n, a, w and self.kernel.writes) for n, a, w in layer.memory)
            yield from ((n, a, False) for n, a in layer.tables.items())


def kernels(name: str) -> Iterator[tuple[str, Launcher, Kernel]]:
    """Every kernel of a set: `operation.TABLE`, its launcher, its table."""
    found = module(name)
    for key, op in vars(found).items():
        if isinstance(op, Launcher):
            yield from ((f"{key}.{n}", op, k) for n, k in inspect.getmembers(type(op)) if isinstance(k, Kernel))


def calls(name: str) -> Iterator[tuple[str, Call]]:
    """A right call of every kernel of a set, all optional arguments given."""
    found = module(name)
    for label, op, kernel in kernels(name):
        memory = Memory()
        cache = found.Cache
        pools, tables = memory.pools(cache), memory.tables(cache)
        call = Call(found, op, kernel, pools, tables, {})
        for p in kernel.arguments:
            call.arguments[p.name] = _argument(p, call, memory)
        yield label, call


def _argument(p: Any, call: Call, memory: Memory) -> Any:
    if isinstance(p, PagePool):
        return call.set.Pages(**memory.pools(call.set.Pages))
    if isinstance(p, OtherCache):
        made = getattr(call.set, p.cache.__name__)
        return made(**memory.pools(made), **memory.tables(made))[1]
    if isinstance(p, Count):
        return 1
    if isinstance(p, Scalar):
        return 1
    assert isinstance(p, Array)
    if p.name == "workspace":
        memory.next += _APART
        return workspace_at(call.op, memory.next)
    return memory.array(p.dtype, p.shape)


def workspace_at(op: Any, pointer: int, device: str = "cpu") -> Workspace:
    """A workspace as one of `device` is divided, at an address of DEVICE."""
    made = Workspace(op.KERNEL, op.split_plan(device), 8, "cpu", 2**20, 4)
    made.view = made.view._replace(pointer=pointer, device=DEVICE)
    return made


def with_pointer(given: Any, pointer: int) -> Any:
    """An argument at another address; a workspace is moved itself."""
    if isinstance(given, Workspace):
        given.view = given.view._replace(pointer=pointer)
        return given
    return given._replace(pointer=pointer)


def where(given: Any) -> ArrayView:
    """The memory of an argument."""
    return given.view if isinstance(given, Workspace) else given


def free_axes(spec: Array, given: ArrayView) -> list[int]:
    """The axes along which the array brings its own strides, and has more than one entry."""
    return [axis for axis in range(int(spec.strided)) if given.shape[axis] > 1]


def with_stride(given: ArrayView, axis: int, stride: int) -> ArrayView:
    """The array with another stride along an axis."""
    return given._replace(strides=(*given.strides[:axis], stride, *given.strides[axis + 1 :]))

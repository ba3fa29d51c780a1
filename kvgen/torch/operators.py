"""Operators: what runs on tensors, and what a trace sees of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import DTYPES
from kvgen.plan.params import Array, Size
from kvgen.runtime import BasePages, LayerCache, OtherCache, PagePool, PlannedLauncher, PoolCache
from kvgen.torch.over_tensors import CacheOver, PagesOver, workspace_over
from kvgen.torch.schema import (
    Argument,
    Method,
    cache_arguments,
    pages_arguments,
    plain_argument,
)

_TYPES: Final[dict[str, Any]] = {
    d.name: getattr(torch, d.numpy_name) for d in DTYPES.values() if hasattr(torch, d.numpy_name)
}
Taker = Callable[[Sequence[Any], PoolCache | LayerCache], object]


def stream_of(tensor: Any) -> int | None:
    """PyTorch's current stream on the tensor's GPU; None on the CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


class Operator:
    """A method of a launcher over flat arguments: tensors of the cache, its layer, what the method takes.

    `arguments` are those of the schema in order. `kernel` runs it, `fake` is what a trace sees of it.
    """

    def __init__(self, method: Method, cache: type[PoolCache], pages: type[BasePages] | None) -> None:
        kernel = method.kernel
        self.method, self.tables = method, cache.TABLES
        self._bind = getattr(method.launcher, method.bind)
        self._cache = CacheOver(cache, whole=kernel.all_layers)
        own = list(cache_arguments(cache, whole=kernel.all_layers, writes=kernel.writes))
        self._takers: list[tuple[str, Taker]] = []
        for param in method.given:
            self._takers.append((param.name, self._taker(param, len(own), pages)))
            own += _arguments_of(param, pages)
        for extra in method.extras:
            self._takers.append((extra.name, _plainly(len(own))))
            own.append(extra)
        longest = [Argument(name, "SymInt?", default="None") for name in cache.LONGEST]
        self._longest = slice(len(own), len(own) + len(longest))
        self.arguments: tuple[Argument, ...] = (*own, *longest)
        self._defaults = [{"None": None, "False": False, "True": True}.get(a.default) for a in self.arguments]
        self._needed = _needed(self.arguments)
        self._written = [i for i, a in enumerate(self.arguments) if a.writes]
        arrays = {p.name: p for p in (*cache.TABLES, *method.given) if isinstance(p, Array)}
        self.dtypes = {t.name: _type_of(t.dtype) for t in cache.TENSORS} | {
            a.name: _type_of(a.dtype) for a in arrays.values()
        }
        named = enumerate(self.arguments)
        self._arrays = [
            (i, arrays[a.name]) for i, a in named if a.name in arrays and arrays[a.name].name != "workspace"
        ]

    def _taker(self, param: object, at: int, pages: type[BasePages] | None) -> Taker:
        if isinstance(param, Array) and param.name == "workspace":
            launcher = self.method.launcher
            assert isinstance(launcher, PlannedLauncher)
            return lambda values, cache: workspace_over(launcher, values[at], cache)  # type: ignore[arg-type]
        if isinstance(param, OtherCache):
            other = CacheOver(param.cache, whole=False, prefix=f"{param.name}_", tables=param.tables)
            return lambda values, cache: other(values[at : at + other.count])
        if isinstance(param, PagePool) and pages is not None:
            over = PagesOver(pages, f"{param.name}_")
            return lambda values, cache: over(values[at : at + over.count], cache.device)
        return _plainly(at)

    def complete(self, given: Sequence[Any]) -> list[Any]:
        """All values: the dispatcher leaves out those at the end that are their defaults, and takes None for any tensor.

        Raises ArgumentError for None in place of a tensor that the operation needs.
        """
        values = [*given, *self._defaults[len(given) :]]
        self.refuse_none(self._needed, values)
        return values

    def refuse_none(self, needed: Sequence[tuple[int, str]], values: Sequence[Any]) -> None:
        """Raise ArgumentError for None in `values` at the places of `needed`, which has their names."""
        for at, name in needed:
            value = values[at]
            places = (
                [f"[{i}]" for i, tensor in enumerate(value) if tensor is None]
                if isinstance(value, (list, tuple))
                else [""] * (value is None)
            )
            for place in places:
                dtype = f" of {self.dtypes[name]}" if name in self.dtypes else ""
                entry = self.method.kernel.entry
                raise ArgumentError(f"{name}{place}: got None; {entry} needs it; pass a tensor{dtype}")

    def kernel(self, *given: Any) -> None:
        """Launch, on PyTorch's current stream."""
        values = self.complete(given)
        cache = self._cache(values, values[self._longest])
        arguments = {name: take(values, cache) for name, take in self._takers}
        first = values[0][0] if isinstance(values[0], (list, tuple)) else values[0]
        self._bind(cache, **arguments, stream=stream_of(first))()
        for at in self._written:
            if values[at] is not None:
                torch.autograd.graph.increment_version(values[at])

    def fake(self, *given: Any) -> None:
        """The call of a trace, or over meta tensors: nothing is computed, arguments that no launch would take are refused.

        Looks at types, ranks and sizes that the spec fixes; the launch checks everything else. Raises ArgumentError for meta
        tensors beside others: PyTorch calls this for them, and a call that looks like a launch would compute nothing.
        """
        values = self.complete(given)
        self._refuse_some_meta(values)
        for argument, value in zip(self.arguments, values, strict=True):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    refuse_gradient(tensor, argument.name)
        for at, spec in self._arrays:
            if values[at] is not None and not (spec.rows and values[at].numel() == 0):
                _refuse_misfit(values[at], spec)

    def _refuse_some_meta(self, values: Sequence[Any]) -> None:
        """Raise ArgumentError unless all tensors are on meta, or none."""
        of_device: dict[str, str] = {}
        for argument, value in zip(self.arguments, values, strict=True):
            for i, tensor in enumerate(value if isinstance(value, (list, tuple)) else (value,)):
                if isinstance(tensor, torch.Tensor):
                    at = f"[{i}]" if isinstance(value, (list, tuple)) else ""
                    of_device.setdefault(tensor.device.type, f"{argument.name}{at}")
        meta = of_device.pop("meta", None)
        if meta is not None and of_device:
            device, other = next(iter(of_device.items()))
            raise ArgumentError(
                f"{meta}: got a meta tensor, which has no memory, where {other} is on {device}; pass it on {device} too; for "
                "shapes alone pass every tensor on meta"
            )


class Returning:
    """The operator that allocates what `operator` writes to its required `out` arrays, and returns it.

    What the operation leaves alone is 0, so that equal arguments give equal results. That costs a fill; the operator that
    writes to given tensors has none.

    Sizes come from the other arguments; one that they do not tell is an argument of its own, at the end of the required
    ones, under the name that the kernel gives it: `num_rows` of gather.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        arrays = {p.name: p for p in operator.method.given if isinstance(p, Array)}
        self.outs = [p for p in arrays.values() if p.access == "out" and not p.optional]
        names = {p.name for p in self.outs}
        kept = [a for a in operator.arguments if a.name not in names]
        known = _known_sizes(kept, {**{t.name: t for t in operator.tables}, **arrays})
        needed = {n.partition("+")[0] for out in self.outs for n in out.shape if isinstance(n, str)} - set(known)
        titles = {p.value: p.name for p in operator.method.kernel.params if isinstance(p, Size)}
        sizes = {symbol: Argument(titles.get(symbol, f"size_{symbol.lower()}"), "SymInt") for symbol in sorted(needed)}
        required = [a for a in kept if not a.default]
        self.arguments = (*required, *sizes.values(), *(a for a in kept if a.default))
        at = {a.name: i for i, a in enumerate(self.arguments)}
        self._sizes: dict[str, tuple[int, int | None, int]] = {s: (at[a.name], None, 0) for s, a in sizes.items()}
        self._sizes |= {s: (at[name], axis, extra) for s, (name, axis, extra) in known.items()}
        self._order = [(a.name, at.get(a.name)) for a in operator.arguments]
        self._defaults = [{"None": None, "False": False, "True": True}.get(a.default) for a in self.arguments]
        self._needed = _needed(self.arguments)
        self._like = next(i for i, a in enumerate(self.arguments) if a.type == "Tensor")

    def kernel(self, *given: Any) -> Any:
        """Allocate, launch, return."""
        values, outs = self._allocated(given)
        self.operator.kernel(*values)
        return _one_or_all(outs)

    def fake(self, *given: Any) -> Any:
        """What a trace sees: tensors of the right shape."""
        values, outs = self._allocated(given)
        self.operator.fake(*values)
        return _one_or_all(outs)

    def _allocated(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = [*given, *self._defaults[len(given) :]]
        self.operator.refuse_none(self._needed, values)
        device = values[self._like].device
        outs = {
            out.name: torch.zeros([self._size(n, values) for n in out.shape], dtype=_TYPES[out.dtype], device=device)
            for out in self.outs
        }
        flat = [outs[name] if at is None else values[at] for name, at in self._order]
        return flat, list(outs.values())

    def _size(self, dimension: int | str, values: Sequence[Any]) -> Any:
        if isinstance(dimension, int):
            return dimension
        symbol, _, more = dimension.partition("+")
        at, axis, extra = self._sizes[symbol]
        name, value = self.arguments[at].name, values[at]
        if axis is not None:
            shape = tuple(value.shape)
            if len(shape) <= axis:
                raise ArgumentError(
                    f"{name}: got shape {shape}; dimension {axis} is the size of what is returned; pass as many "
                    "dimensions as the launcher's docstring says"
                )
            value = shape[axis] - extra
        if isinstance(value, int) and value < 0:
            rule = "it counts what is returned" if axis is None else f"dimension {axis} is at least {extra}"
            raise ArgumentError(f"{name}: got {value + extra}; {rule}; pass {extra} or more")
        return value + int(more or 0)


def _needed(arguments: Sequence[Argument]) -> list[tuple[int, str]]:
    """Places and names of the tensors, and lists of tensors, that a call cannot do without."""
    return [(i, a.name) for i, a in enumerate(arguments) if a.type in ("Tensor", "Tensor[]")]


def refuse_gradient(tensor: Any, name: str) -> None:
    """Raise ArgumentError where autograd would record the call."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}: got a tensor that requires a gradient; kernels have no backward, so its gradient would silently be wrong; "
            f"pass {name}.detach(), or call under torch.no_grad()"
        )


def _refuse_misfit(tensor: Any, spec: Array) -> None:
    wanted = _TYPES.get(spec.dtype)
    if tensor.dtype != wanted:
        raise ArgumentError(
            f"{spec.name}: got dtype {tensor.dtype}; it must be {wanted}{f', {spec.field} of the spec' if spec.field else ''}; "
            f"pass a tensor of {wanted}"
        )
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape) and all(
        not isinstance(size, int) or not isinstance(want, int) or size == want
        for size, want in zip(shape, spec.shape, strict=True)
    )
    if not fits:
        valid = ", ".join(map(str, spec.shape)) + ("," if len(spec.shape) == 1 else "")
        raise ArgumentError(
            f"{spec.name}: got shape {shape}; the spec fixes its rank and the numbers in ({valid}); pass such a tensor"
        )


def _type_of(dtype: str | tuple[str, ...]) -> Any:
    """The torch.dtype of what the spec calls `dtype`, the first of several."""
    return _TYPES[dtype if isinstance(dtype, str) else dtype[0]]


def _plainly(at: int) -> Taker:
    return lambda values, cache: values[at]


def _arguments_of(param: object, pages: type[BasePages] | None) -> Sequence[Argument]:
    if isinstance(param, OtherCache):
        return cache_arguments(param.cache, whole=False, writes=False, prefix=f"{param.name}_", tables=param.tables)
    if isinstance(param, PagePool):
        assert pages is not None
        return pages_arguments(pages, writes=param.writes, prefix=f"{param.name}_")
    return [plain_argument(param)]  # type: ignore[arg-type]


def _known_sizes(kept: Sequence[Argument], arrays: Mapping[str, Array]) -> dict[str, tuple[str, int, int]]:
    """Which argument's axis tells a symbol's size, and by how much that axis is larger."""
    known: dict[str, tuple[str, int, int]] = {}
    for argument in kept:
        found = arrays.get(argument.name)
        if found is None or argument.default or found.name == "workspace":
            continue
        for axis, size in enumerate(found.shape):
            if isinstance(size, str):
                symbol, _, more = size.partition("+")
                known.setdefault(symbol, (argument.name, axis, int(more or 0)))
    return known


def _one_or_all(outs: Sequence[Any]) -> Any:
    return outs[0] if len(outs) == 1 else tuple(outs)

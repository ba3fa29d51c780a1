"""Schemas: what the operator of a launcher's method takes and writes, read from the launcher's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Count, Scalar
from kvgen.runtime import BasePages, Kernel, Launcher, OtherCache, PagePool, PoolCache, Tensor

Given = Array | Scalar | Count | OtherCache | PagePool


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an operator. `type` is a type of a torch schema without its alias set: "Tensor", "Tensor[]", "Tensor?",
    "SymInt", "SymInt?", "float", "bool". `writes`: the operator mutates it. `default` is "" for a required argument."""

    name: str
    type: str
    writes: bool = False
    default: str = ""

    def text(self, number: int) -> str:
        """The argument in a schema, `number` names its alias set."""
        kind, rest = (self.type[:6], self.type[6:]) if self.type.startswith("Tensor") else (self.type, "")
        alias = f"(a{number}!)" if self.writes else ""
        return f"{kind}{alias}{rest} {self.name}" + (f"={self.default}" if self.default else "")


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a launcher: `bind`, `bind_plan` ... as an operator sees it.

    `kernel` is the kernel behind it, `given` its parameters that a call brings, in the launcher's order; `extras` are
    arguments that only the Python method has, such as the plan's `rows`.
    """

    launcher: Launcher
    bind: str
    kernel: Kernel
    given: tuple[Given, ...]
    extras: tuple[Argument, ...]

    @property
    def name(self) -> str:
        """Its name behind the operation's: "" for the launch itself, "plan" for `bind_plan`."""
        return self.bind[5:]


def methods_of(launcher: Launcher) -> list[Method]:
    """The methods of a launcher that bind a launch; the launch itself comes first."""
    kind = type(launcher)
    names = sorted((n for n in dir(kind) if n == "bind" or n.startswith("bind_")), key=lambda n: (n != "bind", n))
    return [_method(launcher, name) for name in names]


def _method(launcher: Launcher, bind: str) -> Method:
    kernel: Kernel = launcher.KERNEL if bind == "bind" else getattr(launcher, bind[5:].upper())
    by_name = {p.name: p for p in kernel.arguments}
    given: list[Given] = []
    extras = []
    for name, parameter in inspect.signature(getattr(launcher, bind)).parameters.items():
        found = by_name.get(name)
        if isinstance(found, Given):
            given.append(found)
        elif found is not None:
            raise ArgumentError(
                f"{kernel.entry}: {name} is a {type(found).__name__}, which no operator of torch can take; call the launcher"
            )
        elif name not in ("cache", "stream"):
            extras.append(_extra(kernel, name, parameter))
    return Method(launcher, bind, kernel, tuple(given), tuple(extras))


def _extra(kernel: Kernel, name: str, parameter: inspect.Parameter) -> Argument:
    kinds = {"bool": "bool", "int | None": "SymInt?"}
    kind = kinds.get(str(parameter.annotation))
    if kind is None or parameter.default is inspect.Parameter.empty:
        raise ArgumentError(
            f"{kernel.entry}: {name} is a {parameter.annotation}, which no operator of torch can take; call the launcher"
        )
    return Argument(name, kind, default=str(parameter.default))


def cache_arguments(
    cache: type[PoolCache], *, whole: bool, writes: bool, prefix: str = "", tables: bool = True
) -> tuple[Argument, ...]:
    """The tensors of a cache as arguments: the pools, the tables, and the layer.

    whole: the operation works on all layers. Otherwise it takes the number of the layer, or where the spec has a tensor a
    layer (`layers="pointers"`, states) that layer's tensors alone. writes: the kernel writes to the pools. tables: it reads
    the page table and lengths.
    """
    pools = _pools(cache.TENSORS, prefix, several=whole and a_tensor_a_layer(cache), writes=writes)
    read = cache.TABLES if tables else ()
    numbered = not whole and not a_tensor_a_layer(cache)
    found = [Argument(prefix + t.name, "Tensor", writes and t.access != "in") for t in read]
    return (*pools, *found, *([Argument(f"{prefix}layer", "SymInt")] if numbered else ()))


def pages_arguments(pages: type[BasePages], *, writes: bool, prefix: str) -> tuple[Argument, ...]:
    """The tensors of a pool without tables as arguments."""
    return tuple(_pools(pages.TENSORS, prefix, several=a_tensor_a_layer(pages), writes=writes))


def a_tensor_a_layer(cache: type[PoolCache] | type[BasePages]) -> bool:
    """Whether the spec has a tensor a layer: `layers="pointers"`, and states."""
    return not any("layer" in t.axes for t in cache.TENSORS)


def _pools(tensors: Sequence[Tensor], prefix: str, *, several: bool, writes: bool) -> list[Argument]:
    kind = "Tensor[]" if several else "Tensor"
    return [Argument(prefix + t.name, kind, writes and t.writes) for t in tensors]


def plain_argument(param: Array | Scalar | Count) -> Argument:
    """An array or a number of the call as an argument."""
    if isinstance(param, Array):
        return Argument(
            param.name,
            "Tensor?" if param.optional else "Tensor",
            param.access != "in",
            "None" if param.optional else "",
        )
    kind = "float" if param.dtype == "f32" else "SymInt"
    return Argument(param.name, kind + "?" if param.optional else kind, default="None" if param.optional else "")


def schema_text(name: str, arguments: Sequence[Argument], returns: int = 0) -> str:
    """The schema of an operator that returns `returns` new tensors."""
    taken = ", ".join(a.text(i) for i, a in enumerate(arguments))
    given = {0: "()", 1: "Tensor"}.get(returns) or f"({', '.join(['Tensor'] * returns)})"
    return f"{name}({taken}) -> {given}"

"""Registration: the operators of a set, defined once in a namespace of torch.ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch

from kvgen.errors import ArgumentError
from kvgen.runtime import BasePages, Launcher, PoolCache
from kvgen.runtime.module import Module
from kvgen.torch.operation import Operation, OperationSet
from kvgen.torch.operators import Operator, Returning
from kvgen.torch.schema import Argument, Method, methods_of, schema_text

_DEVICES: Final = ("CPU", "CUDA")
# Operators are global to the process, so what has been registered is too: namespace -> the set and its operations.
_REGISTERED: Final[dict[str, tuple[Module, OperationSet]]] = {}


def register(package: str | ModuleType, *, namespace: str | None = None) -> OperationSet:
    """The operations of a generated package as operators of PyTorch, in `torch.ops.<namespace>`.

    package: the module or its dotted name, "generated.llama3_8b". namespace: by default "kvgen_" and the name of the set.
    Registering a set again returns the operations that are there. Nothing is compiled and no device is touched.

    Raises ArgumentError for what is no generated package, and for a namespace that another set has.
    """
    module = import_module(package) if isinstance(package, str) else package
    cache = getattr(module, "Cache", None)
    if not (isinstance(module, ModuleType) and isinstance(cache, type) and issubclass(cache, PoolCache)):
        got = repr(package) if isinstance(package, str) else type(package).__name__
        raise ArgumentError(
            f"package: got {got}; it has no Cache; pass a package that `kvgen build` wrote, or its name"
        )
    found = cache.MODULE
    name = namespace if namespace is not None else f"kvgen_{found.name}"
    if not name.isidentifier():
        raise ArgumentError(f"namespace: got {name!r}; torch.ops has it as an attribute; pass a Python identifier")
    if name in _REGISTERED:
        registered, operations = _REGISTERED[name]
        if registered is not found:
            raise ArgumentError(
                f"namespace: got {name!r}, which has the operators of {registered.folder}; pass another namespace for "
                f"{found.folder}"
            )
        return operations
    operations = _define(module, cache, name)
    _REGISTERED[name] = found, operations
    return operations


def _define(module: ModuleType, cache: type[PoolCache], namespace: str) -> OperationSet:
    try:
        library = torch.library.Library(namespace, "DEF")
    except RuntimeError as error:  # a namespace has one library
        raise ArgumentError(
            f"namespace: got {namespace!r}, which another library has defined; pass a name that torch.ops does not have"
        ) from error
    pages = getattr(module, "Pages", None)
    made: dict[str, Operation] = {}
    left_out: dict[str, str] = {}
    for name, launcher in vars(module).items():
        if isinstance(launcher, Launcher) and launcher.KERNEL.module is cache.MODULE:
            try:
                methods = methods_of(launcher)
            except ArgumentError as error:
                left_out[name] = str(error)
            else:
                made[name] = _operation(library, name, methods, cache, pages)
    again = partial(register, module.__name__, namespace=namespace)
    return OperationSet(cache.MODULE.name, namespace, made, left_out, library, again)


def _operation(
    library: Any, name: str, methods: Sequence[Method], cache: type[PoolCache], pages: type[BasePages] | None
) -> Operation:
    launch, *others = [_method(library, name, method, cache, pages) for method in methods]
    for method, operation in zip(methods[1:], others, strict=True):
        launch.add(method.name, operation)
    return launch


def _method(
    library: Any, operation: str, method: Method, cache: type[PoolCache], pages: type[BasePages] | None
) -> Operation:
    name = f"{operation}_{method.name}" if method.name else operation
    operator = Operator(method, cache, pages)
    returning = Returning(operator)
    op = _defined(library, name, operator, operator.arguments)
    allocating = None
    if returning.outs:
        allocating = _defined(library, f"{name}_returning", returning, returning.arguments, len(returning.outs))
    return Operation(name, op, allocating, method, operator.dtypes)


def _defined(
    library: Any, name: str, made: Operator | Returning, arguments: tuple[Argument, ...], returns: int = 0
) -> Any:
    """Define the operator, say what runs it on each device and what a trace sees, and find it in torch.ops."""
    library.define(
        schema_text(name, arguments, returns), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    )
    for device in _DEVICES:
        library.impl(name, made.kernel, device)
    torch.library.register_fake(f"{library.ns}::{name}", made.fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default

"""The Python side of a set: the context of the generated package's `__init__.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvgen.lowering.launcher_table import op_title, takes_pages
from kvgen.lowering.lowered import lower, lower_pages
from kvgen.lowering.module_tensors import ArgumentContext, filled, pool_argument, values_first
from kvgen.lowering.page_runs import STEPS
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import (
    Array,
    Count,
    Field,
    OtherCache,
    PagePool,
    Param,
    Pool,
    Scalar,
    Size,
    TensorMap,
    is_argument,
)
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op


@dataclass(frozen=True)
class StepContext:
    """A kernel that an operation launches before its own: a method of the launcher; `asked`: `<name>=True` launches it."""

    name: str
    title: str
    summary: str
    asked: bool
    signature: tuple[str, ...]
    arguments: tuple[ArgumentContext, ...]


@dataclass(frozen=True)
class OpContext:
    """One operation in the generated module: signatures, whose lines are Python text, and docstring."""

    name: str
    title: str
    planned: bool
    summary: str
    doc: tuple[str, ...]
    signature: tuple[str, ...]
    arguments: tuple[ArgumentContext, ...]
    written: tuple[ArgumentContext, ...]
    plan_signature: tuple[str, ...]
    plan_arguments: tuple[ArgumentContext, ...]
    plan_reads_tables: bool
    steps: tuple[StepContext, ...]


@dataclass(frozen=True)
class CacheClassContext:
    """A class of caches in the generated module: the set's own, or one that a call brings besides. `states`: of states, which
    have no lengths."""

    name: str
    states: bool
    summary: str
    doc: tuple[str, ...]
    signature: tuple[str, ...]
    step_signature: tuple[str, ...]
    tensor_names: str
    table_names: str


@dataclass(frozen=True)
class LauncherContext:
    """Everything launcher/init.py.j2 reads."""

    set: str
    doc: str
    caches: tuple[CacheClassContext, ...]
    pointers: bool
    results: bool
    imports: str
    page_docs: tuple[str, ...]
    page_signature: tuple[str, ...]
    page_names: str
    ops: tuple[OpContext, ...]


_INDENT: Final = 8  # columns before an argument of a signature
_LONGEST: Final = ("max_seq_length: int | None = None", "max_cache_length: int | None = None")


def _imports(plans: Iterable[tuple[KernelPlan, ...]]) -> str:
    """The names that the module imports from kvgen.runtime."""
    kernels = [plan for group in plans for plan in group]
    params = [p for plan in kernels for p in plan.params]
    found = {"ArrayLike", "Bound", "at_once"}
    if any(not plan.all_layers for plan in kernels) or any(isinstance(p, OtherCache) for p in params):
        found.add("LayerCache")
    if any(p.name == "workspace" for p in params):
        found.add("Workspace")
    return ", ".join(sorted(found))


def _signature(required: Iterable[str], named: Iterable[str]) -> tuple[str, ...]:
    """The lines of a signature: arguments by position, then those by name alone."""
    by_name = list(named)
    if by_name:
        by_name[0] = f"*, {by_name[0]}"
    return (*filled(required, _INDENT), *filled(by_name, _INDENT))


def _bind_signature(
    cache: str, arguments: Iterable[ArgumentContext], *flags: str, rows: bool = False
) -> tuple[str, ...]:
    """The lines of the signature of a method that binds a kernel; `flags` name steps that may be asked for."""
    arguments = tuple(arguments)
    return _signature(
        ("self", f"cache: {cache}", *(f"{a.name}: {a.type}" for a in arguments if not a.optional)),
        (
            *(("rows: int | None = None",) if rows else ()),
            *(a.or_none for a in arguments if a.optional),
            *(f"{flag}: bool = False" for flag in flags),
            "stream: object = None",
        ),
    )


def _text(doc: str) -> str:
    """`doc` as part of a docstring."""
    return doc.replace("\\", "\\\\").replace('"""', "'''")


def _describe(p: Param | Field) -> str:
    doc = f": {_text(p.doc).removesuffix('.')}." if p.doc else "."
    match p:
        case PagePool():
            what = "pages of every layer, `Pages` or another `Cache`"
        case TensorMap():
            what = "tensor map, 128 bytes"
        case Count():
            what = "an int, or a host array of one"
        case OtherCache():
            what = "a layer"
        case Array():
            what = _described_array(p)
        case _:
            what = p.dtype
    return f"{p.name}: {what}{doc}"


def _described_array(p: Array) -> str:
    shape = ", ".join(str(s).replace("+", " + ") for s in p.shape)
    notes = [f"{p.dtype}[{shape}]"]
    if p.strided:
        two = "layers and rows" if p.shape[0] == "all_layers" else "the first two axes"
        notes.append(f"{two} may be strided" if p.strided == 2 else "rows may be strided")
    if p.access != "in":
        notes.append("written" if p.access == "out" else "updated")
    if p.optional:
        notes.append("optional")
    return ", ".join(notes)


def _argument(p: Param | Field) -> ArgumentContext:
    kind = "Workspace" if p.name == "workspace" else "ArrayLike"
    if isinstance(p, TensorMap):
        kind = "object"
    if isinstance(p, Count):
        kind = "int | ArrayLike"
    if isinstance(p, OtherCache):
        kind = "LayerCache"
    if isinstance(p, PagePool):
        kind = "Pages | Cache"
    if isinstance(p, Scalar):
        kind = "float" if p.dtype == "f32" else "int"
    optional = not isinstance(p, Pool | Size) and p.optional
    return ArgumentContext(p.name, optional, _describe(p), kind)


def _called(plan: KernelPlan) -> tuple[Param, ...]:
    """The parameters that a call brings."""
    return tuple(p for p in plan.params if is_argument(p))


def _required_first(plan: KernelPlan) -> list[Param]:
    """The parameters that a call brings, in the order of the launcher's arguments."""
    called = _called(plan)
    return [p for p in called if not _argument(p).optional] + [p for p in called if _argument(p).optional]


def _step(op: Op, plan: KernelPlan) -> StepContext:
    name = plan.name.removeprefix(f"{op.name}_")
    summary, asked = STEPS[name]
    arguments = tuple(_argument(p) for p in _required_first(plan))
    cache = "Cache" if plan.all_layers else "LayerCache"
    return StepContext(name, name.upper(), summary, asked, _bind_signature(cache, arguments), arguments)


def _op(op: Op, plans: tuple[KernelPlan, ...], *, planned: bool) -> OpContext:
    plan, planner = plans[0], plans[1] if planned else None
    called = _called(plan)
    lines = [
        line.rstrip().replace("`", "") for line in inspect.cleandoc(op.description).splitlines()
    ]  # lists stay lists
    more = tuple(_text(line) for line in lines[1:] if line)
    arguments = tuple(_argument(p) for p in _required_first(plan))
    steps = () if planned else tuple(_step(op, p) for p in plans[1:])
    plan_arguments = tuple(_argument(p) for p in _required_first(planner)) if planner else ()
    return OpContext(
        name=op.name,
        title=op_title(op),
        planned=planned,
        summary=_text(lines[0]),
        doc=(*more, *(_describe(p) for p in called)),
        signature=_bind_signature(
            "Cache" if plan.all_layers else "LayerCache", arguments, *(s.name for s in steps if s.asked)
        ),
        arguments=arguments,
        written=tuple(_argument(p) for p in called if isinstance(p, Array) and p.access == "out"),
        plan_signature=_bind_signature("LayerCache | Cache", plan_arguments, rows=True),
        plan_arguments=plan_arguments,
        plan_reads_tables=planner.reads_tables if planner else True,
        steps=steps,
    )


def _cache_class(name: str, summary: str, cache: Cache) -> CacheClassContext:
    """The class of a cache of this spec."""
    lowered, tensors = lower(cache), values_first(cache)
    pools = tuple(pool_argument(cache, t) for t in tensors if t.holds_values)
    extras = tuple(pool_argument(cache, t) for t in tensors if not t.holds_values)
    views = tuple(_argument(p) for p in lowered.fields if isinstance(p, Array))
    tables = tuple(a.or_none for a in views)
    return CacheClassContext(
        name=name,
        states=False,
        summary=summary,
        doc=(
            f"lengths count the tokens {cache.lengths} this step; {lowered.allocation.sentence}.",
            *(a.doc for a in (*pools, *extras, *views)),
            f"{', '.join(a.name for a in views)}: None, all of them, for operations that read none.",
            "max_seq_length, max_cache_length: a request's most new tokens, and tokens in all; default: what the table holds.",
        ),
        signature=_signature(("self", *(a.typed for a in pools)), (*(a.typed for a in extras), *tables, *_LONGEST)),
        step_signature=_signature(("self", *tables), _LONGEST),
        tensor_names=", ".join(t.name for t in tensors),
        table_names=", ".join(a.name for a in views),
    )


def _states_class(summary: str, cache: AnyCache) -> CacheClassContext:
    """The class of a cache of states."""
    lowered, tensors = lower_pages(cache), cache.storage.tensors
    pools = tuple(pool_argument(cache, t) for t in tensors)
    views = tuple(_argument(p) for p in lowered.fields if isinstance(p, Array))
    tables = tuple(a.or_none for a in views)
    return CacheClassContext(
        name="Cache",
        states=True,
        summary=summary,
        doc=(
            f"A request has one state a layer; {lowered.allocation.sentence}.",
            *(a.doc for a in (*pools, *views)),
            f"{', '.join(a.name for a in views)}: None for operations that read none.",
        ),
        signature=_signature(("self", *(a.typed for a in pools)), tables),
        step_signature=_signature(("self", *tables), ()),
        tensor_names=", ".join(t.name for t in tensors),
        table_names=", ".join(a.name for a in views),
    )


def launcher_context(kernels: KernelSet, doc: str, plans: Mapping[str, tuple[KernelPlan, ...]]) -> LauncherContext:
    """The context of a set's `__init__.py`."""
    summary = "The cache's memory and page table: views only, checked once; index it by layer for the launchers."
    if kernels.cache.states:
        summary = (
            "The memory of states, and each request's: views only, checked once; index it by layer for the launchers."
        )
        caches = [_states_class(summary, kernels.cache)]
    else:
        caches = [_cache_class("Cache", summary, kernels.kv)]
    for op in kernels.ops:
        for class_name, cache in op.other_caches().items():
            caches.append(_cache_class(class_name, op.about_other(class_name), cache))
    paged = [t for t in values_first(kernels.cache) if "page" in t.axes] if takes_pages(plans) else []
    pages = [(pool_argument(kernels.cache, t), t.holds_values) for t in paged]
    ops = tuple(_op(op, plans[op.name], planned=plans[op.name][0].split is not None) for op in kernels.ops)
    return LauncherContext(
        set=kernels.name,
        doc=_text(doc).strip() or f"The kernels of {kernels.name}.",
        caches=tuple(caches),
        pointers=any("Sequence" in line for c in caches for line in c.signature),
        results=any(len(op.written) > 1 for op in ops),
        imports=_imports(plans.values()),
        page_docs=tuple(a.doc for a, _ in pages),
        page_signature=_signature(
            ("self", *(a.typed for a, of_values in pages if of_values)),
            (*(a.typed for a, of_values in pages if not of_values), "host: bool = False"),
        ),
        page_names=", ".join(t.name for t in paged),
        ops=ops,
    )

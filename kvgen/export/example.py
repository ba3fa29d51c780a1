"""The example of an exported set: every kernel launched once, on memory that is all zeros."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.export.docs import stride_of
from kvgen.export.pools import CacheContext
from kvgen.export.words import title
from kvgen.expr.nodes import Expr, const, var
from kvgen.expr.to_cpp import cpp
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower_pages
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Count, OtherCache, PagePool, Scalar, Size, TensorMap
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.kernel_set import KernelSet

# Extents of the example's batch and pool; what is not here is 4.
_EXTENTS = {"T": 2, "B": 2, "layers": 2, "pages": 8, "scale_pages": 8, "tokens": 64, "rows": 64}


@dataclass(frozen=True)
class Allocation:
    """A member that is an address: so many elements, as C++."""

    member: str
    element: str
    count: str


@dataclass(frozen=True)
class Setting:
    """A member that is a number, as C++; or that is member `value` of the struct `source`."""

    member: str
    value: str
    source: str = ""


@dataclass(frozen=True)
class Constant:
    """An extent of the example."""

    name: str
    value: int


@dataclass(frozen=True)
class CacheMemory:
    """The memory of a cache: `prefix` as in the header; `maker`: the function of the example that allocates it."""

    prefix: str
    name: str
    layered: bool
    tensors: tuple[Allocation, ...]
    extents: tuple[str, ...]
    tables: tuple[Allocation, ...]
    table_extents: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments; `workspace` is the operation whose workspace it takes, `max_tokens` whether that asks for them.

    `pages` are the members that are pages of all layers, `others` those that are layers of another cache.
    """

    name: str
    title: str
    workspace: str
    errors: bool
    allocations: tuple[Allocation, ...]
    settings: tuple[Setting, ...]
    pages: tuple[Setting, ...]
    others: tuple[Setting, ...]


@dataclass(frozen=True)
class Planned:
    """A workspace of the example."""

    name: str
    title: str
    max_tokens: bool


@dataclass(frozen=True)
class ExampleContext:
    """Everything export/example.cpp.j2 reads; `skipped` are kernels that zeros are no arguments for."""

    set: str
    constants: tuple[Constant, ...]
    caches: tuple[CacheMemory, ...]
    planned: tuple[Planned, ...]
    launches: tuple[Launch, ...]
    skipped: tuple[str, ...]
    moves_pages: bool


def example_context(
    kernels: KernelSet, plans: dict[str, tuple[KernelPlan, ...]], ops: tuple[str, ...], caches: tuple[CacheContext, ...]
) -> ExampleContext:
    """The example of the operations `ops` of a set. Planners come before what they plan."""
    chosen = [op for op in kernels.ops if op.name in ops]
    specs: dict[str, AnyCache] = {"Cache": kernels.cache} | {
        n: c for op in chosen for n, c in op.other_caches().items()
    }
    launches, skipped = [], []
    names = {str(n) for spec in specs.values() for n in _open(spec)}
    for op in chosen:
        split = plans[op.name][0].split
        for plan in reversed(plans[op.name]):
            if any(isinstance(p, TensorMap) for p in plan.params) or not all(c.fillings for c in caches):
                skipped.append(plan.name)
                continue
            launches.append(_launch(plan, op.name if split else ""))
            names |= {
                n.partition("+")[0] for p in plan.params if isinstance(p, Array) for n in p.shape if isinstance(n, str)
            }
    names = names - {"all_layers", "planned_rows"} | {"T", "B", "layers"}
    return ExampleContext(
        set=kernels.name,
        constants=tuple(Constant(n, _EXTENTS.get(n, 4)) for n in sorted(names - {"W"})),
        caches=tuple(_memory(specs[c.name], c) for c in caches if c.fillings),
        planned=tuple(
            Planned(op.name, title(op.name), bool(split.chunk_tokens))
            for op in chosen
            if (split := plans[op.name][0].split) is not None
        ),
        launches=tuple(launches),
        skipped=tuple(skipped),
        moves_pages=any(launch.pages for launch in launches),
    )


def _open(cache: AnyCache) -> set[str]:
    tables = [f for f in lower_pages(cache).fields if isinstance(f, Array)]
    shapes = [t.shape for t in cache.storage.tensors] + [t.shape for t in tables]
    return {n.partition("+")[0] for shape in shapes for n in shape if isinstance(n, str)}


def _count(shape: tuple[int | str, ...]) -> str:
    """Elements of an array."""
    whole: Expr = const(1)
    for n in shape:
        name, _, more = str(n).replace("all_layers", "layers").replace("planned_rows", "T").partition("+")
        whole = whole * (const(n) if isinstance(n, int) else var(name) + int(more or 0))
    return cpp(whole)


def _memory(cache: AnyCache, context: CacheContext) -> CacheMemory:
    filling = context.fillings[0]
    tensors = {t.name: t for t in cache.storage.tensors}
    arrays = {f.name: f for f in lower_pages(cache).fields if isinstance(f, Array)}
    return CacheMemory(
        prefix=context.prefix,
        name=context.name,
        layered=filling.layered,
        tensors=tuple(Allocation(t.name, t.element, _count(tensors[t.name].shape)) for t in filling.tensors),
        extents=tuple(e.name for e in filling.extents),
        tables=tuple(Allocation(m.name, m.element, _count(arrays[m.name].shape)) for m in filling.tables),
        table_extents=tuple(e.name for e in filling.table_extents),
    )


def _launch(plan: KernelPlan, planned: str) -> Launch:
    arrays = {p.name: p for p in plan.params if isinstance(p, Array)}
    settings = []
    for p in plan.params:
        if isinstance(p, Scalar | Count):
            settings.append(Setting(p.name, "0" if isinstance(p, Scalar) and p.most is not None else "1"))
        elif isinstance(p, Size) and p.value == "planned_rows":
            settings.append(Setting(p.name, "T"))
        elif isinstance(p, Size) and p.value.endswith("_tokens"):
            settings.append(Setting(p.name, "max_cache_length", p.value.removesuffix("_tokens")))
        elif isinstance(p, Size) and (stride := stride_of(p, tuple(arrays.values()))) is not None:
            axes = stride[0].shape[stride[1] + 1 :]
            if any(isinstance(n, str) for n in axes):
                settings.append(Setting(p.name, _count(axes)))
        elif isinstance(p, Size) and not (planned and p.value.startswith(("num_sm_parts", "max_"))):
            settings.append(Setting(p.name, _count(tuple(p.value.split("*")))))
    return Launch(
        name=plan.name,
        title=title(plan.name),
        workspace=planned if "workspace" in arrays else "",
        errors="errors" in arrays,
        allocations=tuple(
            Allocation(p.name, dtype(p.dtype).c, _count(p.shape))
            for p in arrays.values()
            if p.name not in ("errors", "workspace")
        ),
        settings=tuple(settings),
        pages=tuple(Setting(p.name, "other" if p.argument else "") for p in plan.params if isinstance(p, PagePool)),
        others=tuple(Setting(p.name, p.cache) for p in plan.params if isinstance(p, OtherCache)),
    )

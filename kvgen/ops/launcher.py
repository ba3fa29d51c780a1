"""The Python side of a set: the context of the generated package's `__init__.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvgen.dtypes import dtype
from kvgen.expr import Expr, python, variables
from kvgen.layout import Region
from kvgen.ops.cache import cache_fields, role_regions, roles
from kvgen.plan import KernelPlan, Param
from kvgen.runtime.abi import ABI
from kvgen.spec.cache import Cache, Paged
from kvgen.spec.kernel_set import KernelSet, Op


@dataclass(frozen=True)
class ArgumentContext:
    """One argument of a launcher's signature."""

    name: str
    optional: bool
    doc: str
    type: str = "object"


@dataclass(frozen=True)
class OpContext:
    """One operation in the generated module: signature, docstring and kernel tables, as Python text."""

    name: str
    title: str
    summary: str
    doc: tuple[str, ...]
    arguments: tuple[ArgumentContext, ...]
    params: tuple[str, ...]
    grid: str
    entry: str
    threads: int
    shared: int
    writes: bool
    plan_entry: str
    plan_params: tuple[str, ...]
    plan_threads: int
    fixed_bytes: int
    row_bytes: int


@dataclass(frozen=True)
class LauncherContext:
    """Everything launcher/init.py.j2 reads."""

    set: str
    doc: str
    abi: int
    arch: str
    tensors: tuple[str, ...]
    pools: tuple[ArgumentContext, ...]
    tables: tuple[ArgumentContext, ...]
    fields: tuple[str, ...]
    pointers: bool
    page_tokens: str
    cache_doc: tuple[str, ...]
    workspaces: bool
    ops: tuple[OpContext, ...]


def _tuple(items: tuple[object, ...]) -> str:
    inner = ", ".join(f'"{i}"' if isinstance(i, str) else repr(i) for i in items)
    return f"({inner},)" if len(items) == 1 else f"({inner})"


def _param(p: Param) -> str:
    if p.shape is None:
        return f'Scalar("{p.name}", "{p.dtype.name}", "{p.value}")'
    if p.shape == ("pool",):
        return f'Pool("{p.name}")'
    words = [f'"{p.name}"', f'"{p.dtype.name}"', _tuple(p.shape)]
    if p.access != "in":
        words.append(f'access="{p.access}"')
    if p.align > p.dtype.bytes:
        words.append(f"align={p.align}")
    words += [f"{flag}=True" for flag in ("strided", "optional") if getattr(p, flag)]
    if p.field:
        words.append(f'field="{p.field}"')
    if p.fields:
        words.append(f"fields={_tuple(p.fields)}")
    return f"Array({', '.join(words)})"


def _describe(p: Param) -> str:
    assert p.shape is not None
    shape = ", ".join("B + 1" if s == "B+1" else str(s) for s in p.shape)
    notes = [f"{p.dtype.name}[{shape}]"]
    if p.strided:
        notes.append("rows may be strided")
    if p.access != "in":
        notes.append("written" if p.access == "out" else "updated")
    if p.optional:
        notes.append("optional")
    return f"{p.name}: {', '.join(notes)}: {p.doc}."


def _grid(grid: tuple[Expr, Expr, Expr]) -> str:
    texts = []
    for part in grid:
        text = python(part)
        for name in sorted(variables(part), key=len, reverse=True):
            text = re.sub(rf"\b{name}\b", f'd["{name}"]', text)
        texts.append(text)
    return f"({', '.join(texts)})"


def _argument(p: Param) -> ArgumentContext:
    return ArgumentContext(p.name, p.optional, _describe(p), "Workspace" if p.name == "workspace" else "object")


def _op(op: Op, kernels: KernelSet, plans: tuple[KernelPlan, ...]) -> OpContext:
    plan, planner = plans[0], plans[1] if len(plans) > 1 else None
    fixed, per_row = op.workspace_bytes(kernels)
    called = tuple(p for p in plan.params if p.shape is not None)
    lines = [line.strip() for line in (type(op).__doc__ or "").strip().splitlines()]
    return OpContext(
        name=op.name,
        title="".join(part.title() for part in op.name.split("_")),
        summary=lines[0].replace("`", ""),
        doc=tuple(_describe(p) for p in called),
        arguments=tuple(_argument(p) for p in sorted(called, key=lambda p: p.optional)),
        params=tuple(_param(p) for p in plan.params),
        grid=_grid(plan.grid),
        entry=plan.entry,
        threads=plan.threads,
        shared=plan.shared,
        writes=plan.writes_pool,
        plan_entry=planner.entry if planner else "",
        plan_params=tuple(_param(p) for p in planner.params) if planner else (),
        plan_threads=planner.threads if planner else 0,
        fixed_bytes=fixed,
        row_bytes=per_row,
    )


def _tensor(cache: Cache, name: str, region: Region, vector: int) -> str:
    names, elem = [n for n, _ in role_regions(cache)], dtype(cache.dtype)
    held = tuple(names) if name == "pool" else (name[0],)
    axes = tuple(a.name for a in region.axes)
    behind = {
        "token": "page_size" if isinstance(cache, Paged) else "max_tokens",
        "head": "kv_heads",
        "dim": "v_head_dim" if name == "v_pool" and cache.v_head_dim else "head_dim",
    }
    return (
        f'Tensor("{name}", "{cache.dtype}", {_tuple(held)}, axes={_tuple(axes)}, shape={_tuple(region.shape)}, '
        f"strides={_tuple(region.fixed_strides)}, align={vector * elem.bytes}, "
        f"fields={_tuple(tuple(behind.get(a) for a in axes))})"
    )


def launcher_context(kernels: KernelSet, doc: str, plans: dict[str, tuple[KernelPlan, ...]]) -> LauncherContext:
    """The context of a set's `__init__.py`."""
    cache = kernels.cache
    names = ["pool"] if len(cache.regions) == 1 else ["k_pool", "v_pool"]
    vectors = {r.name: r.vector for r in roles(cache)}
    fields = cache_fields(cache)
    tables = tuple(p for p in fields if p.shape is not None and p.shape != ("pool",))
    pointers = cache.layout.layers == "pointers"
    pool_docs = []
    for name, region in zip(names, cache.regions, strict=True):
        shape = ", ".join(str(s) for s in region.shape)
        each = "one per layer, each " if pointers else ""
        pool_docs.append(ArgumentContext(name, False, f"{name}: {each}{cache.dtype}[{shape}] ({region.text})."))
    return LauncherContext(
        set=kernels.name,
        doc=doc.replace("\\", "\\\\").replace('"""', "'''").strip() or f"The kernels of {kernels.name}.",
        abi=ABI,
        arch=_tuple(kernels.arch),
        tensors=tuple(
            _tensor(cache, n, r, vectors["k"] if n != "v_pool" else vectors["v"])
            for n, r in zip(names, cache.regions, strict=True)
        ),
        pools=tuple(pool_docs),
        tables=tuple(_argument(p) for p in tables),
        fields=tuple(_param(p) for p in fields),
        pointers=pointers,
        page_tokens=repr(cache.page_tokens),
        cache_doc=(
            f"lengths count the tokens {cache.lengths} this step; "
            + (f"pages hold {cache.page_size} tokens." if isinstance(cache, Paged) else "a block holds a request."),
        ),
        workspaces=any(len(p) > 1 for p in plans.values()),
        ops=tuple(_op(op, kernels, plans[op.name]) for op in kernels.ops),
    )

"""The Python side of a set: the context of the generated package's `__init__.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Final

from kvgen.expr.nodes import Expr, variables
from kvgen.expr.to_python import python
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower, lower_pages
from kvgen.lowering.module_tensors import (
    ArgumentContext,
    pool_argument,
    role_text,
    state_tensor_text,
    tensor_text,
    tuple_text,
)
from kvgen.lowering.page_runs import STEPS
from kvgen.lowering.state_rows import state_bytes
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
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.version import ABI


@dataclass(frozen=True)
class StepContext:
    """A kernel that an operation launches before its own: a method of the launcher; `asked`: `<name>=True` launches it."""

    name: str
    title: str
    summary: str
    asked: bool
    arguments: tuple[ArgumentContext, ...]
    file: str
    entry: str
    params: tuple[str, ...]
    grid: str
    threads: int
    all_layers: bool
    reads_tables: bool


@dataclass(frozen=True)
class OpContext:
    """One operation in the generated module: signature, docstring and kernel tables, as Python text."""

    name: str
    title: str
    base: str
    summary: str
    doc: tuple[str, ...]
    arguments: tuple[ArgumentContext, ...]
    params: tuple[str, ...]
    grid: str
    entry: str
    threads: int
    shared: int
    writes: bool
    all_layers: bool
    reads_tables: bool
    written: tuple[ArgumentContext, ...]
    plan_entry: str
    plan_params: tuple[str, ...]
    plan_arguments: tuple[ArgumentContext, ...]
    plan_threads: int
    plan_reads_tables: bool
    steps: tuple[StepContext, ...]
    split_plan: str
    split_plans: tuple[tuple[str, str], ...]
    decode_rows: int
    shared_by_arch: str
    threads_by_arch: str
    grid_by_arch: tuple[tuple[str, str], ...]
    blocks_by_arch: str
    files: str
    plan_files: str


@dataclass(frozen=True)
class CacheClassContext:
    """A subclass of BaseCache in the generated module: the set's own, or one that a call brings besides.

    `state_bytes`: of a cache of states, a subclass of BaseState, which has no heads and lengths; else 0.
    """

    name: str
    base: str
    state_bytes: int
    summary: str
    module: str
    tensors: tuple[str, ...]
    roles: tuple[str, ...]
    kind: str
    heads: int
    page_size: int
    positional: tuple[ArgumentContext, ...]
    keywords: tuple[ArgumentContext, ...]
    tables: tuple[ArgumentContext, ...]
    tensor_names: str
    table_names: str
    fields: tuple[str, ...]
    page_tokens: str
    rate: int
    window: int
    doc: tuple[str, ...]


@dataclass(frozen=True)
class LauncherContext:
    """Everything launcher/init.py.j2 reads."""

    set: str
    doc: str
    abi: int
    arch: str
    caches: tuple[CacheClassContext, ...]
    pointers: bool
    results: bool
    imports: str
    page_pools: tuple[ArgumentContext, ...]
    page_scales: tuple[ArgumentContext, ...]
    page_names: str
    ops: tuple[OpContext, ...]


_IMPORTS: Final = (
    "Array", "ArrayLike", "Bound", "Kernel", "LayerCache", "Module", "Pool", "Size", "Tensor", "at_once",
)  # fmt: skip
_IMPORTS_OF: Final = {"BaseCache": ("BaseCache", "Role", "RoleStrides"), "BaseState": ("BaseState",)}


def _imports(
    plans: Iterable[tuple[KernelPlan, ...]], ops: Iterable[OpContext], caches: Iterable[CacheClassContext]
) -> str:
    """What the module takes from kvgen.runtime."""
    params = [p for group in plans for plan in group for p in plan.params]
    found = {*_IMPORTS, *(type(p).__name__ for p in params), *(op.base for op in ops)}
    found |= {name for c in caches for name in _IMPORTS_OF[c.base]}
    if any(p.name == "workspace" for p in params):
        found |= {"SplitPlan", "Workspace"}
    if any(isinstance(p, PagePool) and p.argument for p in params):
        found.add("BasePages")
    names = sorted(found)
    line = ", ".join(names)
    return line if len(line) <= 80 else "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def _text(doc: str) -> str:
    """`doc` as part of a docstring."""
    return doc.replace("\\", "\\\\").replace('"""', "'''")


def _param(p: Param | Field) -> str:
    """A parameter as Python: its name, then what is not the default; docstrings and plans alone have the rest."""
    if isinstance(p, OtherCache):
        more = (f", window={p.window}" if p.window else "") + ("" if p.tables else ", tables=False")
        return f'OtherCache("{p.name}", {p.cache}{more})'
    if isinstance(p, Pool):
        return f'Pool("{p.name}")'
    words = []
    for f in fields(p):
        value = getattr(p, f.name)
        if f.name in ("doc", "untrusted", "c_name") or (f.default is not MISSING and value == f.default):
            continue
        if isinstance(p, Array) and f.name == "align" and p.align <= dtype(p.dtype).bytes:
            continue  # an element's own
        text = _python(value)
        words.append(text if f.default is MISSING else f"{f.name}={text}")
    return f"{type(p).__name__}({', '.join(words)})"


def _python(value: object) -> str:
    """A field's value, as Python."""
    if isinstance(value, tuple):
        inner = ", ".join(_python(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


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


def _mapping(values: Mapping[str, object]) -> str:
    """A dict by architecture, as Python; "" for an empty one."""
    return repr(values).replace("'", '"') if values else ""


def _grid(grid: tuple[Expr, Expr, Expr]) -> str:
    texts = []
    for part in grid:
        names = variables(part)
        # In one pass: a size may be called d.
        texts.append(re.sub(r"[A-Za-z_]\w*", lambda m: f'd["{m[0]}"]' if m[0] in names else m[0], python(part)))  # noqa: B023
    return f"({', '.join(texts)})"


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


def _title(op: Op) -> str:
    """The beginning of an operation's class names."""
    return "".join(part.title() for part in op.name.split("_"))


def _called(plan: KernelPlan) -> tuple[Param, ...]:
    """What the call brings."""
    return tuple(p for p in plan.params if is_argument(p))


def _required_first(plan: KernelPlan) -> list[Param]:
    """What the call brings, in the order of the launcher's arguments."""
    called = _called(plan)
    return [p for p in called if not _argument(p).optional] + [p for p in called if _argument(p).optional]


def _step(op: Op, plan: KernelPlan) -> StepContext:
    name = plan.name.removeprefix(f"{op.name}_")
    summary, asked = STEPS[name]
    return StepContext(
        name=name,
        title=name.upper(),
        summary=summary,
        asked=asked,
        arguments=tuple(_argument(p) for p in _required_first(plan)),
        file=plan.name,
        entry=plan.entry,
        params=tuple(_param(p) for p in plan.params),
        grid=_grid(plan.grid),
        threads=plan.threads,
        all_layers=plan.all_layers,
        reads_tables=plan.reads_tables,
    )


def _op(op: Op, kernels: KernelSet, plans: tuple[KernelPlan, ...]) -> OpContext:
    plan = plans[0]
    planner = plans[1] if plan.split else None
    called = _called(plan)
    lines = [
        line.rstrip().replace("`", "") for line in inspect.cleandoc(op.description).splitlines()
    ]  # lists stay lists
    more = tuple(_text(line) for line in lines[1:] if line)
    return OpContext(
        name=op.name,
        title=_title(op),
        base="PlannedLauncher" if planner else "Launcher",
        summary=_text(lines[0]),
        doc=(*more, *(_describe(p) for p in called)),
        arguments=tuple(_argument(p) for p in _required_first(plan)),
        params=tuple(_param(p) for p in plan.params),
        grid=_grid(plan.grid),
        entry=plan.entry,
        threads=plan.threads,
        shared=plan.shared,
        writes=plan.writes_pool,
        all_layers=plan.all_layers,
        reads_tables=plan.reads_tables,
        written=tuple(_argument(p) for p in called if isinstance(p, Array) and p.access == "out"),
        plan_entry=planner.entry if planner else "",
        plan_params=tuple(_param(p) for p in planner.params) if planner else (),
        plan_arguments=tuple(_argument(p) for p in _required_first(planner) if p.name != "workspace")
        if planner
        else (),
        plan_threads=planner.threads if planner else 0,
        plan_reads_tables=planner.reads_tables if planner else True,
        steps=() if planner else tuple(_step(op, p) for p in plans[1:]),
        split_plan=_split_plan_text(plan.split) if plan.split else "",
        split_plans=tuple((a, _split_plan_text(s)) for a, s in plan.differing("split").items()),
        decode_rows=op.decode_rows(kernels),
        shared_by_arch=_mapping(plan.differing("shared")),
        threads_by_arch=_mapping(plan.differing("threads")),
        grid_by_arch=tuple((a, _grid(grid)) for a, grid in plan.differing("grid").items()),
        blocks_by_arch=_mapping({a: n for a in kernels.arch if (n := plan.on(a).most_blocks)}),
        files=_mapping({a: f"{name}.cu" for a, name in plan.differing("name").items()}),
        plan_files=_mapping({a: f"{name}.cu" for a, name in planner.differing("name").items()}) if planner else "",
    )


def _split_plan_text(split_plan: SplitPlan) -> str:
    """Its fields, but what is as without tiles of rows."""
    usual = {"slots_a_part": 0, "tiles_a_row": 1}
    return ", ".join(f"{n}={v}" for n, v in asdict(split_plan).items() if usual.get(n) != v)


def _cache_class(name: str, summary: str, module: str, cache: Cache) -> CacheClassContext:
    """The class of a cache of this spec."""
    lowered = lower(cache)
    kind, struct = lowered.kind, lowered.fields
    tables = tuple(p for p in struct if isinstance(p, Array))
    tensors = sorted(cache.storage.tensors, key=lambda t: not t.holds_values)
    pools = tuple(pool_argument(cache, t) for t in tensors if t.holds_values)
    extras = tuple(pool_argument(cache, t) for t in tensors if not t.holds_values)
    views = tuple(_argument(p) for p in tables)
    return CacheClassContext(
        name=name,
        base="BaseCache",
        state_bytes=0,
        summary=summary,
        module=module,
        tensors=tuple(tensor_text(cache, t) for t in tensors),
        roles=tuple(role_text(cache, name, parts) for name, parts in cache.storage.roles.items()),
        kind=kind.name,
        heads=cache.kv_heads,
        page_size=kind.page_size,
        positional=pools,
        keywords=extras,
        tables=views,
        tensor_names=", ".join(t.name for t in tensors),
        table_names=", ".join(t.name for t in tables),
        fields=tuple(_param(p) for p in struct),
        page_tokens=repr(cache.page_tokens),
        rate=cache.entry_tokens,
        window=lowered.table.window,
        doc=(
            f"lengths count the tokens {cache.lengths} this step; {kind.sentence}.",
            *(a.doc for a in (*pools, *extras, *views)),
            f"{', '.join(a.name for a in views)}: None, all of them, for operations that read none.",
            "max_seq_length, max_cache_length: a request's most new tokens, and tokens in all; default: what the table holds.",
        ),
    )


def _states_class(summary: str, cache: AnyCache) -> CacheClassContext:
    """The class of a cache of states."""
    lowered, tensors = lower_pages(cache), cache.storage.tensors
    pools = tuple(pool_argument(cache, t) for t in tensors)
    tables = tuple(p for p in lowered.fields if isinstance(p, Array))
    views = tuple(_argument(p) for p in tables)
    return CacheClassContext(
        name="Cache",
        base="BaseState",
        state_bytes=state_bytes(cache),
        summary=summary,
        module="_MODULE",
        tensors=tuple(state_tensor_text(cache, t) for t in tensors),
        roles=(),
        kind=lowered.kind.name,
        heads=0,
        page_size=0,
        positional=pools,
        keywords=(),
        tables=views,
        tensor_names=", ".join(t.name for t in tensors),
        table_names=", ".join(t.name for t in tables),
        fields=tuple(_param(p) for p in lowered.fields),
        page_tokens=repr(cache.page_tokens),
        rate=1,
        window=0,
        doc=(
            f"A request has one state a layer; {lowered.kind.sentence}.",
            *(a.doc for a in (*pools, *views)),
            f"{', '.join(a.name for a in views)}: None for operations that read none.",
        ),
    )


def launcher_context(kernels: KernelSet, doc: str, plans: dict[str, tuple[KernelPlan, ...]]) -> LauncherContext:
    """The context of a set's `__init__.py`."""
    summary = "The cache's memory and page table: views only, checked once; index it by layer for the launchers."
    if kernels.cache.states:
        summary = (
            "The memory of states, and each request's: views only, checked once; index it by layer for the launchers."
        )
        caches = [_states_class(summary, kernels.cache)]
    else:
        caches = [_cache_class("Cache", summary, "_MODULE", kernels.kv)]
    for op in kernels.ops:
        for class_name, cache in op.other_caches().items():
            summary = op.about_other(class_name)
            module = f'Module("{kernels.name}.{class_name}", __file__, arch={tuple_text(kernels.arch)}, abi={ABI})'
            caches.append(_cache_class(class_name, summary, module, cache))
    swaps = any(
        isinstance(p, PagePool) and p.argument for group in plans.values() for plan in group for p in plan.params
    )
    tensors = sorted(kernels.cache.storage.tensors, key=lambda t: not t.holds_values)
    paged = [t for t in tensors if "page" in t.axes] if swaps else []
    ops = tuple(_op(op, kernels, plans[op.name]) for op in kernels.ops)
    return LauncherContext(
        set=kernels.name,
        doc=_text(doc).strip() or f"The kernels of {kernels.name}.",
        abi=ABI,
        arch=tuple_text(kernels.arch),
        caches=tuple(caches),
        pointers=kernels.cache.layers == "pointers" or any("Sequence" in a.type for c in caches for a in c.positional),
        results=any(len(op.written) > 1 for op in ops),
        imports=_imports(plans.values(), ops, caches),
        page_pools=tuple(pool_argument(kernels.cache, t) for t in paged if t.holds_values),
        page_scales=tuple(pool_argument(kernels.cache, t) for t in paged if not t.holds_values),
        page_names=", ".join(t.name for t in paged),
        ops=ops,
    )

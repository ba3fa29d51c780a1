"""Machine data of a set's launchers: the context of the generated package's `_table.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Final

from kvgen.expr.nodes import Expr, variables
from kvgen.expr.to_python import python
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower, lower_pages
from kvgen.lowering.module_tensors import filled, role_text, state_tensor_text, tensor_text, tuple_text, values_first
from kvgen.lowering.state_rows import state_bytes
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Field, OtherCache, PagePool, Param, Pool
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.version import ABI

PARAMETERS_INDENT: Final = 12  # columns before a parameter of a kernel in `_table.py`
FIELDS_INDENT: Final = 8  # columns before a field of a cache's struct
# What kvgen.runtime.params has under these names.
_NAMED: Final = {
    'rt.Array("errors", "u64", (1,), access="inout", optional=True)': "rt.ERRORS",
    'rt.Size("num_rows", "u32", "T")': "rt.NUM_ROWS",
    'rt.Array("row_offsets", "i32", ("B+1",), field="index_dtype")': "rt.ROW_OFFSETS",
    'rt.Array("workspace", "u8", ("W",), access="inout", align=16)': "rt.WORKSPACE",
}
_SPLIT_SIZES: Final = tuple(
    f'rt.Size("{name}", "u32", "{name}")' for name in ("num_sm_parts", "max_rows", "max_chunks", "max_slots")
)


@dataclass(frozen=True)
class KernelTable:
    """One kernel of a launcher, the attribute `attribute` of its class; mappings by architecture are "" where all are equal."""

    attribute: str
    file: str
    entry: str
    params: tuple[str, ...]
    grid: str
    threads: int
    shared: int
    writes: bool
    all_layers: bool
    reads_tables: bool
    shared_by_arch: str
    threads_by_arch: str
    grid_by_arch: tuple[tuple[str, str], ...]
    blocks_by_arch: str
    files: str


@dataclass(frozen=True)
class LauncherTable:
    """The base class of one launcher, which has its kernels; `split_plan` is "" where no planner divides the work."""

    name: str
    base: str
    kernels: tuple[KernelTable, ...]
    split_plan: str
    split_plans: tuple[tuple[str, str], ...]
    decode_rows: int


@dataclass(frozen=True)
class CacheTable:
    """The base class of one cache, which has its tensors and the struct that kernels take.

    `state_bytes`: of a cache of states, a subclass of BaseState, which has no heads and lengths; else 0.
    """

    name: str
    base: str
    module: str
    state_bytes: int
    kind: str
    heads: int
    page_size: int
    page_tokens: str
    rate: int
    window: int
    tensors: tuple[str, ...]
    roles: tuple[str, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class TableContext:
    """Everything launcher/table.py.j2 reads."""

    set: str
    abi: int
    arch: str
    caches: tuple[CacheTable, ...]
    pages: bool
    launchers: tuple[LauncherTable, ...]


def op_title(op: Op) -> str:
    """The beginning of an operation's class names."""
    return "".join(part.title() for part in op.name.split("_"))


def takes_pages(plans: Mapping[str, tuple[KernelPlan, ...]]) -> bool:
    """True where a call brings pages of memory beside the cache: the package then has a class `Pages`."""
    return any(
        isinstance(p, PagePool) and p.argument for group in plans.values() for plan in group for p in plan.params
    )


def _param(p: Param | Field) -> str:
    """A parameter as Python: its name, then what is not the default; docstrings and plans alone have the rest."""
    if isinstance(p, OtherCache):
        more = (f", window={p.window}" if p.window else "") + ("" if p.tables else ", tables=False")
        return f'rt.OtherCache("{p.name}", {p.cache}{more})'
    if isinstance(p, Pool):
        return f'rt.Pool("{p.name}")'
    words = []
    for f in fields(p):
        value = getattr(p, f.name)
        if f.name in ("doc", "untrusted", "c_name") or (f.default is not MISSING and value == f.default):
            continue
        if isinstance(p, Array) and f.name == "align" and p.align <= dtype(p.dtype).bytes:
            continue  # an element's own
        text = _python(value)
        words.append(text if f.default is MISSING else f"{f.name}={text}")
    return f"rt.{type(p).__name__}({', '.join(words)})"


def _params(params: Iterable[Param | Field]) -> Iterator[str]:
    """Parameters as Python; those that kvgen.runtime.params names by their names."""
    texts = [_param(p) for p in params]
    while texts:
        if tuple(texts[: len(_SPLIT_SIZES)]) == _SPLIT_SIZES:
            yield "*rt.SPLIT_SIZES"
            del texts[: len(_SPLIT_SIZES)]
        else:
            text = texts.pop(0)
            yield _NAMED.get(text, text)


def _python(value: object) -> str:
    """A field's value, as Python."""
    if isinstance(value, tuple):
        inner = ", ".join(_python(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


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


def _split_plan_text(split_plan: SplitPlan) -> str:
    """Its fields, but what is as without tiles of rows."""
    usual = {"slots_a_part": 0, "tiles_a_row": 1}
    return ", ".join(f"{n}={v}" for n, v in asdict(split_plan).items() if usual.get(n) != v)


def _kernel(attribute: str, plan: KernelPlan, archs: Sequence[str]) -> KernelTable:
    return KernelTable(
        attribute=attribute,
        file=plan.name,
        entry=plan.entry,
        params=filled(_params(plan.params), PARAMETERS_INDENT),
        grid=_grid(plan.grid),
        threads=plan.threads,
        shared=plan.shared,
        writes=plan.writes_pool,
        all_layers=plan.all_layers,
        reads_tables=plan.reads_tables,
        shared_by_arch=_mapping(plan.differing("shared")),
        threads_by_arch=_mapping(plan.differing("threads")),
        grid_by_arch=tuple((arch, _grid(grid)) for arch, grid in plan.differing("grid").items()),
        blocks_by_arch=_mapping({arch: most for arch in archs if (most := plan.on(arch).most_blocks)}),
        files=_mapping({arch: f"{name}.cu" for arch, name in plan.differing("name").items()}),
    )


def _launcher(op: Op, kernels: KernelSet, plans: tuple[KernelPlan, ...]) -> LauncherTable:
    own, *others = plans
    split_plan = own.split
    attributes = ["PLAN"] if split_plan else [plan.name.removeprefix(f"{op.name}_").upper() for plan in others]
    return LauncherTable(
        name=f"{op_title(op)}Launcher",
        base="PlannedLauncher" if split_plan else "Launcher",
        kernels=tuple(_kernel(a, p, kernels.arch) for a, p in zip(("KERNEL", *attributes), plans, strict=True)),
        split_plan=_split_plan_text(split_plan) if split_plan else "",
        split_plans=tuple((arch, _split_plan_text(split)) for arch, split in own.differing("split").items()),
        decode_rows=op.decode_rows(kernels),
    )


def _cache(name: str, module: str, cache: Cache) -> CacheTable:
    """The base class of a cache of this spec."""
    lowered = lower(cache)
    return CacheTable(
        name=name,
        base="BaseCache",
        module=module,
        state_bytes=0,
        kind=lowered.allocation.name,
        heads=cache.kv_heads,
        page_size=lowered.allocation.page_size,
        page_tokens=repr(cache.page_tokens),
        rate=cache.entry_tokens,
        window=lowered.table.window,
        tensors=tuple(tensor_text(cache, t) for t in values_first(cache)),
        roles=tuple(role_text(cache, role, parts) for role, parts in cache.storage.roles.items()),
        fields=filled((_param(p) for p in lowered.fields), FIELDS_INDENT),
    )


def _states(cache: AnyCache) -> CacheTable:
    """The base class of a cache of states."""
    lowered = lower_pages(cache)
    return CacheTable(
        name="Cache",
        base="BaseState",
        module="MODULE",
        state_bytes=state_bytes(cache),
        kind=lowered.allocation.name,
        heads=0,
        page_size=0,
        page_tokens=repr(cache.page_tokens),
        rate=1,
        window=0,
        tensors=tuple(state_tensor_text(cache, t) for t in cache.storage.tensors),
        roles=(),
        fields=filled((_param(p) for p in lowered.fields), FIELDS_INDENT),
    )


def table_context(kernels: KernelSet, plans: Mapping[str, tuple[KernelPlan, ...]]) -> TableContext:
    """The context of a set's `_table.py`."""
    arch = tuple_text(kernels.arch)
    caches = [_states(kernels.cache) if kernels.cache.states else _cache("Cache", "MODULE", kernels.kv)]
    for op in kernels.ops:
        for name, cache in op.other_caches().items():
            module = f'rt.Module("{kernels.name}.{name}", __file__, arch={arch}, abi={ABI})'
            caches.append(_cache(name, module, cache))
    return TableContext(
        set=kernels.name,
        abi=ABI,
        arch=arch,
        caches=tuple(caches),
        pages=takes_pages(plans),
        launchers=tuple(_launcher(op, kernels, plans[op.name]) for op in kernels.ops),
    )

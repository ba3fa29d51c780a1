"""The Python side of a set: the context of the generated package's `__init__.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from kvgen.expr import Expr, python, variables
from kvgen.layout import Region
from kvgen.ops.cache import cache_fields, row_of
from kvgen.plan import KernelPlan, Param
from kvgen.runtime.abi import ABI
from kvgen.spec.cache import Cache, Paged
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.storage import Base, PoolTensor, Segment
from kvgen.spec.table import Ring


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
    whole: bool
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
    roles: tuple[str, ...]
    kind: str
    heads: int
    page_size: int
    positional: tuple[ArgumentContext, ...]
    keywords: tuple[ArgumentContext, ...]
    tensor_names: str
    table_names: str
    fields: tuple[str, ...]
    pointers: bool
    page_tokens: str
    window: int
    cache_doc: tuple[str, ...]
    imports: str
    ops: tuple[OpContext, ...]


def _tuple(items: tuple[object, ...]) -> str:
    inner = ", ".join(f'"{i}"' if isinstance(i, str) else repr(i) for i in items)
    return f"({inner},)" if len(items) == 1 else f"({inner})"


_IMPORTS: Final = (
    "Array", "BaseCache", "Bound", "Kernel", "Launcher", "LayerCache", "Module", "Places", "Pool", "Role", "Scalar", "Tensor"
)  # fmt: skip


_BROUGHT: Final = {"scalar": "Number", "count": "Count", "tensor_map": "TensorMap"}


def _imports(plans: Iterable[tuple[KernelPlan, ...]]) -> str:
    """What the module takes from kvgen.runtime."""
    found = set(_IMPORTS)
    for group in plans:
        brought = {p.brought for plan in group for p in plan.params}
        found |= {"Workspace"} if len(group) > 1 else set()
        found |= {name for kind, name in _BROUGHT.items() if kind in brought}
    names = sorted(found)
    line = ", ".join(names)
    return line if len(line) <= 80 else "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def _text(doc: str) -> str:
    """`doc` as part of a docstring."""
    return doc.replace("\\", "\\\\").replace('"""', "'''")


def _param(p: Param) -> str:
    if p.brought:
        kind = f', "{p.dtype.name}"' if p.brought == "scalar" else ""
        return f'{_BROUGHT[p.brought]}("{p.name}"{kind})'
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
    doc = f": {_text(p.doc).removesuffix('.')}." if p.doc else "."
    if p.shape is None:
        what = {"tensor_map": "tensor map, 128 bytes", "count": "an int, or a host array of one"}
        return f"{p.name}: {what.get(p.brought, p.dtype.name)}{doc}"
    shape = ", ".join("B + 1" if s == "B+1" else str(s) for s in p.shape)
    notes = [f"{p.dtype.name}[{shape}]"]
    if p.strided:
        notes.append("rows may be strided")
    if p.access != "in":
        notes.append("written" if p.access == "out" else "updated")
    if p.optional:
        notes.append("optional")
    return f"{p.name}: {', '.join(notes)}{doc}"


def _grid(grid: tuple[Expr, Expr, Expr]) -> str:
    texts = []
    for part in grid:
        names = variables(part)
        # In one pass: a size may be called d.
        texts.append(re.sub(r"[A-Za-z_]\w*", lambda m: f'd["{m[0]}"]' if m[0] in names else m[0], python(part)))  # noqa: B023
    return f"({', '.join(texts)})"


def _argument(p: Param) -> ArgumentContext:
    kind = "Workspace" if p.name == "workspace" else "object"
    if p.brought == "scalar":
        kind = "float" if p.dtype.name == "f32" else "int"
    return ArgumentContext(p.name, p.optional, _describe(p), kind)


def _op(op: Op, kernels: KernelSet, plans: tuple[KernelPlan, ...]) -> OpContext:
    plan, planner = plans[0], plans[1] if len(plans) > 1 else None
    fixed, per_row = op.workspace_bytes(kernels)
    called = tuple(p for p in plan.params if p.shape is not None or p.brought)
    lines = [line.strip().replace("`", "") for line in op.description.strip().splitlines()]
    more = () if plan.source is None else tuple(_text(line) for line in lines[1:] if line)
    return OpContext(
        name=op.name,
        title="".join(part.title() for part in op.name.split("_")),
        summary=_text(lines[0]),
        doc=(*more, *(_describe(p) for p in called)),
        arguments=tuple(_argument(p) for p in sorted(called, key=lambda p: p.optional)),
        params=tuple(_param(p) for p in plan.params),
        grid=_grid(plan.grid),
        entry=plan.entry,
        threads=plan.threads,
        shared=plan.shared,
        writes=plan.writes_pool,
        whole=plan.whole,
        plan_entry=planner.entry if planner else "",
        plan_params=tuple(_param(p) for p in planner.params) if planner else (),
        plan_threads=planner.threads if planner else 0,
        fixed_bytes=fixed,
        row_bytes=per_row,
    )


def _behind(cache: Cache, tensor: PoolTensor) -> tuple[str, tuple[str | None, ...]]:
    """The spec fields behind a tensor's dtype and behind its axes, as the spec names them."""
    role: Literal["k", "v"] = "v" if tensor.name.startswith("v_") else "k"
    quant = cache.quants[role]
    name = "quant" if cache.quant is not None else f"{role}_quant"
    fields = tuple(
        name + f.removeprefix("quant") if f is not None and f.startswith("quant") else f for f in tensor.fields
    )
    if quant is None or tensor.name in ("rope_pool", "k_tail"):
        return "dtype", fields
    if tensor.holds_values:
        last = f"half of {fields[-1]}" if quant.codes.packed and fields[-1] is not None else fields[-1]
        return f"{name}.dtype", (*fields[:-1], last)
    return f"{name}.{'recipe' if tensor.name.endswith('global_scale') else 'scale_dtype'}", fields


def _tensor(cache: Cache, tensor: PoolTensor) -> str:
    bases = [b for b in cache.storage.bases if b.tensor == tensor.name]
    held = tuple(b.name for b in bases) or (tensor.name,)
    kinds = f'"{tensor.dtypes[0]}"' if len(tensor.dtypes) == 1 else _tuple(tensor.dtypes)
    field, fields = _behind(cache, tensor)
    named = f', field="{field}"' if field != "dtype" else ""
    writes = ", writes=False" if tensor.given else ""
    own = ", own_table=True" if any(b.table == "scales" for b in bases) else ""
    return (
        f'Tensor("{tensor.name}", {kinds}, {_tuple(held)}, axes={_tuple(tensor.axes)}, shape={_tuple(tensor.shape)}, '
        f"strides={_tuple(tensor.strides)}, align={tensor.align}, fields={_tuple(fields)}{named}{writes}{own})"
    )


def _places(region: Region, base: Base, heads: int, dims: int) -> str:
    """A region's places in a page, for tensor maps; packed elements as the bytes that hold them."""
    packed = 2 if region.dtype.packed else 1
    strides: list[int | None] = []
    for name in ("token", "head", "dim"):
        found = [(a, s) for a, s in zip(region.axes, region.strides, strict=True) if a.name == name]
        whole = len(found) < 2 and region.swizzle is None
        step = found[0][1] if found else (1 if name == "dim" else dims)
        strides.append(step if not whole or step is None or name == "dim" else step // packed)
        if not whole:
            strides[-1] = None
    row = strides[0] if row_of(region, base) else 0
    codes = f", codes={packed}" if packed > 1 else ""
    return (
        f'Places("{base.name}", "{region.dtype.held_as}", heads={heads}, dim={dims // packed}, offset={region.byte_offset}, '
        f"token_stride={strides[0]}, head_stride={strides[1]}, dim_stride={strides[2]}, row={row}{codes})"
    )


def _role(cache: Cache, name: str, parts: tuple[Segment, ...]) -> str:
    storage, main = cache.storage, parts[0]
    words = [
        f'"{name}"',
        str(sum(s.size for s in parts)),
        _places(main.region, storage.base(main.base), cache.kv_heads, main.size),
    ]
    if len(parts) > 1:
        rope = parts[1]
        words.append(f"rope={_places(rope.region, storage.base(rope.base), cache.kv_heads, rope.size)}")
    scales = main.scales
    if scales is not None:
        if scales.region is not None:
            dims = scales.groups * (1 + scales.zero)
            words.append(f"scales={_places(scales.region, storage.base(scales.base), scales.heads, dims)}")
        words += [f"granularity={scales.block[2]}", f'scale_dtype="{scales.dtype.name}"']
    return f"Role({', '.join(words)})"


def _pool(cache: Cache, tensor: PoolTensor) -> ArgumentContext:
    shape = ", ".join(str(s) for s in tensor.shape)
    each = "one per layer, each " if cache.layout.layers == "pointers" else ""
    kinds = " or ".join(tensor.dtypes)
    kind = "Sequence[object]" if each else "object"
    return ArgumentContext(tensor.name, False, f"{tensor.name}: {each}{kinds}[{shape}] ({tensor.text}).", kind)


def launcher_context(kernels: KernelSet, doc: str, plans: dict[str, tuple[KernelPlan, ...]]) -> LauncherContext:
    """The context of a set's `__init__.py`."""
    cache = kernels.cache
    fields = cache_fields(cache)
    tables = tuple(p for p in fields if p.shape is not None and p.shape != ("pool",))
    tensors = sorted(cache.storage.tensors, key=lambda t: not t.holds_values)
    pools = tuple(_pool(cache, t) for t in tensors if t.holds_values)
    extras = tuple(_pool(cache, t) for t in tensors if not t.holds_values)
    views = tuple(_argument(p) for p in tables)
    return LauncherContext(
        set=kernels.name,
        doc=_text(doc).strip() or f"The kernels of {kernels.name}.",
        abi=ABI,
        arch=_tuple(kernels.arch),
        tensors=tuple(_tensor(cache, t) for t in tensors),
        roles=tuple(_role(cache, name, parts) for name, parts in cache.storage.roles.items()),
        kind="paged" if isinstance(cache, Paged) else "continuous_batching",
        heads=cache.kv_heads,
        page_size=cache.page_size if isinstance(cache, Paged) else 0,
        positional=pools,
        keywords=(*extras, *views),
        tensor_names=", ".join(t.name for t in tensors),
        table_names=", ".join(t.name for t in tables),
        fields=tuple(_param(p) for p in fields),
        pointers=cache.layout.layers == "pointers",
        page_tokens=repr(cache.page_tokens),
        window=cache.page_table.window if isinstance(cache.page_table, Ring) else 0,
        cache_doc=(
            f"lengths count the tokens {cache.lengths} this step; "
            + (f"pages hold {cache.page_size} tokens." if isinstance(cache, Paged) else "a block holds a request."),
            *(a.doc for a in (*pools, *extras, *views)),
            "max_seq_length, max_cache_length: a request's most new tokens, and tokens in all; default: what the table holds.",
        ),
        imports=_imports(plans.values()),
        ops=tuple(_op(op, kernels, plans[op.name]) for op in kernels.ops),
    )

"""A set's decisions as plain data (`kvgen show --plan --json`) and as text for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.emit import set_plans
from kvgen.expr import c, python
from kvgen.layout import Region
from kvgen.ops.cache import cache_fields, role_regions
from kvgen.plan import KernelPlan, Param
from kvgen.spec.loader import LoadedSet


def describe(loaded: LoadedSet, ops: Sequence[str]) -> dict[str, Any]:
    """The cache's layout and the plans of `ops`, as JSON values."""
    kernels = loaded.kernels
    cache, plans = kernels.cache, set_plans(loaded)
    return {
        "set": kernels.name,
        "spec": loaded.source,
        "arch": list(kernels.arch),
        "q_heads": kernels.q_heads,
        "group": kernels.group,
        "cache": {
            "kind": type(cache).__name__,
            "dtype": cache.dtype,
            "kv_heads": cache.kv_heads,
            "head_dim": cache.head_dim,
            "v_head_dim": cache.v_dim,
            "page_tokens": cache.page_tokens,
            "lengths": f"{cache.lengths} this step, {cache.lengths_dtype}",
            "stores": cache.stores,
            "layers": cache.layout.layers,
            "table": cache.page_table.model_dump(),
            "fields": [_param(p) for p in cache_fields(cache)],
            "roles": {name: _region(region) for name, region in role_regions(cache)},
        },
        "kernels": [{"op": op, **_plan(plan)} for op in ops for plan in plans[op]],
    }


def _region(region: Region) -> dict[str, Any]:
    return {
        "axes": region.text,
        "shape": list(region.shape),
        "strides": list(region.strides),
        "offset": c(region.offset()),
        "vector": region.vector,
        "span": region.span,
    }


def _plan(plan: KernelPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "entry": plan.entry,
        "template": f"templates/{plan.template}",
        "threads": plan.threads,
        "grid": [python(part) for part in plan.grid],
        "dynamic_shared": plan.shared,
        "writes_pool": plan.writes_pool,
        "params": [_param(p) for p in plan.params],
    }


def _param(p: Param) -> dict[str, Any]:
    return {
        "name": p.name,
        "dtype": p.dtype.name,
        "shape": None if p.shape is None else list(p.shape),
        "value": p.value or None,
        "access": p.access,
        "align": p.align,
        "strided": p.strided,
        "optional": p.optional,
        "untrusted": p.untrusted,
        "doc": p.doc or None,
    }


def plan_text(found: dict[str, Any]) -> str:
    """`describe`'s result for a reader."""
    cache = found["cache"]
    dims = (
        str(cache["head_dim"])
        if cache["v_head_dim"] == cache["head_dim"] or cache["stores"] == "k"
        else (f"{cache['head_dim']}/{cache['v_head_dim']}")
    )
    table = ", ".join(f"{key}={value}" for key, value in cache["table"].items() if key != "kind")
    lines = [
        f"{found['set']}  ({found['spec']}; {', '.join(found['arch'])})",
        f"  heads    {found['q_heads']} query over {cache['kv_heads']} kv, group {found['group']}, head dim {dims}",
        f"  cache    {cache['kind']} {cache['dtype']}, {cache['page_tokens'] or 'run-time'} tokens a page, "
        f"stores {cache['stores']}, layers by {cache['layers']}",
        f"  table    {cache['table']['kind']}: {table}",
        f"  lengths  {cache['lengths']}",
    ]
    for role, region in cache["roles"].items():
        axes = zip(region["axes"].split(), region["shape"], region["strides"], strict=True)
        lines.append(f"\n  {role.upper()}: element offset in a page: {region['offset']}")
        span = region["span"] or "a run-time number of"
        lines.append(f"     widest access {region['vector']} elements, a page spans {span}")
        lines += _columns([("axis", "extent", "stride"), *((a, str(e), _stride(s)) for a, e, s in axes)], "     ")
    lines.append("\n  Cache: the struct that every kernel takes first")
    lines += _params("field", cache["fields"])
    for kernel in found["kernels"]:
        lines.append(f"\n  {kernel['name']}: {kernel['entry']} from {kernel['template']}")
        lines.append(
            f"     grid ({', '.join(kernel['grid'])}) of {kernel['threads']} threads, "
            f"{kernel['dynamic_shared']} bytes of dynamic shared memory"
        )
        lines += _params("parameter", kernel["params"])
    return "\n".join(lines)


def _stride(stride: int | None) -> str:
    return "run-time" if stride is None else str(stride)


def _params(title: str, params: Sequence[dict[str, Any]]) -> list[str]:
    rows = [(title, "type", "notes"), *((p["name"], _type(p), _notes(p)) for p in params)]
    return _columns(rows, "     ")


def _type(p: dict[str, Any]) -> str:
    return p["dtype"] if p["shape"] is None else f"{p['dtype']}[{', '.join(map(str, p['shape']))}]"


def _notes(p: dict[str, Any]) -> str:
    notes = [p["value"]] if p["shape"] is None else [p["access"]]
    notes += [flag for flag in ("strided", "optional", "untrusted") if p[flag]]
    if p["align"] > 1:
        notes.append(f"{p['align']}-byte aligned")
    return ", ".join(filter(None, notes))


def _columns(rows: Sequence[tuple[str, ...]], indent: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]

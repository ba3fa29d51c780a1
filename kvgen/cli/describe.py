"""A set's decisions as plain data (`kvgen show --plan --json`) and as text for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvgen.cli.kernel_choice import attention, attention_text
from kvgen.cli.op_fields import op_fields
from kvgen.codegen.emit import kernel_files
from kvgen.expr.to_c import c
from kvgen.expr.to_python import python
from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import PoolTensor, Segment
from kvgen.lowering.lowered import lower_pages
from kvgen.lowering.state_rows import state_bytes
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Field, Param
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import LoadedSet


def describe(loaded: LoadedSet, ops: Sequence[str]) -> dict[str, Any]:
    """The cache's layout and the plans of `ops`, as JSON values."""
    kernels = loaded.kernels
    heads = {} if kernels.cache.states else {"q_heads": kernels.q_heads, "group": kernels.group}
    return {
        "set": kernels.name,
        "spec": loaded.source,
        "arch": list(kernels.arch),
        **heads,
        "layers": _layers(kernels),
        "cache": _states(kernels.cache) if kernels.cache.states else _tokens(kernels.kv),
        "kernels": [
            {
                "op": op.name,
                **_plan(kernel, archs),
                "fields": op_fields(kernels, op),
                "attention": None if kernels.cache.states else attention(kernels, op, kernel, archs),
            }
            for op in kernels.ops
            if op.name in ops
            for kernel, archs in kernel_files(loaded, [op.name])
        ],
    }


def _tokens(cache: Cache) -> dict[str, Any]:
    """A cache of tokens."""
    return {
        "kind": type(cache).__name__,
        "dtype": cache.dtype,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "v_head_dim": cache.v_dim,
        "page_tokens": cache.page_tokens,
        "rate": cache.entry_tokens,
        "lengths": f"{cache.lengths} this step, {cache.lengths_dtype}",
        "stores": cache.stores,
        **_memory(cache),
        "roles": {name: [_segment(cache, name, s) for s in parts] for name, parts in cache.storage.roles.items()},
    }


def _states(cache: AnyCache) -> dict[str, Any]:
    """A cache of states."""
    return {"kind": type(cache).__name__, "state_bytes": state_bytes(cache), **_memory(cache), "roles": {}}


def _memory(cache: AnyCache) -> dict[str, Any]:
    """What every cache has: its table, the struct, the tensors."""
    return {
        "layers": cache.layers,
        "table": cache.page_table.model_dump(),
        "fields": [_param(p) for p in lower_pages(cache).fields],
        "tensors": [_tensor(tensor) for tensor in cache.storage.tensors],
    }


def _layers(kernels: KernelSet) -> list[dict[str, Any]]:
    """The model's layers by kind: which they are, what is said of them, and the set's operations that serve them."""
    model = kernels.model
    if model is None or model.layers is None:
        return []
    numbers: dict[str, list[int]] = {}
    for layer in range(model.layers):
        numbers.setdefault(model.layer_name(layer), []).append(layer)
    facts = {kind.name: kind.model_dump(exclude_defaults=True, exclude={"name", "rope"}) for kind in model.kinds}
    if not model.kinds:
        facts = {name: {"window": model.window} if name == "local" else {} for name in numbers}
    roped = {kind.name: kind.rope is not None for kind in model.kinds}
    return [
        {
            "kind": name,
            "layers": layers,
            "facts": facts[name],
            "rope": roped.get(name, model.rope is not None) if facts[name].get("cache", True) else False,
            "ops": list(kernels.layers.get(name, ())),
        }
        for name, layers in numbers.items()
    ]


def _layer_line(kind: dict[str, Any]) -> str:
    """One kind of layers: "full  5, 11, 17 and 27 more: 8 query heads over 1 of 512; append, decode"."""
    layers, facts = kind["layers"], kind["facts"]
    shown = ", ".join(map(str, layers[:4])) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    said = (
        [f"{facts['q_heads']} query heads over {facts['kv_heads']} of {facts['head_dim']}"]
        if "q_heads" in facts
        else []
    )
    said += [f"V of {facts['v_head_dim']}"] if "v_head_dim" in facts else []
    said += [
        f"{name} {facts[name]}" for name in ("window", "chunk", "scale", "logit_softcap") if facts.get(name) is not None
    ]
    said += ["sinks"] if facts.get("sinks") else []
    said += [f"reads layer {facts['kv_source']}"] if "kv_source" in facts else []
    if picks := facts.get("indexer"):
        whose = "an indexer" if picks.get("source") is None else f"layer {picks['source']}'s indexer"
        said += [f"{picks['topk']} tokens picked by {whose}"]
    if not facts.get("cache", True):
        said = ["no keys and values"]
    else:
        said += ["RoPE" if kind["rope"] else "no RoPE"]
    said += [", ".join(kind["ops"])] if kind["ops"] else []
    return f"{kind['kind']}: {shown}; {'; '.join(said)}"


def _tensor(tensor: PoolTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtypes": list(tensor.dtypes),
        "axes": " ".join(tensor.axes) if tensor.given else tensor.text,
        "shape": list(tensor.shape),
        "strides": list(tensor.strides),
        "align": tensor.align,
    }


def _segment(cache: Cache, role: str, segment: Segment) -> dict[str, Any]:
    scales = segment.scales
    quant = cache.quants[role] if segment.quant is not None else None
    return {
        "dims": [segment.begin, segment.begin + segment.size],
        "dtype": segment.region.dtype.name,
        "base": segment.base,
        "tensor": cache.storage.base(segment.base).tensor,
        **_region(segment.region),
        "vector": segment.vector,
        "quant": None if quant is None else quant.model_dump(exclude_defaults=True),
        "scales": None
        if scales is None
        else {
            "dtype": scales.dtype.name,
            "zero": scales.zero,
            "block": list(scales.block),
            "place": scales.base or scales.array,
            "tensor": cache.storage.base(scales.base).tensor if scales.base else scales.array,
            **(_region(scales.region) if scales.region is not None else {"shape": [scales.heads, scales.groups]}),
        },
    }


def _region(region: Region) -> dict[str, Any]:
    return {
        "axes": region.text,
        "shape": list(region.shape),
        "strides": list(region.strides),
        "offset": c(region.offset()),
        "byte_offset": region.byte_offset,
        "span": region.span,
    }


def _plan(plan: KernelPlan, archs: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": plan.name,
        "entry": plan.entry,
        "archs": list(archs),
        "template": plan.source.path if plan.source else f"templates/{plan.template}",
        "threads": plan.threads,
        "grid": [python(part) for part in plan.grid],
        "dynamic_shared": {a: plan.shared_on(a) for a in archs} if plan.differing("shared") else plan.shared,
        "writes_pool": plan.writes_pool,
        "params": [_param(p) for p in plan.params],
    }


def _param(p: Param | Field) -> dict[str, Any]:
    return {"kind": type(p).__name__, **{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(p).items()}}


def _place(tensor: str, base: str, region: dict[str, Any]) -> str:
    """Where elements lie: the tensor, the pointer into its page, the offset from there."""
    behind = f", from byte {region['byte_offset']} of the page or row" if region.get("byte_offset") else ""
    return f"{tensor}{f' (page pointer {base})' if base != tensor else ''}{behind}, at {region['offset']}"


def _counted(number: int, word: str) -> str:
    """ "the token", "16 tokens", "all tokens"."""
    return f"all {word}s" if not number else f"{number} {word}{'' if number == 1 else 's'}"


def _quantized(segment: dict[str, Any]) -> list[str]:
    """What the codes of a segment mean, and where their scales are."""
    quant, scales = segment["quant"], segment["scales"]
    if quant is None:
        return []
    if scales is None:
        return ["value = code, a cast that saturates"]
    token, head, dim = scales["block"]
    block = " x ".join((_counted(token, "token"), _counted(head, "head"), _counted(dim, "dim")))
    recipe = quant.get("recipe")
    code = (
        "codebook[code]" if quant.get("codebook") else "(code - zero)" if scales["zero"] and recipe != "min" else "code"
    )
    if recipe == "signs":
        code = f"(codebook[code % {len(quant['codebook'])}] +- left)"
    times = {"global": " * global scale", "min": " + least"}.get(recipe, "")
    times += " / norm of the block's values" if quant.get("norm_correction") else ""
    second = {"min": " and least value", "signs": " and root mean square of what is left"}.get(
        recipe, " and zero point" if scales["zero"] else ""
    )
    what = f"{scales['dtype']} scale{second}"
    how = "given" if quant.get("scale") == "given" else f"recipe {quant.get('recipe', 'amax')}"
    lines = [f"value = {code} * scale{times}: one {what} per {block}, {how}"]
    if quant.get("residual"):
        lines.append(f"{quant['residual']} tokens are quantized together; until then they wait in k_tail")
    if "offset" in scales:
        lines.append(f"scales in {_place(scales['tensor'], scales['place'], scales)}, counting blocks")
    else:
        lines.append(f"scales in {scales['tensor']}, [{', '.join(map(str, scales['shape']))}] a layer")
    return lines


def _pages(cache: dict[str, Any]) -> str:
    """How many tokens a page has."""
    if cache["kind"] == "Ragged":
        return "no pages"
    if cache["rate"] > 1:
        return f"{cache['page_tokens']} entries of {cache['rate']} tokens a page"
    return f"{cache['page_tokens'] or 'run-time'} tokens a page"


def plan_text(found: dict[str, Any]) -> str:
    """`describe`'s result for a reader."""
    cache = found["cache"]
    lines = _states_head(found) if "state_bytes" in cache else _tokens_head(found)
    lines += [f"  {'layers' if i == 0 else '      '}   {_layer_line(kind)}" for i, kind in enumerate(found["layers"])]
    for tensor in cache["tensors"]:
        axes = zip(tensor["axes"].split(), tensor["shape"], tensor["strides"], strict=True)
        lines.append(f"\n  {tensor['name']}: {' or '.join(tensor['dtypes'])}, accesses of {tensor['align']} bytes")
        lines += _columns([("axis", "extent", "stride"), *((a, str(e), _stride(s)) for a, e, s in axes)], "     ")
    for role, segments in cache["roles"].items():
        for segment in segments:
            begin, end = segment["dims"]
            kind = f"{segment['dtype']}{' codes' if segment['quant'] else ''}"
            place = _place(segment["tensor"], segment["base"], segment)
            lines.append(f"\n  {role.upper()} [{begin}, {end}): {kind} in {place}")
            span = segment["span"] or "a run-time number of"
            bits = ", and places count bits" if segment["dtype"] == "u3" else ""
            lines.append(f"     widest access {segment['vector']} elements, a page spans {span}{bits}")
            lines += [f"     {line}" for line in _quantized(segment)]
    lines.append("\n  Cache: the struct that every kernel takes first")
    lines += _params("field", cache["fields"])
    for kernel in found["kernels"]:
        where = f", on {', '.join(kernel['archs'])}" if kernel["archs"] != found["arch"] else ""
        lines.append(f"\n  {kernel['name']}: {kernel['entry']} from {kernel['template']}{where}")
        lines.append(f"     grid ({', '.join(kernel['grid'])}) of {kernel['threads']} threads, {_shared(kernel)}")
        if kernel["fields"] and kernel["name"] == kernel["op"]:
            rows = [("field", "value", "from"), *((f["field"], f["value"], f["from"]) for f in kernel["fields"])]
            lines += _columns(rows, "     ")
        if kernel["attention"] is not None:
            lines += [f"     {line}" for line in attention_text(kernel["attention"])]
        lines += _params("parameter", kernel["params"])
    return "\n".join(lines)


def _tokens_head(found: dict[str, Any]) -> list[str]:
    """The first lines about a cache of tokens."""
    cache = found["cache"]
    dims = (
        str(cache["head_dim"])
        if cache["v_head_dim"] == cache["head_dim"] or cache["stores"] == "k"
        else (f"{cache['head_dim']}/{cache['v_head_dim']}")
    )
    return [
        f"{found['set']}  ({found['spec']}; {', '.join(found['arch'])})",
        f"  heads    {found['q_heads']} query over {cache['kv_heads']} kv, group {found['group']}, head dim {dims}",
        f"  cache    {cache['kind']} {cache['dtype']}, {_pages(cache)}, "
        f"stores {cache['stores']}, layers by {cache['layers']}",
        _table(cache),
        f"  lengths  {cache['lengths']}",
    ]


def _states_head(found: dict[str, Any]) -> list[str]:
    """The same about a cache of states."""
    cache = found["cache"]
    return [
        f"{found['set']}  ({found['spec']}; {', '.join(found['arch'])})",
        f"  cache    {cache['kind']} of {cache['state_bytes']} bytes, a state a request, layers by {cache['layers']}",
        _table(cache),
    ]


def _table(cache: dict[str, Any]) -> str:
    facts = ", ".join(f"{key}={value}" for key, value in cache["table"].items() if key != "kind")
    return f"  table    {cache['table']['kind']}: {facts}"


def _shared(kernel: dict[str, Any]) -> str:
    """Dynamic shared memory, where architectures differ of each."""
    nbytes = kernel["dynamic_shared"]
    if isinstance(nbytes, int):
        return f"{nbytes} bytes of dynamic shared memory"
    return f"dynamic shared memory: {', '.join(f'{n} bytes on {arch}' for arch, n in nbytes.items())}"


def _stride(stride: int | None) -> str:
    return "run-time" if stride is None else str(stride)


def _params(title: str, params: Sequence[dict[str, Any]]) -> list[str]:
    rows = [(title, "type", "notes"), *((p["name"], _type(p), _notes(p)) for p in params)]
    return _columns(rows, "     ")


def _type(p: dict[str, Any]) -> str:
    if p["kind"] == "Array":
        return f"{p['dtype']}[{', '.join(map(str, p['shape']))}]"
    if p["kind"] == "Pool":
        return f"{p['dtype']}[pool]"
    known = {"PagePool": "pages", "OtherCache": "another cache"} | dict.fromkeys(("TensorMap", "PoolMap"), "tensor map")
    return known.get(p["kind"]) or p["dtype"]


def _notes(p: dict[str, Any]) -> str:
    known = {"Array": p.get("access"), "Pool": "inout", "Size": p.get("value"), "PoolMap": "of the pages"}
    access = known.get(p["kind"], "of the call")
    notes = [access, *(flag for flag in ("strided", "optional", "untrusted") if p.get(flag))]
    if p["kind"] == "Array" and 8 * p["align"] > dtype(p["dtype"]).bits:  # more than elements have anyway
        notes.append(f"{p['align']}-byte aligned")
    return ", ".join(filter(None, notes))


def _columns(rows: Sequence[tuple[str, ...]], indent: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]

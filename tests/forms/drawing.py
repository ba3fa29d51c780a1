"""Kernel sets of one operation, drawn from all that their specs can say.

Each part of a spec is drawn until it is valid by itself, then held against the others; most fields keep their default, so that
what is rare alone is met beside everything else. `test_forms.py` holds that every field of every model here takes values.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvgen import (
    CSR,
    Block,
    Continuous,
    Dense,
    Indirect,
    KernelSet,
    Latent,
    Layout,
    Mapped,
    Mask,
    Paged,
    PerKV,
    Quant,
    Ragged,
    Ring,
    Score,
    ops,
    presets,
)
from kvgen.schema.codebooks import lloyd_max
from kvgen.schema.keys import Keys
from kvgen.schema.model import LinearScaling, Rope
from kvgen.schema.norm import LayerNorm, RmsNorm
from kvgen.schema.position_scale import PositionScale
from kvgen.schema.score import Tensor

Draw = random.Random
Made = TypeVar("Made")

INDEX: Final = ("u32", "i32", "i64")
FLOATS: Final = ("f32", "f16", "bf16", "bf16")
# What the CPU machine executes, and all there are.
EXECUTED: Final = ("sm_80", "sm_89", "sm_90a")
ARCHS: Final = (*EXECUTED, "sm_100f", "sm_120f")
DIMS: Final = (1, 3, 8, 12, 13, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 200, 256, 320, 512, 1024)
USUAL_DIMS: Final = (32, 64, 64, 128, 128, 256)
GROUPS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 71, 128)
USUAL_GROUPS: Final = (1, 4, 4, 8)
PAGES: Final = (1, 2, 3, 4, 5, 8, 16, 32, 48, 64, 128, 256)
USUAL_PAGES: Final = (8, 16, 64, 128)
LATENTS: Final = (
    (512, 64),
    (512, 64),
    (448, 64),
    (512, 0),
    (256, 64),
    (384, 64),
    (400, 48),
    (192, 64),
    (128, 0),
    (96, 32),
    (64, 16),
    (32, 8),
)


def some(draw: Draw, odds: float, /, **fields: Sequence[Any]) -> dict[str, Any]:
    """Few of the fields, each with one of its values."""
    return {name: draw.choice(values) for name, values in fields.items() if draw.random() < odds}


def valid(make: Callable[[], Made], tries: int = 60) -> Made:
    """What `make` returns, as soon as it is valid; raises ValueError where it never is."""
    for _ in range(tries - 1):
        try:
            return make()
        except ValueError:
            continue
    return make()


def one(draw: Draw, usual: Sequence[Any], every: Sequence[Any]) -> Any:
    """A usual value as often as any other."""
    return draw.choice(usual if draw.random() < 0.5 else every)


# Quantization ---------------------------------------------------------------------------------------------------------

QUANTS: Final = (
    "fp8",
    "fp8",
    "mx",
    "mx",
    "nvfp4",
    "nvfp4",
    "integer",
    "integer",
    "integer",
    "book",
    "given",
    "residual",
)


def quant(draw: Draw, dim: int, heads: int = 1, kind: str = "") -> Quant:
    """How rows of `dim` dims become codes, valid by itself."""
    return valid(lambda: _quant(draw, dim, heads, kind or draw.choice(QUANTS)))


def _quant(draw: Draw, dim: int, heads: int, kind: str) -> Quant:
    dims = draw.choice([d for d in (None, None, 1, 2, 4, 8, 12, 16, 32, 64, 128) if d is None or d <= dim])
    block: dict[str, Any] = {"dim": dims}
    if dims is None and heads > 1:
        block |= some(draw, 0.15, head=(None, 2))
    fields: dict[str, Any] = {"block": Block(**block)}
    match kind:
        case "fp8":
            fields |= {
                "dtype": draw.choice(("e4m3", "e5m2")),
                "scale_dtype": draw.choice((None, "f32", "f32", "f16", "bf16")),
            }
            fields |= some(draw, 0.2, recipe=("pow2",))
            if fields["scale_dtype"] is None:
                return Quant(dtype=fields["dtype"])
        case "mx":
            fields |= {"dtype": draw.choice(("e4m3", "e5m2", "e2m1", "e2m1")), "recipe": "pow2"}
            fields["scale_dtype"] = draw.choice(("e8m0", "e8m0", "e8m0", "f32"))
        case "nvfp4":
            fields |= {"dtype": "e2m1", "scale_dtype": "e4m3", "recipe": draw.choice(("max", "global", "amax"))}
            if fields["recipe"] != "amax":
                del fields["block"]
        case "integer":
            fields |= {
                "dtype": draw.choice(("i8", "i8", "i4", "i4", "i3", "i2")),
                "scale_dtype": draw.choice(("f32", "f16", "bf16")),
            }
            fields["zero"] = draw.random() < 0.5 or fields["dtype"] in ("i3", "i2")
            fields |= some(draw, 0.2 * fields["zero"], recipe=("min",)) | some(draw, 0.1, packing=("strided",))
        case "book":
            recipe = draw.choice(("amax", "norm", "norm", "unit", "signs"))
            code = draw.choice(("i4", "i3", "i2"))
            fields |= {"dtype": code, "scale_dtype": draw.choice(("f32", "f16", "bf16")), "recipe": recipe}
            fields |= {
                "codebook": lloyd_max(int(code[1]) - (recipe == "signs"), dims or dim),
                "zero": recipe == "signs",
            }
            fields |= some(draw, 0.3 * (recipe == "norm"), norm_correction=(True,)) | some(
                draw, 0.2, packing=("strided",)
            )
        case "given":
            fields |= {"dtype": draw.choice(("e4m3", "e5m2", "i8", "i4", "e2m1")), "scale": "given"}
            fields |= {"scale_dtype": draw.choice(("f32", "f16", "bf16")), "block": Block(**block | {"token": None})}
            return Quant(**fields)
        case "residual":
            tokens = draw.choice((4, 8, 16, 32, 64))
            fields |= {
                "dtype": draw.choice(("i8", "i4", "i4", "i2", "e4m3", "e2m1")),
                "scale_dtype": draw.choice(("f32", "f16", "f16", "bf16")),
            }
            fields |= {
                "residual": tokens,
                "block": Block(token=tokens, dim=1),
                "zero": fields["dtype"].startswith("i") and draw.random() < 0.8,
            }
            return Quant(**fields | some(draw, 0.1, place=("page",)))
    fields |= (
        some(draw, 0.15, own_table=(True,))
        or some(draw, 0.15, order=("swizzled",))
        or some(draw, 0.4, place=("page", "row"))
    )
    if fields.get("recipe", "amax") in ("amax", "pow2") and not fields.get("zero"):
        fields |= some(draw, 0.08, amax_min=(1e-3, 0.5)) or some(draw, 0.05, scale_min=(1e-3, 0.5))
    if "place" in fields and heads == 1:
        fields |= some(draw, 0.2, scale_pad=(8, 16, 32))
    return Quant(**fields)


# Caches ---------------------------------------------------------------------------------------------------------------


def table(draw: Draw, *, second: bool = False) -> Any:
    """A page table; `second`: one that may have another beside it, of scales."""
    kind = Dense if second else draw.choice((Dense, Dense, Dense, CSR, CSR, PerKV, Indirect, Ring, Mapped))
    fields = some(draw, 0.25, dtype=INDEX, id_multiplier=(2, 3))
    if kind is Dense:
        fields |= some(draw, 0.2, align=(2, 4, 8))
    elif kind is CSR:
        fields |= some(draw, 0.4, last_page_len=(True,))
    elif kind is Ring:
        fields["window"] = draw.randint(1, 70)
    elif kind in (Indirect, Mapped):
        fields |= some(draw, 0.4, request_dtype=INDEX)
    return kind(**fields)


def axes(draw: Draw, dim: int, outer: Sequence[str], *, head: bool = True) -> str:
    """The axes of a tensor, those in `outer` slowest in most layouts; `head`: there is an axis of heads."""
    outer, inner = list(outer), ["token", *(["head"] if head else []), "dim"]
    if draw.random() < 0.4:
        draw.shuffle(outer)
    match draw.choice(("usual",) * 6 + ("apart", "any", "split", "inside")):
        case "usual":
            inner[:-1] = draw.sample(inner[:-1], len(inner) - 1)
        case "apart":  # heads outside of what has strides of the call's
            inner = [n for n in inner if n != "head"]
            outer[draw.randint(0, len(outer)) : 0] = ["head"] * head
        case "any":
            draw.shuffle(inner)
        case "split":
            draw.shuffle(inner)
            by = draw.choice([d for d in (2, 4, 8, 16) if dim % d == 0 and dim > d] or [1])
            if by > 1:
                at = inner.index("dim")
                inner[at] = f"dim/{by}"
                inner.insert(draw.randint(at + 1, len(inner)), f"dim%{by}")
        case "inside" if "kv" in outer:
            outer.remove("kv")
            inner.insert(draw.randint(0, len(inner)), "kv")
    return " ".join((*outer, *inner))


def layout(draw: Draw, dim: int, v_dim: int, page: str, form: str, quants: Sequence[Quant | None]) -> Layout:
    """A layout, valid by itself. `form`: "kv" one tensor, "per_kv" one whose K and V have pages of their own, "apart" two, "k"
    keys alone, "latent" rows without heads."""
    return valid(lambda: _layout(draw, dim, v_dim, page, form, quants))


def _layout(draw: Draw, dim: int, v_dim: int, page: str, form: str, quants: Sequence[Quant | None]) -> Layout:
    layers = draw.choice(("axis", "axis", "pointers"))
    outer = [*([page] if page else []), *(["layer"] if layers == "axis" else [])]
    kv = [outer[0], "kv", *outer[1:]] if form == "kv" else outer
    head = form != "latent"
    fields: dict[str, Any] = {"layers": layers}
    if form == "apart":
        fields |= {"k": axes(draw, dim, outer), "v": axes(draw, v_dim, outer)}
    else:
        fields["kv" if form in ("kv", "per_kv") or draw.random() < 0.5 else "k"] = axes(draw, dim, kv, head=head)
    if form == "latent":
        fields |= {"rope": axes(draw, dim, outer, head=False)} if draw.random() < 0.15 else {}
    pools = [q for q in quants if q is not None and q.computed and q.place == "pool"]
    if pools and draw.random() < 0.2:
        fields["scales"] = axes(draw, 1, kv, head=head)
        if form in ("kv", "apart") and draw.random() < 0.4:
            fields["v_scales"] = axes(draw, 1, outer)
    if any(q is not None and q.place == "row" for q in quants):
        fields |= some(draw, 0.2, row_align=(16, 64))
    return Layout(
        **fields | some(draw, 0.05, page_align=(256, 4096)) | some(draw, 0.05, swizzle=((1, 2, 2), (3, 3, 3)))
    )


def _extents(found: Layout, page: int, elements: int) -> dict[str, int]:
    """Numbers of pages and layers, where strides depend on them; raises ValueError where such a pool is too much to run."""
    words = (found.kv or found.k or "").replace("block", "page").split()
    first = min(words.index(n) for n in ("token", "head") if n in words)
    rooms = {"page": 120 + 1200 // page, "layer": 3}
    within = {f"total_{name}s": room for name, room in rooms.items() if name in words and words.index(name) > first}
    if within and elements > 2**15:
        raise ValueError(f"pages of {elements} elements")
    return within


def _where(draw: Draw, quants: Sequence[Quant | None]) -> dict[str, Any]:
    """Pages of a cache."""
    second = any(q is not None and q.own_table for q in quants)
    found = table(draw, second=second)
    page = 1 if found.token_slots else one(draw, USUAL_PAGES, PAGES)
    for q in quants:
        if q is not None and q.order == "swizzled":
            page = draw.choice((128, 256))
        if q is not None and q.residual:
            page = q.residual * draw.choice((1, 2))
    fields = {"table": found, "page_size": page} | some(draw, 0.3, lengths=("before", "after"), lengths_dtype=INDEX)
    if found.counts_tokens:
        fields["lengths"] = "after"
    return fields


# Caches of engines, by the names of their presets.
ENGINES: Final = [
    "flash_attention",
    "flashinfer_hnd",
    "flashinfer_nvfp4",
    "kivi",
    "kvbm_universal",
    "lmdeploy_int4",
    "lmdeploy_int8",
    "lmdeploy_turboquant",
    "max_continuous",
    "max_nvfp4",
    "max_paged_fp8",
    "max_paged_scaled",
    "sglang",
    "tensorrt_llm",
    "tensorrt_llm_nvfp4",
    "vllm",
    "vllm_hnd",
    "vllm_interleaved",
    "vllm_nvfp4",
    "vllm_packed",
    "vllm_turboquant",
    "vllm_xpacked",
]
LATENT_ENGINES: Final = [
    "flashinfer_mla",
    "flashinfer_v4_nvfp4",
    "flashmla",
    "flashmla_fp8",
    "flashmla_v4",
    "flashmla_v4",
    "flashmla_v41",
    "flashmla_v41",
    "flashmla_v41_fp4",
    "max_mla",
    "max_mla_fp8",
    "sglang_mla",
    "sglang_mla_fp8",
    "sglang_v4",
    "sglang_v4_fp4",
    "vllm_mla",
    "vllm_mla_fp8",
    "vllm_v4",
    "vllm_v41",
    "vllm_v41_fp4",
]
KEY_ENGINES: Final = [
    "max_indexer",
    "sglang_indexer",
    "vllm_indexer",
    "vllm_indexer",
    "vllm_indexer_fp4",
    "vllm_indexer_fp4",
]


def engine_cache(draw: Draw, names: Sequence[str], **fields: Any) -> Any:
    """A cache of one of these presets, with those of the fields that it takes."""
    preset = getattr(presets, draw.choice(names))
    taken = inspect.signature(preset).parameters
    fields |= {"total_layers": 2, "page_size": one(draw, USUAL_PAGES, PAGES)} | some(
        draw,
        0.3,
        kv_cache_dtype=("fp8_e4m3", "fp8_e5m2", "fp4_e2m1"),
        kv_layout=("NHD", "HND"),
        place=("page", "row"),
        rate=(2, 4),
    )
    return preset(**{name: value for name, value in fields.items() if name in taken})


def heads_cache(draw: Draw, like: Any = None) -> Any:
    """A cache of keys and values, or of keys alone; `like`: one whose tokens it can hold, of as many heads or not."""
    if like is None and draw.random() < 0.2:
        kind, heads = draw.choice(FLOATS), draw.choice((1, 2, 2))
        return valid(
            lambda: engine_cache(draw, ENGINES, dtype=kind, kv_heads=heads, head_dim=one(draw, USUAL_DIMS, DIMS))
        )
    return valid(lambda: _heads_cache(draw, like, fast=draw.random() < 0.3))


def _heads_cache(draw: Draw, like: Any, fast: bool) -> Any:
    """`fast`: what the best tensor cores take."""
    kind = "paged" if fast else draw.choice(("paged",) * 8 + ("continuous", "ragged"))
    dim = one(draw, USUAL_DIMS, DIMS) if like is None else like.head_dim
    if fast and like is None:
        dim = draw.choice((64, 64, 128, 128, 192, 256))
    v_dim = dim if draw.random() < 0.85 else draw.choice((5, 8, 16, 24, 40, 64, 128, 256, 300))
    v_dim = v_dim if like is None else like.v_dim
    heads = draw.choice((1, 1, 2, 2, 2, 3, 4)) if like is None or draw.random() < 0.3 else like.kv_heads
    fields: dict[str, Any] = {"dtype": draw.choice(FLOATS[fast:]), "kv_heads": heads, "head_dim": dim}
    if v_dim != dim:
        fields["v_head_dim"] = v_dim
    k_only = like.stores == "k" if like is not None else kind == "paged" and v_dim == dim and draw.random() < 0.05
    fields |= {"stores": "k"} if k_only else {}
    which = (
        draw.choice(("both", "both", "both", "both", "k", "v", "differ", "none", "none", "none"))
        if not k_only
        else "both"
    )
    match which:
        case "both":
            fields["quant"] = quant(draw, min(dim, v_dim), heads)
        case "k":
            fields["k_quant"] = quant(draw, dim, heads)
        case "v":
            fields["v_quant"] = quant(draw, v_dim, heads)
        case "differ":
            fields |= {"k_quant": quant(draw, dim, heads), "v_quant": quant(draw, v_dim, heads)}
    k, v = (fields.get(f"{r}_quant") or fields.get("quant") for r in "kv")
    if k is not None and k.residual and v == k:
        fields |= {"quant": None, "k_quant": k, "v_quant": quant(draw, v_dim, heads, "integer")}
        k, v = fields["k_quant"], fields["v_quant"]
    page = {"paged": "page", "continuous": "block", "ragged": ""}[kind]
    quants = (k,) if k_only else (k, v)
    where = _where(draw, quants) if kind == "paged" else some(draw, 0.3, lengths_dtype=INDEX)
    separate = kind == "paged" and where["table"].separate_kv
    together = k == v and v_dim == dim and kind != "ragged"
    form = "k" if k_only else "apart" if not together or draw.random() < 0.2 else "per_kv" if separate else "kv"
    found = layout(draw, dim, v_dim, page, form, quants)
    size = where.get("page_size", 64)
    fields |= where | {"layout": found} | _extents(found, size, size * heads * max(dim, v_dim))
    match kind:
        case "paged":
            return Paged(**fields | some(draw, 0.06, rate=(2, 4)))
        case "continuous":
            fields |= some(draw, 0.3, lengths=("before", "after"))
            return Continuous(**fields | some(draw, 0.7, max_tokens=(1, 40, 128, 310), table_dtype=INDEX))
    extents = {"total_tokens": fields.pop("total_pages")} if "total_pages" in fields else {}
    # Draws of its own, so that all others stay what they were.
    wider = some(Draw(f"{heads} {dim} {v_dim} {size}"), 0.2, row_elements=(2**14, 2**15)) if k is v is None else {}
    try:
        return Ragged(**fields | extents | wider)
    except ValueError:
        return Ragged(**fields | extents)


def latent_cache(draw: Draw, like: Latent | None = None) -> Latent:
    """A cache of latent rows; `like`: one whose rows have as many dims."""
    if draw.random() < 0.35:
        found: Latent = valid(lambda: engine_cache(draw, LATENT_ENGINES, dtype=draw.choice(FLOATS[1:])))
        mine, its = ((c.dtype, c.head_dim, c.latent_part, c.rope_dim) for c in (found, like or found))
        if mine == its:
            return found
    return valid(lambda: _latent_cache(draw, like))


def _latent_cache(draw: Draw, like: Latent | None) -> Latent:
    latent, rope = draw.choice(LATENTS) if like is None else (like.latent_dim, like.rope_dim)
    fields: dict[str, Any] = {"dtype": draw.choice(FLOATS) if like is None else like.dtype}
    values = draw.choice(("latent", "latent", "row")) if like is None else like.values
    scaled = None if draw.random() < 0.3 else quant(draw, latent, 1, draw.choice(QUANTS[:-1]))
    if scaled is not None:
        fields |= {"quant": scaled} | some(draw, 0.25, quant_rope=(True,))
    found = layout(draw, latent + rope, latent + rope, "page", "latent", (scaled,))
    where = _where(draw, (scaled,)) | some(draw, 0.1, rate=(2, 4))
    fields |= where | _extents(found, where["page_size"], where["page_size"] * (latent + rope))
    return Latent(latent_dim=latent, rope_dim=rope, values=values, layout=found, **fields)


def key_cache(draw: Draw) -> Paged:
    """A cache of an indexer's keys."""
    if draw.random() < 0.3:
        found: Paged = valid(lambda: engine_cache(draw, KEY_ENGINES, dtype=draw.choice(("bf16", "f16"))))
        return found
    return valid(lambda: _key_cache(draw))


def _key_cache(draw: Draw) -> Paged:
    dim = draw.choice((128, 128, 128, 64, 32, 256))
    place = some(draw, 0.6, place=("page", "row"))
    match draw.choice(("plain", "fp8", "fp8", "mxfp4", "mxfp4")):
        case "fp8":
            scaled = Quant(
                dtype="e4m3", **place, **draw.choice(({"scale_dtype": "f32"}, {"scale_dtype": "f32", "recipe": "pow2"}))
            )
        case "mxfp4":
            scaled = Quant(dtype="e2m1", scale_dtype="e8m0", recipe="pow2", block=Block(dim=32), **place)
        case _:
            scaled = None
    found = layout(draw, dim, dim, "page", "k", (scaled,))
    fields = _where(draw, (scaled,)) | some(draw, 0.3, rate=(2, 4))
    fields |= _extents(found, fields["page_size"], fields["page_size"] * dim)
    kind = draw.choice(("bf16", "f16"))
    return Paged(dtype=kind, kv_heads=1, head_dim=dim, stores="k", quant=scaled, layout=found, **fields)


# Attention ------------------------------------------------------------------------------------------------------------


def mask(draw: Draw) -> Mask:
    """A mask."""

    def make() -> Mask:
        fields = some(
            draw, 0.25, causal=(False,), window=(1, 20, 33, 128), ahead=(1, 20), chunk=(24, 64), padding=(True,)
        )
        if "ahead" in fields:
            fields["causal"] = False
        return Mask(**fields | (some(draw, 0.15, block=(24, 32)) or some(draw, 0.3, tree=("packed", "mask"))))

    return valid(make)


def hides(s: Any, at: Any) -> Any:
    """Every eleventh token is hidden, for one query head by another count."""
    from kvgen import score as functions

    return functions.where((at.token + at.q_head) % 11 == 5, float("-inf"), s * 0.5)


def biased(s: Any, at: Any, table: Any, slope: Any) -> Any:
    """Reads a tensor and a number."""
    return s + table[at.q_head, (at.position - at.token) // 3 % 5] * slope


def score(draw: Draw) -> Score:
    """What is done to scores: something."""

    def make() -> Score:
        fields = some(draw, 0.3, softcap=(8.0,), alibi=(True,), relative=(9,), bias=(True,))
        fields |= some(draw, 0.5 * ("relative" in fields), relative_dtype=("f32",))
        match draw.choice(("none",) * 5 + ("hides", "biased")):
            case "hides":
                fields["function"] = hides
            case "biased":
                read = Tensor(draw.choice(("f32", "f16", "bf16", "i32", "u32", "i8", "u8")), ("q_heads", "N"))
                fields |= {
                    "function": biased,
                    "tensors": {"table": read},
                    "scalars": {"slope": draw.choice(("f32", "i32", "u32"))},
                }
        return Score(**fields or {"softcap": 8.0})

    return valid(make)


def _attends(draw: Draw) -> dict[str, Any]:
    """What decode and extend share."""
    fields = some(
        draw, 0.15, scale=(0.2,), q_dtype=("e4m3",), out_dtype=("f16", "bf16", "f32", "e4m3"), sinks=("out", "lse")
    )
    fields |= some(draw, 0.15, lse_base=("2",), lse_empty=("inf",), index_dtype=INDEX)
    if draw.random() < 0.08:
        return fields | {"cross": True, "mask": Mask(causal=False, padding=draw.random() < 0.3)}
    if draw.random() < 0.45:
        fields["mask"] = mask(draw)
    if draw.random() < 0.3:
        fields["score"] = score(draw)
    return fields


def _set(draw: Draw, cache: Any, op: Any, heads: int = 0) -> KernelSet:
    heads = heads or cache.kv_heads * one(draw, USUAL_GROUPS, GROUPS)
    archs = draw.sample(ARCHS, draw.randint(2, 4)) if draw.random() < 0.2 else []
    found = [a for a in ARCHS if a in archs] if set(archs) & set(EXECUTED) else [draw.choice((*EXECUTED, "sm_90a"))]
    return KernelSet(name="drawn", q_heads=heads, cache=cache, ops=(op,), arch=tuple(found))


def decode(draw: Draw, cache: Any) -> KernelSet:
    """A decode of a cache."""
    fields = _attends(draw)
    if draw.random() < 0.06:
        fields["pages"] = "per_head"
    else:
        fields |= some(draw, 0.25, rows=(2, 3, 4, 8, 16, 128), split=("balanced", "balanced", "invariant"))
    if fields.get("split") == "invariant":
        fields |= some(draw, 0.5, chunk=(64, 256))
    return _set(draw, cache, ops.Decode(**fields))


def extend(draw: Draw, cache: Any) -> KernelSet:
    """An extend of a cache."""
    fields = _attends(draw)
    if draw.random() < 0.2:
        fields |= {"split": "invariant"} | some(draw, 0.9, chunk=(64, 128, 256))
    return _set(draw, cache, ops.Extend(**fields))


def mla_decode(draw: Draw, cache: Latent) -> KernelSet:
    """A decode of latent rows."""
    fields: dict[str, Any] = {"scale": 0.1} | some(draw, 0.2, sinks=("out", "lse"), out_dtype=("f32", "f16", "bf16"))
    fields |= some(draw, 0.2, lse_base=("2",), lse_empty=("inf",), index_dtype=INDEX)
    fields |= some(draw, 0.35, split=("balanced", "balanced", "invariant"))
    if draw.random() < 0.5:
        fields["sparse"] = True
        if draw.random() < 0.4:
            names = ("compressed", "local")[: draw.randint(1, 2)]
            fields["sources"] = [Keys(name=name, cache=latent_cache(draw, cache)) for name in names]
    else:
        fields |= some(draw, 0.3, rows=(2, 3, 4, 8))
    if fields.get("split") == "invariant":
        fields |= some(draw, 0.5, chunk=(64, 256))
    return _set(draw, cache, ops.MlaDecode(**fields), draw.choice((1, 4, 8, 16, 16, 32, 64, 64, 128)))


def indexer_scores(draw: Draw, cache: Paged) -> KernelSet:
    """Scores of an indexer's keys."""
    fields = some(draw, 0.25, rows=(2, 4, 8), index_dtype=INDEX)
    match draw.choice(("all", "maxima", "lists")):
        case "all":
            fields |= some(draw, 0.3, fill=(False,))
        case "maxima":
            fields |= {"block_max": draw.choice((2, 4, 8, 16))}
            fields |= some(draw, 0.3, pin_newest=(True,), logits=(False,), fill=(False,))
        case "lists":
            fields["candidates"] = draw.choice((1, 2, 4, 8, 16, 32, 64, 128))
    return _set(draw, cache, ops.IndexerScores(**fields), draw.choice((1, 8, 16, 32, 64)))


# Rows -----------------------------------------------------------------------------------------------------------------


def norm(draw: Draw, dim: int) -> RmsNorm | LayerNorm:
    """A norm of heads of `dim` dims."""

    def make() -> RmsNorm | LayerNorm:
        if draw.random() < 0.3:
            return LayerNorm(**some(draw, 0.4, eps=(1e-3,), bias=(True,), per_head=(True,), weight_dtype=("f32",)))
        if draw.random() < 0.15:
            return RmsNorm(weight=False, **some(draw, 0.3, over=("row",), eps=(1e-3,)))
        fields = some(draw, 0.3, over=("row",), weight_offset=(1.0,), multiply=("before",), weight_dtype=("f32",))
        return RmsNorm(**fields | some(draw, 0.2, eps=(1e-3,), dim=(max(2, dim // 2),)))

    return valid(make)


def rope(draw: Draw, dim: int) -> Rope:
    """RoPE of heads of `dim` dims."""

    def make() -> Rope:
        fields = some(draw, 0.3, dim=(max(2, dim // 4 * 2), dim))
        fields |= some(draw, 0.3 * ("dim" in fields), part=("first", "last")) or some(draw, 0.2, proportional=(True,))
        fields |= some(draw, 0.15, scaling=(LinearScaling(factor=4.0),)) | some(draw, 0.1, local_theta=(1e3,))
        return Rope(style=draw.choice(("neox", "interleaved")), theta=1e4, **fields)

    return valid(make)


def append(draw: Draw, cache: Any) -> KernelSet:
    """An append to a cache."""
    latent = bool(cache.latent_part)
    fields = some(draw, 0.15, bias=(True,), q_out=("e4m3", "none"), q_out_heads=(64, 128), index_dtype=INDEX)
    fields |= some(draw, 0.4, rows=("padded", "slots"))
    fields |= some(draw, 0.3, inputs=("parts",) if latent else ("qkv", "qkv", "q"))
    for role in "qkv":
        if draw.random() < 0.2:
            fields[f"{role}_norm"] = norm(draw, cache.latent_part or cache.head_dim)
    fields |= some(draw, 0.1, hadamard=("qk", "qkv"))
    if latent:
        fields |= some(draw, 0.3, q_dim=(cache.head_dim,))
    if draw.random() < 0.08:
        scaled = PositionScale(scale=0.1, period=64, offset=draw.choice((0, 1)))
        fields |= {"position_scale": scaled} | some(draw, 0.3, positions=("given",))
    if draw.random() < 0.5:
        whole = cache.rope_part or cache.head_dim
        fields["rope"] = rope(draw, whole)
        fields |= some(draw, 0.2, norm_order=("after",), positions=("given",)) | some(
            draw, 0.3, angles=("pairs", "halves")
        )
        fields |= some(draw, 0.4 * ("angles" in fields), angles_dtype=("same",))
        if draw.random() < 0.15:
            pairs = (fields["rope"].dim or whole) // 2
            fields |= {"sections": (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3), "positions": "given"}
            fields |= some(draw, 0.5, sections_order=("interleaved",))
    return _set(draw, cache, ops.Append(**fields))


def _copied(draw: Draw) -> dict[str, Any]:
    fields = some(draw, 0.25, rows=("slots",), layers=("all",), index_dtype=INDEX, raw=(True,))
    return fields | some(draw, 0.5 * ("layers" in fields), max_layers=(2, 16))


def gather(draw: Draw, cache: Any) -> KernelSet:
    """A gather from a cache."""
    return _set(draw, cache, ops.Gather(**_copied(draw) | some(draw, 0.1, rows=("runs",))))


def scatter(draw: Draw, cache: Any) -> KernelSet:
    """A scatter to a cache."""
    return _set(draw, cache, ops.Scatter(**_copied(draw)))


def convert(draw: Draw, cache: Any) -> KernelSet:
    """A convert to a cache, of another one or of one with the same elements."""
    source = latent_cache(draw, cache) if isinstance(cache, Latent) else heads_cache(draw, cache)
    if draw.random() < 0.3:
        source = cache.model_copy(update=some(draw, 0.5, page_size=PAGES, lengths_dtype=INDEX, kv_heads=(2, 4)))
    fields = some(draw, 0.2, same_scales=(True,)) | some(
        draw, 0.6 if source.kv_heads != cache.kv_heads else 0.1, heads=(1, 1, 2)
    )
    return _set(draw, cache, ops.Convert(source=source, **fields))


def any_cache(draw: Draw) -> Any:
    """A cache of heads or of latent rows."""
    return latent_cache(draw) if draw.random() < 0.25 else heads_cache(draw)


# An operation, the caches that it is drawn over, and how often.
KINDS: Final[Mapping[str, tuple[Callable[[Draw, Any], KernelSet], Callable[[Draw], Any], int]]] = {
    "decode": (decode, heads_cache, 5),
    "extend": (extend, heads_cache, 5),
    "mla_decode": (mla_decode, latent_cache, 4),
    "indexer_scores": (indexer_scores, key_cache, 1),
    "append": (append, any_cache, 4),
    "gather": (gather, any_cache, 2),
    "scatter": (scatter, any_cache, 1),
    "convert": (convert, any_cache, 2),
}


def drawn(seed: str) -> KernelSet:
    """The set of a seed, of one operation."""
    draw = random.Random(seed)
    (name,) = draw.choices(list(KINDS), [odds for *_, odds in KINDS.values()])
    of, cache, _ = KINDS[name]
    while True:
        try:
            return valid(functools.partial(of, draw, cache(draw)), 12)
        except ValueError:
            continue

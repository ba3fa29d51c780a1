"""Caches of every variant drawn by hypothesis, right and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from kvgen.schema.cache import Cache, Continuous, Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.codebooks import lloyd_max
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, PerKV, Ring


@dataclass(frozen=True)
class Around:
    """What a quantization or layout is drawn for.

    `bold` draws ask for anything, others mostly for what fits; `focus` is something rare that a draw shall have.
    """

    variant: type[Cache]
    stores: str
    heads: int
    dims: int
    tokens: int | None
    table: Any
    bold: bool
    focus: str

    def pick(self, draw: st.DrawFn, fits: list[Any], others: list[Any]) -> Any:
        return draw(st.sampled_from(fits + others if self.bold or not fits else fits))

    def rarely(self, draw: st.DrawFn, fits: bool, **fields: Any) -> dict[str, Any]:
        return fields if (fits or self.bold) and draw(st.integers(0, 4)) == 0 else {}


def divisors(whole: int) -> list[int]:
    return [n for n in range(1, whole + 1) if whole % n == 0]


def draw_quant(draw: st.DrawFn, a: Around, *, groups: bool) -> Quant:
    """A quantization; `groups`: of K alone, which may quantize tokens in groups."""
    kinds = {"zero": ["i8", "i4", "i2"], "packed": ["i4", "e2m1"], "narrow": ["i3", "i3", "i2", "i2", "i4"]}.get(
        a.focus, ["e4m3", "e5m2", "i8", "i4", "i3", "i2", "e2m1"]
    )
    kind = draw(st.sampled_from(kinds))
    if not a.focus and kind in ("e4m3", "e5m2") and draw(st.integers(0, 5)) == 0:
        return Quant(dtype=kind)
    if kind == "e2m1" and a.focus != "residual" and draw(st.booleans()):
        return Quant(
            dtype=kind, scale_dtype="e4m3", recipe=draw(st.sampled_from(["max", "global"])), **draw_where(draw, a)
        )
    fields: dict[str, Any] = {"dtype": kind, "scale_dtype": draw(st.sampled_from(["f32", "f16", "bf16"]))}
    fits = [n for n in (1, 2, 3, 4, 6, 12, 16, 32) if n <= a.dims]
    if a.focus == "swizzled":
        fits = [n for n in fits if -(-a.dims // n) % 4 == 0]
    dim = a.pick(draw, fits if a.focus == "swizzled" else [None, None, *fits], [64])
    head = 1
    if (dim is None and a.focus != "rows") or a.bold:
        head = a.pick(draw, [*divisors(a.heads), None], [2, 3])
    if not a.focus and draw(st.integers(0, 4)) == 0:
        zero = a.rarely(draw, False, zero=True)
        return Quant(**fields, scale="given", block=Block(token=None, head=head, dim=dim), **zero)
    fields |= {"zero": True} if a.focus == "zero" else a.rarely(draw, kind in ("i8", "i4"), zero=True)
    if (kind in ("i3", "i2") and a.focus != "zero") or a.focus == "narrow":
        fields |= draw_narrow(draw, int(kind[1]))
    fields |= a.rarely(draw, kind in ("e4m3", "e5m2") and fields["scale_dtype"] == "f32", recipe="pow2")
    if kind in ("e4m3", "e5m2", "e2m1") and not a.focus and draw(st.integers(0, 4)) == 0:
        fields |= {"scale_dtype": "e8m0", "recipe": "pow2"}
    fields |= a.rarely(draw, kind in ("e4m3", "e5m2", "e2m1"), amax_min=1e-4)
    tokens = 1
    fitting = [n for n in divisors(a.tokens or 1) if 1 < n < 16]
    often = a.focus == "residual" or (a.focus not in ("swizzled", "rows") and draw(st.integers(0, 2)) == 0)
    if fitting and often and (groups or a.bold):
        tokens = fields["residual"] = a.pick(draw, fitting, [2, 3])
        if not a.bold:
            head, dim = 1, 1
            fields.pop("recipe", None)
            fields.pop("amax_min", None)
            if fields.pop("codebook", None):
                fields["zero"] = True
            fields.pop("norm_correction", None)
            if fields["scale_dtype"] == "e8m0":
                fields["scale_dtype"] = "f16"
    strided = a.rarely(draw, False, packing="strided")
    if a.focus == "narrow" and kind != "i3" and tokens == 1 and draw(st.booleans()):
        head, dim, strided = 1, None, {"packing": "strided"}
    fields |= strided
    return Quant(**fields, block=Block(token=tokens, head=head, dim=dim), **draw_where(draw, a))


def draw_narrow(draw: st.DrawFn, bits: int) -> dict[str, Any]:
    """What codes of so few bits stand for."""
    book = {"codebook": lloyd_max(bits, 8)}
    return draw(
        st.sampled_from(
            [
                {"zero": True},
                {"zero": True, "recipe": "min"},
                book,
                {**book, "recipe": "unit"},
                {**book, "recipe": "norm", "norm_correction": True},
                {"codebook": lloyd_max(bits - 1, 8), "recipe": "signs", "zero": True},
            ]
        )
    )


def draw_where(draw: st.DrawFn, a: Around) -> dict[str, Any]:
    row = ["row", "row"] if a.variant is Latent else []
    page = ["page"] if a.tokens is not None else []
    fits = {
        "swizzled": ["pool"],
        "page": ["page"],
        "row": ["row"],
        "rows": ["row"],
        "narrow": ["pool", "page", "row"],
    }.get(a.focus, ["pool", "pool", *row, *page])
    place = a.pick(draw, fits, ["row", "page"])
    if place != "pool":
        return {"place": place, **a.rarely(draw, a.heads == 1, scale_pad=1024)}
    own = a.rarely(draw, isinstance(a.table, Dense), own_table=True)
    if a.focus == "swizzled":
        return {**own, "order": "swizzled"}
    return {**own, **a.rarely(draw, False, order="swizzled")}


def draw_axes(draw: st.DrawFn, a: Around, *, kv: bool, layer: bool) -> str:
    """Axes in a drawn order, sometimes split; dim is innermost more often than not."""
    words: list[str] = []
    for name, whole in (("token", a.tokens or 1), ("head", a.heads), ("dim", a.dims)):
        whole_rows = name == "dim" and a.focus in ("row", "rows", "packed", "narrow")
        step = a.pick(draw, [0] if whole_rows else [0, 0, 0, *divisors(whole)[1:-1][:2]], [2, 4])
        words += [f"{name}/{step}", f"{name}%{step}"] if step else [name]
    words = draw(st.permutations(words))
    if draw(st.integers(0, 3)) or a.focus in ("row", "rows", "packed", "narrow"):
        words = [w for w in words if "dim" not in w] + ["dim"]
    outer = draw(st.permutations(["page", *(["layer"] if layer else [])]))
    if a.tokens is None and not a.bold:
        words = ["token", *(w for w in words if "token" not in w)]
    text = [*outer, *words]
    if kv and a.focus == "rows" and draw(st.booleans()):
        text.insert(len(text) - 1, "kv")  # a row is K's and then V's
    elif kv:
        text.insert(draw(st.integers(0, len(outer) if a.tokens is None or draw(st.booleans()) else len(text))), "kv")
    return " ".join(text)


def draw_layout(draw: st.DrawFn, a: Around, *, latent: bool, scaled: bool) -> Layout:
    """A layout for a cache; with pages of their own (PerKV) K and V share a tensor without a kv axis."""
    layers = draw(st.sampled_from(["axis", "pointers"]))
    on, apart = layers == "axis", isinstance(a.table, PerKV)
    fields: dict[str, Any] = {"layers": layers}
    one = draw(st.booleans()) or apart or a.focus == "page"
    both = one and a.stores == "kv" and not apart
    if one:
        fields["kv"] = draw_axes(draw, a, kv=both or draw(st.integers(0, 9)) == 0, layer=on)
    else:
        fields["k"] = draw_axes(draw, a, kv=False, layer=on)
        if a.stores == "kv":
            fields["v"] = draw_axes(draw, a, kv=False, layer=on)
    whole = replace(a, dims=1)
    if latent and a.focus != "row" and draw(st.integers(0, 2)) == 0:
        fields["rope"] = draw_axes(draw, whole, kv=False, layer=on)
    if scaled and a.focus != "swizzled" and draw(st.integers(0, 4)) == 0:
        fields["scales"] = draw_axes(draw, whole, kv=both, layer=on)
    if scaled and a.stores == "kv" and draw(st.integers(0, 6)) == 0:
        fields["v_scales"] = draw_axes(draw, whole, kv=False, layer=on)
    if a.focus == "rows":
        fields["row_align"] = draw(st.sampled_from([1, 1, 4, 16]))
    if not a.focus and draw(st.integers(0, 9)) == 0:
        fields["swizzle"] = draw(st.sampled_from([(1, 1, 1), (2, 2, 3), (1, 3, 3)]))
    return Layout(**fields)


@st.composite
def caches(draw: st.DrawFn, focus: str) -> Cache:
    """A cache of any variant, right or wrong."""
    variants = {"row": [Latent], "page": [Paged, Paged, Latent], "residual": [Paged], "swizzled": [Paged, Latent]}
    variants["rows"] = [Paged, Paged, Continuous]
    variant = draw(st.sampled_from(variants.get(focus, [Paged, Paged, Latent, Latent, Continuous])))
    bold = draw(st.integers(0, 3)) == 0
    fields: dict[str, Any] = {"dtype": draw(st.sampled_from(["bf16", "f16", "f32"]))}
    if variant is Latent:
        odd = [5, 3] if bold else []
        rope = [4, 8] if focus == "row" else [0, 4, 8]
        fields |= {
            "latent_dim": draw(st.sampled_from([4, 16, 32, *odd])),
            "rope_dim": draw(st.sampled_from(rope + odd)),
        }
        if focus == "page" or (focus != "row" and draw(st.integers(0, 4)) == 0):
            fields["quant_rope"] = True
        heads, dims = 1, fields["latent_dim"]
    else:
        heads, dims = draw(st.integers(1, 4)), draw(st.sampled_from([1, 5, 8, 16, 24, 64]))
        fields |= {"kv_heads": heads, "head_dim": dims}
        fields |= draw(st.sampled_from([{}] * 6 + [{"v_head_dim": 8}, {"stores": "k"}]))
    stores = "k" if variant is Latent else fields.get("stores", "kv")
    table: Any = Dense()
    tokens = None
    if variant is not Continuous:
        more = [CSR(), Indirect(), Mapped(), Ring(window=4)] + ([PerKV()] if stores == "kv" or bold else [])
        fields["table"] = table = draw(st.sampled_from([Dense()] * 4 + more))
        fits = [1] if isinstance(table, Indirect) else [1, 2, 4, 8, 8, 128]
        fits = {"residual": [4, 8], "swizzled": [128, 128, 256]}.get(focus, fits)
        tokens = fields["page_size"] = 8 if bold else draw(st.sampled_from(fits))
    elif draw(st.booleans()):
        tokens = fields["max_tokens"] = draw(st.sampled_from([4, 8]))
    a = Around(variant, stores, heads, dims, tokens, table, bold, focus)
    both, rarer = ["both"] * 3 * (stores == "kv"), [] if focus else ["k_quant", "none"]
    which = draw(st.sampled_from((both if both and focus == "residual" else ["quant"] * 4 + both) + rarer))
    if which in ("quant", "k_quant"):
        fields[which] = draw_quant(draw, a, groups=which == "k_quant" or stores == "k")
    elif which == "both":
        fields |= {"k_quant": draw_quant(draw, a, groups=True), "v_quant": draw_quant(draw, a, groups=False)}
    scaled = any(isinstance(q, Quant) and q.computed and q.place == "pool" for q in fields.values())
    fields["layout"] = draw_layout(draw, a, latent=variant is Latent, scaled=scaled or bold)
    return variant(**fields)

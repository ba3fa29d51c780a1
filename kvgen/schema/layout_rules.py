"""What a layout and a quantization ask of each other: text that would be read by nobody is refused, not ignored."""

from __future__ import annotations

from kvgen.layout.axes import INNER, parse_axes
from kvgen.schema.cache_fields import CacheFields, Layout


def check_layout(cache: CacheFields) -> None:
    """Raise ValueError where the layout says more than the cache has, or less than its scales need."""
    layout = cache.layout
    if layout.rope is not None and not cache.rope_part:
        raise ValueError(
            f"layout: got rope={layout.rope!r} for rows without a RoPE part; it is for Latent with rope_dim; leave it out"
        )
    if layout.swizzle is not None and cache.byte_rows:
        raise ValueError(
            f"layout: got swizzle={layout.swizzle} with latent rows of bytes, whose elements differ in size; leave it out"
        )
    if layout.row_align != 1 and not cache.scaled_rows:
        raise ValueError(
            f"layout: got row_align={layout.row_align} for rows without scales in them; it pads rows of place='row'; leave it out"
        )
    if layout.rope is not None and any(q is not None and q.place == "page" for q in cache.quants.values()):
        raise ValueError(
            f"layout: got rope={layout.rope!r} with place='page'; a page of bytes has rows with both parts, then their scales; "
            "leave rope out, or use place='pool'"
        )
    if layout.page_align is not None and (cache.ragged or cache.total_pages is not None):
        which = "requests that lie without pages" if cache.ragged else f"total_pages={cache.total_pages}"
        raise ValueError(
            f"layout: got page_align={layout.page_align} with {which}; pages whose distance the tensor brings at run time are "
            "aligned; leave it out"
        )
    check_totals(cache)
    _check_scales(cache)


def check_totals(cache: CacheFields) -> None:
    """Raise ValueError for a number of pages or layers on which no stride depends."""
    layout = cache.layout
    texts = [t for t in (layout.kv, layout.k, layout.v, layout.rope, layout.scales, layout.v_scales) if t is not None]
    for name, total in cache.outer_extents:
        field = f"total_{name}s"
        outside = all(_first_inner(text) > _place(text, name) for text in texts)
        if total is not None and outside:
            raise ValueError(
                f"{field}: got {total}, but {name} lies outside token, head and dim, so that no stride depends on it; leave "
                "it out"
            )


def _place(text: str, name: str) -> int:
    """Where axis `name` stands in a layout; -1 where it does not."""
    return next((i for i, a in enumerate(parse_axes(text)) if a.name == name), -1)


def _first_inner(text: str) -> int:
    return next((i for i, a in enumerate(parse_axes(text)) if a.name in INNER), len(text))


def check_room(layout: Layout, total_tokens: int) -> None:
    """Raise ValueError where no stride of ragged tensors depends on how many rows they have room for."""
    for text in filter(None, (layout.kv, layout.k, layout.v, layout.scales, layout.v_scales)):
        if next((a.name for a in parse_axes(text) if a.name in INNER), "token") != "token":
            return
    raise ValueError(
        f"total_tokens: got {total_tokens}, but token lies outside head and dim, so that no stride depends on it; leave it out"
    )


def _check_scales(cache: CacheFields) -> None:
    layout = cache.layout
    computed = {r: q for r, q in cache.quants.items() if q is not None and q.computed}
    pools = {r: q for r, q in computed.items() if q.place == "pool"}
    for field, text, role in (("scales", layout.scales, ""), ("v_scales", layout.v_scales, "v")):
        if text is None:
            continue
        if not pools or (role and role not in pools):
            raise ValueError(
                f"layout: got {field}={text!r}, but no computed scales{' of V' if role else ''} lie in a pool of their own; "
                "leave it out"
            )
        if any(q.order == "swizzled" for r, q in pools.items() if not role or r == role):
            raise ValueError(
                f"layout: got {field}={text!r} beside order='swizzled', which is an order itself; give one"
            )
    if layout.v_scales is not None and "kv" in [a.name for a in parse_axes(layout.v_scales)]:
        raise ValueError(
            f"layout: got v_scales={layout.v_scales!r}; V's scales are a tensor of their own; drop the kv axis"
        )
    if layout.scales is not None and cache.scales_together:
        has_axis = "kv" in [a.name for a in parse_axes(layout.scales)]
        apart = cache.stores == "k" or cache.page_table.separate_kv
        if not has_axis and not apart:
            raise ValueError(
                f"layout: got scales={layout.scales!r} without a kv axis, but the scales of K and V share a tensor; add it"
            )

"""From a cache's layout and quantization to its memory: builds the `Storage` that operations read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvgen.errors import SpecError
from kvgen.layout.axes import INNER, OUTER, Axis, Swizzle, parse_axes
from kvgen.layout.dtypes import DType, dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, PoolTensor, Scales, Segment, Storage
from kvgen.schema.cache_fields import CacheFields
from kvgen.schema.extra_tensors import given_tensors, tail_tensor
from kvgen.schema.quant import Quant
from kvgen.schema.scaled_rows import Extents, byte_part, scaled_rows


def storage_of(cache: CacheFields) -> Storage:
    """The memory of a cache; raises SpecError where its layout and quantization contradict."""
    return _Builder(cache).build()


def scale_axes(text: str, block: tuple[int, int, int], order: str) -> str:
    """The axes of the scales of values laid out as `text`: the same without dim's split, groups innermost."""
    words = text.split()
    named = {name: [w for w in words if parse_axes(w)[0].name == name] for name in INNER}
    if order == "swizzled":
        outer = [w for w in words if parse_axes(w)[0].name in OUTER]
        return " ".join([*outer, *named["head"], "token/128 dim/4 token%32 token/32%4 dim%4"])
    kept: list[str] = []
    for word in words:
        name = parse_axes(word)[0].name
        whole = {"token": block[0], "head": block[1]}.get(name, 1)
        if name == "dim" or (whole != 1 and name in kept):
            continue
        kept.append(name if whole != 1 else word)
    return " ".join([*kept, "dim"])


@dataclass
class _Builder:
    """Collects tensors and bases while it goes through the roles."""

    cache: CacheFields

    def build(self) -> Storage:
        cache = self.cache
        self.tensors: list[PoolTensor] = []
        self.bases: list[Base] = []
        places = {q.place for q in cache.quants.values() if q is not None and q.computed}
        if cache.byte_rows:
            roles = {"k": self._byte_rows()}
        elif "page" in places:
            roles = self._byte_pages()
        elif "row" in places:
            self.tensors, self.bases, roles = scaled_rows(cache, self._blocks, self._field)
            self._align_values(roles)
        else:
            roles = self._regions()
        for segment in (s for segments in roles.values() for s in segments):
            _check_bytes(segment)
        self._align_scales(roles)
        if cache.layout.page_align is not None:
            self.tensors = [
                replace(t, page_align=cache.layout.page_align) if t.holds_values and "page" in t.axes else t
                for t in self.tensors
            ]
        self.tensors += [*given_tensors(cache, roles), *tail_tensor(cache, roles)]
        return Storage(tuple(self.tensors), tuple(self.bases), roles)

    def _align_values(self, roles: dict[str, tuple[Segment, ...]]) -> None:
        """Rows of bytes are accessed as widely as what lies in them allows."""
        for segment in (s for segments in roles.values() for s in segments):
            at = next(i for i, t in enumerate(self.tensors) if t.name == self._of(segment.base).tensor)
            self.tensors[at] = replace(self.tensors[at], align=max(self.tensors[at].align, segment.align))

    def _align_scales(self, roles: dict[str, tuple[Segment, ...]]) -> None:
        """A tensor's widest access is also that of the scales in it."""
        for segment in (s for segments in roles.values() for s in segments):
            scales = segment.scales
            if scales is None or scales.array:
                continue
            at = next(i for i, t in enumerate(self.tensors) if t.name == self._of(scales.base).tensor)
            tensor, width = self.tensors[at], segment.scale_vector * scales.dtype.bytes
            self.tensors[at] = replace(tensor, align=max(tensor.align, width))

    # --- K and V in tensors of their element type ---------------------------------------------------------------------

    def _regions(self) -> dict[str, tuple[Segment, ...]]:
        cache, layout = self.cache, self.cache.layout
        regions = {r: self._region(r, text, size) for r, text, size in self._texts()}
        scales = self._scale_pools()
        roles: dict[str, tuple[Segment, ...]] = {}
        for role in cache.roles:
            begin, found = 0, []
            for part in ("", "rope"):
                key = f"{role}_{part}" if part else role
                if key not in regions:
                    continue
                region = regions[key]
                size = dict(region.extents)["dim"]
                assert size is not None
                quant = cache.quants[role] if not part else None
                kv = 1 if role == "v" and layout.kv is not None else 0
                self.bases.append(Base(key, _tensor_name(layout.kv is not None, key), region.dtype, kv))
                found.append(
                    Segment(
                        begin,
                        size,
                        key,
                        region,
                        quant,
                        scales.get(role) if not part else None,
                        self._global(role, quant),
                    )
                )
                begin += size
            roles[role] = tuple(found)
        self.bases.sort(key=lambda b: b.table == "scales" or b.name.endswith("scales"))
        self._value_tensors(roles)
        self.tensors.sort(key=lambda t: t.name.endswith("scales"))
        return roles

    def _texts(self) -> list[tuple[str, str, int]]:
        """(base, axes, dims) of every value region."""
        cache, layout = self.cache, self.cache.layout
        found: list[tuple[str, str, int]] = []
        for role in cache.roles:
            text = layout.kv or (layout.k if role == "k" else layout.v)
            assert text is not None
            whole = cache.head_dim if role == "k" else cache.v_dim
            rope = cache.rope_part if role == "k" and layout.rope is not None else 0
            found.append((role, text, whole - rope))
            if rope:
                assert layout.rope is not None
                found.append(("k_rope", layout.rope, rope))
        return found

    def _region(self, role: str, text: str, dims: int) -> Region:
        cache = self.cache
        swizzle = Swizzle(*cache.layout.swizzle) if cache.layout.swizzle else None
        quant = cache.quants.get(role)
        element = quant.codes if quant else dtype(cache.dtype)
        both = cache.layout.kv is not None
        return Region(
            "kv" if both and cache.stores == "kv" else "v" if role == "v" else "k",
            element,
            parse_axes(text),
            (
                ("kv", 1 if cache.stores == "k" else 2),
                ("token", cache.token_extent),
                ("head", cache.kv_heads),
                ("dim", dims),
                *cache.outer_extents,
            ),
            swizzle=swizzle,
            ragged=cache.ragged,
            strided=quant is not None and quant.strided,
            token_step=cache.token_step,
        )

    def _value_tensors(self, roles: dict[str, tuple[Segment, ...]]) -> None:
        held: dict[str, list[Segment]] = {}
        for segment in (s for segments in roles.values() for s in segments):
            held.setdefault(self._of(segment.base).tensor, []).append(segment)
        for name, segments in held.items():
            dims = "v_head_dim" if segments[0].base == "v" and self.cache.v_head_dim else "head_dim"
            self.tensors.append(self._tensor(name, [s.region for s in segments], max(s.align for s in segments), dims))

    def _of(self, base: str) -> Base:
        return next(b for b in self.bases if b.name == base)

    def _tensor(self, name: str, regions: list[Region], align: int, dims: str, pages: str = "pages") -> PoolTensor:
        """The tensor that these regions lie in, side by side along its kv axis if there are two."""
        region, kind = regions[0], regions[0].dtype
        strides, shape = list(region.fixed_strides), list(region.shape)
        if kind.packed:
            if not region.strided:
                _check_packed(region)
            shape[-1] = kind.size_of(int(shape[-1]))
            strides = [s if s is None else s * kind.place // 8 for s in strides[:-1]] + [1]
        names = dict.fromkeys(r.dtype.held_as for r in regions)
        axes = tuple(a.name for a in region.axes)
        return PoolTensor(
            name,
            (*names, "u8")
            if len(names) == 1 and kind.bits == 8 and "u8" not in names
            else ("u8",)
            if len(names) > 1
            else (*names,),
            axes,
            tuple(pages if s == "pages" else s for s in shape),
            tuple(strides),
            align,
            region.text,
            tuple(self._field(a, dims) for a in axes),
        )

    def _field(self, axis: str, dims: str) -> str | None:
        fields = type(self.cache).model_fields
        token = next((name for name in ("max_tokens", "page_size") if name in fields), None)
        return {"token": token, "head": "kv_heads", "dim": dims}.get(axis)

    # --- scales -------------------------------------------------------------------------------------------------------

    def _blocks(self, quant: Quant, dims: int) -> tuple[tuple[int, int, int], int, int]:
        """(block extents, blocks along heads, blocks along dim)."""
        heads, block = self.cache.kv_heads, quant.block
        bh, bd = block.head or heads, min(block.dim or dims, dims)
        return (block.token or 0, bh, bd), heads // bh, math.ceil(dims / bd)

    def _latent_dims(self, role: str) -> int:
        cache = self.cache
        return cache.v_dim if role == "v" else cache.head_dim - cache.plain_dims

    def _global(self, role: str, quant: Quant | None) -> str:
        return f"{role}_global_scale" if quant is not None and quant.recipe == "global" else ""

    def _scale_pools(self) -> dict[str, Scales]:
        cache, layout, found = self.cache, self.cache.layout, {}
        quants = {r: q for r, q in cache.quants.items() if q is not None and q.scale_dtype is not None}
        shared = cache.scales_together
        for role, quant in quants.items():
            assert quant.scale_dtype is not None
            dims, kind = self._latent_dims(role), dtype(quant.scale_dtype)
            block, heads, groups = self._blocks(quant, dims)
            if not quant.computed:
                found[role] = Scales(kind, quant.zero, block, heads, groups, array=f"{role}_scale")
                continue
            source = layout.kv or (layout.k if role == "k" else layout.v)
            own = layout.v_scales if role == "v" else None
            text = own or layout.scales or scale_axes(source or "", block, quant.order)
            if not shared:
                text = " ".join(w for w in text.split() if w != "kv")
            tokens = cache.token_extent
            region = Region(
                "kv" if shared and cache.stores == "kv" else "v" if role == "v" else "k",
                kind,
                parse_axes(text),
                (
                    ("kv", 1 if cache.stores == "k" else 2),
                    ("token", tokens // block[0] if tokens is not None else None),
                    ("head", heads),
                    ("dim", groups * (1 + quant.zero)),
                    *cache.outer_extents,
                ),
                ragged=cache.ragged,
            )
            if quant.zero and region.vector % 2:
                raise SpecError(
                    f"layout: got {region.text!r} for scales with zero points; a zero point follows its scale: dim innermost, "
                    "split by even numbers if at all"
                )
            tensor = "scales" if shared else f"{role}_scales"
            base = f"{role}_scales"
            kv = 1 if shared and role == "v" else 0
            self.bases.append(Base(base, tensor, kind, kv, "scales" if quant.own_table else "values"))
            if tensor not in [t.name for t in self.tensors]:
                align = kind.bytes * (1 + quant.zero)
                self.tensors.append(self._tensor(tensor, [region], align, "quant.block", "scale_pages"))
            found[role] = Scales(kind, quant.zero, block, heads, groups, base, region)
        return found

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _byte_rows(self) -> tuple[Segment, ...]:
        """A latent row: codes, scales where they lie in the row, then the RoPE part in the cache's dtype."""
        cache = self.cache
        quant, plain = cache.quants["k"], cache.plain_dims
        assert quant is not None
        latent, elem = cache.head_dim - plain, dtype(cache.dtype)
        block, heads, groups = self._blocks(quant, latent)
        in_row = quant.computed and quant.place == "row"
        start = quant.codes.size_of(latent)
        kind, pad = dtype(quant.scale_dtype or "f32"), quant.padding(groups)
        tail = start + ((groups * (1 + quant.zero) + pad) * kind.bytes if in_row else 0)
        row = tail + plain * elem.bytes
        text = cache.layout.kv or cache.layout.k
        assert text is not None

        def region(element: DType, dims: int, at: int, what: str) -> Region:
            return byte_part(element, parse_axes(text), self._extents(dims), at, row, what)

        scales = self._scale_pools().get("k") if not in_row else None
        if in_row:
            place = region(kind, groups * (1 + quant.zero), start, "scales")
            scales = Scales(kind, quant.zero, block, heads, groups, "k", place, pad=pad)
        values = region(quant.codes, latent, 0, "codes")
        axes = tuple(a.name if a.name != "dim" else "byte" for a in values.axes)
        strides = tuple(s if s is None else s * values.dtype.place // 8 for s in values.fixed_strides)
        segments: tuple[Segment, ...] = (Segment(0, latent, "k", values, quant, scales, self._global("k", quant)),)
        if plain:
            segments += (Segment(latent, plain, "k", region(elem, plain, tail, "RoPE part")),)
        shape = tuple(row if a == "byte" else s for a, s in zip(axes, values.shape, strict=True))
        align = max(s.align for s in segments)
        self.bases.insert(0, Base("k", "pool", dtype("u8")))
        words = values.text.replace("dim", "byte")
        fields = tuple("quant" if a == "byte" else self._field(a, "quant") for a in axes)
        self.tensors.insert(0, PoolTensor("pool", ("u8",), axes, shape, (*strides[:-1], 1), align, words, fields))
        return segments

    def _extents(self, dims: int) -> Extents:
        cache = self.cache
        inner = (("kv", 1), ("token", cache.page_tokens), ("head", cache.kv_heads), ("dim", dims))
        return (*inner, *cache.outer_extents)

    def _byte_pages(self) -> dict[str, tuple[Segment, ...]]:
        """A page of bytes: the rows of K, of V, then the scales of K and of V."""
        cache = self.cache
        text = cache.layout.kv
        assert text is not None
        outer = [w for w in text.split() if parse_axes(w)[0].name in ("page", "layer")]
        inner = [w for w in text.split() if parse_axes(w)[0].name in INNER]
        at, end, values, scales = 0, 0, dict[str, list[Region]](), dict[str, Scales]()

        def place(element: DType, words: list[str], extents: Extents, pad: int = 0, *, strided: bool = False) -> Region:
            nonlocal at, end
            pitch = (dict(extents)["dim"] or 0) + pad if pad else 0
            axes = parse_axes(" ".join(["page", *words]))
            region = Region("k", element, axes, extents, byte_offset=at, pitch=pitch, strided=strided)
            assert region.span is not None
            end = at - (-(region.span + pad) * element.place // 8)
            at = -(-end // 16) * 16
            return region

        for role in cache.roles:
            dims = cache.head_dim if role == "k" else cache.v_dim
            quant = cache.quants[role]
            if quant is not None and cache.plain_dims:
                values[role] = self._mixed_rows(quant, parse_axes(" ".join(["page", *inner])))
                tokens, last = cache.page_tokens or 0, values[role][-1]
                end = at - (-tokens * last.pitch * last.dtype.place // 8)
                at = -(-end // 16) * 16
                continue
            codes, strided = (quant.codes, quant.strided) if quant else (dtype(cache.dtype), False)
            values[role] = [place(codes, inner, self._extents(dims), strided=strided)]
        for role in cache.roles:
            quant = cache.quants[role]
            if quant is None or quant.scale_dtype is None:
                continue
            kind = dtype(quant.scale_dtype)
            block, heads, groups = self._blocks(quant, self._latent_dims(role))
            if not quant.computed:
                scales[role] = Scales(kind, quant.zero, block, heads, groups, array=f"{role}_scale")
                continue
            pad = quant.padding(groups)
            words = scale_axes(" ".join(inner), block, "linear").split()
            assert cache.page_tokens is not None
            extents = (
                ("kv", 1),
                ("token", cache.page_tokens // block[0]),
                ("head", heads),
                ("dim", groups * (1 + quant.zero)),
            )
            region = place(kind, words, extents, pad)
            scales[role] = Scales(kind, quant.zero, block, heads, groups, "bytes", region, pad=pad)
        roles: dict[str, tuple[Segment, ...]] = {}
        for name, (main, *rest) in values.items():
            quant, size = cache.quants[name], self._latent_dims(name)
            first = Segment(0, size, "bytes", main, quant, scales.get(name), self._global(name, quant))
            roles[name] = (first, *(Segment(size, cache.plain_dims, "bytes", r) for r in rest))
        # Pages that lie multiples of 16 bytes apart need no bytes behind their last part, and the views of engines have none.
        whole = end if cache.layout.page_align is not None and cache.layout.page_align % 16 == 0 else at
        names = {"page": "pages", "layer": "layers"}
        self.bases.append(Base("bytes", "pool", dtype("u8")))
        self.tensors.append(
            PoolTensor(
                "pool",
                ("u8",),
                (*(parse_axes(w)[0].name for w in outer), "byte"),
                (*(names[parse_axes(w)[0].name] for w in outer), whole),
                (*(None for _ in outer), 1),
                16,
                " ".join([*outer, "byte"]),
                (*(None for _ in outer), "quant"),
            )
        )
        return roles

    def _mixed_rows(self, quant: Quant, axes: tuple[Axis, ...]) -> list[Region]:
        """Codes and RoPE part of latent rows that have their scales elsewhere in the page, which they begin."""
        cache = self.cache
        latent, plain, elem = cache.head_dim - cache.plain_dims, cache.plain_dims, dtype(cache.dtype)
        codes = quant.codes.size_of(latent)
        row = codes + plain * elem.bytes
        return [
            byte_part(quant.codes, axes, self._extents(latent), 0, row, "codes"),
            byte_part(elem, axes, self._extents(plain), codes, row, "RoPE part"),
        ]


def _tensor_name(one: bool, base: str) -> str:
    return "rope_pool" if base == "k_rope" else "pool" if one else f"{base}_pool"


def _check_bytes(segment: Segment) -> None:
    """The codes of a byte (of three bytes of 3-bit codes) are written by one access: they lie in one row, and in one block or
    in whole ones.
    """
    region, kind, scales = segment.region, segment.region.dtype, segment.scales
    if not kind.packed or region.strided:
        return
    _check_packed(region)
    if segment.vector % kind.together:
        assert scales is not None
        raise SpecError(
            f"quant: got block.dim={scales.block[2]} with {kind.name} codes, {kind.packing}; codes that share bytes share a "
            f"scale, or whole blocks do: a multiple of {kind.together} dims, or a divisor of it"
        )


def _check_packed(region: Region) -> None:
    kind = region.dtype
    if region.vector % kind.together:
        raise SpecError(
            f"layout: got {region.text!r} with {kind.bits}-bit elements, {kind.packing}; dim must be innermost and a multiple of "
            f"{kind.together}, so that a byte belongs to one row (and a block of scales to whole bytes)"
        )

"""K and V of one layer as rows of tokens, whatever memory they lie in.

A role is a run of parts (kvgen.reference.segments), each of which lies in views of the engine's tensors. Where those are
follows from the written contract alone: one tensor for K and V or one each; scales in tensors of their own, behind the
values of their page, or inside each token's row; the newest tokens of a residual cache in a tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.layout.dtypes import dtype
from kvgen.reference.elements import Elements, Padded, Raw, cut, in_tiles, typed, without_dim, words
from kvgen.reference.faults import FaultLog
from kvgen.reference.segments import Coded, Part, Plain
from kvgen.reference.tables import Place
from kvgen.schema.cache import Cache
from kvgen.schema.quant import Quant

Arrays = Mapping[str, Raw | Sequence[Raw]]
BYTE_PAGE_ALIGN = 16


class Rows:
    """K or V of one layer, token by token; views of the engine's memory, which `write` changes.

    `tail[B, R, heads, dim]` and `sealed[B]` are a residual cache's: the newest tokens of each request, R places a request,
    and how many of its tokens are quantized.
    """

    def __init__(self, parts: Sequence[Part], *, tail: Raw | None = None, sealed: Raw | None = None) -> None:
        self.parts, self.tail, self.sealed = tuple(parts), tail, sealed
        first = self.parts[0]
        self.heads, self.dim = first.heads, sum(p.dim for p in self.parts)
        self.pages, self.tokens = first.pages, first.tokens

    @property
    def residual(self) -> int:
        """Tokens of a group that is quantized as one, the newest ones waiting in the tail; 0: none wait."""
        return 0 if self.tail is None else int(self.tail.shape[1])

    @property
    def scale_pages(self) -> int:
        """Pages that scales have; as many as values have where there are no scales in pages."""
        found = [p.scales.pages for p in self.parts if isinstance(p, Coded) and isinstance(p.scales, Elements)]
        return found[0] if found else self.pages

    # --- pages --------------------------------------------------------------------------------------------------------

    def read(self, page: int, token: int, scales: int | None = None) -> Raw:
        """The row `[heads, dim]` of one token in the cache's dtype, a copy; `scales` is the page of its scales."""
        place = Place(page, page if scales is None else scales)
        return _joined([p.read(place, token) for p in self.parts])

    def numbers(self, page: int, token: int, scales: int | None = None) -> NDArray[np.float64]:
        """The same as attention sees it: dequantized, not rounded to the cache's dtype."""
        place = Place(page, page if scales is None else scales)
        return _joined([p.numbers(place, token) for p in self.parts])

    def write(self, page: int, token: int, row: Raw, scales: int | None = None) -> None:
        """Store `row` `[heads, dim]`, of the cache's dtype, as one token."""
        place = Place(page, page if scales is None else scales)
        for part, dims in self._dims():
            part.write(place, token, row[None, :, dims])

    def write_run(self, page: int, first: int, rows: Raw, scales: int | None = None) -> None:
        """Store `rows` `[T, heads, dim]` as the tokens of a page from `first`."""
        place = Place(page, page if scales is None else scales)
        for part, dims in self._dims():
            step = part.together or len(rows)
            for i in range(0, len(rows), step):
                part.write(place, first + i, rows[i : i + step, :, dims])

    def logical(self) -> Raw:
        """All of it, `[page, token, head, dim]`, scales from the page of the same number; a copy."""
        found = [[self.read(page, token) for token in range(self.tokens)] for page in range(self.pages)]
        return np.array(found).reshape(self.pages, self.tokens, self.heads, self.dim)

    def _dims(self) -> Iterator[tuple[Part, slice]]:
        """Every part and its dims of a row."""
        begin = 0
        for part in self.parts:
            yield part, slice(begin, begin + part.dim)
            begin += part.dim

    # --- tokens of a request ------------------------------------------------------------------------------------------

    def token(self, b: int, position: int, place: Place) -> Raw:
        """A token of request b in the cache's dtype; `place` is where its page is."""
        waiting = self._waiting(b, position)
        return _joined([p.read(place, position % self.tokens) for p in self.parts]) if waiting is None else waiting

    def token_numbers(self, b: int, position: int, place: Place) -> NDArray[np.float64]:
        """The same as attention sees it."""
        waiting = self._waiting(b, position)
        if waiting is None:
            return _joined([p.numbers(place, position % self.tokens) for p in self.parts])
        return waiting.astype(np.float64)

    def run_numbers(self, b: int, position: int, count: int, place: Place) -> NDArray[np.float64]:
        """`[T, heads, dim]` of `count` tokens of request b from `position`, all of one page, as attention sees them."""
        if self.tail is not None:
            return np.stack([self.token_numbers(b, p, place) for p in range(position, position + count)])
        parts = [p.numbers_run(place, position % self.tokens, count) for p in self.parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)

    def _waiting(self, b: int, position: int) -> Raw | None:
        """A copy of a token in the tail; None where readers find it in its page."""
        if self.tail is None or self.sealed is None:
            return None
        sealed = int(self.sealed[b])
        if sealed < 0 or position < sealed:  # a negative number is read as the largest one
            return None
        return np.array(self.tail[b, position % self.residual])

    def miscounted(self, b: int, tokens: int) -> bool:
        """Whether `sealed[b]` is not what seal leaves for a request that has some tokens: those in whole groups."""
        if self.sealed is None or not tokens:
            return False
        return int(self.sealed[b]) != tokens // self.residual * self.residual

    def put(self, b: int, position: int, place: Place, row: Raw, after: int) -> None:
        """Store a new token of request b, which has `after` tokens with this step's.

        In a residual cache it waits in the tail; tokens of groups that this step completes are what `seal` stores.
        """
        if self.tail is None:
            for part, dims in self._dims():
                part.write(place, position % self.tokens, row[None, :, dims])
        elif position >= after // self.residual * self.residual:
            self.tail[b, position % self.residual] = row

    def seal(self, b: int, first: int, place: Place, new: Raw, before: int) -> None:
        """Quantize the group of tokens from `first` of request b: from the tail, and from `new`, the rows after `before`."""
        assert self.tail is not None
        size, (part,) = self.residual, self.parts
        group = [new[p - before] if p >= before else self.tail[b, p % size] for p in range(first, first + size)]
        part.write(place, first % self.tokens, np.stack(group))


def scales_word(rows: Sequence[Rows]) -> int:
    """The error word of K's and V's given scales of a layer: 0 where all are scales. Kernels that read or write values by them
    report it beside their own faults, of which the larger word stays."""
    faults = FaultLog()
    for role, one in enumerate(rows):
        for part in one.parts:
            if isinstance(part, Coded):
                part.report_scales(role, faults)
    return faults.word


def _joined(parts: list[Raw]) -> Raw:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def cache_rows(cache: Cache, arrays: Arrays | Sequence[Raw | Sequence[Raw]], layer: int) -> tuple[Rows, ...]:
    """(K,) or (K, V) of one layer.

    `arrays` are the tensors by the names that a generated `Cache` takes them by (others are ignored): `pool`, or `k_pool`
    and `v_pool`; `rope_pool`; `scales`, or `k_scales` and `v_scales`; given scales `k_scale` and `v_scale`; `k_global_scale`
    and `v_global_scale`; `k_tail`; also `k_sealed`. Each is an array, or a list of one a layer. A sequence is taken for
    the tensors in the order of the cache's storage.
    """
    if not isinstance(arrays, Mapping):
        arrays = dict(zip((t.name for t in cache.storage.tensors), arrays, strict=False))
    return _Finder(cache, arrays, layer).roles()


class _Finder:
    """Finds every part's memory in the tensors of one layer."""

    def __init__(self, cache: Cache, arrays: Arrays, layer: int) -> None:
        self.cache, self.layout, self.layer = cache, cache.layout, layer
        self.arrays = {n: a if isinstance(a, np.ndarray) else a[layer] for n, a in arrays.items()}
        self.kind = dtype(cache.dtype).numpy()

    def roles(self) -> tuple[Rows, ...]:
        in_pages = any(q is not None and q.computed and q.place == "page" for q in self.cache.quants.values())
        found = []
        for role in self.cache.roles:
            quant = self.cache.quants[role]
            if self.cache.byte_rows and quant is not None:
                parts = self._byte_row(quant)
            elif in_pages:
                parts = self._byte_page()[role]
            elif self._in_rows():
                parts = self._scaled_row(role)
            else:
                parts = self._tensors(role, quant)
            if quant is None or quant.residual is None:
                found.append(Rows(parts))
                continue
            found.append(Rows(parts, tail=self._own(f"{role}_tail", 4), sealed=self.arrays[f"{role}_sealed"]))
        return tuple(found)

    def _own(self, name: str, rank: int) -> Raw:
        """This layer's part of an array that has the layers in front, or, a layer an array, has not."""
        array = self.arrays[name]
        return array if array.ndim == rank else np.asarray(array[self.layer])

    def _dim(self, role: str) -> int:
        return self.cache.v_dim if role == "v" else self.cache.head_dim

    def _text(self, role: str) -> str:
        text = self.layout.kv or (self.layout.v if role == "v" else self.layout.k)
        assert text is not None
        return text

    def _elements(self, array: Raw, axes: str, role: str, dim: int, **more: Any) -> Elements:
        heads = more.pop("heads", self.cache.kv_heads)
        kind = Padded if more.get("pad") else Elements
        if kind is Elements:
            more.pop("pad", None)
        if self.cache.ragged:  # a page is a row
            axes = axes.replace("token", "page")
        return kind(array, axes, heads=heads, dim=dim, layer=self.layer, kv=int(role == "v"), **more)

    # --- values in tensors of their own type --------------------------------------------------------------------------

    def _tensors(self, role: str, quant: Quant | None) -> list[Part]:
        rope = self.cache.rope_part if role == "k" and self.layout.rope is not None else 0
        dim, swizzle = self._dim(role) - rope, self.layout.swizzle
        array = self.arrays["pool" if self.layout.kv is not None else f"{role}_pool"]
        parts: list[Part] = []
        if quant is None:
            parts.append(Plain(self._elements(array, self._text(role), role, dim, swizzle=swizzle)))
        else:
            bytes_ = typed(array, np.dtype(np.uint8))
            codes = self._elements(bytes_, self._text(role), role, dim, swizzle=swizzle, **_packing(quant))
            parts.append(self._coded(role, quant, codes, self._scale_tensor(role, quant, dim)))
        if rope and self.layout.rope is not None:
            array = self.arrays["rope_pool"]
            parts.append(Plain(self._elements(array, self.layout.rope, role, rope, swizzle=swizzle)))
        return parts

    def _block(self, quant: Quant, dim: int) -> tuple[int, int, int]:
        """Tokens, heads and dims that share a scale."""
        return quant.block.token or 0, quant.block.head or self.cache.kv_heads, min(quant.block.dim or dim, dim)

    def _scale_row(self, quant: Quant, dim: int) -> tuple[int, int]:
        """The scales of a token: blocks of heads, and places along dim, two a block where there is a zero point."""
        _, heads, dims = self._block(quant, dim)
        return self.cache.kv_heads // heads, math.ceil(dim / dims) * (1 + quant.zero)

    def _pad(self, quant: Quant, places: int) -> int:
        """Places of zeros behind a token's scales."""
        if quant.scale_pad is None or quant.scale_dtype is None:
            return 0
        return quant.scale_pad // dtype(quant.scale_dtype).bytes - places

    def _scale_tensor(self, role: str, quant: Quant, dim: int) -> Elements | None:
        """Scales in a tensor of their own, K's and V's in one where both are quantized alike in one tensor."""
        if quant.scale_dtype is None or not quant.computed:
            return None
        layout, alike = self.layout, all(q == quant for q in self.cache.quants.values())
        shared = layout.kv is not None and alike and layout.v_scales is None
        axes = layout.v_scales if role == "v" and layout.v_scales else layout.scales
        if axes is None and quant.order == "swizzled":
            axes = in_tiles(self._text(role))
        elif axes is None:
            axes = without_dim(self._text(role), self._block(quant, dim))
        if not shared:
            axes = " ".join(a for a in axes.split() if a != "kv")
        array = self.arrays["scales" if shared else f"{role}_scales"]
        heads, places = self._scale_row(quant, dim)
        return self._elements(typed(array, dtype(quant.scale_dtype).numpy()), axes, role, places, heads=heads)

    def _coded(self, role: str, quant: Quant, codes: Elements, scales: Elements | None) -> Coded:
        given, factor = None, None
        if quant.scale == "given" and quant.scale_dtype is not None:
            given = typed(self._own(f"{role}_scale", 2), dtype(quant.scale_dtype).numpy())
        if quant.recipe == "global":
            factor = float(self._own(f"{role}_global_scale", 1)[0])
        return Coded(quant, self._block(quant, codes.dim), codes, scales, given, factor, self.kind)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _byte_row(self, quant: Quant) -> list[Part]:
        """A latent row: codes, then scales if they lie in it, then the RoPE part in the cache's dtype."""
        pool, axes, plain = self.arrays["pool"], self._text("k"), self.cache.plain_dims
        latent = self.cache.head_dim - plain
        code_bytes = latent * quant.codes.bits // 8
        codes = self._elements(cut(pool, 0, [code_bytes], np.dtype(np.uint8)), axes, "k", latent, **_packing(quant))
        end, scales = code_bytes, None
        if quant.place == "row" and quant.scale_dtype is not None and quant.computed:
            kind, (heads, places) = dtype(quant.scale_dtype).numpy(), self._scale_row(quant, latent)
            pad = self._pad(quant, places)
            found = cut(pool, end, [places + pad], kind)
            scales = self._elements(found, axes, "k", places, heads=heads, pad=pad)
            end += (places + pad) * kind.itemsize
        else:
            scales = self._scale_tensor("k", quant, latent)
        parts: list[Part] = [self._coded("k", quant, codes, scales)]
        if plain:
            parts.append(Plain(self._elements(cut(pool, end, [plain], self.kind), axes, "k", plain)))
        return parts

    def _in_rows(self) -> bool:
        return any(q is not None and q.computed and q.place == "row" for q in self.cache.quants.values())

    def _scaled_row(self, role: str) -> list[Part]:
        """A head's row of bytes: codes, then scales. K's and V's rows are one where kv stands before dim in the layout."""
        axes, begin = self._text(role).split(), 0
        if axes[-2] == "kv" and self.cache.stores == "kv":
            axes.remove("kv")
            begin = self._row_bytes("k") if role == "v" else 0
        pool = self.arrays["pool" if self.layout.kv is not None else f"{role}_pool"].view(np.uint8)
        quant, dim, text = self.cache.quants[role], self._dim(role), " ".join(axes)
        if quant is None:
            return [Plain(self._elements(cut(pool, begin, [dim], self.kind), text, role, dim))]
        code_bytes = dim * quant.codes.bits // 8
        bytes_ = cut(pool, begin, [code_bytes], np.dtype(np.uint8))
        codes = self._elements(bytes_, text, role, dim, **_packing(quant))
        scales = None
        if quant.scale_dtype is not None and quant.computed:
            _, places = self._scale_row(quant, dim)
            pad = self._pad(quant, places)
            numbers = cut(pool, begin + code_bytes, [places + pad], dtype(quant.scale_dtype).numpy())
            scales = self._elements(numbers, text, role, places, pad=pad)
        return [self._coded(role, quant, codes, scales)]

    def _row_bytes(self, role: str) -> int:
        """Bytes of a head's row of codes and scales."""
        quant, dim = self.cache.quants[role], self._dim(role)
        if quant is None:
            return dim * self.kind.itemsize
        numbers = self._scale_row(quant, dim)[1] if quant.computed else 0
        numbers += self._pad(quant, numbers)
        return dim * quant.codes.bits // 8 + numbers * dtype(quant.scale_dtype or "f32").numpy().itemsize

    def _byte_page(self) -> dict[str, list[Part]]:
        """A page of bytes: rows of K, rows of V, scales of K, scales of V, each from a multiple of 16 bytes on."""
        cache, pool, axes = self.cache, self.arrays["pool"], self._text("k").split()
        outer = [a for a in axes if words(a)[0].name in ("page", "layer")]
        inner = [a for a in axes if words(a)[0].name in ("token", "head", "dim")]
        tokens, end, found = cache.page_tokens or 0, 0, dict[str, list[Part]]()

        def take(within: list[str], extents: dict[str, int], kind: np.dtype[Any], packed: int = 0) -> Raw:
            nonlocal end
            shape = [w.extent(extents[w.name]) for w in words(" ".join(within))]
            if packed:
                shape[-1] = shape[-1] * packed // 8
            part = cut(pool, end, shape, kind)
            end += -(-math.prod(shape) * kind.itemsize // BYTE_PAGE_ALIGN) * BYTE_PAGE_ALIGN
            return part

        elements: dict[str, Elements] = {}
        rope: list[Part] = []
        for role in cache.roles:
            quant, dim = cache.quants[role], self._dim(role)
            if quant is not None and cache.plain_dims:  # a latent row: codes, then the RoPE part in the cache's dtype
                plain, latent = cache.plain_dims, dim - cache.plain_dims
                code_bytes, row_axes = latent * quant.codes.bits // 8, " ".join([*outer, *inner])
                sizes = {"token": tokens, "head": 1, "dim": code_bytes + plain * self.kind.itemsize}
                row = take(inner, sizes, np.dtype(np.uint8))
                codes = cut(row, 0, [code_bytes], np.dtype(np.uint8))
                elements[role] = self._elements(codes, row_axes, role, latent, **_packing(quant))
                rope.append(Plain(self._elements(cut(row, code_bytes, [plain], self.kind), row_axes, role, plain)))
                continue
            packing, kind = (_packing(quant), np.dtype(np.uint8)) if quant else ({}, self.kind)
            sizes = {"token": tokens, "head": cache.kv_heads, "dim": dim}
            part = take(inner, sizes, kind, packing.get("packed", 0))
            elements[role] = self._elements(part, " ".join([*outer, *inner]), role, dim, **packing)
        for role in cache.roles:
            quant, dim = cache.quants[role], elements[role].dim
            if quant is None:
                found[role] = [Plain(elements[role])]
                continue
            scales = None
            if quant.scale_dtype is not None and quant.computed:
                block, (heads, places) = self._block(quant, dim), self._scale_row(quant, dim)
                within = without_dim(" ".join(inner), block).split()
                pad = self._pad(quant, places)
                sizes = {"token": tokens // block[0], "head": heads, "dim": places + pad}
                part = take(within, sizes, dtype(quant.scale_dtype).numpy())
                scales = self._elements(part, " ".join([*outer, *within]), role, places, heads=heads, pad=pad)
            found[role] = [self._coded(role, quant, elements[role], scales), *rope]
        return found


def _packing(quant: Quant) -> dict[str, int]:
    """Bits of codes that are parts of bytes, 0 for whole ones; and whether those of a byte are no neighbours."""
    return {"packed": quant.codes.bits if quant.codes.packed else 0, "strided": quant.packing == "strided"}

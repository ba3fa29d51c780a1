"""Any cache that a spec can describe has a memory without overlaps: drawn specs, every byte of two pages marked.

A drawn spec is refused in words, or its storage must hold: every dim of every role lies in one segment, every element and
every scale has a place of its own inside its tensor, elements share a scale exactly where the spec's block says so, and an
access of a segment's vector is a run of memory, aligned, with whole blocks of scales or within one. The places come from
`Storage` and from the run-time strides of tensors laid out here, padding included; the blocks from the spec alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvgen.errors import SpecError
from kvgen.expr.nodes import evaluate, var
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import PoolTensor, Segment
from kvgen.schema.cache import Cache, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import PerKV
from tests.schema.drawn import caches

Ints = NDArray[np.int64]
PAGES, LAYERS, OPEN_TOKENS = 2, 2, 3
# Of any spec, and of each focus; a campaign draws more.
EXAMPLES, FOCUSED = (500, 240) if "KVGEN_DRAWN" in os.environ else (150, 100)


@dataclass
class Memory:
    """One tensor laid out as an engine would: packed inside a page, padded between pages, layers and K and V.

    `owner` has an entry a bit: 0, or the number of who lies there.
    """

    spec: PoolTensor
    steps: dict[str, int]
    owner: Ints

    @classmethod
    def of(cls, spec: PoolTensor, pages: int, padding: int) -> Memory:
        names = {"pages": pages, "layers": LAYERS, "tokens": OPEN_TOKENS, "scale_pages": pages}
        shape = [names[n] if isinstance(n, str) else n for n in spec.shape]
        itemsize = dtype(spec.dtypes[0]).bits // 8
        steps: dict[str, int] = {}
        reach = 1
        for axis, count, fixed in zip(reversed(spec.axes), reversed(shape), reversed(spec.strides), strict=True):
            stride = reach if fixed is None else fixed
            assert fixed is None or fixed == reach or count == 1, f"{spec.name}: {axis} has stride {fixed}, not {reach}"
            steps.setdefault(axis, stride * itemsize)
            reach = stride * count
            # Whole vectors, so that what is aligned stays aligned; only where every stride further out is run-time.
            index = len(spec.axes) - len(steps)
            if axis in ("page", "layer", "kv") and all(s is None for s in spec.strides[:index]):
                reach += padding * max(1, spec.align // itemsize)
        return cls(spec, steps, np.zeros(8 * reach * itemsize, np.int32))

    def claim(self, bits: Ints, owners: Ints) -> None:
        """Mark places; two owners at one place, or a place outside the tensor, fail."""
        assert bits.min() >= 0, f"{self.spec.name}: a place before the tensor"
        assert bits.max() < self.owner.size, f"{self.spec.name}: a place behind the tensor"
        order = np.argsort(bits, kind="stable")
        places, who = bits[order], owners[order]
        assert not ((np.diff(places) == 0) & (np.diff(who) != 0)).any(), f"{self.spec.name}: two at one place"
        held = self.owner[places]
        assert ((held == 0) | (held == who)).all(), f"{self.spec.name}: a place has an owner already"
        self.owner[places] = who


def _bits(byte: Ints, bit: Ints, bits: int) -> Ints:
    """The bits that elements at these bytes take."""
    return ((8 * byte + bit)[..., None] + np.arange(bits)).reshape(-1)


class Marker:
    """Marks all that a cache stores in the memory of its tensors."""

    def __init__(self, cache: Cache, padding: int) -> None:
        self.cache, self.storage = cache, cache.storage
        pages = 2 * PAGES if isinstance(cache.page_table, PerKV) else PAGES
        named = {b.tensor for b in self.storage.bases}
        self.memory = {t.name: Memory.of(t, pages, padding) for t in self.storage.tensors if t.name in named}
        self.tokens = cache.page_tokens or OPEN_TOKENS
        self.owners = 0

    def starts(self, name: str, role: str) -> Iterator[tuple[Memory, int]]:
        """The byte where each page of each layer begins, as a kernel finds it; K and V never share a page id here."""
        base = self.storage.base(name)
        memory = self.memory[base.tensor]
        first = PAGES if isinstance(self.cache.page_table, PerKV) and role == "v" else 0
        for layer in range(LAYERS):
            for page in range(first, first + PAGES):
                steps = memory.steps
                outer = layer * steps.get("layer", 0) + page * steps["page"] + base.kv * steps.get("kv", 0)
                yield memory, outer
            if "layer" not in memory.steps:
                return

    def mark(self) -> None:
        for role, segments in self.storage.roles.items():
            whole = self.cache.v_dim if role == "v" else self.cache.head_dim
            ends = [0, *(s.begin + s.size for s in segments)]
            assert [s.begin for s in segments] == ends[:-1]
            assert ends[-1] == whole
            for segment in segments:
                index = np.indices((self.tokens, self.cache.kv_heads, segment.size), dtype=np.int64)
                self.values(role, segment, index)
                self.vectors(segment, index)
                self.scales(role, segment, index)

    def gaps(self) -> None:
        """Without padding every bit has an owner, but for what aligns the parts of a page of bytes."""
        parts = sum(1 + (s.scales is not None) for s in self.storage.segments)
        for name, memory in self.memory.items():
            if isinstance(self.cache.page_table, PerKV) and sum(b.tensor == name for b in self.storage.bases) == 1:
                continue  # the other role's pages of a tensor that has one role only
            if self.cache.layout.row_align > 1:
                continue  # rows are padded
            unowned = int((memory.owner == 0).sum())
            pages = PAGES * (LAYERS if "layer" in memory.steps else 1)
            aligned = any(q is not None and q.computed and q.place == "page" for q in self.cache.quants.values())
            allowed = 8 * 15 * parts * pages if aligned else 0
            assert unowned <= allowed, f"{name}: {unowned} bits belong to nobody"

    def values(self, role: str, segment: Segment, index: Ints) -> None:
        region = segment.region
        byte, bit = self.places(segment, index)
        for memory, start in self.starts(segment.base, role):
            ids = self.fresh(byte.size)
            memory.claim(_bits(byte + start, bit, region.dtype.bits), np.repeat(ids, region.dtype.bits))

    def places(self, segment: Segment, index: Ints) -> tuple[Ints, Ints]:
        env = dict(zip(("token", "head", "dim"), index, strict=True))
        region = segment.region
        byte, bit = (evaluate(e, env) for e in region.byte_of(region.offset()))
        return np.broadcast_to(byte, index[0].shape), np.broadcast_to(bit, index[0].shape)

    def fresh(self, count: int) -> Ints:
        self.owners += count
        return np.arange(self.owners - count + 1, self.owners + 1, dtype=np.int64)

    def vectors(self, segment: Segment, index: Ints) -> None:
        """An access of `vector` dims is one run of memory, aligned to its size, that blocks do not cut."""
        width, bits = segment.vector, segment.region.dtype.bits
        byte, bit = self.places(segment, index)
        runs = (8 * byte + bit).reshape(*byte.shape[:2], -1, width)
        if segment.quant is not None and segment.quant.packing == "strided":
            runs, bits = runs - runs % 8, 8  # of bytes, of which each element has a part
        np.testing.assert_array_equal(runs, runs[..., :1] + np.arange(width) * bits)
        aligned = width if bits == 3 else width * bits  # three accesses in place of one
        assert not (runs[..., 0] % aligned).any(), "an access is not aligned to its size"
        tensor = self.storage.tensor(self.storage.base(segment.base).tensor)
        assert aligned // 8 <= tensor.align
        assert width * bits % 8 == 0, "a byte belongs to two accesses"
        if segment.scales is not None:
            block = segment.scales.block[2]
            assert block % width == 0 or width % block == 0

    def blocks(self, segment: Segment, index: Ints) -> Ints:
        """The number of the block that each element belongs to, from the spec's words alone."""
        quant = segment.quant
        assert quant is not None
        token, head, dim = index
        extents = (quant.block.token or self.tokens, quant.block.head or self.cache.kv_heads, quant.block.dim or 10**6)
        parts = np.stack([token // extents[0], head // extents[1], dim // extents[2]]).reshape(3, -1)
        return np.unique(parts, axis=1, return_inverse=True)[1].reshape(token.shape)

    def scales(self, role: str, segment: Segment, index: Ints) -> None:
        scales = segment.scales
        assert (scales is not None) == (segment.quant is not None and segment.quant.scale_dtype is not None)
        if scales is None:
            return
        assert segment.quant is not None
        numbers = self.blocks(segment, index).reshape(-1)
        places = self.scale_places(segment, index)
        pairs = np.unique(np.stack([numbers, places]), axis=1)
        assert pairs.shape[1] == len(np.unique(numbers)) == len(np.unique(places)), (
            "blocks and scales are not one to one"
        )
        if scales.region is None:
            assert not segment.quant.computed
            assert places.min() == 0
            assert places.max() == scales.heads * scales.groups - 1
            assert self.storage.tensor(scales.array).shape[-2:] == (scales.heads, scales.groups)
            return
        bits = scales.dtype.bits
        assert (self.storage.base(scales.base).table == "scales") == segment.quant.own_table
        for memory, start in self.starts(scales.base, role):
            for k in range(1 + scales.zero):
                ids = self.fresh(numbers.max() + 1)[pairs[0]]
                byte = scales.region.byte_offset + (pairs[1] + k) * bits // 8 + start
                assert not (byte * 8 % bits).any(), "a scale is not aligned to its size"
                memory.claim(_bits(byte, np.zeros_like(byte), bits), np.repeat(ids, bits))
            if scales.pad:  # zeros behind the scales of a token, of one head
                ends = np.unique(places.reshape(index[0].shape)[..., 0]) + scales.groups * (1 + scales.zero)
                zeros = (ends[:, None] + np.arange(scales.pad)).reshape(-1)
                byte = scales.region.byte_offset + zeros * bits // 8 + start
                memory.claim(_bits(byte, np.zeros_like(byte), bits), np.repeat(self.fresh(len(zeros)), bits))

    def scale_places(self, segment: Segment, index: Ints) -> Ints:
        scales = segment.scales
        assert scales is not None
        names = segment.region.index_vars()
        place = scales.offset(names["token"], names["head"], names["dim"])
        env = dict(zip(("token", "head", "dim"), index, strict=True))
        return np.broadcast_to(evaluate(place, env), index[0].shape).reshape(-1)


def check(cache: Cache, padding: int = 0) -> None:
    """Everything the module's docstring promises of one cache."""
    marker = Marker(cache, padding)
    marker.mark()
    if not padding:
        marker.gaps()


@pytest.mark.parametrize("focus", ["", "row", "rows", "page", "zero", "packed", "narrow", "residual", "swizzled"])
def test_a_drawn_spec_is_refused_in_words_or_has_a_memory_without_overlaps(focus: str) -> None:
    accepted = 0

    @given(st.data(), st.integers(0, 2))
    @settings(derandomize=True, deadline=None, max_examples=FOCUSED if focus else EXAMPLES)
    def drawn(data: st.DataObject, padding: int) -> None:
        nonlocal accepted
        try:
            cache = data.draw(caches(focus))
        except SpecError as error:
            for line in str(error).split("\n"):
                assert re.match(r"[a-zA-Z_.0-9]+: ", line), line
                assert "Assertion" not in line
            return
        check(cache, padding)
        accepted += 1

    drawn()
    assert accepted >= 10, "the test draws too few specs that are right"


def test_the_marker_sees_an_overlap() -> None:
    """The test above is worth nothing if a wrong place passes."""
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=8, page_size=4)
    marker = Marker(cache, 0)
    marker.mark()
    with pytest.raises(AssertionError, match="has an owner already"):
        marker.mark()


def test_parts_of_a_page_of_bytes_begin_at_multiples_of_16() -> None:
    quant = Quant(dtype="e4m3", scale_dtype="f32", place="page")
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=5, page_size=3, quant=quant)
    parts = [s.region.byte_offset for s in cache.storage.segments]
    parts += [s.scales.region.byte_offset for s in cache.storage.segments if s.scales and s.scales.region]
    assert parts == [0, 16, 32, 48]
    assert cache.storage.tensor("pool").shape == ("pages", "layers", 64)


@pytest.mark.parametrize("layout", ["page kv layer token head dim", "page head kv token dim layer"])
def test_swizzled_scales_lie_in_tiles_of_128_tokens_by_4(layout: str) -> None:
    """The order of block-scaled GEMMs: `(t // 128, g // 4)` tiles of 512, in them `t % 32 * 16 + t // 32 % 4 * 4 + g % 4`."""
    if layout.endswith("layer"):
        layout = layout.replace(" layer", "").replace("page", "page layer")
    quant = Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max", order="swizzled")
    cache = Paged(dtype="bf16", kv_heads=3, head_dim=128, page_size=256, layout=layout, quant=quant)
    scales = cache.storage.roles["k"][0].scales
    assert scales is not None
    assert scales.region is not None
    token, head, dim = np.indices((256, 3, 128))
    names = scales.region.index_vars()
    places = evaluate(
        scales.offset(names["token"], names["head"], var("dim", 127)), {"token": token, "head": head, "dim": dim}
    )
    g, tiles = dim // 16, 128 // 16 // 4
    tile = token // 128 * tiles + g // 4
    np.testing.assert_array_equal(places, head * 256 * 8 + tile * 512 + token % 32 * 16 + token // 32 % 4 * 4 + g % 4)


def test_groups_of_tokens_share_a_scale_in_a_split_layout() -> None:
    quant = Quant(dtype="i8", scale_dtype="f16", block=Block(token=4, head=1, dim=1), residual=4)
    layout = Layout(k="page layer token/2 head token%2 dim", v="page layer token head dim")
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=8, page_size=8, layout=layout, k_quant=quant)
    check(cache)
    assert cache.storage.tensor("k_scales").shape == ("scale_pages", "layers", 2, 2, 8)


def test_a_changed_copy_has_a_storage_of_its_own() -> None:
    """Nothing that was worked out for the first cache stays, and rules hold for the copy as for any cache."""
    small = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=8)
    assert small.storage.tensors[0].shape[3] == 8
    assert small.model_copy(update={"page_size": 16}).storage.tensors[0].shape[3] == 16
    with pytest.raises(ValueError, match="page_size"):
        small.model_copy(update={"page_size": 0})

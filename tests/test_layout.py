"""Layouts against NumPy: an array of the region's shape, filled with its own flat index, transposed to logical order."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvgen.errors import SpecError
from kvgen.expr.nodes import const, evaluate
from kvgen.layout.axes import Axis, Swizzle, parse_axes
from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region

Ints = NDArray[np.int64]
LOGICAL = ("page", "kv", "layer", "token", "head", "dim")


@dataclass
class Sample:
    """A region, its concrete extents, the strides of a tensor of it and the space that tensor covers."""

    region: Region
    extents: dict[str, int]
    shape: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)
    size: int = 1

    def steps(self) -> dict[str, int]:
        """Strides of the outer axes, as a kernel gets them at run time."""
        pairs = zip(self.region.axes, self.strides, strict=True)
        return {a.name: s for a, s in pairs if a.name in ("page", "kv", "layer")}

    def logical(self) -> Ints:
        """Where every element lies: `[page, kv, layer, token, head, dim]`, by NumPy alone."""
        flat = np.arange(self.size, dtype=np.int64)
        array = as_strided(flat, self.shape, [s * flat.itemsize for s in self.strides])
        words = self.region.text.split()
        order: list[int] = []
        for name in LOGICAL:
            found = [i for i, w in enumerate(words) if re.split("[/%]", w)[0] == name]
            order += sorted(found, key=lambda i: -int((re.search(r"/(\d+)", words[i]) or [0, 1])[1]))
        return array.transpose(order).reshape([self.extents[n] for n in LOGICAL])

    def computed(self) -> Ints:
        """The same by `Region.offset` and the run-time strides."""
        index = dict(zip(LOGICAL, np.indices([self.extents[n] for n in LOGICAL]), strict=True))
        inside = evaluate(self.region.offset(), {n: index[n] for n in ("token", "head", "dim")})
        return np.asarray(inside + sum(index[n] * s for n, s in self.steps().items()))


@st.composite
def factors(draw: st.DrawFn, name: str) -> tuple[int, list[str]]:
    """(extent, words) of an inner axis split up to three ways; the words multiply to the extent."""
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    counts = [counts[0], *(c for c in counts[1:] if c > 1)]
    words, step = [], math.prod(counts)
    for i, count in enumerate(counts):
        step //= count
        words.append(name + (f"/{step}" if step > 1 else "") + (f"%{count}" if i else ""))
    return math.prod(counts), words


@st.composite
def samples(draw: st.DrawFn, element: str = "bf16") -> Sample:
    extents = {"page": draw(st.integers(1, 3)), "layer": draw(st.integers(1, 2)), "kv": draw(st.sampled_from([1, 2]))}
    open_tokens = draw(st.booleans())
    words: list[str] = []
    for name in ("token", "head", "dim"):
        if name == "token" and open_tokens:
            extents[name] = draw(st.integers(1, 5))
            continue
        extents[name], found = draw(factors(name))
        words += found if extents[name] > 1 or draw(st.booleans()) else []
    # An open token extent, page and layer may have nothing with a compile-time stride to their left.
    inner = (["token"] if open_tokens else []) + draw(st.permutations(words))
    outer = draw(st.permutations(["page", "layer"] if extents["layer"] > 1 or draw(st.booleans()) else ["page"]))
    text = [*outer, *inner]
    if extents["kv"] == 2:
        text.insert(draw(st.integers(0, len(outer) if open_tokens else len(text))), "kv")
    tokens = None if open_tokens else extents["token"]
    known = (("kv", extents["kv"]), ("token", tokens), ("head", extents["head"]), ("dim", extents["dim"]))
    region = Region("kv", dtype(element), parse_axes(" ".join(text)), known)
    sample = Sample(region, extents)
    first = next((i for i, w in enumerate(text) if re.split("[/%]", w)[0] in ("token", "head", "dim")), len(text))
    for i in reversed(range(len(text))):
        axis = region.axes[i]
        count = extents[axis.name] if axis == Axis(axis.name) else axis.extent(extents[axis.name])
        sample.shape.insert(0, count)
        sample.strides.insert(0, sample.size)
        sample.size *= count
        if i <= first:  # An engine pads pages, interleaves layers, keeps K and V apart.
            sample.size += draw(st.sampled_from([0, 0, 1, 24]))
    return sample


@given(samples())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_every_element_is_where_numpy_puts_it(sample: Sample) -> None:
    np.testing.assert_array_equal(sample.computed(), sample.logical())


@given(samples())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_shape_strides_and_span_describe_the_tensor(sample: Sample) -> None:
    region = sample.region
    for want, got in zip(region.shape, sample.shape, strict=True):
        assert want in ("pages", "layers", "tokens") if isinstance(want, str) else want == got
    for axis, fixed, stride in zip(region.axes, region.fixed_strides, sample.strides, strict=True):
        assert (fixed is None) if axis.name in ("page", "kv", "layer") else fixed == stride
    page = sample.logical()[0, 0, 0]
    if dict(region.extents)["token"] is not None:
        assert region.span == page.max() - page.min() + 1
        assert page.max() - page.min() <= region.offset().upper
    else:
        assert region.span is None


@given(samples())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_vectors_are_contiguous_and_aligned(sample: Sample) -> None:
    region, width = sample.region, sample.region.vector
    assert width & (width - 1) == 0
    assert width * region.dtype.bits <= 128
    inside = sample.computed()[0, 0, 0]
    groups = inside.reshape(*inside.shape[:2], -1, width)
    np.testing.assert_array_equal(groups, groups[..., :1] + np.arange(width))
    assert not (groups[..., 0] % width).any()


@pytest.mark.parametrize(
    ("text", "element", "tokens", "dim", "start", "width"),
    [
        ("page kv layer token head dim", "bf16", 16, 128, 0, 8),
        ("page kv layer token head dim", "f32", 16, 128, 0, 4),
        ("page kv layer token head dim", "e4m3", 16, 128, 0, 16),
        ("page kv layer token head dim", "i4", 16, 128, 0, 32),
        ("page kv layer token head dim", "bf16", 16, 20, 0, 4),
        ("page kv layer token head dim", "bf16", 16, 7, 0, 1),
        ("page kv head token dim", "bf16", 3, 8, 0, 8),
        ("page kv head dim token", "bf16", 16, 128, 0, 1),
        ("page kv head dim/8 token dim%8", "bf16", 16, 128, 0, 8),
        ("page kv head dim/4 token dim%4", "bf16", 16, 128, 0, 4),
        ("page token head kv dim", "bf16", 16, 12, 0, 4),
        ("page kv token head dim", "bf16", 16, 128, 8, 4),
        ("page kv token head dim", "bf16", 16, 128, 32, 8),
        ("page kv token head dim", "bf16", 16, 128, 2, 1),
    ],
)
def test_vector_widths(text: str, element: str, tokens: int, dim: int, start: int, width: int) -> None:
    extents = (("kv", 2), ("token", tokens), ("head", 2), ("dim", dim))
    assert Region("kv", dtype(element), parse_axes(text), extents, byte_offset=start).vector == width


def swizzled(text: str, tokens: int, heads: int, dim: int, swizzle: Swizzle) -> Region:
    extents = (("kv", 2), ("token", tokens), ("head", heads), ("dim", dim))
    return Region("kv", dtype("bf16"), parse_axes(text), extents, swizzle=swizzle)


@given(
    st.permutations(["token", "head", "dim"]),
    st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])] * 3),
    st.builds(Swizzle, bits=st.integers(1, 3), base=st.integers(0, 3), shift=st.integers(3, 5)),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_swizzles_permute_the_page(order: list[str], extents: tuple[int, int, int], swizzle: Swizzle) -> None:
    size = math.prod(extents)
    try:
        region = swizzled(f"page kv {' '.join(order)}", *extents, swizzle)
    except SpecError as error:
        assert size % 2 ** (swizzle.base + swizzle.bits)
        assert "swizzle: got bits=" in str(error)
        return
    token, head, dim = np.indices(extents)
    places = np.asarray(evaluate(region.offset(), {"token": token, "head": head, "dim": dim}))
    assert sorted(places.ravel().tolist()) == list(range(size))
    assert region.span == size
    assert places.max() <= region.offset().upper
    width = region.vector
    groups = places.reshape(extents[0], extents[1], -1, width)
    np.testing.assert_array_equal(groups, groups[..., :1] + np.arange(width))
    assert not (groups[..., 0] % width).any()
    plain = evaluate(swizzled(region.text, *extents, swizzle).swizzle.apply(const(5)), {})  # type: ignore[union-attr]
    assert plain == 5 ^ ((5 >> (swizzle.base + swizzle.shift)) % 2**swizzle.bits << swizzle.base)


@pytest.mark.parametrize("element", ["i4", "e2m1", "bf16", "e4m3"])
@pytest.mark.parametrize("start", [0, 16])
def test_bytes_of_elements(element: str, start: int) -> None:
    kind = dtype(element)
    extents = (("kv", 1), ("token", 4), ("head", 2), ("dim", 6))
    region = Region("k", kind, parse_axes("page token head dim"), extents, byte_offset=start)
    count, per = 4 * 2 * 6, max(8 // kind.bits, 1)
    # Elements in order fill a byte from its low bits up.
    values = np.arange(count) % 2**kind.bits
    if per == 2:
        memory = np.concatenate([np.zeros(start, np.int64), values[0::2] | values[1::2] << 4])
    byte, bit = region.byte_of(region.offset())
    places = np.indices((4, 2, 6))
    env: dict[str, Any] = dict(zip(("token", "head", "dim"), places, strict=True))
    bytes_, bits = evaluate(byte, env), np.broadcast_to(evaluate(bit, env), (4, 2, 6))
    if per == 2:
        np.testing.assert_array_equal((memory[bytes_] >> bits & 15).ravel(), values)
    else:
        assert not bits.any()
        np.testing.assert_array_equal(bytes_.ravel(), start + np.arange(count) * kind.bits // 8)


KNOWN = (("kv", 2), ("token", 16), ("head", 4), ("dim", 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "layout: got no axes; e.g. 'page kv layer token head dim'"),
        (
            "page tokens head dim",
            "layout: got the axis 'tokens' in 'page tokens head dim'; axes are page (or block), kv",
        ),
        ("page token head dim/", "layout: got the axis 'dim/' in"),
        ("page token head dim/0 dim", "layout: got the axis 'dim/0' in"),
        ("page token head dim%0", "layout: got the axis 'dim%0' in"),
        ("page/2 token head dim page%2", "layout: got the axis 'page/2' in"),
        ("kv%2 page token head dim", "layout: got the axis 'kv%2' in"),
        ("page token head dim token", "layout: the axis token stands twice in 'page token head dim token'"),
        ("page token head dim/8", "layout: dim is split as dim/8 in 'page token head dim/8'; the factors must cover"),
        ("page token head dim%8", "layout: dim is split as dim%8 in 'page token head dim%8'; the factors must cover"),
        ("page dim/8 token head dim%4", "dim%4 must count 8, as dim%8"),
        ("page dim/16 token dim/4%2 head dim%4", "dim/4%2 must count 4, as dim/4%4"),
        (
            "page dim/24 token head dim%24",
            "layout: dim/24 in 'page dim/24 token head dim%24' does not divide the extent",
        ),
        ("page token dim", "layout: 'page token dim' has no head axis, but head has 4 elements; add it"),
        (
            "token head dim",
            "layout: got 'token head dim'; pages need an axis of their own; write page (or block) into it",
        ),
        ("token page head dim", "layout: token lies outside an axis whose extent is known only at run time in"),
        ("page token layer head dim", "layout: token lies outside an axis whose extent is known only at run time in"),
    ],
)
def test_impossible_layouts(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        Region("kv", dtype("bf16"), parse_axes(text), KNOWN)


def test_an_open_token_extent_is_outermost_and_whole() -> None:
    known = (("kv", 2), ("token", None), ("head", 4), ("dim", 64))
    assert Region("kv", dtype("bf16"), parse_axes("block kv layer token head dim"), known).shape[3] == "tokens"
    with pytest.raises(SpecError, match="head lies outside an axis whose extent is known only at run time"):
        Region("kv", dtype("bf16"), parse_axes("page head token dim"), known)
    with pytest.raises(SpecError, match="does not divide the extent of token, None"):
        Region("kv", dtype("bf16"), parse_axes("page token/16 head token%16 dim"), known)


def test_a_region_begins_at_an_element() -> None:
    with pytest.raises(SpecError, match="layout: byte offset 2 is no multiple of a f32 element"):
        Region("kv", dtype("f32"), parse_axes("page token head dim"), KNOWN, byte_offset=2)


@pytest.mark.parametrize(("bits", "base", "shift"), [(0, 0, 3), (1, -1, 3), (3, 0, 2)])
def test_swizzles_that_are_no_bijection(bits: int, base: int, shift: int) -> None:
    with pytest.raises(SpecError, match=f"swizzle: got bits={bits}, base={base}, shift={shift}; bits >= 1"):
        Swizzle(bits, base, shift)


def test_a_swizzle_wants_a_page_without_gaps() -> None:
    with pytest.raises(
        SpecError, match="swizzle: got the layout 'page token kv head dim', where page, kv or layer lies"
    ):
        swizzled("page token kv head dim", 16, 4, 64, Swizzle(3, 3, 3))


def test_a_swizzled_page_that_ends_inside_a_block_would_leave_it() -> None:
    """48 elements, blocks of 32: element 40 would move past the page's end."""
    with pytest.raises(SpecError, match=r"they must be a multiple of 2\^\(base \+ bits\) = 32"):
        swizzled("page kv token head dim", 3, 2, 8, Swizzle(2, 3, 2))


# --- parts of wider rows --------------------------------------------------------------------------------------------------


def part(element: str, dim: int, start: int, row: int, text: str = "page kv token head dim") -> Region:
    """`dim` elements from byte `start` on of rows of `row` bytes."""
    kind = dtype(element)
    extents = (("kv", 1), ("token", 6), ("head", 2), ("dim", dim))
    return Region("k", kind, parse_axes(text), extents, byte_offset=start, pitch=row * 8 // kind.bits)


ROW = (("e4m3", 24, 0), ("f32", 3, 24), ("bf16", 5, 36), ("i4", 12, 46))  # 52 bytes


@pytest.mark.parametrize(
    "text", ["page kv token head dim", "page head token/2 kv token%2 dim", "page token%3 head token/3 dim"]
)
def test_parts_of_a_row_lie_beside_each_other(text: str) -> None:
    """Every byte of every row belongs to exactly one element of one part (to two of 4 bits)."""
    owners = np.zeros(6 * 2 * 52 * 2, np.int64)
    for element, dim, start in ROW:
        region = part(element, dim, start, 52, text)
        env: dict[str, Any] = dict(zip(("token", "head", "dim"), np.indices((6, 2, dim)), strict=True))
        byte, bit = (np.broadcast_to(evaluate(e, env), (6, 2, dim)) for e in region.byte_of(region.offset()))
        row = (byte - start) // 52
        assert (row == row[..., :1]).all(), "a row's part leaves the row"
        np.testing.assert_array_equal((byte * 8 + bit - 8 * (row * 52 + start)), env["dim"] * region.dtype.bits)
        for nibble in range(region.dtype.bits // 4):
            np.add.at(owners, 2 * byte + bit // 4 + nibble, 1)
    assert (owners == 1).all()


def test_a_part_of_a_row_has_the_rows_strides() -> None:
    region = part("bf16", 64, 528, 656)
    assert region.strides == (6 * 2 * 328, 6 * 2 * 328, 656, 328, 1)
    assert region.fixed_strides == (None, None, 656, 328, 1)
    assert region.shape == ("pages", 1, 6, 2, 64)
    assert region.span == 5 * 656 + 328 + 64
    assert region.run == 64
    plain = Region("k", region.dtype, region.axes, region.extents)
    assert plain.strides == (768, 768, 128, 64, 1)


@pytest.mark.parametrize(
    ("element", "dim", "start", "row", "width"),
    [
        ("e4m3", 512, 0, 656, 16),  # 656 = 41 * 16
        ("f32", 4, 512, 656, 4),
        ("bf16", 64, 528, 656, 8),
        ("bf16", 64, 512, 640, 8),
        ("e4m3", 512, 0, 648, 8),  # rows of 648 bytes are aligned to 8 only
        ("bf16", 64, 520, 648, 4),
        ("bf16", 64, 514, 642, 1),
        ("i4", 32, 0, 20, 8),
        ("i4", 32, 0, 17, 2),
    ],
)
def test_vectors_in_a_part_of_a_row(element: str, dim: int, start: int, row: int, width: int) -> None:
    assert part(element, dim, start, row).vector == width

"""What the lanes of a warp do together, and atomics on memory of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tests.golden_gpu.float_families import float_words, pairs
from tests.golden_gpu.forms import Family, MemoryFamily, WarpFamily
from tests.golden_gpu.integer_families import integer_words
from tests.golden_gpu.numbers import add, exactly, larger, smaller, wrapped

Lanes = Sequence[Any]


def _source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane that shfl reads from, and whether it was in range."""
    segment, clamp, b = c >> 8 & 31, c & 31, b & 31
    low = lane & segment
    high = low | clamp & ~segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | b & ~segment}[mode]
    inside = j >= high if mode == "up" else j <= high
    return (j, True) if inside else (lane, False)


def _shuffle(mode: str, c: int) -> Callable[[Lanes, Lanes], Lanes]:
    def reference(a: Lanes, b: Lanes) -> Lanes:
        found = [_source(mode, lane, b[lane], c) for lane in range(32)]
        return [a[j] ^ (0 if inside else 1 << 31) for j, inside in found]

    return reference


def warp() -> Family:
    """shfl, vote, match, redux, elect and lane masks."""
    # Few different values, so that lanes match; the second word gives shuffles a source of their own for every lane.
    rng = np.random.default_rng(40)
    alike = np.concatenate([rng.choice([0, 7, 9, 2**31], 64), np.full(32, 5), integer_words(32, 64, 41)]).astype(
        np.uint32
    )
    family = WarpFamily("warp", (alike, integer_words(32, 160, 42), integer_words(32, 160, 43)))
    for mode in ("up", "down", "bfly", "idx"):
        for c in (0, 31, 7, 24 << 8 | 7, 16 << 8 | 15, 28 << 8):
            text = f"{{ .reg .pred p; shfl.sync.{mode}.b32 %0|p, %1, %2, {c}, 0xffffffff; @!p xor.b32 %0, %0, 0x80000000; }}"
            family.add(text, "u32 u32", "u32", _shuffle(mode, c))
    half = "{ .reg .pred q, p; .reg .b32 l; mov.u32 l, %%laneid; setp.lt.u32 q, l, 16; mov.b32 %0, 77; @q "
    family.add(
        half + "shfl.sync.bfly.b32 %0, %1, 5, 31, 0xffff; }",
        "u32",
        "u32",
        lambda a: [a[lane ^ 5] if lane < 16 else 77 for lane in range(32)],
    )
    odd = "{ .reg .pred p; .reg .b32 t; and.b32 t, %1, 1; setp.ne.u32 p, t, 0; "
    ballot: Callable[[Lanes], int] = lambda a: sum((x & 1) << i for i, x in enumerate(a))  # noqa: E731
    family.add(odd + "vote.sync.ballot.b32 %0, p, 0xffffffff; }", "u32", "u32", lambda a: [ballot(a)] * 32)
    for mode, holds in (("all", lambda n: n == 32), ("any", lambda n: n > 0), ("uni", lambda n: n in (0, 32))):
        family.add(
            f"{odd}vote.sync.{mode}.pred p, p, 0xffffffff; selp.u32 %0, 1, 0, p; }}",
            "u32",
            "u32",
            lambda a, h=holds: [int(h(ballot(a).bit_count()))] * 32,
        )
    family.add(
        half + "match.any.sync.b32 %0, %1, 0xffff; }",
        "u32",
        "u32",
        lambda a: [_same(a[:16], lane) if lane < 16 else 77 for lane in range(32)],
    )
    family.add("match.any.sync.b32 %0, %1, 0xffffffff;", "u32", "u32", lambda a: [_same(a, i) for i in range(32)])
    family.add(
        "{ .reg .b64 w; cvt.u64.u32 w, %1; match.any.sync.b64 %0, w, 0xffffffff; }",
        "u32",
        "u32",
        lambda a: [_same(a, i) for i in range(32)],
    )
    family.add(
        "{ .reg .pred p; match.all.sync.b32 %0|p, %1, 0xffffffff; @p add.u32 %0, %0, 1; }",
        "u32",
        "u32",
        lambda a: [0] * 32,  # all lanes and a predicate that adds 1, or none and no predicate
    )
    for kind, operations in (
        ("u32", {"add": add, "min": min, "max": max}),
        ("s32", {"add": add, "min": min, "max": max}),
        ("b32", {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}),
    ):
        for op, function in operations.items():
            family.add(
                f"redux.sync.{op}.{kind} %0, %1, 0xffffffff;",
                kind,
                kind,
                lambda a, f=function, k=kind: [wrapped(reduce(f, a), k)] * 32,
            )
    # Which lane is elected is open; that it is one, and knows, is not.
    family.add(
        "{ .reg .pred p, q; .reg .b32 l, m; mov.u32 l, %%laneid; elect.sync m|p, 0xffffffff; setp.eq.and.u32 q, l, m, p; "
        "vote.sync.ballot.b32 m, q, 0xffffffff; popc.b32 %0, m; }",
        "_",
        "u32",
        lambda: [1] * 32,
    )
    for mask, of in (
        ("eq", lambda i: 1 << i),
        ("lt", lambda i: (1 << i) - 1),
        ("le", lambda i: (2 << i) - 1),
        ("gt", lambda i: -2 << i),
        ("ge", lambda i: -1 << i),
    ):
        family.add(f"mov.u32 %0, %%lanemask_{mask};", "_", "u32", lambda f=of: [f(i) for i in range(32)])
    return family


def _same(a: Lanes, lane: int) -> int:
    return sum(1 << i for i, x in enumerate(a) if x == a[lane])


def _integers(family: MemoryFamily, width: int) -> None:
    u, s, b = f"u{width}", f"s{width}", f"b{width}"
    table: list[tuple[str, str, Callable[..., int]]] = [
        ("add", u, lambda m, x: m + x),
        ("min", u, min),
        ("max", u, max),
        ("min", s, min),
        ("max", s, max),
        ("and", b, lambda m, x: m & x),
        ("or", b, lambda m, x: m | x),
        ("xor", b, lambda m, x: m ^ x),
    ]
    if width == 32:
        table += [
            ("add", s, lambda m, x: m + x),
            ("inc", u, lambda m, x: 0 if m >= x else m + 1),
            ("dec", u, lambda m, x: x if m == 0 or m > x else m - 1),
        ]
    for op, kind, reference in table:
        family.add(f"atom.global.{op}.{kind} %0, [cell], %1;", kind, kind, reference)
        family.add(f"red.relaxed.gpu.global.{op}.{kind} [cell], %1; mov.b{width} %0, 0;", kind, kind, reference)
    family.add(f"atom.acq_rel.gpu.global.exch.{b} %0, [cell], %1;", b, b, lambda m, x: x)
    family.add(f"atom.cas.{b} %0, [cell], %1, %2;", f"{b} {b}", b, lambda m, x, y: y if m == x else m)


def atomics32() -> Family:
    """Atomics of 32 bits."""
    x, y = integer_words(32, 96, 44), integer_words(32, 96, 45)
    cells = integer_words(32, 96, 46)
    cells[::3] = x[::3]  # so that some comparisons hold
    family = MemoryFamily("atomics32", (x, y), cells=cells)
    _integers(family, 32)
    return family


def atomics64() -> Family:
    """Atomics of 64 bits."""
    x, y = integer_words(64, 96, 47), integer_words(64, 96, 48)
    cells = integer_words(64, 96, 49)
    cells[::3] = x[::3]
    family = MemoryFamily("atomics64", (x, y), cells=cells)
    _integers(family, 64)
    return family


def float_atomics() -> Family:
    """Atomics of f32 (global memory flushes subnormals) and of packed halves; which NaN comes out is open."""
    family = MemoryFamily("float_atomics", (float_words("f32", 96, 50),), cells=float_words("f32", 96, 51))
    for text, kind in (("f32", "f32"), ("noftz.f16x2", "f16x2"), ("noftz.bf16x2", "bf16x2")):
        reference = exactly(add, kind.removesuffix("x2"), ftz=kind == "f32")
        family.add(f"atom.global.add.{text} %0, [cell], %1;", kind, kind, reference, any_nan=True)
        family.add(f"red.global.add.{text} [cell], %1; mov.b32 %0, 0;", kind, kind, reference, any_nan=True)
    return family


def wide_float_atomics() -> Family:
    """f64, and vectors of f32 and of halves."""
    words = pairs("f16", 96, 52).astype(np.uint64) | pairs("f16", 96, 53).astype(np.uint64) << 32
    cells = pairs("f16", 96, 54).astype(np.uint64) | pairs("f16", 96, 55).astype(np.uint64) << 32
    family = MemoryFamily("wide_float_atomics", (words,), cells=cells)
    family.add("atom.global.add.f64 %0, [cell], %1;", "f64", "f64", exactly(add, "f64"), any_nan=True)
    apart = "{ .reg .b32 x, y, u, v; mov.b64 {x, y}, %1; "
    # Whether the vector forms flush subnormals, as the scalar one does, is not said.
    family.add(
        apart + "atom.global.v2.f32.add {u, v}, [cell], {x, y}; mov.b64 %0, {u, v}; }",
        "f32x2",
        "f32x2",
        exactly(add, "f32"),
        absolute=2.0**-125,
    )
    for kind in ("f16", "bf16"):
        for op, reference in (("add", exactly(add, kind)), ("min", smaller), ("max", larger)):
            family.add(
                f"{apart}atom.global.v2.{kind}x2.{op}.noftz {{u, v}}, [cell], {{x, y}}; mov.b64 %0, {{u, v}}; }}",
                f"{kind}x4",
                f"{kind}x4",
                reference,
                any_nan=True,
            )
            halves = "{ .reg .b16 a, b, c, d; mov.b64 {a, b, c, d}, %1; "
            family.add(
                f"{halves}red.global.v4.{kind}.{op}.noftz [cell], {{a, b, c, d}}; mov.b64 %0, 0; }}",
                f"{kind}x4",
                f"{kind}x4",
                reference,
                any_nan=True,
            )
    return family


def families() -> list[Family]:
    """All of this module."""
    return [warp(), atomics32(), atomics64(), float_atomics(), wide_float_atomics()]

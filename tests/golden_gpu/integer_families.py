"""Integer and logic opcodes, of 32 and of 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.golden_gpu.forms import Family
from tests.golden_gpu.numbers import Array, bits_of, clamped, wrapped


def integer_words(width: int, count: int, seed: int) -> Array:
    """Corners, small numbers, any bits."""
    rng = np.random.default_rng(seed)
    top = 1 << width
    corners = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, top - 1, top - 2, top // 2, top // 2 - 1,
               top // 2 + 1, 0x80, 0x8000, 0x7FFF, 0xFFFF, 0x10000, 0x0F0F0F0F, 0x80808080]  # fmt: skip
    some = rng.choice(np.array(corners, np.uint64), count // 2)
    return np.concatenate([some, rng.integers(0, top, count - count // 2, np.uint64)]).astype(f"u{width // 8}")


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _bfe(a: int, b: int, c: int, width: int, signed: bool) -> int:
    position, length = b & 255, c & 255
    bits = a & (1 << width) - 1
    top = bits >> min(position + length - 1, width - 1) & 1 if signed and length else 0
    field = bits >> position & (1 << length) - 1
    known = max(min(length, width - position), 0)
    return (field | (-1 << known if top else 0)) & (1 << width) - 1


def _bfi(a: int, b: int, position: int, length: int, width: int) -> int:
    mask = ((1 << (length & 255)) - 1 << (position & 255)) & (1 << width) - 1
    return b & ~mask | a << (position & 255) & mask


def _bfind(a: int, signed: bool, shift: bool, width: int) -> int:
    length = (~a if signed and a < 0 else a).bit_length()
    return (width - length if shift else length - 1) if length else -1


def _fns(mask: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if mask >> base & 1 else -1
    places = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [i for i in places if mask >> i & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else -1


def _prmt(a: int, b: int, c: int, mode: str = "") -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    if not mode:
        picked = [(source[s & 7], s & 8) for s in (c >> 4 * i & 15 for i in range(4))]
        return int.from_bytes(bytes((255 if x >> 7 else 0) if fill else x for x, fill in picked), "little")
    k = c & 3
    order = {
        "f4e": [k, k + 1, k + 2, k + 3],
        "b4e": [k, (k - 1) & 7, (k - 2) & 7, (k - 3) & 7],
        "rc8": [k, k, k, k],
        "ecl": [max(k, i) for i in range(4)],
        "ecr": [min(k, i) for i in range(4)],
        "rc16": [0, 1, 0, 1] if k % 2 == 0 else [2, 3, 2, 3],
    }[mode]
    return int.from_bytes(bytes(source[i] for i in order), "little")


def _lanes(a: int, kind: str, count: int) -> list[int]:
    width = bits_of(kind)
    return [wrapped(a >> width * i, kind) for i in range(count)]


def _arithmetic(family: Family, width: int) -> None:
    u, s = f"u{width}", f"s{width}"
    for t in (u, s):
        two, three = f"{t} {t}", f"{t} {t} {t}"
        family.add(f"mul.hi.{t} %0, %1, %2;", two, t, lambda a, b, w=width: a * b >> w)
        family.add(f"mad.lo.{t} %0, %1, %2, %3;", three, t, lambda a, b, c: a * b + c)
        family.add(f"mad.hi.{t} %0, %1, %2, %3;", three, t, lambda a, b, c, w=width: (a * b >> w) + c)
        family.add(f"min.{t} %0, %1, %2;", two, t, min)
        family.add(f"max.{t} %0, %1, %2;", two, t, max)
        family.add(f"sad.{t} %0, %1, %2, %3;", three, t, lambda a, b, c: abs(a - b) + c)
        odd = f"{{ .reg .b{width} o; or.b{width} o, %2, 1; "
        family.add(f"{odd}div.{t} %0, %1, o; }}", two, t, lambda a, b: _quotient(a, b | 1))
        family.add(f"{odd}rem.{t} %0, %1, o; }}", two, t, lambda a, b: a - (b | 1) * _quotient(a, b | 1))
        # Shift amounts are 32 bits wide and clamp.
        family.add(f"shr.{t} %0, %1, %2;", f"{t} u32", t, lambda a, b, w=width: a >> min(b, w))
        for op in ("bfe", "bfind", "bfind.shiftamt"):
            signed = t == s
            if op == "bfe":
                family.add(
                    f"bfe.{t} %0, %1, %2, %3;",
                    f"{t} u32 u32",
                    u,
                    lambda a, b, c, w=width, g=signed: _bfe(a, b, c, w, g),
                )
            else:
                family.add(
                    f"{op}.{t} %0, %1;",
                    t,
                    "u32",
                    lambda a, g=signed, h=op != "bfind", w=width: _bfind(a, g, h, w),
                )
    family.add(f"abs.{s} %0, %1;", s, s, abs)
    family.add(f"neg.{s} %0, %1;", s, s, lambda a: -a)
    family.add(f"shl.b{width} %0, %1, %2;", f"{u} u32", u, lambda a, b, w=width: a << b if b < w else 0)
    family.add(f"popc.b{width} %0, %1;", u, "u32", int.bit_count)
    family.add(f"clz.b{width} %0, %1;", u, "u32", lambda a, w=width: w - a.bit_length())
    family.add(f"brev.b{width} %0, %1;", u, u, lambda a, w=width: int(f"{a:0{w}b}"[::-1], 2))
    family.add(f"cnot.b{width} %0, %1;", u, u, lambda a: int(a == 0))
    family.add(
        f"{{ .reg .b32 p, n; shr.u32 p, %3, 3; and.b32 n, %3, 255; bfi.b{width} %0, %1, %2, p, n; }}",
        f"{u} {u} u32",
        u,
        lambda a, b, c, w=width: _bfi(a, b, c >> 3, c & 255, w),
    )


def i32() -> Family:
    """32-bit integers."""
    family = Family("i32", tuple(integer_words(32, 192, seed) for seed in (30, 31, 32)))
    _arithmetic(family, 32)
    two, three = "u32 u32", "u32 u32 u32"
    family.add("add.sat.s32 %0, %1, %2;", "s32 s32", "s32", lambda a, b: clamped(a + b, "s32"))
    family.add("sub.sat.s32 %0, %1, %2;", "s32 s32", "s32", lambda a, b: clamped(a - b, "s32"))
    family.add(
        "mad.hi.sat.s32 %0, %1, %2, %3;", "s32 s32 s32", "s32", lambda a, b, c: clamped((a * b >> 32) + c, "s32")
    )
    for t in ("u32", "s32"):
        low: Callable[[int], int] = lambda a, t=t: wrapped(a << 8, t) >> 8  # type: ignore[misc]  # noqa: E731
        family.add(f"mul24.lo.{t} %0, %1, %2;", f"{t} {t}", t, lambda a, b, f=low: f(a) * f(b))
        family.add(f"mul24.hi.{t} %0, %1, %2;", f"{t} {t}", t, lambda a, b, f=low: f(a) * f(b) >> 16)
    for left in (True, False):
        for clamp in (True, False):
            name = f"shf.{'l' if left else 'r'}.{'clamp' if clamp else 'wrap'}.b32"
            family.add(f"{name} %0, %1, %2, %3;", three, "u32", lambda a, b, c, v=left, m=clamp: _funnel(a, b, c, v, m))
    for mode in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        dots = f".{mode}" if mode else ""
        family.add(f"prmt.b32{dots} %0, %1, %2, %3;", three, "u32", lambda a, b, c, m=mode: _prmt(a, b, c, m))
    for table in (0x00, 0x1D, 0x80, 0x96, 0xCA, 0xE8, 0xF6):
        family.add(f"lop3.b32 %0, %1, %2, %3, {table};", three, "u32", lambda a, b, c, t=table: _lop3(a, b, c, t))
    for a_kind in ("u32", "s32"):
        for b_kind in ("u32", "s32"):
            c_kind = "u32" if a_kind == b_kind == "u32" else "s32"
            bytes_of: Callable[[int, str], list[int]] = lambda x, t: _lanes(x, f"{t[0]}8", 4)  # noqa: E731
            pairs_of: Callable[[int, str], list[int]] = lambda x, t: _lanes(x, f"{t[0]}16", 2)  # noqa: E731
            family.add(
                f"dp4a.{a_kind}.{b_kind} %0, %1, %2, %3;",
                f"{a_kind} {b_kind} {c_kind}",
                c_kind,
                lambda a, b, c, s=a_kind, t=b_kind, f=bytes_of: (
                    c + sum(x * y for x, y in zip(f(a, s), f(b, t), strict=True))
                ),
            )
            for half, first in (("lo", 0), ("hi", 2)):
                family.add(
                    f"dp2a.{half}.{a_kind}.{b_kind} %0, %1, %2, %3;",
                    f"{a_kind} {b_kind} {c_kind}",
                    c_kind,
                    lambda a, b, c, s=a_kind, t=b_kind, f=pairs_of, g=bytes_of, i=first: (
                        c + sum(x * y for x, y in zip(f(a, s), g(b, t)[i : i + 2], strict=True))
                    ),
                )
    family.add(
        "{ .reg .b32 b, o; and.b32 b, %2, 31; and.b32 o, %3, 15; sub.s32 o, o, 7; fns.b32 %0, %1, b, o; }",
        three,
        "u32",
        lambda a, b, c: _fns(a, b & 31, (c & 15) - 7),
    )
    for mode in ("clamp", "wrap"):
        family.add(f"szext.{mode}.u32 %0, %1, %2;", two, "u32", lambda a, b, m=mode: _extend(a, b, m, False))
        family.add(f"szext.{mode}.s32 %0, %1, %2;", "s32 u32", "s32", lambda a, b, m=mode: _extend(a, b, m, True))
        family.add(f"bmsk.{mode}.b32 %0, %1, %2;", two, "u32", lambda a, b, m=mode: _mask(a, b, m))
    family.add("{ add.cc.u32 %0, %1, %2; addc.u32 %0, %3, 0; }", three, "u32", lambda a, b, c: c + (a + b >> 32))
    family.add("{ sub.cc.u32 %0, %1, %2; subc.u32 %0, %3, 0; }", three, "u32", lambda a, b, c: c - int(a < b))
    family.add(
        "{ mad.lo.cc.u32 %0, %1, %2, %3; madc.hi.u32 %0, %1, %2, 0; }", three, "u32", lambda a, b, c: a * b + c >> 32
    )
    family.add("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mul.wide.s16 %0, l, h; }", "u32", "s32", _halves_product)
    family.add("slct.s32.s32 %0, %1, %2, %3;", "s32 s32 s32", "s32", lambda a, b, c: a if c >= 0 else b)
    return family


def _halves_product(a: int) -> int:
    low, high = _lanes(a, "s16", 2)
    return low * high


def _funnel(a: int, b: int, c: int, left: bool, clamp: bool) -> int:
    n = min(c, 32) if clamp else c & 31
    return (b << 32 | a) << n >> 32 if left else (b << 32 | a) >> n


def _lop3(a: int, b: int, c: int, table: int) -> int:
    out = 0
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _extend(a: int, b: int, mode: str, signed: bool) -> int:
    n = b & 31 if mode == "wrap" else min(b, 32)
    if n == 32:
        return a
    field = a & (1 << n) - 1
    return field - (1 << n) if signed and n and field >> n - 1 else field


def _mask(a: int, b: int, mode: str) -> int:
    """`b` ones from bit `a` on."""
    if mode == "wrap":
        return (1 << (b & 31)) - 1 << (a & 31)
    return (1 << min(b, 32)) - 1 << a if a < 32 else 0


def i64() -> Family:
    """64-bit integers."""
    family = Family("i64", tuple(integer_words(64, 96, seed) for seed in (33, 34, 35)))
    _arithmetic(family, 64)
    for t in ("u", "s"):
        wide: Callable[[Any, Any], Any] = lambda a, b: a * b  # noqa: E731
        family.add(f"mul.wide.{t}32 %0, %1, %2;", f"{t}32 {t}32", f"{t}64", wide)
        family.add(f"mad.wide.{t}32 %0, %1, %2, %3;", f"{t}32 {t}32 {t}64", f"{t}64", lambda a, b, c: a * b + c)
    family.add(
        "{ add.cc.u64 %0, %1, %2; addc.u64 %0, %3, 0; }", "u64 u64 u64", "u64", lambda a, b, c: c + (a + b >> 64)
    )
    return family


def families() -> list[Family]:
    """All of this module."""
    return [i32(), i64()]

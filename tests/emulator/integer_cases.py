"""Integer and logic opcodes against Python integers."""

from __future__ import annotations

import itertools
import operator

from tests.emulator.cases import Suite, clamp, wrap

SUITE = Suite("integer")
add = SUITE.add
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def truncated_division(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def width(kind: str) -> int:
    return int(kind[1:])


# ---------------------------------------------------------------- arithmetic
for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    n = width(t)
    add(f"add.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, operator.add)
    add(f"sub.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, operator.sub)
    add(f"mul.lo.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, operator.mul)
    add(f"mul.hi.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b, n=n: (a * b) >> n)
    add(f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c: a * b + c)
    add(f"mad.hi.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c, n=n: (a * b >> n) + c)
    add(f"min.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, min)
    add(f"max.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, max)
    add(f"div.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}:nonzero", t, truncated_division)
    add(f"rem.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}:nonzero", t, lambda a, b: a - b * truncated_division(a, b))
    add(f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c: c + abs(a - b))
    add(f"shr.{t} {{d}}, {{a}}, {{b}};", f"{t} u32:count", t, lambda a, b: a >> min(b, 64))
    if t in WIDE:
        w = WIDE[t]
        add(f"mul.wide.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", w, operator.mul)
        add(f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {w}", w, lambda a, b, c: a * b + c)
for t in ("s16", "s32", "s64"):
    add(f"abs.{t} {{d}}, {{a}};", t, t, abs)
    add(f"neg.{t} {{d}}, {{a}};", t, t, operator.neg)
for t in ("u16x2", "s16x2"):
    add(f"add.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, operator.add)
    for op, choose in (("min", min), ("max", max)):
        add(f"{op}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, choose)
for t in ("s32", "s16x2"):
    for op, choose in (("min", min), ("max", max)):
        add(f"{op}.relu.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b, f=choose: max(f(a, b), 0))
add("add.sat.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: clamp(a + b, "s32"))
add("sub.sat.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: clamp(a - b, "s32"))
add("mad.hi.sat.s32 {d}, {a}, {b}, {c};", "s32 s32 s32", "s32", lambda a, b, c: clamp((a * b >> 32) + c, "s32"))

# ---------------------------------------------------------------- chains: the carry of one instruction enters the next
for t in ("u32", "s32", "u64", "s64"):
    n = width(t)
    mask = (1 << n) - 1
    for op, function in (("add", operator.add), ("sub", operator.sub)):
        code = f"{op}.cc.{t} {{d}}, {{a}}, {{b}}; {op}c.{t} {{d}}, {{c}}, {{a}};"

        def second(a: int, b: int, c: int, f=function, mask=mask, n=n) -> int:
            wide = f(a & mask | c << n, b & mask | a << n)
            return int(wide >> n)

        add(code, f"{t} {t} {t}", t, second)
        code = f"{op}.cc.{t} {{d}}, {{a}}, {{b}}; {op}c.cc.{t} {{d}}, {{a}}, {{b}}; {op}c.{t} {{d}}, 0, 0;"

        def third(a: int, b: int, f=function, mask=mask, n=n) -> int:
            a, b = a & mask, b & mask
            return int(f(a | a << n, b | b << n) >> 2 * n)

        add(code, f"{t} {t}", t, third)
    for first, then in itertools.product(("lo", "hi"), repeat=2):
        part = {"lo": lambda x, mask=mask: x & mask, "hi": lambda x, mask=mask, n=n: x >> n & mask}

        def chained(a: int, b: int, c: int, p=part[first], q=part[then], mask=mask, n=n) -> int:
            carry = (p(a * b) + (c & mask)) >> n
            return q(a * b) + c + carry

        code = f"mad.{first}.cc.{t} {{d}}, {{a}}, {{b}}, {{c}}; madc.{then}.{t} {{d}}, {{a}}, {{b}}, {{c}};"
        add(code, f"{t} {t} {t}", t, chained)

        def carried(a: int, b: int, c: int, p=part[first], q=part[then], mask=mask, n=n) -> int:
            carry = (p(a * b) + (c & mask)) >> n
            return (q(a * b) + (c & mask) + carry) >> n

        code = (
            f"mad.{first}.cc.{t} {{d}}, {{a}}, {{b}}, {{c}}; madc.{then}.cc.{t} {{d}}, {{a}}, {{b}}, {{c}};"
            f" addc.{t} {{d}}, 0, 0;"
        )
        add(code, f"{t} {t} {t}", t, carried)

# ---------------------------------------------------------------- 24 bits and dot products
for t in ("u32", "s32"):
    for part, shift in (("lo", 0), ("hi", 16)):

        def product24(a: int, b: int, t=t, shift=shift) -> int:
            a, b = (wrap(x, f"{t[0]}24") for x in (a, b))
            return (a * b >> shift) & 0xFFFFFFFF

        add(f"mul24.{part}.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, product24)
        code = f"mad24.{part}.{t} {{d}}, {{a}}, {{b}}, {{c}};"
        add(code, f"{t} {t} {t}", t, lambda a, b, c, f=product24: f(a, b) + c)
        if part == "hi" and t == "s32":

            def clamped24(a: int, b: int, c: int, f=product24) -> int:
                return clamp(wrap(f(a, b), "s32") + c, "s32")

            add("mad24.hi.sat.s32 {d}, {a}, {b}, {c};", "s32 s32 s32", "s32", clamped24)
for x, y in itertools.product("us", repeat=2):

    def dot4(a: int, b: int, c: int, x=x, y=y) -> int:
        return c + sum(wrap(a >> 8 * i, f"{x}8") * wrap(b >> 8 * i, f"{y}8") for i in range(4))

    add(f"dp4a.{x}32.{y}32 {{d}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32", dot4)
    for half, first_byte in (("lo", 0), ("hi", 2)):

        def dot2(a: int, b: int, c: int, x=x, y=y, k=first_byte) -> int:
            return c + sum(wrap(a >> 16 * i, f"{x}16") * wrap(b >> 8 * (i + k), f"{y}8") for i in range(2))

        add(f"dp2a.{half}.{x}32.{y}32 {{d}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32", dot2)

# ---------------------------------------------------------------- logic, shifts, bits
for n in (16, 32, 64):
    u = f"u{n}"
    for op, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        add(f"{op}.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, function)
    add(f"not.b{n} {{d}}, {{a}};", u, u, operator.invert)
    add(f"cnot.b{n} {{d}}, {{a}};", u, u, lambda a: int(a == 0))
    add(f"shl.b{n} {{d}}, {{a}}, {{b}};", f"{u} u32:count", u, lambda a, b: a << min(b, 64))
    add(f"shr.b{n} {{d}}, {{a}}, {{b}};", f"{u} u32:count", u, lambda a, b: a >> min(b, 64))
for op, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
    add(f"{op}.pred {{d}}, {{a}}, {{b}};", "pred pred", "pred", function)
add("not.pred {d}, {a};", "pred", "pred", lambda a: 1 - a)
for way, mode in itertools.product("lr", ("wrap", "clamp")):

    def funnel(a: int, b: int, c: int, way=way, mode=mode) -> int:
        n = c & 31 if mode == "wrap" else min(c, 32)
        return (b << 32 | a) << n >> 32 if way == "l" else (b << 32 | a) >> n

    add(f"shf.{way}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32:count", "u32", funnel)


def leading(a: int) -> int:
    return (~a if a < 0 else a).bit_length() - 1


for n in (32, 64):
    u, s = f"u{n}", f"s{n}"
    add(f"popc.b{n} {{d}}, {{a}};", u, "u32", int.bit_count)
    add(f"clz.b{n} {{d}}, {{a}};", u, "u32", lambda a, n=n: n - a.bit_length())
    add(f"brev.b{n} {{d}}, {{a}};", u, u, lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
    for t in (u, s):
        add(f"bfind.{t} {{d}}, {{a}};", t, "u32", leading)
        add(f"bfind.shiftamt.{t} {{d}}, {{a}};", t, "u32", lambda a, n=n: n - 1 - p if (p := leading(a)) >= 0 else -1)

        def extracted(a: int, b: int, c: int, t=t, n=n) -> int:
            position, length = b & 255, c & 255
            sign = a >> min(position + length - 1, n - 1) & 1 if t[0] == "s" and length else 0
            return sum((a >> (position + i) & 1 if i < length and position + i < n else sign) << i for i in range(n))

        add(f"bfe.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} u32:count u32:count", t, extracted)

    def inserted(a: int, b: int, c: int, e: int, n=n) -> int:
        position, length = c & 255, e & 255
        ones = ((1 << length) - 1) << position
        return b & ~ones | a << position & ones & ((1 << n) - 1)

    add(f"bfi.b{n} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};", f"{u} {u} u32:count u32:count", u, inserted)
for mode in ("wrap", "clamp"):
    for t in ("u32", "s32"):

        def extension(a: int, b: int, t=t, mode=mode) -> int:
            n = b & 31 if mode == "wrap" else min(b, 32)
            return wrap(a, f"{t[0]}{n}") if n else 0

        add(f"szext.{mode}.{t} {{d}}, {{a}}, {{b}};", f"{t} u32:count", t, extension)

    def ones(a: int, b: int, mode=mode) -> int:
        first, length = (x & 31 if mode == "wrap" else min(x, 32) for x in (a, b))
        return ((1 << length) - 1) << first & 0xFFFFFFFF

    add(f"bmsk.{mode}.b32 {{d}}, {{a}}, {{b}};", "u32:count u32:count", "u32", ones)


def nth_set(mask: int, base: int, offset: int) -> int:
    offset = offset % 8 - 4
    positions = [i for i in range(32) if mask >> i & 1 and (i >= base if offset >= 0 else i <= base)]
    if offset == 0:
        return base if base in positions else -1
    positions = positions if offset > 0 else positions[::-1]
    return positions[abs(offset) - 1] if abs(offset) <= len(positions) else -1


code = "and.b32 %r60, {b}, 31; and.b32 %r61, {c}, 7; sub.s32 %r61, %r61, 4; fns.b32 {d}, {a}, %r60, %r61;"
add(code, "u32 u32 u32", "u32", lambda a, b, c: nth_set(a, b & 31, c))

# ---------------------------------------------------------------- tables
for table in (0x00, 0xCA, 0xBE, 0x96, 0x80, 0xFE, 0x1B, 0xFF):

    def looked_up(a: int, b: int, c: int, table=table) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

    add(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", "u32 u32 u32", "u32", looked_up)
    for op, function in (("and", operator.and_), ("or", operator.or_)):
        code = f"lop3.{op}.b32 _|{{d}}, {{a}}, {{b}}, {{c}}, {table}, {{e}};"
        add(
            code,
            "u32 u32 u32 pred",
            "pred",
            lambda a, b, c, e, f=looked_up, g=function: g(int(f(a, b, c) != 0), e),
        )
add("lop3.or.b32 {d}|%p5, {a}, {b}, {c}, 0xE8, {e};", "u32 u32 u32 pred", "u32", lambda a, b, c, e: a & b | c & (a | b))


def permuted(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        s = selector >> 4 * i & 15
        byte = source[s & 7]
        out.append((255 if byte >> 7 else 0) if s & 8 else byte)
    return int.from_bytes(bytes(out), "little")


add("prmt.b32 {d}, {a}, {b}, {c};", "u32 u32 u32", "u32", permuted)
PICKS = {  # bytes of b:a, lowest first, that byte i of the result is when the selector is c
    "f4e": lambda c, i: c + i,
    "b4e": lambda c, i: (c - i) % 8,
    "rc8": lambda c, i: c,
    "ecl": lambda c, i: max(c, i),
    "ecr": lambda c, i: min(c, i),
    "rc16": lambda c, i: 2 * (c & 1) + (i & 1),
}
for mode, pick in PICKS.items():

    def gathered(a: int, b: int, c: int, pick=pick) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(source[pick(c & 3, i)] for i in range(4)), "little")

    add(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32", gathered)


# ---------------------------------------------------------------- SIMD video
VIDEO = {
    "vadd": operator.add,
    "vsub": operator.sub,
    "vavrg": lambda x, y: (x + y + (x + y >= 0)) >> 1,
    "vabsdiff": lambda x, y: abs(x - y),
    "vmin": min,
    "vmax": max,
}
TESTS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def simd(function, lanes, kinds, end, of_a=None, of_b=None, mask=None):
    """`kinds`: of the result and the operands; `of_a`, `of_b`: pieces of b:a, lowest lane first."""
    width = 32 // lanes
    d, ka, kb = (f"{k[0]}{width}" for k in kinds)

    def reference(a: int, b: int, c: int) -> int:
        both, out = b << 32 | a, c
        for i in range(lanes) if mask is None else mask:
            x = wrap(both >> width * (of_a or range(lanes))[i], ka)
            y = wrap(both >> width * (of_b or range(lanes, 2 * lanes))[i], kb)
            t = int(function(x, y))
            t = clamp(t, d) if end == "sat" else t
            if end == "add":
                out += t
            else:
                ones = ((1 << width) - 1) << width * i
                out = out & ~ones | t << width * i & ones
        return out & 0xFFFFFFFF

    return reference


for lanes, kinds in itertools.product((2, 4), itertools.product(("u32", "s32"), repeat=3)):
    for op, end in itertools.product(VIDEO, ("", "sat", "add")):
        code = f"{op}{lanes}.{'.'.join(kinds)}{'.' if end else ''}{end} {{d}}, {{a}}, {{b}}, {{c}};"
        add(code, "u32 u32 u32", "u32", simd(VIDEO[op], lanes, kinds, end))
    if kinds[0] == "u32":
        for test, end in itertools.product(TESTS, ("", "add")):
            code = f"vset{lanes}.{kinds[1]}.{kinds[2]}.{test}{'.' if end else ''}{end} {{d}}, {{a}}, {{b}}, {{c}};"
            add(code, "u32 u32 u32", "u32", simd(TESTS[test], lanes, kinds, end))
ALL = ("s32", "s32", "s32")
add("vsub2.s32.s32.s32 {d}.h1, {a}.h03, {b}.h22, {c};", "u32 u32 u32", "u32",
    simd(operator.sub, 2, ALL, "", [3, 0], [2, 2], [1]))  # fmt: skip
add("vsub4.s32.s32.s32.sat {d}.b20, {a}.b0725, {b}.b1346, {c};", "u32 u32 u32", "u32",
    simd(operator.sub, 4, ALL, "sat", [5, 2, 7, 0], [6, 4, 3, 1], [0, 2]))  # fmt: skip
add("vadd4.u32.u32.u32.add {d}.b321, {a}, {b}.b0000, {c};", "u32 u32 u32", "u32",
    simd(operator.add, 4, ("u32",) * 3, "add", None, [0] * 4, [1, 2, 3]))  # fmt: skip

"""Integer and logic opcodes against Python integers. Importing this fills CASES."""

from __future__ import annotations

from tests.emulator.cases import bits_of, clamp, integer, wrap


def truncated_division(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
    integer(f"add_{t}", f"add.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: a + b)
    integer(f"sub_{t}", f"sub.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: a - b)
    integer(f"mul_lo_{t}", f"mul.lo.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b: a * b)
    integer(f"mul_hi_{t}", f"mul.hi.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, lambda a, b, t=t: (a * b) >> bits_of(t))
    integer(f"mad_lo_{t}", f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c: a * b + c)
    integer(f"min_{t}", f"min.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, min)
    integer(f"max_{t}", f"max.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", t, max)
    integer(
        f"div_{t}",
        f"or.b{t[1:]} {{b}}, {{b}}, 1; div.{t} {{d}}, {{a}}, {{b}};",
        f"{t} {t}",
        t,
        lambda a, b, t=t: truncated_division(a, wrap(b | 1, t)),
    )
    integer(
        f"rem_{t}",
        f"or.b{t[1:]} {{b}}, {{b}}, 1; rem.{t} {{d}}, {{a}}, {{b}};",
        f"{t} {t}",
        t,
        lambda a, b, t=t: a - wrap(b | 1, t) * truncated_division(a, wrap(b | 1, t)),
    )
    integer(f"sad_{t}", f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {t}", t, lambda a, b, c: c + abs(a - b))
    integer(
        f"shr_{t}",
        f"and.b32 {{b}}, {{b}}, 127; shr.{t} {{d}}, {{a}}, {{b}};",
        f"{t} u32",
        t,
        lambda a, b: a >> (b & 127),
    )
    for op, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        compare = eval(f"lambda a, b: int(a {sign} b)")
        code = f"setp.{op}.{t} %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;"
        integer(f"setp_{op}_{t}", code, f"{t} {t}", "u32", compare)
for t in ("s16", "s32", "s64"):
    integer(f"abs_{t}", f"abs.{t} {{d}}, {{a}};", t, t, abs)
    integer(f"neg_{t}", f"neg.{t} {{d}}, {{a}};", t, t, lambda a: -a)
for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
    integer(f"mul_wide_{t}", f"mul.wide.{t} {{d}}, {{a}}, {{b}};", f"{t} {t}", w, lambda a, b: a * b)
    integer(f"mad_wide_{t}", f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};", f"{t} {t} {w}", w, lambda a, b, c: a * b + c)
for n in (16, 32, 64):
    u = f"u{n}"
    integer(f"and_{n}", f"and.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, lambda a, b: a & b)
    integer(f"or_{n}", f"or.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, lambda a, b: a | b)
    integer(f"xor_{n}", f"xor.b{n} {{d}}, {{a}}, {{b}};", f"{u} {u}", u, lambda a, b: a ^ b)
    integer(f"not_{n}", f"not.b{n} {{d}}, {{a}};", u, u, lambda a: ~a)
    integer(f"cnot_{n}", f"cnot.b{n} {{d}}, {{a}};", u, u, lambda a: int(a == 0))
    integer(
        f"shl_{n}",
        f"and.b32 {{b}}, {{b}}, 127; shl.b{n} {{d}}, {{a}}, {{b}};",
        f"{u} u32",
        u,
        lambda a, b: a << (b & 127),
    )
for n in (32, 64):
    u = f"u{n}"
    integer(f"popc_{n}", f"popc.b{n} {{d}}, {{a}};", u, "u32", lambda a: a.bit_count())
    integer(f"clz_{n}", f"clz.b{n} {{d}}, {{a}};", u, "u32", lambda a, n=n: n - a.bit_length())
    integer(f"brev_{n}", f"brev.b{n} {{d}}, {{a}};", u, u, lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
    integer(f"bfind_u{n}", f"bfind.u{n} {{d}}, {{a}};", u, "u32", lambda a: a.bit_length() - 1)
    integer(f"bfind_s{n}", f"bfind.s{n} {{d}}, {{a}};", f"s{n}", "u32", lambda a: (~a if a < 0 else a).bit_length() - 1)
    integer(
        f"bfind_shift_u{n}",
        f"bfind.shiftamt.u{n} {{d}}, {{a}};",
        u,
        "u32",
        lambda a, n=n: n - a.bit_length() if a else -1,
    )
    integer(
        f"bfi_{n}",
        f"bfi.b{n} {{d}}, {{a}}, {{b}}, 5, 11;",
        f"{u} {u}",
        u,
        lambda a, b: (b & ~(2047 << 5)) | (a & 2047) << 5,
    )
    integer(
        f"bfi_past_{n}",
        f"bfi.b{n} {{d}}, {{a}}, {{b}}, {n - 4}, 30;",
        f"{u} {u}",
        u,
        lambda a, b, n=n: (b & ~(15 << (n - 4))) | (a & 15) << (n - 4),
    )
    integer(f"bfe_u{n}", f"bfe.u{n} {{d}}, {{a}}, 3, 9;", u, u, lambda a: a >> 3 & 511)
    integer(
        f"bfe_s{n}",
        f"bfe.s{n} {{d}}, {{a}}, 3, 9;",
        f"s{n}",
        f"s{n}",
        lambda a: (a >> 3 & 511) - (512 if a >> 11 & 1 else 0),
    )
    integer(f"bfe_past_s{n}", f"bfe.s{n} {{d}}, {{a}}, {n - 3}, 40;", f"s{n}", f"s{n}", lambda a, n=n: a >> (n - 3))
    integer(f"bfe_empty_{n}", f"bfe.s{n} {{d}}, {{a}}, 7, 0;", f"s{n}", f"s{n}", lambda a: 0)
integer("add_sat", "add.sat.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: clamp(a + b, "s32"))
integer("sub_sat", "sub.sat.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: clamp(a - b, "s32"))
integer("carry_add", "add.cc.u32 {d}, {a}, {b}; addc.u32 {d}, 0, 0;", "u32 u32", "u32", lambda a, b: (a + b) >> 32)
integer(
    "carry_sub", "sub.cc.u32 {d}, {a}, {b}; subc.u32 {d}, {c}, 0;", "u32 u32 u32", "u32", lambda a, b, c: c - int(a < b)
)
integer(
    "carry_add_64",
    "add.cc.u64 {d}, {a}, {b}; addc.cc.u64 {d}, {a}, {b}; addc.u64 {d}, {d}, 0;",
    "u64 u64",
    "u64",
    lambda a, b: (s := a + b + ((a + b) >> 64)) + (s >> 64),
)
integer(
    "carry_mad",
    "mad.lo.cc.u32 {d}, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, 0;",
    "u32 u32 u32",
    "u32",
    lambda a, b, c: (a * b + c) >> 32,
)
integer(
    "mul24",
    "mul24.lo.s32 {d}, {a}, {b};",
    "s32 s32",
    "s32",
    lambda a, b: wrap(a << 8, "s32") // 256 * (wrap(b << 8, "s32") // 256),
)
integer(
    "shf_l_wrap",
    "shf.l.wrap.b32 {d}, {a}, {b}, {c};",
    "u32 u32 u32",
    "u32",
    lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
)
integer(
    "shf_r_clamp",
    "and.b32 {c}, {c}, 63; shf.r.clamp.b32 {d}, {a}, {b}, {c};",
    "u32 u32 u32",
    "u32",
    lambda a, b, c: (b << 32 | a) >> min(c & 63, 32),
)
integer("lop3", "lop3.b32 {d}, {a}, {b}, {c}, 0xCA;", "u32 u32 u32", "u32", lambda a, b, c: (a & b) | (~a & c))
integer("lop3_xor_or", "lop3.b32 {d}, {a}, {b}, {c}, 0xBE;", "u32 u32 u32", "u32", lambda a, b, c: (a ^ b) | c)
integer(
    "dp4a",
    "dp4a.s32.u32 {d}, {a}, {b}, {c};",
    "u32 u32 s32",
    "s32",
    lambda a, b, c: c + sum(wrap(a >> 8 * i, "s8") * (b >> 8 * i & 255) for i in range(4)),
)
integer(
    "dp2a",
    "dp2a.hi.u32.s32 {d}, {a}, {b}, {c};",
    "u32 u32 s32",
    "s32",
    lambda a, b, c: c + sum((a >> 16 * i & 65535) * wrap(b >> 8 * (i + 2), "s8") for i in range(2)),
)
integer("slct", "slct.s32.s32 {d}, {a}, {b}, {c};", "s32 s32 s32", "s32", lambda a, b, c: a if c >= 0 else b)
integer("set", "set.lt.and.u32.s32 {d}, {a}, {b}, %p0;", "s32 s32", "u32", lambda a, b: 0)
integer(
    "setp_pair",
    "setp.lt.or.s32 %p1|%p2, {a}, {b}, !%p0; selp.b32 {d}, 2, 0, %p1; @%p2 add.s32 {d}, {d}, 1;",
    "s32 s32",
    "u32",
    lambda a, b: 3,
)
integer(
    "guard",
    "mov.b32 {d}, 7; setp.hi.u32 %p1, {a}, {b}; @!%p1 mov.b32 {d}, 9;",
    "u32 u32",
    "u32",
    lambda a, b: 7 if a > b else 9,
)
integer("pack", "mov.b64 {d}, {{{a}, {b}}};", "u32 u32", "u64", lambda a, b: b << 32 | a)
integer("unpack", "mov.b64 {{_, {d}}}, {a};", "u64", "u32", lambda a: a >> 32)
integer("pack_16", "mov.b32 {d}, {{{a}, {b}}};", "u16 u16", "u32", lambda a, b: b << 16 | a)


def prmt(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        s = selector >> 4 * i & 15
        byte = source[s & 7]
        out.append((255 if byte >> 7 else 0) if s & 8 else byte)
    return int.from_bytes(bytes(out), "little")


integer("prmt", "prmt.b32 {d}, {a}, {b}, {c};", "u32 u32 u32", "u32", lambda a, b, c: prmt(a, b, c & 0xFFFF))
integer(
    "prmt_rc16",
    "prmt.b32.rc16 {d}, {a}, {b}, {c};",
    "u32 u32 u32",
    "u32",
    lambda a, b, c: prmt(a, b, 0x3232 if c & 1 else 0x1010),
)
integer(
    "prmt_b4e",
    "prmt.b32.b4e {d}, {a}, {b}, {c};",
    "u32 u32 u32",
    "u32",
    lambda a, b, c: int.from_bytes(
        bytes((b << 32 | a).to_bytes(8, "little")[(c % 4 - i) % 8] for i in range(4)), "little"
    ),
)

INTEGER_KINDS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
for source in INTEGER_KINDS:
    for target in INTEGER_KINDS:
        integer(f"cvt_{target}_{source}", f"cvt.{target}.{source} {{d}}, {{a}};", source, target, lambda a: a)
for source, target in (("s32", "s8"), ("s32", "u8"), ("u32", "s16"), ("s64", "u32"), ("u64", "s32"), ("s32", "u16")):
    integer(
        f"cvt_sat_{target}_{source}",
        f"cvt.sat.{target}.{source} {{d}}, {{a}};",
        source,
        target,
        lambda a, target=target: clamp(a, target),
    )

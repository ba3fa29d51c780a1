"""Loads, stores, moves and addresses in every state space, type and width, in check mode."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator

from tests.emulator.cases import Suite, wrap
from tests.emulator.float_cases import dotted
from tests.emulator.forms import form, pairwise

DECLARATIONS = (
    "".join(
        f".{space} .align 32 .b8 {name}[32] = {{{', '.join(map(str, range(32)))}}};\n"
        for space, name in (("const", "table"), ("global", "steady"))  # which no case writes
    )
    + """
.func (.param .align 16 .b8 result[32]) same(.param .align 16 .b8 given[32]) {
.reg .b64 %x<4>;
ld.param.v2.b64 {%x0, %x1}, [given]; ld.param.v2.b64 {%x2, %x3}, [given+16];
st.param.v2.b64 [result], {%x0, %x1}; st.param.v2.b64 [result+16], {%x2, %x3};
ret;
}
"""
)
SUITE = Suite("memory", slots=True, declarations=DECLARATIONS)
add = SUITE.add
M64 = 2**64 - 1
WORDS = 4  # 64-bit words of a slot
SCOPES = ("cta", "cluster", "gpu", "sys")
SHARED = ("shared", "shared::cta", "shared::cluster")
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "b128")


def some(opcode: str, variants: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Enough of the variants (their last word is a type) to meet every pair of words."""
    found = list(variants)
    random.Random(opcode).shuffle(found)
    named = {form(opcode, [w for part in v for w in part.split(".") if w]): v for v in found}
    return (named[f] for f in pairwise(named))


def bits(kind: str) -> int:
    return int(kind[1:])


def passed(store: str, load: str) -> str:
    """A call that gives y what x was."""
    variables = ".param .align 16 .b8 x[32]; .param .align 16 .b8 y[32];"
    return f"{{{{ {variables} {store} call.uni (y), same, (x); {load} }}}}"


def dotted_space(space: str) -> str:
    return f".{space}" if space else ""


def places(space: str) -> tuple[str, ...]:
    """Addresses that an instruction of this space may name."""
    if space in SHARED:
        return ("[%r62]",)
    return {"": ("[%rd20]", "[%rd21]"), "local": ("[%rd22]",), "param::func": ("[y]",)}.get(space, ("[%rd20]",))


# ---------------------------------------------------------------- loads and stores: of the operands, then of their complements
INPUTS = "u64 u64 u64 u64"


def element(values: tuple[int, ...], i: int) -> int:
    return values[i] if i < 4 else ~values[i - 4] & M64


def fold(values: Iterable[int]) -> int:
    out = 0
    for v in values:
        out = (out * 31 + v) & M64
    return out


def folding(registers: Iterable[str]) -> str:
    """{d}: 64 bits of all the registers, in which their order counts."""
    code = "mov.u64 {d}, 0;"
    for r in registers:
        move = {"%r": "cvt.u64.u32", "%f": "mov.b32"}.get(r.rstrip("0123456789"), "mov.b64")
        if move == "mov.b32":
            code += f" mov.b32 %r78, {r}; cvt.u64.u32 %rd39, %r78;"
        elif r.startswith("%q"):
            code += f" mov.b128 {{{{%rd38, %rd39}}}}, {r}; mad.lo.u64 {{d}}, {{d}}, 31, %rd38;"
        else:
            code += f" {move} %rd39, {r};"
        code += " mad.lo.u64 {d}, {d}, 31, %rd39;"
    return code


def registers(kind: str, count: int) -> list[str]:
    if kind == "b128":
        return ["%q1"]
    prefix, first = {"f32": ("%f", 10), "f64": ("%fd", 10)}.get(kind, ("%rd", 24) if bits(kind) == 64 else ("%r", 64))
    return [f"{prefix}{first + i}" for i in range(count)]


def widths(space: str, kind: str) -> Iterator[str]:
    most = 32 if space in ("", "global") else 16
    yield ""
    yield from (f"v{n}" for n in (2, 4, 8) if kind != "b128" and n * bits(kind) // 8 <= most)


def vector(names: list[str], width: str) -> str:
    return f"{{{{{', '.join(names)}}}}}" if width else names[0]


def accesses(spaces: Iterable[str], last: str) -> Iterator[tuple[str, ...]]:
    orders = ["", "weak", "volatile", *(f"{o}.{s}" for o, s in itertools.product(("relaxed", last), SCOPES))]
    for space in spaces:
        weak = space == "const" or space.startswith("param")
        mmio = ["mmio.relaxed.sys"] if space in ("", "global") else []
        allowed = orders[:2] if weak else orders[:3] if space == "local" else orders + mmio
        for order, kind in itertools.product(allowed, TYPES):
            for width in ("",) if order.startswith("mmio") else widths(space, kind):
                yield order, space, width, kind


HINTS = ("L1::evict_last", "L2::cache_hint", "L1::no_allocate", "L1::evict_first.L2::cache_hint", "")
OPERATORS = {"ld": ("ca", "cg", "cs", "lu", "cv", ""), "st": ("wb", "cg", "cs", "wt", "")}
FIXED = {"const": "table", "param": "block", "param::entry": "block"}


def hinted(opcode: str, order: str, space: str, n: int) -> tuple[str, str]:
    """Some words for the caches, which change nothing, and the operand that one of them brings."""
    if space not in ("", "global") or order == "volatile" or order.startswith("mmio"):
        return "", ""
    if order in ("", "weak") and n % 2:
        return OPERATORS[opcode][n % len(OPERATORS[opcode])], ""
    words = HINTS[n % len(HINTS)]
    return words, ", %rd20" if "cache_hint" in words else ""


def loaded(kind: str, raw: int) -> int:
    """A register of 32 bits or of its own width after a load."""
    n = bits(kind)
    return wrap(raw, kind) & 0xFFFFFFFF if kind[0] == "s" and n < 32 else raw & (2**n - 1)


def expected_load(kind: str, count: int, constant: bool) -> Callable[..., int]:
    def reference(*values: int) -> int:
        memory = bytes(range(32))
        if not constant:
            memory = b"".join(v.to_bytes(8, "little") for v in values)
        n = bits(kind) // 8
        raw = [int.from_bytes(memory[i * n : i * n + n], "little") for i in range(count)]
        if kind == "b128":
            return fold((raw[0] & M64, raw[0] >> 64))
        return fold(loaded(kind, r) for r in raw)

    return reference


def filled(place: str, space: str) -> str:
    base, st = place.strip("[]"), f"st{dotted_space(space)}.v2.b64"
    return f"{st} [{base}], {{{{{{a}}, {{b}}}}}}; {st} [{base}+16], {{{{{{c}}, {{e}}}}}};"


READABLE = ("", "global", "local", "const", "param", "param::entry", "param::func", *SHARED)
for n, (order, space, width, kind) in enumerate(some("ld", accesses(READABLE, "acquire"))):
    names = registers(kind, int(width[1:] if width else 1))
    hint, policy = hinted("ld", order, space, n)
    place = f"[{FIXED[space]}]" if space in FIXED else places(space)[n % len(places(space))]
    access = f"ld{dotted(order, space, hint, width)}.{kind} {vector(names, width)}, {place}{policy};"
    if space == "param::func":
        access = passed(filled("[x]", "param"), access)
    elif space not in FIXED:
        access = f"{filled(place, space)} {access}"
    add(f"{access} {folding(names)}", INPUTS, "u64", expected_load(kind, len(names), space in FIXED))
for space, kind in itertools.product(("", "global"), TYPES):
    for width in ("", "v2", "v4"):
        if width and (kind == "b128" or int(width[1]) * bits(kind) > 128):
            continue
        names = registers(kind, int(width[1:] if width else 1))
        access = f"mov.u64 %rd28, steady; ldu{dotted(space, width)}.{kind} {vector(names, width)}, [%rd28];"
        add(f"{access} {folding(names)}", INPUTS, "u64", expected_load(kind, len(names), True))
for kind in TYPES:
    for width in widths("global", kind):
        names = registers(kind, int(width[1:] if width else 1))
        access = f"ld.global.nc.L2::128B{dotted(width)}.{kind} {vector(names, width)}, [steady];"
        add(f"{access} {folding(names)}", INPUTS, "u64", expected_load(kind, len(names), True))


def expected_store(kind: str, count: int) -> Callable[..., int]:
    def reference(*values: int) -> int:
        if kind == "b128":
            return fold((*values[:2], 0, 0))
        n = bits(kind)
        memory = sum((element(values, i) & (2**n - 1)) << i * n for i in range(count))
        return fold(memory >> 64 * i & M64 for i in range(WORDS))

    return reference


def prepared(kind: str, names: list[str]) -> str:
    """The elements in registers."""
    if kind == "b128":
        return "mov.b128 %q1, {{ {a}, {b} }};"
    n, code = max(bits(kind), 32), ""
    for i, name in enumerate(names):
        word, spare = ("{a}", "{b}", "{c}", "{e}")[i % 4], "%rd39" if n == 64 else "%r78"
        code += f" {'mov' if n == 64 else 'cvt.u32'}.u64 {spare}, {word};"
        code += f" not.b{n} {spare}, {spare};" if i >= 4 else ""
        code += f" mov.b{n} {name}, {spare};"
    return code


def read_back(place: str, space: str) -> str:
    base, ld = place.strip("[]"), f"ld{dotted_space(space)}.v2.b64"
    return f"{ld} {{{{%rd24, %rd25}}}}, [{base}]; {ld} {{{{%rd26, %rd27}}}}, [{base}+16];"


WRITABLE = ("", "global", "local", "param", "param::func", *SHARED)
for n, (order, space, width, kind) in enumerate(some("st", accesses(WRITABLE, "release"))):
    names = registers(kind, int(width[1:] if width else 1))
    hint, policy = hinted("st", order, space, n)
    called = space.startswith("param")
    place = "[x]" if called else places(space)[n % len(places(space))]
    base, st = place.strip("[]"), f"st{dotted_space(space)}.v2.b64"
    clear = f"{st} [{base}], {{{{0, 0}}}}; {st} [{base}+16], {{{{0, 0}}}};"
    access = f"{clear} st{dotted(order, space, hint, width)}.{kind} {place}, {vector(names, width)}{policy};"
    access = passed(access, read_back("[y]", space)) if called else f"{access} {read_back(place, space)}"
    code = f"{prepared(kind, names)} {access} {folding(f'%rd{24 + i}' for i in range(WORDS))}"
    add(code, INPUTS, "u64", expected_store(kind, len(names)))

# ---------------------------------------------------------------- moves and addresses
add("mov.b32 {d}, {{ {a}, {b} }};", "u16 u16", "u32", lambda a, b: b << 16 | a)
add("mov.b64 {d}, {{ {a}, {b} }};", "u32 u32", "u64", lambda a, b: b << 32 | a)
add("mov.b64 {d}, {{ {a}, {b}, {b}, {c} }};", "u16 u16 u16", "u64", lambda a, b, c: c << 48 | b << 32 | b << 16 | a)
add("mov.b64 {{ _, {d} }}, {a};", "u64", "u32", lambda a: a >> 32)
add("mov.b32 {{ {d}, _ }}, {a};", "u32", "u16", lambda a: a)
add("mov.b64 {{ _, _, {d}, _ }}, {a};", "u64", "u16", lambda a: a >> 32)
add("mov.b128 %q1, {{ {a}, {b} }}; mov.b128 %q2, %q1; mov.b128 {{ _, {d} }}, %q2;", "u64 u64", "u64", lambda a, b: b)
add("mov.pred {d}, {a};", "pred", "pred", lambda a: a)
add("mov.f32 {d}, 0f3FC00000;", "f32", "f32", lambda a: 1.5)
SPACE_OF = {"global": "%rd20", "shared": "%rd21", "local": "%rd28", "const": "%rd24", "param": "%rd25"}
ADDRESSES = (
    "mov.u64 %rd24, table; cvta.const.u64 %rd24, %rd24; mov.b64 %rd25, block; cvta.param.u64 %rd25, %rd25;"
    "cvta.local.u64 %rd28, %rd22;"
)
for asked, (space, address) in itertools.product(
    ("global", "local", "const", "param", "param::entry", *SHARED), SPACE_OF.items()
):
    holds = asked.partition(":")[0] == space
    add(f"{ADDRESSES} isspacep.{asked} {{d}}, {address};", "u32", "pred", lambda a, h=holds: h)
for space, address in SPACE_OF.items():
    names = {"shared": SHARED, "param": ("param", "param::entry")}.get(space, (space,))
    for to, back in itertools.product(names, repeat=2):
        code = f"{ADDRESSES} cvta.to.{to}.u64 %rd26, {address}; cvta.{back}.u64 %rd27, %rd26; sub.u64 {{d}}, %rd27, {address};"
        add(code, "u32", "u64", lambda a: 0)

# ---------------------------------------------------------------- what only caches see: values stay as they are
PRIORITIES = ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged")
HINT_CODES = [
    *(f"prefetch{dotted(space)}.{level} [%rd20];" for space in ("", "global", "local") for level in ("L1", "L2")),
    "prefetch.global.L2::evict_last [%rd20];", "prefetch.global.L2::evict_normal [%rd20+8];", "prefetchu.L1 [%rd20];",
    "applypriority.L2::evict_normal [%rd20], 128;", "applypriority.global.L2::evict_normal [%rd20], 128;",
    "createpolicy.cvt.L2.b64 %rd24, %rd20;",
]  # fmt: skip
for first, second in itertools.product(PRIORITIES, ("", *PRIORITIES[2:])):
    HINT_CODES.append(f"createpolicy.fractional{dotted(first, second)}.b64 %rd24, 0.5;")
    HINT_CODES += [
        f"createpolicy.range{dotted(space, first, second)}.b64 %rd24, [%rd20], 0x1000, %r62;"
        for space in ("", "global")
    ]
for code in [
    *HINT_CODES,
    "createpolicy.fractional.L2::evict_first.b64 %rd24; ld.global.L2::cache_hint.u32 %r64, [%rd20], %rd24;",
]:
    add(f"st.global.u32 [%rd20], {{a}}; {code} ld.global.u32 {{d}}, [%rd20];", "u32", "u32", lambda a: a)

"""Integer and logic opcodes."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, WIDER, PtxType

_INTEGERS = "u16 s16 u32 s32 u64 s64"
_LOGIC = "b16 b32 b64 pred"
U32 = TYPES["u32"]


def _unsigned(kind: PtxType) -> str:
    return f"u{kind.bits}"


def add_sub(cx: Context, ins: Instruction, sign: str) -> str:
    """add, sub, with .cc (sets the carry) or .sat (s32)."""
    ins.count(3)
    kind = ins.modifiers.type(_INTEGERS)
    carry_out, sat = ins.modifiers.flag("cc"), ins.modifiers.flag("sat")
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:])
    if sat:
        if kind.name != "s32":
            raise ins.fail(".sat needs .s32")
        return cx.assign(ins, ins.operands[0], kind, f"clamp_s32((s64){a} {sign} (s64){b})")
    if carry_out:
        return _carry(cx, ins, kind, f"(u128)({_unsigned(kind)}){a} {sign} (u128)({_unsigned(kind)}){b}")
    return cx.assign(ins, ins.operands[0], kind, f"({_unsigned(kind)}){a} {sign} ({_unsigned(kind)}){b}")


def _carry(cx: Context, ins: Instruction, kind: PtxType, wide: str) -> str:
    # The carry of a subtraction is a borrow: bit `bits` of the wrapped difference serves both.
    return f"u128 t = {wide}; carry = (u32)(t >> {kind.bits}) & 1; " + cx.assign(
        ins, ins.operands[0], kind, f"({_unsigned(kind)})t"
    )


def add_sub_carry(cx: Context, ins: Instruction, sign: str) -> str:
    """addc, subc."""
    ins.count(3)
    kind = ins.modifiers.type("u32 s32 u64 s64")
    carry_out = ins.modifiers.flag("cc")
    a, b = (f"(u128)({_unsigned(kind)}){cx.value(ins, o, kind)}" for o in ins.operands[1:])
    wide = f"{a} {sign} {b} {sign} carry"
    return _carry(cx, ins, kind, wide) if carry_out else cx.assign(ins, ins.operands[0], kind, wide)


def multiply(cx: Context, ins: Instruction, with_add: bool) -> str:
    """mul and mad with .lo .hi .wide, .cc and .sat (mad.hi.s32)."""
    ins.count(4 if with_add else 3)
    kind = ins.modifiers.type(_INTEGERS)
    part = ins.modifiers.choice(("lo", "hi", "wide"))
    carry_out = with_add and ins.modifiers.flag("cc")
    sat = with_add and ins.modifiers.flag("sat")
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    if part == "wide":
        if kind.name not in WIDER:
            raise ins.fail(f".wide does not take .{kind.name}")
        wide = TYPES[WIDER[kind.name]]
        product = f"(({wide.c}){a} * ({wide.c}){b})"
        if with_add:
            product = f"({_unsigned(wide)}){product} + ({_unsigned(wide)}){cx.value(ins, ins.operands[3], wide)}"
        if carry_out or sat:
            raise ins.fail("mad.wide takes neither .cc nor .sat")
        return cx.assign(ins, ins.operands[0], wide, product)
    big = "s128" if kind.kind == "s" else "u128"
    product = (
        f"({_unsigned(kind)})((({big}){a} * ({big}){b}) >> {kind.bits})"
        if part == "hi"
        else f"({_unsigned(kind)})((u64){a} * (u64){b})"
    )
    if not with_add:
        return cx.assign(ins, ins.operands[0], kind, product)
    c = cx.value(ins, ins.operands[3], kind)
    if sat:
        if part != "hi" or kind.name != "s32":
            raise ins.fail("mad.sat needs .hi.s32")
        return cx.assign(ins, ins.operands[0], kind, f"clamp_s32((s64)(s32){product} + (s64){c})")
    if carry_out:
        return _carry(cx, ins, kind, f"(u128){product} + (u128)({_unsigned(kind)}){c}")
    return cx.assign(ins, ins.operands[0], kind, f"{product} + ({_unsigned(kind)}){c}")


def multiply_carry(cx: Context, ins: Instruction) -> str:
    """madc."""
    ins.count(4)
    kind = ins.modifiers.type("u32 s32 u64 s64")
    part = ins.modifiers.choice(("lo", "hi"))
    carry_out = ins.modifiers.flag("cc")
    a, b, c = (cx.value(ins, o, kind) for o in ins.operands[1:])
    big = "s128" if kind.kind == "s" else "u128"
    u = _unsigned(kind)
    product = f"({u})((({big}){a} * ({big}){b}) >> {kind.bits if part == 'hi' else 0})"
    wide = f"(u128){product} + (u128)({u}){c} + carry"
    return _carry(cx, ins, kind, wide) if carry_out else cx.assign(ins, ins.operands[0], kind, wide)


def multiply24(cx: Context, ins: Instruction, with_add: bool) -> str:
    ins.count(4 if with_add else 3)
    kind = ins.modifiers.type("u32 s32")
    part = ins.modifiers.choice(("lo", "hi"))
    a, b = (f"((s64)({kind.c})({cx.value(ins, o, U32)} << 8) >> 8)" for o in ins.operands[1:3])
    product = f"(u32)(({a} * {b}) >> {16 if part == 'hi' else 0})"
    c = f" + {cx.value(ins, ins.operands[3], U32)}" if with_add else ""
    return cx.assign(ins, ins.operands[0], kind, product + c)


def divide(cx: Context, ins: Instruction, function: str) -> str:
    ins.count(3)
    kind = ins.modifiers.type(_INTEGERS)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:])
    return cx.assign(ins, ins.operands[0], kind, f"{function}<{kind.c}>({a}, {b}, {ins.site()})")


def min_max(cx: Context, ins: Instruction, function: str) -> str:
    ins.count(3)
    kind = ins.modifiers.type(_INTEGERS)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:])
    value = f"{function}<{kind.c}>({a}, {b})"
    if ins.modifiers.flag("relu"):
        value = f"larger<{kind.c}>({value}, 0)"
    return cx.assign(ins, ins.operands[0], kind, value)


def absolute(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("s16 s32 s64")
    a = cx.value(ins, ins.operands[1], kind)
    u = _unsigned(kind)
    return cx.assign(ins, ins.operands[0], kind, f"{a} < 0 ? ({u})(({u})0 - ({u}){a}) : ({u}){a}")


def negate(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("s16 s32 s64")
    return cx.assign(ins, ins.operands[0], kind, f"0 - ({_unsigned(kind)}){cx.value(ins, ins.operands[1], kind)}")


def logic(cx: Context, ins: Instruction) -> str:
    """and or xor not."""
    kind = ins.modifiers.type(_LOGIC)
    pred = kind.kind == "pred"
    values = [cx.predicate(ins, o) if pred else cx.value(ins, o, kind) for o in ins.operands[1:]]
    if ins.opcode == "not":
        ins.count(2)
        return cx.assign(ins, ins.operands[0], kind, f"{'!' if pred else '~'}{values[0]}")
    ins.count(3)
    sign = {"and": "&", "or": "|", "xor": "^"}[ins.opcode]
    return cx.assign(ins, ins.operands[0], kind, f"({values[0]} {sign} {values[1]})")


def logical_not(cx: Context, ins: Instruction) -> str:
    """cnot: 1 where the operand is 0."""
    ins.count(2)
    kind = ins.modifiers.type("b16 b32 b64")
    return cx.assign(ins, ins.operands[0], kind, f"{cx.value(ins, ins.operands[1], kind)} == 0 ? 1 : 0")


def shift(cx: Context, ins: Instruction) -> str:
    ins.count(3)
    left = ins.opcode == "shl"
    kind = ins.modifiers.type("b16 b32 b64" if left else "b16 b32 b64 u16 u32 u64 s16 s32 s64")
    a, n = cx.value(ins, ins.operands[1], kind), cx.value(ins, ins.operands[2], U32)
    return cx.assign(ins, ins.operands[0], kind, f"shift_{'left' if left else 'right'}<{kind.c}>({a}, {n})")


def funnel(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type("b32")
    way = ins.modifiers.choice(("l", "r"))
    mode = ins.modifiers.choice(("wrap", "clamp"))
    a, b, n = (cx.value(ins, o, U32) for o in ins.operands[1:])
    amount = f"smaller<u32>({n}, 32u)" if mode == "clamp" else f"({n} & 31u)"
    return cx.assign(ins, ins.operands[0], kind, f"funnel_{'left' if way == 'l' else 'right'}({a}, {b}, {amount})")


def lop3(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type("b32")
    fold = ins.modifiers.optional(("and", "or"))
    ins.count(6 if fold else 5)
    a, b, c = (cx.value(ins, o, U32) for o in ins.operands[1:4])
    value = f"lop3({a}, {b}, {c}, {cx.integer(ins, ins.operands[4])}u)"
    if fold is None:
        return cx.assign(ins, ins.operands[0], kind, value)
    first, second = cx.pair(ins, ins.operands[0])
    sign = "&" if fold == "and" else "|"
    predicate = f"((t != 0) {sign} {cx.predicate(ins, ins.operands[5])})"
    if second is None:
        raise ins.fail("lop3 with .and or .or writes d|p")
    return (
        f"u32 t = {value}; bool p = {predicate}; "
        + cx.assign(ins, first, kind, "t")
        + cx.assign(ins, second, TYPES["pred"], "p")
    )


def permute(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = ins.modifiers.optional(modes)
    kind = ins.modifiers.type("b32")
    a, b, c = (cx.value(ins, o, U32) for o in ins.operands[1:])
    value = f"permute({a}, {b}, {c})" if mode is None else f"permute_mode({a}, {b}, {c}, {modes.index(mode)})"
    return cx.assign(ins, ins.operands[0], kind, value)


def extract(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type("u32 u64 s32 s64")
    a = cx.value(ins, ins.operands[1], kind)
    position, length = (cx.value(ins, o, U32) for o in ins.operands[2:])
    return cx.assign(ins, ins.operands[0], kind, f"extract_bits<{kind.c}>({a}, {position}, {length})")


def insert(cx: Context, ins: Instruction) -> str:
    ins.count(5)
    kind = ins.modifiers.type("b32 b64")
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    position, length = (cx.value(ins, o, U32) for o in ins.operands[3:])
    return cx.assign(ins, ins.operands[0], kind, f"insert_bits<{kind.c}>({a}, {b}, {position}, {length})")


def bit_count(cx: Context, ins: Instruction) -> str:
    """popc, clz: a 32-bit result."""
    ins.count(2)
    kind = ins.modifiers.type("b32 b64")
    a = cx.value(ins, ins.operands[1], kind)
    value = f"__builtin_popcountll({a})" if ins.opcode == "popc" else f"leading_zeros({a})"
    return cx.assign(ins, ins.operands[0], U32, value)


def reverse(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("b32 b64")
    return cx.assign(ins, ins.operands[0], kind, f"reverse_bits({cx.value(ins, ins.operands[1], kind)})")


def find_leading(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("u32 s32 u64 s64")
    shiftamt = "true" if ins.modifiers.flag("shiftamt") else "false"
    a = cx.value(ins, ins.operands[1], kind)
    return cx.assign(ins, ins.operands[0], U32, f"find_leading<{kind.c}>({a}, {shiftamt})")


def absolute_difference(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type(_INTEGERS)
    a, b, c = (cx.value(ins, o, kind) for o in ins.operands[1:])
    u = _unsigned(kind)
    difference = f"({a} < {b} ? ({u}){b} - ({u}){a} : ({u}){a} - ({u}){b})"
    return cx.assign(ins, ins.operands[0], kind, f"({u}){c} + ({u}){difference}")


def dot(cx: Context, ins: Instruction) -> str:
    """dp4a and dp2a."""
    ins.count(4)
    kind_b = ins.modifiers.type("u32 s32")
    kind_a = ins.modifiers.type("u32 s32")
    signs = ", ".join("true" if k.kind == "s" else "false" for k in (kind_a, kind_b))
    values = ", ".join(cx.value(ins, o, U32) for o in ins.operands[1:])
    if ins.opcode == "dp4a":
        return cx.assign(ins, ins.operands[0], U32, f"dot4<{signs}>({values})")
    high = int(ins.modifiers.choice(("lo", "hi")) == "hi")
    return cx.assign(ins, ins.operands[0], U32, f"dot2<{signs}>({values}, {high})")


HANDLERS: dict[str, Handler] = {
    "addc": lambda cx, ins: add_sub_carry(cx, ins, "+"),
    "subc": lambda cx, ins: add_sub_carry(cx, ins, "-"),
    "madc": multiply_carry,
    "mul24": lambda cx, ins: multiply24(cx, ins, False),
    "mad24": lambda cx, ins: multiply24(cx, ins, True),
    "rem": lambda cx, ins: divide(cx, ins, "remainder_of"),
    "and": logic,
    "or": logic,
    "xor": logic,
    "not": logic,
    "cnot": logical_not,
    "shl": shift,
    "shr": shift,
    "shf": funnel,
    "lop3": lop3,
    "prmt": permute,
    "bfe": extract,
    "bfi": insert,
    "popc": bit_count,
    "clz": bit_count,
    "brev": reverse,
    "bfind": find_leading,
    "sad": absolute_difference,
    "dp4a": dot,
    "dp2a": dot,
}

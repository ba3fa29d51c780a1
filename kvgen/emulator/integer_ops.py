"""Integer and logic opcodes. `arithmetic` and `min_max` are reached through float_ops, which shares their names."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, WIDER, PtxType

INTEGERS = "u16 s16 u32 s32 u64 s64"
_CARRIED = ("u32", "s32", "u64", "s64")
U32, S32 = TYPES["u32"], TYPES["s32"]


def unsigned(kind: PtxType) -> str:
    return f"u{kind.bits}"


# ---------------------------------------------------------------- addition and multiplication
def add_sub(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """add, sub, with .cc (sets the carry) or .sat (s32), or on a pair of 16-bit lanes."""
    ins.count(3)
    sign = "+" if ins.opcode == "add" else "-"
    if kind.kind == "q":
        pairs = [cx.value(ins, o, kind) for o in ins.operands[1:]]
        return cx.assign(ins, ins.operands[0], kind, kind.each_lane(pairs, lambda v: f"{v[0]} + {v[1]}"))
    if ins.modifiers.flag("sat"):
        if kind.name != "s32":
            raise ins.fail(".sat needs .s32")
        a, b = (cx.value(ins, o, kind) for o in ins.operands[1:])
        return cx.assign(ins, ins.operands[0], kind, f"clamp_s32((s64){a} {sign} (s64){b})")
    a, b = (cx.word(ins, o, kind) for o in ins.operands[1:])
    if ins.modifiers.flag("cc"):
        return "carry = 0; " + _carry(cx, ins, kind, sign, a, b)
    return cx.assign(ins, ins.operands[0], kind, f"{a} {sign} {b}")


def _carry(cx: Context, ins: Instruction, kind: PtxType, sign: str, a: str, b: str) -> str:
    """A sum or difference with the carry, which becomes that of the result; of a difference it is the borrow."""
    if kind.name not in _CARRIED:
        raise ins.fail(f".cc does not take .{kind.name}")
    function = "add" if sign == "+" else "subtract"
    return cx.assign(ins, ins.operands[0], kind, f"{function}_carry_{unsigned(kind)}({a}, {b}, &carry)")


def add_sub_carry(cx: Context, ins: Instruction) -> str:
    """addc, subc."""
    ins.count(3)
    sign = "+" if ins.opcode == "addc" else "-"
    kind = ins.modifiers.type(" ".join(_CARRIED))
    carry_out = ins.modifiers.flag("cc")
    a, b = (f"({unsigned(kind)}){cx.value(ins, o, kind)}" for o in ins.operands[1:])
    if carry_out:
        return _carry(cx, ins, kind, sign, a, b)
    return cx.assign(ins, ins.operands[0], kind, f"{a} {sign} {b} {sign} carry")


def _product(kind: PtxType, part: str, a: str, b: str) -> str:
    """The low or high half of a product, without sign."""
    if part == "lo":
        return f"({unsigned(kind)})({a} * {b})"
    if kind.bits == 64:
        return f"(u64)emu_multiply_high_{kind.c}({a}, {b})"
    big = f"{kind.kind}{2 * kind.bits}"
    shift = f" >> {kind.bits}" if part == "hi" else ""
    return f"({unsigned(kind)})((({big}){a} * ({big}){b}){shift})"


def _clamped_sum(cx: Context, ins: Instruction, product: str, c: str) -> str:
    return cx.assign(ins, ins.operands[0], S32, f"clamp_s32((s64)(s32){product} + (s64){c})")


def multiply(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """mul and mad with .lo .hi .wide, .cc and .sat (mad.hi.s32)."""
    with_add = ins.opcode == "mad"
    ins.count(4 if with_add else 3)
    part = ins.modifiers.choice(("lo", "hi", "wide"))
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    if part == "wide":
        if kind.name not in WIDER:
            raise ins.fail(f".wide does not take .{kind.name}")
        wide = TYPES[WIDER[kind.name]]
        product = f"(({wide.c}){a} * ({wide.c}){b})"
        if with_add:
            product = f"({unsigned(wide)}){product} + ({unsigned(wide)}){cx.value(ins, ins.operands[3], wide)}"
        return cx.assign(ins, ins.operands[0], wide, product)
    product = _product(kind, part, a, b)
    if not with_add:
        return cx.assign(ins, ins.operands[0], kind, product)
    c = cx.value(ins, ins.operands[3], kind)
    if ins.modifiers.flag("sat"):
        if part != "hi" or kind.name != "s32":
            raise ins.fail("mad.sat needs .hi.s32")
        return _clamped_sum(cx, ins, product, c)
    if ins.modifiers.flag("cc"):
        return "carry = 0; " + _carry(cx, ins, kind, "+", product, f"({unsigned(kind)}){c}")
    return cx.assign(ins, ins.operands[0], kind, f"{product} + ({unsigned(kind)}){c}")


def multiply_carry(cx: Context, ins: Instruction) -> str:
    """madc."""
    ins.count(4)
    kind = ins.modifiers.type(" ".join(_CARRIED))
    part = ins.modifiers.choice(("lo", "hi"))
    carry_out = ins.modifiers.flag("cc")
    a, b, c = (cx.value(ins, o, kind) for o in ins.operands[1:])
    product, c = _product(kind, part, a, b), f"({unsigned(kind)}){c}"
    if carry_out:
        return _carry(cx, ins, kind, "+", product, c)
    return cx.assign(ins, ins.operands[0], kind, f"{product} + {c} + carry")


def multiply24(cx: Context, ins: Instruction) -> str:
    """mul24, mad24: products of the low 24 bits; .hi takes bits 47 to 16."""
    with_add = ins.opcode == "mad24"
    ins.count(4 if with_add else 3)
    kind = ins.modifiers.type("u32 s32")
    part = ins.modifiers.choice(("lo", "hi"))
    a, b = (f"((s64)({kind.c})({cx.value(ins, o, U32)} << 8) >> 8)" for o in ins.operands[1:3])
    product = f"(u32)(({a} * {b}) >> {16 if part == 'hi' else 0})"
    if not with_add:
        return cx.assign(ins, ins.operands[0], kind, product)
    if ins.modifiers.flag("sat"):
        if part != "hi" or kind.name != "s32":
            raise ins.fail("mad24.sat needs .hi.s32")
        return _clamped_sum(cx, ins, product, cx.value(ins, ins.operands[3], S32))
    return cx.assign(ins, ins.operands[0], kind, f"{product} + {cx.value(ins, ins.operands[3], U32)}")


def divide(cx: Context, ins: Instruction, kind: PtxType) -> str:
    """div; by zero faults (`arithmetic`), where a GPU gives an unspecified value."""
    ins.count(3)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:])
    return cx.assign(ins, ins.operands[0], kind, f"emu_divide_{kind.c}({a}, {b}, {ins.site()})")


def remainder(cx: Context, ins: Instruction) -> str:
    ins.count(3)
    kind = ins.modifiers.type(INTEGERS)
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:])
    return cx.assign(ins, ins.operands[0], kind, f"emu_remainder_{kind.c}({a}, {b}, {ins.site()})")


def min_max(cx: Context, ins: Instruction, kind: PtxType) -> str:
    ins.count(3)
    relu = kind.name in ("s32", "s16x2") and ins.modifiers.flag("relu")
    function = "smaller" if ins.opcode == "min" else "larger"
    c = (kind.lane if kind.kind == "q" else kind).c

    def scalar(v: list[str] | tuple[str, ...]) -> str:
        value = f"{function}_{c}({v[0]}, {v[1]})"
        return f"larger_{c}({value}, 0)" if relu else value

    values = [cx.value(ins, o, kind) for o in ins.operands[1:]]
    value = kind.each_lane(values, lambda v: scalar([*v])) if kind.kind == "q" else scalar(values)
    return cx.assign(ins, ins.operands[0], kind, value)


def absolute(cx: Context, ins: Instruction, kind: PtxType) -> str:
    ins.count(2)
    a, u = cx.value(ins, ins.operands[1], kind), unsigned(kind)
    return cx.assign(ins, ins.operands[0], kind, f"{a} < 0 ? ({u})(({u})0 - ({u}){a}) : ({u}){a}")


def negate(cx: Context, ins: Instruction, kind: PtxType) -> str:
    ins.count(2)
    return cx.assign(ins, ins.operands[0], kind, f"0 - ({unsigned(kind)}){cx.value(ins, ins.operands[1], kind)}")


def absolute_difference(cx: Context, ins: Instruction) -> str:
    """sad."""
    ins.count(4)
    kind = ins.modifiers.type(INTEGERS)
    a, b, c = (cx.value(ins, o, kind) for o in ins.operands[1:])
    u = unsigned(kind)
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
        return cx.assign(ins, ins.operands[0], U32, f"emu_dot4({signs}, {values})")
    high = int(ins.modifiers.choice(("lo", "hi")) == "hi")
    return cx.assign(ins, ins.operands[0], U32, f"emu_dot2({signs}, {values}, {high})")


# ---------------------------------------------------------------- logic and shifts
def logic(cx: Context, ins: Instruction) -> str:
    """and or xor not."""
    ins.count(2 if ins.opcode == "not" else 3)
    kind = ins.modifiers.type("b16 b32 b64 pred")
    pred = kind.kind == "pred"
    values = [cx.predicate(ins, o) if pred else cx.value(ins, o, kind) for o in ins.operands[1:]]
    if ins.opcode == "not":
        return cx.assign(ins, ins.operands[0], kind, f"{'!' if pred else '~'}{values[0]}")
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
    kind = ins.modifiers.type("b16 b32 b64" if left else f"b16 b32 b64 {INTEGERS}")
    a, n = cx.value(ins, ins.operands[1], kind), cx.value(ins, ins.operands[2], U32)
    if n[:-1].isdecimal() and int(n[:-1]) < kind.bits:
        return cx.assign(ins, ins.operands[0], kind, f"{a} {'<<' if left else '>>'} {n}")
    return cx.assign(ins, ins.operands[0], kind, f"shift_{'left' if left else 'right'}_{kind.c}({a}, {n})")


def funnel(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type("b32")
    way = ins.modifiers.choice(("l", "r"))
    mode = ins.modifiers.choice(("wrap", "clamp"))
    a, b, n = (cx.value(ins, o, U32) for o in ins.operands[1:])
    amount = f"smaller_u32({n}, 32u)" if mode == "clamp" else f"({n} & 31u)"
    return cx.assign(ins, ins.operands[0], kind, f"funnel_{'left' if way == 'l' else 'right'}({a}, {b}, {amount})")


def lop3(cx: Context, ins: Instruction) -> str:
    kind = ins.modifiers.type("b32")
    fold = ins.modifiers.optional(("and", "or"))
    ins.count(6 if fold else 5)
    a, b, c = (cx.value(ins, o, U32) for o in ins.operands[1:4])
    value = _looked_up(a, b, c, cx.integer(ins, ins.operands[4]))
    if fold is None:
        return cx.assign(ins, ins.operands[0], kind, value)
    first, second = cx.pair(ins, ins.operands[0])
    if second is None:
        raise ins.fail("lop3 with .and or .or writes d|p")
    predicate = f"((t != 0) {'&' if fold == 'and' else '|'} {cx.predicate(ins, ins.operands[5])})"
    return (
        f"u32 t = {value}; bool p = {predicate}; "
        + cx.assign(ins, first, kind, "t")
        + cx.assign(ins, second, TYPES["pred"], "p")
    )


def _looked_up(a: str, b: str, c: str, table: int) -> str:
    """C of lop3: bit `4a + 2b + c` of the table, for each bit of the operands."""

    def of_two(half: int) -> str:
        """The function of b and c whose table is `half`."""
        low, high = half & 3, half >> 2  # where b is 0 and 1
        one = {0: "0u", 1: f"~{c}", 2: c, 3: "~0u"}
        if low == high:
            return one[low]
        return f"(({b} & {one[high]}) | (~{b} & {one[low]}))"

    low, high = of_two(table & 15), of_two(table >> 4 & 15)
    return low if low == high else f"(({a} & {high}) | (~{a} & {low}))"


# ---------------------------------------------------------------- bits and bytes
def _permuted(a: str, b: str, selector: str) -> str:
    """C of prmt: where the selector is a number, shifts of runs of bytes."""
    if not selector[:-1].isdecimal():
        return f"emu_permute({a}, {b}, {selector})"
    nibbles = [int(selector[:-1]) >> 4 * i & 15 for i in range(4)]
    if any(n & 8 for n in nibbles):  # the sign of a byte
        return f"emu_permute({a}, {b}, {selector})"
    pieces, at = [], 0
    while at < 4:
        count = 1
        while at + count < 4 and nibbles[at + count] == nibbles[at] + count and (nibbles[at] + count) % 4:
            count += 1
        word, byte = (a, b)[nibbles[at] // 4], nibbles[at] % 4
        mask = "" if byte + count == 4 else f" & {(1 << 8 * count) - 1}u"
        piece = f"({word} >> {8 * byte}{mask})" if byte or mask else word
        pieces.append(f"{piece} << {8 * at}" if at else piece)
        at += count
    return " | ".join(f"({p})" for p in pieces)


def permute(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type("b32")
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = ins.modifiers.optional(modes)
    a, b, c = (cx.value(ins, o, U32) for o in ins.operands[1:])
    value = _permuted(a, b, c) if mode is None else f"emu_permute_mode({a}, {b}, {c}, {modes.index(mode)})"
    return cx.assign(ins, ins.operands[0], kind, value)


def extract(cx: Context, ins: Instruction) -> str:
    """bfe."""
    ins.count(4)
    kind = ins.modifiers.type("u32 u64 s32 s64")
    a = cx.value(ins, ins.operands[1], kind)
    position, length = (cx.value(ins, o, U32) for o in ins.operands[2:])
    return cx.assign(ins, ins.operands[0], kind, f"emu_extract_{kind.c}({a}, {position}, {length})")


def insert(cx: Context, ins: Instruction) -> str:
    """bfi."""
    ins.count(5)
    kind = ins.modifiers.type("b32 b64")
    a, b = (cx.value(ins, o, kind) for o in ins.operands[1:3])
    position, length = (cx.value(ins, o, U32) for o in ins.operands[3:])
    return cx.assign(ins, ins.operands[0], kind, f"emu_insert_{kind.c}({a}, {b}, {position}, {length})")


def bit_count(cx: Context, ins: Instruction) -> str:
    """popc, clz: a 32-bit result."""
    ins.count(2)
    kind = ins.modifiers.type("b32 b64")
    a = cx.value(ins, ins.operands[1], kind)
    value = f"emu_popcount({a})" if ins.opcode == "popc" else f"emu_leading_zeros_{kind.c}({a})"
    return cx.assign(ins, ins.operands[0], U32, value)


def reverse(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("b32 b64")
    return cx.assign(ins, ins.operands[0], kind, f"emu_reverse_{kind.c}({cx.value(ins, ins.operands[1], kind)})")


def find_leading(cx: Context, ins: Instruction) -> str:
    ins.count(2)
    kind = ins.modifiers.type("u32 s32 u64 s64")
    shiftamt = "true" if ins.modifiers.flag("shiftamt") else "false"
    a = cx.value(ins, ins.operands[1], kind)
    return cx.assign(ins, ins.operands[0], U32, f"emu_find_leading_{kind.c}({a}, {shiftamt})")


def find_nth_set(cx: Context, ins: Instruction) -> str:
    ins.count(4)
    kind = ins.modifiers.type("b32")
    mask, base = (cx.value(ins, o, U32) for o in ins.operands[1:3])
    offset = cx.value(ins, ins.operands[3], S32)
    return cx.assign(ins, ins.operands[0], kind, f"emu_find_nth_set({mask}, {base}, {offset})")


def extend(cx: Context, ins: Instruction) -> str:
    """szext: the low b bits of a, extended by zeros or by their sign."""
    ins.count(3)
    kind = ins.modifiers.type("u32 s32")
    wrap = ins.modifiers.choice(("wrap", "clamp")) == "wrap"
    a, n = cx.value(ins, ins.operands[1], kind), cx.value(ins, ins.operands[2], U32)
    length = f"({n} & 31u)" if wrap else f"smaller_u32({n}, 32u)"
    return cx.assign(ins, ins.operands[0], kind, f"emu_extract_{kind.c}({a}, 0, {length})")


def mask(cx: Context, ins: Instruction) -> str:
    """bmsk: b ones from bit a up."""
    ins.count(3)
    kind = ins.modifiers.type("b32")
    wrap = ins.modifiers.choice(("wrap", "clamp")) == "wrap"
    a, b = (cx.value(ins, o, U32) for o in ins.operands[1:])
    first, length = (f"({n} & 31u)" if wrap else f"smaller_u32({n}, 32u)" for n in (a, b))
    ones = f"(shift_left_u32(1u, {length}) - 1u)"
    return cx.assign(ins, ins.operands[0], kind, f"shift_left_u32({ones}, {first})")


HANDLERS: dict[str, Handler] = {
    "addc": add_sub_carry,
    "subc": add_sub_carry,
    "madc": multiply_carry,
    "mul24": multiply24,
    "mad24": multiply24,
    "rem": remainder,
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
    "fns": find_nth_set,
    "szext": extend,
    "bmsk": mask,
    "sad": absolute_difference,
    "dp4a": dot,
    "dp2a": dot,
}

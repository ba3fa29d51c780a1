"""Matrix fragments in the registers of a warp: ldmatrix, stmatrix, movmatrix and mma.sync.

The multiply-add of mma is exact but for one rounding of the sum to nearest even; a tensor core aligns its addends and
cuts them off, so that floating-point results agree with a GPU's only to about 2**-22 of the largest addend (2**-12 for
fp8 on Hopper). Integer and f64 results are the same bits. Sparse, .kind:: and block-scaled forms and wmma are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES

B32, B64, F64 = TYPES["b32"], TYPES["b64"], TYPES["f64"]

# Element type -> the shapes mma.sync has for it.
_SHAPES = {
    "f16": ("m16n8k8", "m16n8k16"),
    "bf16": ("m16n8k8", "m16n8k16"),
    "tf32": ("m16n8k4", "m16n8k8"),
    "e4m3": ("m16n8k16", "m16n8k32"),
    "e5m2": ("m16n8k16", "m16n8k32"),
    "f64": ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
    "s8": ("m8n8k16", "m16n8k16", "m16n8k32"),
    "u8": ("m8n8k16", "m16n8k16", "m16n8k32"),
    "s4": ("m8n8k32", "m16n8k32", "m16n8k64"),
    "u4": ("m8n8k32", "m16n8k32", "m16n8k64"),
    "b1": ("m8n8k128", "m16n8k128", "m16n8k256"),
}
_MIXED = ({"e4m3", "e5m2"}, {"s8", "u8"}, {"s4", "u4"})
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}


def accumulators(kind: str) -> tuple[str, ...]:
    """The types that sums of products of `kind` may have."""
    if kind in ("f16", "e4m3", "e5m2"):
        return ("f32", "f16")
    return ("f32",) if kind in ("bf16", "tf32") else ("f64",) if kind == "f64" else ("s32",)


def check_operand_types(ins: Instruction, a: str, b: str, known: Sequence[str]) -> None:
    if a not in known:
        raise ins.fail(f".{a} is not one of .{' .'.join(known)}")
    if a != b and not any({a, b} <= pair for pair in _MIXED):
        raise ins.fail(f".{a} and .{b} cannot be multiplied")


def take(ins: Instruction, count: int) -> list[str]:
    """The last `count` modifiers."""
    words = ins.modifiers.words
    if len(words) < count:
        raise ins.fail("types are missing")
    taken = words[-count:]
    del words[-count:]
    return taken


def form(
    m: int, n: int, k: int, a: str, b: str, d: str, *, saturate: bool = False, more: str = "1, false, false"
) -> str:
    """The MatrixForm of an instruction, as a declaration."""
    kinds = ", ".join(f"ELEMENT_{kind.upper()}" for kind in (a, b, d))
    return f"static const MatrixForm form = {{{m}, {n}, {k}, {kinds}, {str(saturate).lower()}, {more}}}; "


def words(cx: Context, ins: Instruction, names: Sequence[str]) -> str:
    """The 32-bit registers `names`, as a C initialiser; a number with a point in it is an f32."""
    bits = (
        f"bits_f32({cx.value(ins, name, TYPES['f32'])})" if "." in name else cx.value(ins, name, B32) for name in names
    )
    return "{" + ", ".join(bits) + "}"


def _aligned(ins: Instruction) -> None:
    ins.modifiers.choice(("sync",))
    ins.modifiers.choice(("aligned",))


# ---------------------------------------------------------------- 8 x 8 matrices
def _matrices(ins: Instruction) -> tuple[int, int]:
    """How many, and whether transposed."""
    _aligned(ins)
    ins.modifiers.choice(("m8n8",))  # the shapes of 8-bit elements are refused
    ins.modifiers.type("b16")
    count = {"x1": 1, "x2": 2, "x4": 4}[ins.modifiers.choice(("x1", "x2", "x4"))]
    transposed = int(ins.modifiers.flag("trans"))
    if ins.modifiers.optional(("shared", "shared::cta")) is None:
        raise ins.fail(f"{ins.opcode} needs .shared")
    ins.count(2)
    return count, transposed


def load_matrix(cx: Context, ins: Instruction) -> str:
    count, transposed = _matrices(ins)
    names = cx.vector(ins.operands[0])
    if len(names) != count:
        raise ins.fail(f"{len(names)} registers for .x{count}")
    address = cx.address(ins, ins.operands[1], narrow=True)
    code = f"u32 t[4]; emu_ldmatrix(self, t, {count}, {transposed}, {address}, {ins.site()}); "
    return code + " ".join(cx.assign(ins, n, B32, f"t[{i}]") for i, n in enumerate(names))


def store_matrix(cx: Context, ins: Instruction) -> str:
    count, transposed = _matrices(ins)
    names = cx.vector(ins.operands[1])
    if len(names) != count:
        raise ins.fail(f"{len(names)} registers for .x{count}")
    address = cx.address(ins, ins.operands[0], narrow=True)
    return f"const u32 t[] = {words(cx, ins, names)}; emu_stmatrix(t, {count}, {transposed}, {address}, {ins.site()});"


def move_matrix(cx: Context, ins: Instruction) -> str:
    _aligned(ins)
    ins.modifiers.choice(("m8n8",))
    ins.modifiers.choice(("trans",))
    ins.modifiers.type("b16")
    ins.count(2)
    return cx.assign(ins, ins.operands[0], B32, f"emu_movmatrix({cx.value(ins, ins.operands[1], B32)}, {ins.site()})")


# ---------------------------------------------------------------- mma
def multiply_matrix(cx: Context, ins: Instruction) -> str:
    """mma.sync, dense."""
    m = ins.modifiers
    _aligned(ins)
    for word in m.words:
        if word.startswith(("sp", "kind::", "block_scale", "scale_vec")):
            raise ins.fail(f"mma with .{word} is not supported")
    logic = m.optional(("xor", "and"))
    if logic:
        m.choice(("popc",))
    d, a, b, c = take(ins, 4)
    check_operand_types(ins, a, b, tuple(_SHAPES))
    shape = m.choice(_SHAPES[a])
    m.choice(("row",))
    m.choice(("col",))
    saturate = a in ("s8", "u8", "s4", "u4") and m.flag("satfinite")
    if d not in accumulators(a) or c != d:
        raise ins.fail(f"accumulators of .{a} are .{' or .'.join(accumulators(a))}, the same on both sides")
    if (logic is None) == (a == "b1"):
        raise ins.fail("b1 operands, and only they, take .xor.popc or .and.popc")
    rows, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 :])
    ins.count(4)
    operands = [cx.vector(o) for o in ins.operands]
    along = k // 4 if a == "f64" else k * BITS[a] // 128
    sums = rows // 8 if d == "f16" else rows // 4
    if [len(o) for o in operands] != [sums, along * rows // 8, along, sums]:
        raise ins.fail(f"{shape}.{a} takes {sums}, {along * rows // 8}, {along} and {sums} registers")
    code = form(rows, 8, k, a, b, d, saturate=saturate)
    if a == "f64":
        values = ["{" + ", ".join(cx.value(ins, x, F64) for x in o) + "}" for o in operands[1:]]
        call, kind, ctype = "emu_mma_f64(d, a, b, &form", F64, "double"
    else:
        values = [words(cx, ins, o) for o in operands[1:]]
        call, kind, ctype = "emu_mma(d, a, b, &form", B32, "u32"
        if logic:
            call = f"emu_mma_b1(d, a, b, &form, {int(logic == 'xor')}"
    code += f"const {ctype} a[] = {values[0]}, b[] = {values[1]}; {ctype} d[] = {values[2]}; {call}, {ins.site()}); "
    return code + " ".join(cx.assign(ins, x, kind, f"d[{i}]") for i, x in enumerate(operands[0]))


def legacy(cx: Context, ins: Instruction) -> str:
    raise ins.fail("wmma is not supported: use ldmatrix and mma.sync")


HANDLERS: dict[str, Handler] = {
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
    "movmatrix": move_matrix,
    "mma": multiply_matrix,
    "wmma": legacy,
}

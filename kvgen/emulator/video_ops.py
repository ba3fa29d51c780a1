"""SIMD video instructions: pairs of halves and quads of bytes in 32 bits. The scalar ones (vadd, vmad...) are refused."""

from __future__ import annotations

import functools
import re

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.ptxtypes import TYPES, PtxType

U32 = TYPES["u32"]
_OPERATIONS = ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset")
_TESTS = ("eq", "ne", "lt", "le", "gt", "ge")


def _selected(ins: Instruction, operand: str, lanes: int, pieces: int) -> tuple[str, list[int] | None]:
    """An operand without its selector, and the pieces that the selector names, lowest lane first."""
    name, _, selector = operand.partition(".")
    if not selector:
        return name, None
    unit = "b" if lanes == 4 else "h"
    if not re.fullmatch(rf"{unit}[0-{pieces - 1}]{{1,{lanes}}}", selector):
        raise ins.fail(f"cannot read the selector .{selector}")
    return name, [int(digit) for digit in reversed(selector[1:])]


def _simd(cx: Context, ins: Instruction, name: str, lanes: int) -> str:
    ins.count(4)
    b_kind, a_kind = (ins.modifiers.type("u32 s32") for _ in range(2))
    if name == "vset":
        result, operation = U32, len(_OPERATIONS) - 1 + _TESTS.index(ins.modifiers.choice(_TESTS))
    else:
        result, operation = ins.modifiers.type("u32 s32"), _OPERATIONS.index(name)
    adds = ins.modifiers.flag("add")
    saturates = not adds and name != "vset" and ins.modifiers.flag("sat")
    target, mask = _selected(ins, ins.operands[0], lanes, lanes)
    a, a_pieces = _selected(ins, ins.operands[1], lanes, 2 * lanes)
    b, b_pieces = _selected(ins, ins.operands[2], lanes, 2 * lanes)
    pieces = [*(a_pieces or range(lanes)), *(b_pieces or range(lanes, 2 * lanes))]
    if len(pieces) != 2 * lanes:
        raise ins.fail(f"a selector names {lanes} pieces")
    selectors = sum(piece << 4 * i for i, piece in enumerate(pieces))
    written = sum(1 << lane for lane in set(range(lanes) if mask is None else mask))
    flags = [_signed(k) for k in (result, a_kind, b_kind)] + [int(saturates), int(adds)]
    values = ", ".join(cx.value(ins, o, U32) for o in (a, b, ins.operands[3]))
    packed = sum(flag << i for i, flag in enumerate(flags))
    value = f"emu_simd_video({lanes}, {operation}, {packed}, {selectors}u, {written}, {values})"
    return cx.assign(ins, target, U32, value)


def _signed(kind: PtxType) -> int:
    return int(kind.kind == "s")


HANDLERS: dict[str, Handler] = {
    f"{name}{lanes}": functools.partial(_simd, name=name, lanes=lanes) for name in _OPERATIONS for lanes in (2, 4)
}

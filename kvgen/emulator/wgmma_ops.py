"""What a warpgroup does: wgmma, and setmaxnreg.

Sums are rounded as those of mma.sync are, see tensor_ops.py; all products of one instruction and its accumulator are one
sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.parser import Entry, Statement
from kvgen.emulator.ptxtypes import TYPES
from kvgen.emulator.tensor_ops import B32, BITS, accumulators, check_operand_types, form, take, words

U64 = TYPES["u64"]
_KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")
_INTEGER_N = (8, 16, 24, *range(32, 257, 16))
_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")
_COPY = re.compile(r"(?:@!?\s*[%\w$]+\s+)?(?:mov|selp)\.[bfsu]32 ([%\w$]+), ([^{}]+)$")
_SET_REGISTERS = re.compile(r"(?:@!?\s*[%\w$]+\s+)?setmaxnreg\.\S+ (\d+)")
_REGISTERS = 65536  # of a multiprocessor
_FEWEST = 24  # that setmaxnreg leaves a thread
_SUMS = re.compile(r"(?:@!?\s*[%\w$]+\s+)?wgmma\.mma_async\.\S+ \{([^{}]*)\}")


def late_registers(statements: Iterable[Statement]) -> frozenset[str]:
    """Names of 32-bit registers that may hold an accumulator before its wgmma is waited for: through moves, too."""
    copies: dict[str, list[str]] = {}
    found: list[str] = []
    for s in statements:
        if s.kind != "instruction":
            continue
        if m := _COPY.match(s.text):
            for source in m.group(2).split(","):
                copies.setdefault(source.strip(), []).append(m.group(1))
        elif m := _SUMS.match(s.text):
            found += [name.strip() for name in m.group(1).split(",")]
    late: set[str] = set()
    while found:
        name = found.pop()
        if name not in late:
            late.add(name)
            found += copies.get(name, ())
    return frozenset(late)


def starting_registers(entry: Entry) -> int | None:
    """What ptxas gives each thread of a kernel with setmaxnreg; None: there is none, or ptxas cannot know and drops it.

    As many as .minnctapersm blocks of .maxntid threads leave room for, but no more than a setmaxnreg asks for.
    """
    counts = [int(m.group(1)) for s in entry.statements if (m := _SET_REGISTERS.match(s.text))]
    if not counts:
        return None
    if entry.max_registers is not None:
        return entry.max_registers
    if entry.max_threads is None or entry.min_blocks is None:
        return None
    threads = -(-entry.max_threads // 32) * 32 * max(entry.min_blocks, 1)
    return min(_REGISTERS // threads // 8 * 8, max(counts))


def multiply(cx: Context, ins: Instruction) -> str:
    """wgmma.fence, commit_group, wait_group and mma_async; sparse ones are refused."""
    m = ins.modifiers
    action = m.choice(("fence", "commit_group", "wait_group", "mma_async"))
    if "sp" in m.words:
        raise ins.fail("sparse wgmma is not supported")
    m.choice(("sync",))
    m.choice(("aligned",))
    if not cx.is_entry:
        raise ins.fail("wgmma in a function that is called is not supported: it must be inlined into the kernel")
    if action == "mma_async":
        return _multiply(cx, ins)
    if action == "wait_group":
        ins.count(1)
        keep = cx.integer(ins, ins.operands[0])
        if not 0 <= keep <= 7:
            raise ins.fail(f"wait_group {keep}: it is 0 to 7")
        return f"emu_wgmma_wait({keep}, {'late, LATE' if cx.late_count else 'nullptr, 0'}, {ins.site()});"
    ins.count(0)
    return f"emu_wgmma_{'fence' if action == 'fence' else 'commit'}({ins.site()});"


def _multiply(cx: Context, ins: Instruction) -> str:
    d, a, b = take(ins, 3)
    saturate = ins.modifiers.flag("satfinite")
    check_operand_types(ins, a, b, _KINDS)
    integer = BITS[a] == 8 and a[0] in "su"
    if d not in accumulators(a):
        raise ins.fail(f"accumulators of .{a} are .{' or .'.join(accumulators(a))}")
    if saturate and not integer:
        raise ins.fail(".satfinite is for integers")
    n, k = _shape(ins)
    if k != 256 // BITS[a]:
        raise ins.fail(f"k of .{a} is {256 // BITS[a]}")
    if n not in (_INTEGER_N if integer else range(8, 257, 8)):
        raise ins.fail(f"n cannot be {n}")
    sums, first = (cx.vector(o) for o in ins.operands[:2])
    in_registers = ins.operands[1].startswith("{")
    count = n // 4 if d == "f16" else n // 2
    if len(sums) != count or (in_registers and len(first) != 4):
        raise ins.fail(f"takes {count} accumulators, and 4 registers or a descriptor of A")
    constants = [] if integer else [*((1, -1),) * 2]
    if BITS[a] == 16:
        constants += [*((0, 1),) * (1 if in_registers else 2)]
    ins.count(4 + len(constants))
    given = [cx.integer(ins, o) for o in ins.operands[4:]]
    if any(value not in allowed for value, allowed in zip(given, constants, strict=True)):
        raise ins.fail("imm-scale is 1 or -1, imm-trans is 0 or 1")
    sign = given[0] * given[1] if given else 1
    trans = [bool(t) for t in given[2:]]
    majors = [False, False] if not trans else [False, *trans] if in_registers else trans
    more = ", ".join([str(sign), *(str(t).lower() for t in majors)])
    registers = [cx.register(ins, name) for name in sums]
    code = form(64, n, k, a, b, d, saturate=saturate, more=more)
    code += f"u32 d[] = {{{', '.join(r.c for r in registers)}}}; "
    code += f"const u32 a[] = {words(cx, ins, first)}; " if in_registers else ""
    descriptors = ["a, 0" if in_registers else f"nullptr, {cx.value(ins, ins.operands[1], U64)}"]
    descriptors.append(cx.value(ins, ins.operands[2], U64))
    code += (
        f"emu_wgmma(d, {count}, {', '.join(descriptors)}, {cx.predicate(ins, ins.operands[3])}, &form, {ins.site()}); "
    )
    return code + " ".join(cx.assign(ins, name, B32, f"d[{i}]") for i, name in enumerate(sums))


def _shape(ins: Instruction) -> tuple[int, int]:
    for word in ins.modifiers.words:
        if m := _SHAPE.match(word):
            ins.modifiers.words.remove(word)
            return int(m.group(1)), int(m.group(2))
    raise ins.fail("needs a shape .m64nNkK")


def set_registers(cx: Context, ins: Instruction) -> str:
    takes = ins.modifiers.choice(("inc", "dec")) == "inc"
    ins.modifiers.choice(("sync",))
    ins.modifiers.choice(("aligned",))
    ins.modifiers.type("u32")
    ins.count(1)
    count = cx.integer(ins, ins.operands[0])
    if count % 8 or not _FEWEST <= count <= 256:
        raise ins.fail(f"{count} registers: it is a multiple of 8 from 24 to 256")
    return f"emu_setmaxnreg({count}, {int(takes)}, {ins.site()});"


HANDLERS: dict[str, Handler] = {
    "wgmma": multiply,
    "setmaxnreg": set_registers,
}

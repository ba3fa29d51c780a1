"""Calls of device functions, direct and through pointers, and how a function or thread ends.

A function is C of one shape, f(thread, parameters, results): the caller lays the parameters out as bytes. A function
pointer is the address of the function's row in its module's table, so that a call through a stray one is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.declarations import Variable, place
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type
from kvgen.emulator.symbols import Callee, Signature

# What CUDA's own library provides: bytes of the parameters and of the results.
_RUNTIME = {"vprintf": ("emu_vprintf", (8, 8), (4,)), "__assertfail": ("emu_assert_failed", (8, 8, 4, 8, 8), ())}


def call(cx: Context, ins: Instruction) -> str:
    ins.modifiers.flag("uni")
    operands = list(ins.operands)
    results = _bracketed(operands.pop(0)) if operands and operands[0].startswith("(") else []
    if not operands:
        raise ins.fail("a call without a function")
    target = operands.pop(0)
    arguments = _bracketed(operands.pop(0)) if operands and operands[0].startswith("(") else []
    callee = cx.symbols.functions.get(target)
    if callee is not None:
        if operands:
            raise ins.fail(f"{operands[0]!r} after a call by name")
        signature, before, code = callee.signature, _depth_check(cx, ins, callee.recurses), _direct(ins, callee)
    else:
        if len(operands) != 1:
            raise ins.fail(f"{target!r} is no function of this module; a call through a register names a prototype")
        signature = _prototype(cx, ins, operands[0])
        before, code = _indirect(cx, ins, target, operands[0], signature)
    return before + _pass(cx, ins, signature, arguments) + code + _receive(cx, ins, signature, results)


def _bracketed(text: str) -> list[str]:
    inner = text[1:-1].strip()
    return [item.strip() for item in inner.split(",")] if inner else []


def _depth_check(cx: Context, ins: Instruction, recurses: bool) -> str:
    return f"emu_check_stack({cx.symbols.most_frame}, {ins.site()}); " if recurses else ""


def _direct(ins: Instruction, callee: Callee) -> str:
    if callee.c:
        return f"{callee.c}(self, a, r); "
    known = _RUNTIME.get(callee.name)
    shape = tuple(tuple(v.nbytes for v in of) for of in (callee.signature.params, callee.signature.results))
    if known is None or shape != known[1:]:
        raise ins.fail(f"{callee.name!r} has no body in this module")
    return f"{known[0]}(a, r, {ins.site()}); "


def _prototype(cx: Context, ins: Instruction, label: str) -> Signature:
    if label in cx.prototypes:
        return cx.prototypes[label]
    if label not in cx.call_targets:
        raise ins.fail(f"no .callprototype or .calltargets named {label!r}")
    targets = [cx.symbols.functions.get(name) for name in cx.call_targets[label]]
    if not targets or targets[0] is None or any(t is None or not t.c for t in targets):
        raise ins.fail(f"a function of {label!r} is not defined in this module")
    return targets[0].signature


def _indirect(cx: Context, ins: Instruction, target: str, label: str, signature: Signature) -> tuple[str, str]:
    """What comes before the parameters are laid out, and the call."""
    address = cx.value(ins, target, TYPES["u64"])
    sizes = f"{place(signature.params)[1]}, {place(signature.results)[1]}"
    names = cx.call_targets.get(label)
    known = [cx.symbols.functions[name].address for name in names] if names else []
    before = _depth_check(cx, ins, cx.symbols.indirect_recurses)
    before += f"const FunctionInfo* f = emu_function({address}, {cx.symbols.function_table}, {sizes}, {ins.site()}); "
    if known:
        before += f"if ({' && '.join(f'(u64)f != {a}' for a in known)}) emu_bad_call((u64)f, {ins.site()}); "
    return before, "f->code(self, a, r); "


def _pass(cx: Context, ins: Instruction, signature: Signature, arguments: Sequence[str]) -> str:
    """Parameters as the bytes `a`, room for results as `r`."""
    formals = signature.params
    if len(arguments) != len(formals):
        raise ins.fail(f"{len(arguments)} arguments where the function takes {len(formals)}")
    offsets, nbytes = place(formals)
    code = f"u8 a[{max(nbytes, 1)}] EMU_ALIGNED, r[{max(place(signature.results)[1], 1)}] EMU_ALIGNED; "
    for formal, offset, argument in zip(formals, offsets, arguments, strict=True):
        given = cx.find_param(argument)
        if given is not None:
            if given.nbytes != formal.nbytes or not given.readable:
                raise ins.fail(f"{argument!r} has {given.nbytes} bytes, the parameter {formal.nbytes}")
            code += f"__builtin_memcpy(a + {offset}, {given.c}, {formal.nbytes}); "
        else:
            kind = _register_type(ins, formal, argument)
            code += f"*({kind.storage}_at*)(a + {offset}) = {cx.value(ins, argument, bit_type(kind.bits))}; "
    return code


def _receive(cx: Context, ins: Instruction, signature: Signature, results: Sequence[str]) -> str:
    if len(results) != len(signature.results):
        raise ins.fail(f"{len(results)} results where the function gives {len(signature.results)}")
    code = ""
    for formal, offset, result in zip(signature.results, place(signature.results)[0], results, strict=True):
        taken = cx.find_param(result)
        if taken is not None:
            if taken.nbytes != formal.nbytes or not taken.writable:
                raise ins.fail(f"{result!r} has {taken.nbytes} bytes, the result {formal.nbytes}")
            code += f"__builtin_memcpy({taken.c}, r + {offset}, {formal.nbytes}); "
        elif result != "_":
            kind = _register_type(ins, formal, result)
            code += cx.assign(ins, result, bit_type(kind.bits), f"*(const {kind.storage}_at*)(r + {offset})") + " "
    return code


def _register_type(ins: Instruction, formal: Variable, operand: str) -> PtxType:
    if formal.nbytes * 8 != formal.type.bits:
        raise ins.fail(f"{operand!r} is no .param variable, as the {formal.nbytes} bytes of this parameter need")
    return formal.type


def leave(cx: Context, ins: Instruction) -> str:
    """ret: from a function to its caller, from an entry for good."""
    ins.modifiers.flag("uni")
    ins.count(0)
    return f"{cx.epilogue()}goto leave;"


def end_thread(cx: Context, ins: Instruction) -> str:
    ins.count(0)
    return "goto leave;" if cx.is_entry else "emu_exit();"


def allocate(cx: Context, ins: Instruction) -> str:
    """alloca: local memory until the function returns."""
    kind = ins.modifiers.type("u64")
    ins.count(2, 3)
    cx.allocates = True
    size = cx.value(ins, ins.operands[1], kind)
    align = cx.integer(ins, ins.operands[2]) if len(ins.operands) == 3 else 8
    if align < 1 or align & (align - 1) or align > 4096:
        raise ins.fail(f"alignment {align} is no power of two up to 4096")
    code = f"u64 n = {size}; emu_check_stack(n, {ins.site()}); "
    code += f"LocalArray* l = (LocalArray*)__builtin_alloca(n + {align} + sizeof(LocalArray)); "
    code += f"l->outer = self->locals, l->base = (u8*)(((u64)(l + 1) + {align - 1}) & -(u64){align}), l->bytes = n; "
    code += "self->locals = l; "
    return code + cx.assign(ins, ins.operands[0], kind, "local_from_generic(self, (u64)l->base)")


HANDLERS: dict[str, Handler] = {"call": call, "ret": leave, "exit": end_thread, "alloca": allocate}

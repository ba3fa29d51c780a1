"""What an opcode's translation may use: its modifiers, its operands as C expressions, and places to put results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvgen.emulator.declarations import Variable, integer, place, split_operands
from kvgen.emulator.errors import TranslateError
from kvgen.emulator.parser import Function, Location
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type, storage_of
from kvgen.emulator.symbols import ParamPlace, Register, Scope, Signature, Symbols, mangle

_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_NUMBER = r"0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*"
_READS_SPECIAL = ("mov", "cvt")
_WIDER = ("ld", "ldu", "st", "cvt")
_ADDRESS = re.compile(rf"\[\s*([%\w$.]+|-?\d+)\s*(?:\+\s*(-?(?:{_NUMBER}))|(-\s*(?:{_NUMBER})))?\s*\]$")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?$")

SPECIAL = {
    **{
        f"%{ptx}.{axis}": f"self->{c}[{i}]"
        for ptx, c in (("tid", "tid"), ("ntid", "ntid"), ("ctaid", "ctaid"), ("nctaid", "nctaid"))
        for i, axis in enumerate("xyz")
    },
    "%laneid": "self->lane",
    "%warpid": "self->warp",
    "%nwarpid": "32u",
    "%smid": "0u",
    "%nsmid": "1u",
    "%gridid": "0ul",
    "%lanemask_eq": "(1u << self->lane)",
    "%lanemask_lt": "((1u << self->lane) - 1u)",
    "%lanemask_le": "((2u << self->lane) - 1u)",
    "%lanemask_gt": "(~((2u << self->lane) - 1u))",
    "%lanemask_ge": "(~((1u << self->lane) - 1u))",
    "%dynamic_smem_size": "emu_dynamic_bytes",
    # Allocated in units of 128 bytes; what the system keeps for itself lies below the first address.
    "%total_smem_size": "(emu_dynamic_bytes + emu_static_bytes + 127u & ~127u)",
    "%aggr_smem_size": "((emu_dynamic_bytes + emu_static_bytes + 127u & ~127u) + SHARED_ORIGIN)",
    "%reserved_smem_offset_begin": "0u",
    **dict.fromkeys(("%reserved_smem_offset_end", "%reserved_smem_offset_cap"), "(u32)SHARED_ORIGIN"),
    **{f"%reserved_smem_offset_{i}": "0u" for i in range(2)},
    "%cluster_ctarank": "self->rank",
    "%cluster_nctarank": "(self->cluster_nctaid[0] * self->cluster_nctaid[1] * self->cluster_nctaid[2])",
    **{f"%cluster_ctaid.{a}": f"self->cluster_ctaid[{i}]" for i, a in enumerate("xyz")},
    **{f"%cluster_nctaid.{a}": f"self->cluster_nctaid[{i}]" for i, a in enumerate("xyz")},
    **{f"%clusterid.{a}": f"(self->ctaid[{i}] / self->cluster_nctaid[{i}])" for i, a in enumerate("xyz")},
    **{f"%nclusterid.{a}": f"(self->nctaid[{i}] / self->cluster_nctaid[{i}])" for i, a in enumerate("xyz")},
    **dict.fromkeys(("%clock64", "%globaltimer"), "emu_clock()"),
    **dict.fromkeys(("%clock", "%globaltimer_lo"), "(u32)emu_clock()"),
    **dict.fromkeys(("%clock_hi", "%globaltimer_hi"), "(u32)(emu_clock() >> 32)"),
    "%current_graph_exec": "0ul",
    "WARP_SZ": "32u",
}


class Modifiers:
    """The dot-modifiers of one instruction. Each must be taken by the opcode's translation, else it is an error."""

    def __init__(self, words: Sequence[str], fail: Callable[[str], TranslateError]) -> None:
        self.words = list(words)
        self.fail = fail

    def flag(self, word: str) -> bool:
        if word in self.words:
            self.words.remove(word)
            return True
        return False

    def optional(self, choices: Sequence[str]) -> str | None:
        found = next((w for w in self.words if w in choices), None)
        if found is not None:
            self.words.remove(found)
        return found

    def choice(self, choices: Sequence[str]) -> str:
        found = self.optional(choices)
        if found is None:
            raise self.fail(f"needs one of .{' .'.join(choices)}")
        return found

    def ignore(self, choices: Sequence[str]) -> None:
        """Modifiers that are known and change nothing here (hints to caches)."""
        self.words = [w for w in self.words if w not in choices]

    def type(self, allowed: str) -> PtxType:
        """The last modifier that names a type, which must be one of the space-separated `allowed`."""
        at = next((i for i in range(len(self.words) - 1, -1, -1) if self.words[i] in TYPES), None)
        if at is None or f" {self.words[at]} " not in f" {allowed} ":
            raise self.fail(f"type .{'' if at is None else self.words[at]} is not one of {allowed}")
        return TYPES[self.words.pop(at)]

    def done(self) -> None:
        if self.words:
            raise self.fail(f"unknown modifier .{self.words[0]}")


@dataclass(slots=True)
class Instruction:
    opcode: str
    modifiers: Modifiers
    operands: list[str]
    text: str
    line: int
    location: Location | None
    site: Callable[[], str]

    def fail(self, message: str) -> TranslateError:
        return TranslateError(
            f"{message} in {self.text!r}",
            ptx_line=self.line,
            source=f"{self.location.file}:{self.location.line}" if self.location else None,
        )

    def count(self, least: int, most: int | None = None) -> None:
        if not least <= len(self.operands) <= (most or least):
            raise self.fail(f"{len(self.operands)} operands, expected {least}{f' to {most}' if most else ''}")


def _offset(address: re.Match[str]) -> int:
    return integer((address.group(2) or address.group(3) or "0").replace(" ", ""))


def _constant(number: int, kind: PtxType) -> str:
    """A C literal of type kind.c, of any number modulo its width."""
    value = number & (2**kind.bits - 1)
    if kind.c == "u32":
        return f"{value}u"
    if kind.c == "u64":
        return f"{value}ul"
    return f"(({kind.c}){value}ul)"


class Context:
    """One function's registers, labels and locals, and the rendering of operands."""

    def __init__(self, function: Function, symbols: Symbols, is_entry: bool, late: frozenset[str]) -> None:
        """`late` names registers in which results of wgmma may be late."""
        self.function = function
        self.late = late
        self.late_count = 0
        self.is_entry = is_entry
        self.symbols = symbols
        self.scopes = [Scope(0)]
        self.registers: list[Register] = []
        self.locals: dict[str, tuple[str, int, int]] = {}
        self.param_locals: list[tuple[str, int]] = []
        self.allocates = False
        self.labels: dict[tuple[int, str], str] = {}
        self.branch_targets: dict[str, list[str]] = {}
        self.prototypes: dict[str, Signature] = {}
        self.call_targets: dict[str, list[str]] = {}
        self.param_offsets, self.param_bytes = place(function.params)
        self.result_offsets, self.result_bytes = place(function.results)
        for v, offset in zip(function.params, self.param_offsets, strict=True):
            if v.space == "param":
                self.scopes[0].params[v.name] = self._param_place(f"(P + {offset})", v, offset if is_entry else None)
        for v, offset in zip(function.results, self.result_offsets, strict=True):
            if v.space == "param":
                self.scopes[0].params[v.name] = self._param_place(f"(R + {offset})", v, reads=False, writes=True)

    def _param_place(
        self, c: str, variable: Variable, offset: int | None = None, *, reads: bool = True, writes: bool = False
    ) -> ParamPlace:
        """`offset`: of a kernel's parameter; all others lie on the thread's stack, as its local memory does."""
        near = f"local_from_generic(self, (u64){c})" if offset is None else f"(PARAM_ORIGIN + {offset}u)"
        return ParamPlace(c, near, variable.nbytes, reads, writes)

    # ---- names
    def open_scope(self, number: int) -> None:
        self.scopes.append(Scope(number))

    def declare(self, name: str, kind: PtxType, line: int) -> Register:
        scope = self.scopes[-1]
        if name in scope.registers:
            raise TranslateError(f"register {name!r} is declared twice", ptx_line=line)
        if name in self.late and kind.bits == 32:
            register = Register(f"late[{self.late_count}]", kind, late=True)
            self.late_count += 1
        else:
            register = Register(mangle(name, scope.number), kind)
        scope.registers[name] = register
        self.registers.append(register)
        return register

    def declare_param(self, variable: Variable) -> ParamPlace:
        """A .param variable of the function's own, for the calls it makes."""
        scope = self.scopes[-1]
        if variable.name in scope.params:
            raise TranslateError(f".param {variable.name!r} is declared twice", ptx_line=variable.line)
        name = f"p{mangle(variable.name, scope.number)}"
        found = self._param_place(name, variable, writes=True)
        scope.params[variable.name] = found
        self.param_locals.append((name, variable.nbytes))
        return found

    def find(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope.registers:
                scope.registers[name].used = True
                return scope.registers[name]
        return None

    def find_param(self, name: str) -> ParamPlace | None:
        for scope in reversed(self.scopes):
            if name in scope.params:
                return scope.params[name]
        return None

    def register(self, ins: Instruction, name: str) -> Register:
        found = self.find(name)
        if found is None:
            raise ins.fail(f"unknown register {name!r}")
        return found

    def label(self, ins: Instruction, name: str) -> str:
        for scope in reversed(self.scopes):
            if (scope.number, name) in self.labels:
                return self.labels[scope.number, name]
        raise ins.fail(f"unknown label {name!r}")

    def label_here(self, name: str) -> str:
        """The C label of a PTX one where it stands."""
        return self.labels[self.scopes[-1].number, name]

    def epilogue(self) -> str:
        """What a function does before it returns: hand over the results that are registers."""
        return "".join(
            f"*({self.scopes[0].registers[v.name].storage}_at*)(R + {offset}) = {self.scopes[0].registers[v.name].c}; "
            for v, offset in zip(self.function.results, self.result_offsets, strict=True)
            if v.space == "reg"
        )

    # ---- reading
    def value(self, ins: Instruction, operand: str, kind: PtxType) -> str:
        """A C rvalue of type kind.c; fails for anything that is not a known operand."""
        text = operand.strip()
        if (found := self.find(text)) is not None:
            return self.converted(ins, found, kind)
        if text.startswith("{") and ins.opcode == "mov":
            width = self.part_bits(ins, text, kind)
            pieces = [
                f"(({kind.storage})({storage_of(width)}){self.value(ins, p, bit_type(width))} << {i * width})"
                for i, p in enumerate(self.vector(text))
            ]
            return self.reinterpret(" | ".join(pieces), kind)
        if (literal := self.literal(text, kind)) is not None:
            return literal
        if text in SPECIAL:
            if ins.opcode not in _READS_SPECIAL and text != "WARP_SZ":
                raise ins.fail(f"{text} is read by mov and cvt only")
            return f"(({kind.c})({SPECIAL[text]}))"
        base, plus, offset = text.partition("+")
        if (address := self.symbol(base.strip())) is not None and (not plus or _INTEGER.match(offset.strip())):
            return f"(({kind.c})({address}{f' + {integer(offset.strip())}' if plus else ''}))"
        if text in self.symbols.undefined or text in self.symbols.functions:
            raise ins.fail(f"{text!r} is declared in this module, but not defined")
        raise ins.fail(f"unknown operand {text!r}")

    def word(self, ins: Instruction, operand: str, kind: PtxType) -> str:
        """The value of an integer type as an unsigned number: of sums and the low half of products the sign is no matter."""
        found = self.find(operand.strip())
        if found is None and _INTEGER.match(operand.strip()):
            return _constant(integer(operand.strip()), bit_type(kind.bits))
        if found is None or found.type.kind == "pred":
            return f"({kind.storage}){self.value(ins, operand, kind)}"
        self.check(ins, found, kind)
        return self.converted(ins, found, bit_type(kind.bits))

    def converted(self, ins: Instruction, register: Register, kind: PtxType) -> str:
        if (kind.kind == "pred") != (register.type.kind == "pred"):
            raise ins.fail("a predicate and a value are mixed")
        if kind.kind == "pred":
            return register.c
        self.check(ins, register, kind)
        copies = ins.opcode in ("mov", "selp") and "{" not in ins.text
        c = register.c if copies else self.used(ins, register)
        if register.storage == kind.c:
            return c
        if register.storage != register.type.storage:  # float or double
            c = register.type.to_bits(c)
            return c if register.type.storage == kind.c else self.reinterpret(c, kind)
        return self.reinterpret(c, kind)

    def check(self, ins: Instruction, register: Register, kind: PtxType) -> None:
        """A register is as wide as the type; of a load, store or conversion it may be wider. Floats are no integers."""
        found = register.type
        if found.bits < kind.bits or (found.bits != kind.bits and ins.opcode not in _WIDER):
            raise ins.fail(f"a {found.bits}-bit register where {kind.bits} bits are needed")
        # Handlers read bits as unsigned numbers, so a type counts only where the instruction names it.
        one, other = found.kind, kind.kind
        mixed = (one in "fh" and other in "us") or (one in "us" and other in "fh")
        if mixed and f".{kind.name}" in ins.text:
            raise ins.fail(f"a .{found.name} register where .{kind.name} is needed")

    def used(self, ins: Instruction, register: Register) -> str:
        return f"arrived({register.c}, {ins.site()})" if register.late else register.c

    def reinterpret(self, expression: str, kind: PtxType) -> str:
        return kind.from_bits(expression)

    def literal(self, text: str, kind: PtxType) -> str | None:
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            raw = f"f32_of(0x{text[2:]}u)"
            if kind.name == "f64":
                return f"((double){raw})"
            return raw if kind.name == "f32" else f"(({kind.c})0x{text[2:]}u)"
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            raw = f"f64_of(0x{text[2:]}ul)"
            if kind.name == "f32":
                return f"((float){raw})"
            return raw if kind.name == "f64" else f"(({kind.c})0x{text[2:]}ul)"
        if _INTEGER.match(text):
            number = integer(text)
            if kind.kind == "f":
                return f"(({kind.c}){number}.0)"
            if kind.kind == "pred":
                return "true" if number else "false"
            return _constant(number, kind)
        if _DECIMAL.match(text) and kind.kind == "f":
            return f"(({kind.c}){text})"
        return None

    def symbol(self, name: str) -> str | None:
        if name in self.symbols.shared:
            return self.symbols.shared[name]
        if name in self.symbols.globals:
            return self.symbols.globals[name]
        if name in self.symbols.constants:
            return self.symbols.constants[name]
        if name in self.locals:
            return f"local_from_generic(self, (u64){self.locals[name][0]})"
        if (param := self.find_param(name)) is not None:
            return param.address
        if name in self.symbols.functions:
            return self.symbols.functions[name].address
        return None

    def space_of(self, name: str) -> str | None:
        """The state space of a variable whose address in that space is no generic one."""
        for space, names in (
            ("shared", self.symbols.shared),
            ("const", self.symbols.constants),
            ("local", self.locals),
        ):
            if name in names:
                return space
        return "param" if self.find_param(name) else None

    def predicate(self, ins: Instruction, operand: str) -> str:
        text = operand.strip()
        negated = text.startswith("!")
        name = text.lstrip("! ")
        value = self.value(ins, name, TYPES["pred"])
        return f"(!{value})" if negated else value

    def integer(self, ins: Instruction, operand: str) -> int:
        """A literal number, for operands that must be constants."""
        if not _INTEGER.match(operand):
            raise ins.fail(f"{operand!r} must be a constant")
        return integer(operand)

    def vector(self, operand: str) -> list[str]:
        return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]

    def part_bits(self, ins: Instruction, operand: str, kind: PtxType) -> int:
        """Bits of each part of a vector that makes up one value."""
        parts = len(self.vector(operand))
        if parts not in (1, 2, 4) or kind.bits // parts < 8:
            raise ins.fail(f"{parts} parts of {kind.bits} bits")
        return kind.bits // parts

    # ---- writing
    def assign(self, ins: Instruction, operand: str, kind: PtxType, expression: str, *, extend: bool = False) -> str:
        """C that stores an expression of type `kind` in a register; `extend` widens by sign where it is signed."""
        if operand == "_":
            return f"(void)({expression});"
        register = self.register(ins, operand)
        if kind.kind == "pred" or register.type.kind == "pred":
            if kind.kind != register.type.kind:
                raise ins.fail("a predicate and a value are mixed")
            return f"{register.c} = {expression};"
        self.check(ins, register, kind)
        if kind.kind == "f":
            if register.storage == kind.c:
                return f"{register.c} = {expression};"
            word = kind.to_bits(f"({kind.c})({expression})")
        elif extend and kind.kind == "s":
            word = f"({register.type.storage})(s{register.type.bits})({kind.c})({expression})"
        else:
            word = f"({kind.storage})({expression})"
        if register.storage != register.type.storage:
            word = register.type.from_bits(word)
        return f"{register.c} = {word};"

    def pair(self, ins: Instruction, operand: str) -> tuple[str, str | None]:
        first, bar, second = operand.partition("|")
        return first.strip(), second.strip() if bar else None

    # ---- addresses
    def address(self, ins: Instruction, operand: str, *, narrow: bool, near: bool = False) -> str:
        """The address of "[base+offset]" as u32 (`narrow`, shared windows) or u64: generic, or with `near` in the space
        that the instruction names, where 32 bits may hold it."""
        m = _ADDRESS.match(operand)
        if not m:
            raise ins.fail(f"cannot read the address {operand!r}")
        base, offset = m.group(1), _offset(m)
        found = self.find(base)
        kind = TYPES["u64"] if found is None or found.type.bits == 64 else TYPES["u32"]
        if not (narrow or near) and found is not None and found.type.bits < 64:
            raise ins.fail("a 64-bit address is needed")
        if not (narrow or near) and found is None and (space := self.space_of(base)):
            return f"(generic_from_{space}(self, {self.value(ins, base, kind)}) + ({offset}l))"
        return f"({'u32' if narrow else 'u64'})({self.value(ins, base, kind)} + ({offset}l))"

    def param_pointer(self, ins: Instruction, operand: str, nbytes: int, *, write: bool) -> str:
        """A C pointer to `nbytes` bytes of .param space at "[name+offset]" or "[register+offset]"."""
        m = _ADDRESS.match(operand)
        found = self.find_param(m.group(1)) if m else None
        if m is None or found is None:
            if write:
                raise ins.fail(f"{operand!r} is no .param variable of this function")
            address = self.address(ins, operand, narrow=False, near=True)
            return f"at_param(self, {address}, {nbytes}, P, PARAM_BYTES, {ins.site()})"
        offset = _offset(m)
        if not (found.writable if write else found.readable):
            raise ins.fail(f"{m.group(1)!r} cannot be {'written' if write else 'read'} here")
        if not 0 <= offset <= found.nbytes - nbytes:
            raise ins.fail(f"bytes {offset} to {offset + nbytes} of {m.group(1)!r}, which has {found.nbytes}")
        return f"({found.c} + {offset})"


Handler = Callable[[Context, Instruction], str]

__all__ = ["Context", "Handler", "Instruction", "Modifiers", "split_operands"]

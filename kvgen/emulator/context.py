"""What an opcode's translation may use: its modifiers, its operands as C++ expressions, and places to put results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvgen.emulator.errors import TranslateError
from kvgen.emulator.parser import Entry, Location
from kvgen.emulator.ptxtypes import TYPES, PtxType, bit_type, storage_of

_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_ADDRESS = re.compile(r"\[\s*([%\w$.]+|-?\d+)\s*(?:\+\s*(-?\w+)|(-\s*\w+))?\s*\]$")
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
    "%gridid": "0ull",
    "%lanemask_eq": "(1u << self->lane)",
    "%lanemask_lt": "((1u << self->lane) - 1u)",
    "%lanemask_le": "((2u << self->lane) - 1u)",
    "%lanemask_gt": "(~((2u << self->lane) - 1u))",
    "%lanemask_ge": "(~((1u << self->lane) - 1u))",
    "%dynamic_smem_size": "emu_dynamic_bytes",
    "%total_smem_size": "(emu_dynamic_bytes + emu_static_bytes)",
    "%cluster_ctarank": "0u",
    "%cluster_nctarank": "1u",
    **{f"%cluster_ctaid.{a}": "0u" for a in "xyz"},
    **{f"%cluster_nctaid.{a}": "1u" for a in "xyz"},
    **{f"%clusterid.{a}": f"self->ctaid[{i}]" for i, a in enumerate("xyz")},
    **{f"%nclusterid.{a}": f"self->nctaid[{i}]" for i, a in enumerate("xyz")},
    "%clock": "0u",
    "%clock_hi": "0u",
    "%clock64": "0ull",
    "%globaltimer": "0ull",
    "%globaltimer_lo": "0u",
    "%globaltimer_hi": "0u",
    "WARP_SZ": "32u",
}


def split_operands(text: str) -> list[str]:
    """Split at the commas outside brackets and braces."""
    out: list[str] = []
    depth = 0
    word = ""
    for c in text:
        depth += (c in "[{(") - (c in ")}]")
        if c == "," and depth == 0:
            out.append(word.strip())
            word = ""
        else:
            word += c
    if word.strip() or out:
        out.append(word.strip())
    return out


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
        """The last modifier, which must be one of the space-separated type names."""
        if not self.words or self.words[-1] not in allowed.split():
            raise self.fail(f"type .{self.words[-1] if self.words else ''} is not one of {allowed}")
        return TYPES[self.words.pop()]

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


def mangle(name: str) -> str:
    return "v_" + re.sub(r"\W", "_", name)


@dataclass(slots=True)
class Register:
    c: str
    type: PtxType


@dataclass(slots=True)
class Symbols:
    """Module-level names: C++ expressions of their addresses, and sizes."""

    shared: dict[str, str] = field(default_factory=dict)
    globals: dict[str, str] = field(default_factory=dict)


class Context:
    """One entry's registers, labels and locals, and the rendering of operands."""

    def __init__(self, entry: Entry, symbols: Symbols, param_offsets: dict[str, int]) -> None:
        self.entry = entry
        self.symbols = symbols
        self.param_offsets = param_offsets
        self.scopes: list[tuple[int, dict[str, Register]]] = [(0, {})]
        self.registers: list[Register] = []
        self.locals: dict[str, tuple[str, int, int]] = {}
        self.labels: dict[tuple[int, str], str] = {}
        self.branch_targets: dict[str, list[str]] = {}

    # ---- names
    def declare(self, name: str, kind: PtxType) -> None:
        scope = self.scopes[-1][0]
        register = Register(mangle(name) + (f"_s{scope}" if scope else ""), kind)
        self.scopes[-1][1][name] = register
        self.registers.append(register)

    def find(self, name: str) -> Register | None:
        for _, names in reversed(self.scopes):
            if name in names:
                return names[name]
        return None

    def register(self, ins: Instruction, name: str) -> Register:
        found = self.find(name)
        if found is None:
            raise ins.fail(f"unknown register {name!r}")
        return found

    def label(self, ins: Instruction, name: str) -> str:
        for scope, _ in reversed(self.scopes):
            if (scope, name) in self.labels:
                return self.labels[scope, name]
        raise ins.fail(f"unknown label {name!r}")

    # ---- reading
    def value(self, ins: Instruction, operand: str, kind: PtxType) -> str:
        """A C++ rvalue of type kind.c; fails for anything that is not a known operand."""
        text = operand.strip()
        if (found := self.find(text)) is not None:
            return self.converted(ins, found, kind)
        if text.startswith("{"):
            parts = self.vector(text)
            width = kind.bits // len(parts)
            pieces = [
                f"(({kind.storage})({storage_of(width)}){self.bits_of(ins, p, width)} << {i * width})"
                for i, p in enumerate(parts)
            ]
            return self.reinterpret(" | ".join(pieces), kind)
        if (literal := self.literal(text, kind)) is not None:
            return literal
        if text in SPECIAL:
            return f"(({kind.c})({SPECIAL[text]}))"
        base, plus, offset = text.partition("+")
        if (address := self.symbol(base.strip())) is not None and (not plus or _INTEGER.match(offset.strip())):
            return f"(({kind.c})({address}{f' + {int(offset, 0)}' if plus else ''}))"
        raise ins.fail(f"unknown operand {text!r}")

    def converted(self, ins: Instruction, register: Register, kind: PtxType) -> str:
        if (kind.kind == "pred") != (register.type.kind == "pred"):
            raise ins.fail("a predicate and a value are mixed")
        if kind.kind == "pred":
            return register.c
        if register.type.bits < kind.bits:
            raise ins.fail(f"a {register.type.bits}-bit register where .{kind.name} needs {kind.bits} bits")
        return self.reinterpret(register.c, kind)

    def reinterpret(self, expression: str, kind: PtxType) -> str:
        if kind.kind == "f":
            return f"bits<{kind.c}>(({kind.storage})({expression}))"
        return f"(({kind.c})({expression}))"

    def literal(self, text: str, kind: PtxType) -> str | None:
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            raw = f"bits<float>(0x{text[2:]}u)"
            if kind.name == "f64":
                return f"((double){raw})"
            return raw if kind.name == "f32" else f"(({kind.c})0x{text[2:]}u)"
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            raw = f"bits<double>(0x{text[2:]}ull)"
            if kind.name == "f32":
                return f"((float){raw})"
            return raw if kind.name == "f64" else f"(({kind.c})0x{text[2:]}ull)"
        if _INTEGER.match(text):
            digits = text.rstrip("U")
            sign, body = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
            octal = len(body) > 1 and body.isdigit() and body.startswith("0")
            number = sign * int(body, 8 if octal else 0)
            if kind.kind == "f":
                return f"(({kind.c}){number}.0)"
            if kind.kind == "pred":
                return "true" if number else "false"
            return f"(({kind.c}){number & (2**64 - 1)}ull)"
        if _DECIMAL.match(text) and kind.kind == "f":
            return f"(({kind.c}){text})"
        return None

    def symbol(self, name: str) -> str | None:
        if name in self.symbols.shared:
            return self.symbols.shared[name]
        if name in self.symbols.globals:
            return f"(u64){self.symbols.globals[name]}"
        if name in self.locals:
            return f"(u64){self.locals[name][0]}"
        if name in self.param_offsets:
            return f"((u64)P + {self.param_offsets[name]})"
        return None

    def bits_of(self, ins: Instruction, operand: str, width: int) -> str:
        found = self.find(operand)
        return found.c if found is not None else self.value(ins, operand, bit_type(width))

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
        return int(operand.rstrip("U"), 0)

    def vector(self, operand: str) -> list[str]:
        return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]

    # ---- writing
    def assign(self, ins: Instruction, operand: str, kind: PtxType, expression: str, *, extend: bool = False) -> str:
        """C++ that stores an expression of type `kind` in a register; `extend` widens by sign where it is signed."""
        if operand == "_":
            return f"(void)({expression});"
        register = self.register(ins, operand)
        if kind.kind == "pred" or register.type.kind == "pred":
            if kind.kind != register.type.kind:
                raise ins.fail("a predicate and a value are mixed")
            return f"{register.c} = {expression};"
        if register.type.bits < kind.bits:
            raise ins.fail(f"a {register.type.bits}-bit register for a .{kind.name} result")
        storage = register.type.storage
        if kind.kind == "f":
            return f"{register.c} = ({storage})bits<{kind.storage}>(({kind.c})({expression}));"
        if extend and kind.kind == "s":
            return f"{register.c} = ({storage})(s{register.type.bits})({kind.c})({expression});"
        return f"{register.c} = ({storage})({kind.storage})({expression});"

    def pair(self, ins: Instruction, operand: str) -> tuple[str, str | None]:
        first, bar, second = operand.partition("|")
        return first.strip(), second.strip() if bar else None

    # ---- addresses
    def address(self, ins: Instruction, operand: str, *, narrow: bool) -> str:
        """The address of "[base+offset]" as u32 (`narrow`, shared windows) or u64."""
        m = _ADDRESS.match(operand)
        if not m:
            raise ins.fail(f"cannot read the address {operand!r}")
        offset = int((m.group(2) or m.group(3) or "0").replace(" ", ""), 0)
        base = m.group(1)
        found = self.find(base)
        kind = TYPES["u64"] if found is None or found.type.bits == 64 else TYPES["u32"]
        if not narrow and found is not None and found.type.bits < 64:
            raise ins.fail("a 64-bit address is needed")
        return f"({'u32' if narrow else 'u64'})({self.value(ins, base, kind)} + ({offset}ll))"

    def param_place(self, operand: str) -> tuple[str, int] | None:
        m = _ADDRESS.match(operand)
        if m and m.group(1) in self.param_offsets:
            return m.group(1), int((m.group(2) or m.group(3) or "0").replace(" ", ""), 0)
        return None


Handler = Callable[[Context, Instruction], str]

__all__ = ["Context", "Handler", "Instruction", "Modifiers", "Register", "Symbols", "mangle", "split_operands"]

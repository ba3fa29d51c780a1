"""PTX declarations: variables and parameters of every state space, and the initial values of variables."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvgen.emulator.errors import TranslateError
from kvgen.emulator.ptxtypes import TYPES, PtxType


@dataclass(frozen=True, slots=True)
class Address:
    """Eight bytes of an initial value: where a variable or function is, as a generic address or one in its space, plus
    an offset."""

    symbol: str
    offset: int
    generic: bool


@dataclass(frozen=True, slots=True)
class _Byte:
    """One byte of an address, as 0xFF00(symbol) gives it."""

    index: int
    address: Address


_Nested: TypeAlias = "str | list[_Nested]"


@dataclass(frozen=True, slots=True)
class Variable:
    """`initial` holds the first bytes in order, zeros follow; `linkage` is visible, extern, weak, common or ""."""

    space: str
    name: str
    type: PtxType
    align: int
    nbytes: int
    line: int
    linkage: str = ""
    initial: tuple[bytes | Address, ...] = ()

    @property
    def extern(self) -> bool:
        return self.linkage == "extern"


_MOST_BYTES = {"local": 512 << 10, "param": 32764}  # of a thread, of a kernel
_MOST_ALIGN = 1 << 16
_LINKAGES = ("visible", "extern", "weak", "common")
_SPACES = ("global", "const", "shared", "local", "param", "reg")
_OPAQUE = ("texref", "samplerref", "surfref", "tex")
_WORD = re.compile(r"\.(?:attribute\s*\(\s*(?P<attribute>\.\w+)[^()]*(?:\([^()]*\))?\s*\)|(?P<word>\w+))\s*")
_DECLARATOR = re.compile(r"([%\w$]+)\s*((?:\[\s*\d*\s*\]\s*)*)(?:=\s*(.+))?$", re.S)
_ALIGN = re.compile(r"(\d+)\s*")
_POINTER = re.compile(r"(?:\.(?:global|shared|const|local)\s*)?(?:\.align\s+\d+\s*)?")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$")
_INTEGER = re.compile(r"[-+~]?\s*(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_ADDRESS = re.compile(r"(?:generic\s*\(\s*([A-Za-z_$][\w$]*)\s*\)|([A-Za-z_$][\w$]*))\s*(?:\+\s*(\d+))?$")
_MASKED = re.compile(r"0[xX][fF]{2}((?:00){0,7})\s*\((.+)\)$")


_OPERAND = re.compile(r"(?:[^,\[\]{}()]|\[[^\[\]{}()]*\]|\{[^\[\]{}()]*\}|\([^\[\]{}()]*\))+")


def split_operands(text: str) -> list[str]:
    """Split at the commas outside brackets and braces."""
    if not any(c in text for c in "[{("):
        return [word.strip() for word in text.split(",")] if text.strip() else []
    found = _OPERAND.findall(text)
    if found and sum(map(len, found)) + len(found) - 1 == len(text):  # nothing is empty, and no bracket in another
        return [word.strip() for word in found]
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


def integer(text: str) -> int:
    """A PTX integer literal, which starts with 0 where it is octal."""
    body = text.rstrip("U")
    sign = -1 if body.startswith("-") else 1
    body = body.lstrip("+-~ ")
    octal = len(body) > 1 and body.isdigit() and body.startswith("0")
    number = int(body, 8 if octal else 0)
    return ~number if text.startswith("~") else sign * number


def place(variables: Sequence[Variable]) -> tuple[tuple[int, ...], int]:
    """Byte offsets of parameters laid out one after another, each aligned, and the bytes of all."""
    offsets, end = [], 0
    for v in variables:
        at = -(-end // v.align) * v.align
        offsets.append(at)
        end = at + v.nbytes
    return tuple(offsets), end


def variables(text: str, line: int) -> list[Variable]:
    """The variables of one declaration, `text` being all of it up to its semicolon."""
    return _Declaration(text, line).read()


def parameters(text: str, line: int) -> list[Variable]:
    """What stands between the brackets of a parameter list."""
    out = []
    for item in split_operands(text):
        found = variables(item, line)
        if found[0].space not in ("param", "reg"):
            raise TranslateError(f"unknown parameter declaration {' '.join(item.split())!r}", ptx_line=line)
        out += found
    return out


class _Declaration:
    def __init__(self, text: str, line: int) -> None:
        self.text = text.strip()
        self.line = line
        self.linkage = self.space = ""
        self.align = self.lanes = 0
        self.kind = TYPES["pred"]

    def fail(self, message: str) -> TranslateError:
        return TranslateError(f"{message} in {' '.join(self.text.split())[:80]!r}", ptx_line=self.line)

    def read(self) -> list[Variable]:
        names = self.text[self.words() :]
        if not self.space or self.kind.kind == "pred" or (self.lanes and self.space == "reg"):
            raise self.fail("unknown declaration")
        if self.align & (self.align - 1) or self.align > _MOST_ALIGN:
            raise self.fail(f".align {self.align} is no power of two up to {_MOST_ALIGN}")
        out = [self.variable(item) for item in split_operands(names)]
        if not out:
            raise self.fail("a declaration without a name")
        return out

    def words(self) -> int:
        """Take the dot-words before the names; returns where the names start."""
        at = 0
        while m := _WORD.match(self.text, at):
            at, word = m.end(), m.group("word")
            if attribute := m.group("attribute"):
                if attribute not in (".managed", ".unified"):
                    raise self.fail(f"unknown attribute {attribute}")
            elif word == "ptr":  # where a pointer points: each access says so again
                pointee = _POINTER.match(self.text, at)
                at = pointee.end() if pointee else at
            elif word == "align":
                if not (number := _ALIGN.match(self.text, at)):
                    raise self.fail(".align without a number")
                self.align, at = int(number.group(1)), number.end()
            elif word in _LINKAGES and not self.linkage:
                self.linkage = word
            elif word in _SPACES and not self.space:
                self.space = word
            elif word in ("v2", "v4") and not self.lanes:
                self.lanes = int(word[1:])
            elif word in TYPES and self.kind.kind == "pred":
                self.kind = TYPES[word]
            elif word in _OPAQUE:
                raise self.fail("unknown declaration: textures, samplers and surfaces are not supported")
            else:
                raise self.fail(f"unknown declaration: .{word}")
        return at

    def variable(self, text: str) -> Variable:
        m = _DECLARATOR.match(text)
        if not m:
            raise self.fail(f"unknown declaration: cannot read {text!r}")
        dims = [int(n or 0) for n in re.findall(r"\[\s*(\d*)\s*\]", m.group(2))]
        if self.lanes:
            dims.append(self.lanes)
        initial: tuple[bytes | Address, ...] = ()
        if m.group(3):
            if self.space not in ("global", "const"):
                raise self.fail(f"a .{self.space} variable has no initial value")
            value = _nested(m.group(3).strip())
            if dims and dims[0] == 0:
                dims[0] = len(value)
            initial = self.joined(self.flat(value, dims))
        size = self.kind.bits // 8
        natural = size * max(self.lanes, 1)
        nbytes = size * math.prod(dims)
        if not nbytes and (self.linkage, self.space) != ("extern", "shared"):
            raise self.fail(f"{m.group(1)!r} has no size")
        if nbytes > _MOST_BYTES.get(self.space, nbytes):
            raise self.fail(f"{m.group(1)!r} has {nbytes} bytes, .{self.space} at most {_MOST_BYTES[self.space]}")
        return Variable(
            self.space, m.group(1), self.kind, self.align or natural, nbytes, self.line, self.linkage, initial
        )

    # ---- initial values
    def flat(self, value: _Nested, dims: list[int]) -> list[bytes | Address | _Byte]:
        """One item per element; what an inner row leaves out is zero."""
        if not dims:
            if not isinstance(value, str):
                raise self.fail("braces around one value")
            return [self.element(value)]
        if isinstance(value, str) or len(value) > dims[0]:
            raise self.fail(f"an initial value that does not fit {dims[0]} elements")
        out: list[bytes | Address | _Byte] = []
        for row in value:
            items = self.flat(row, dims[1:])
            out += items + [bytes(self.kind.bits // 8)] * (math.prod(dims[1:]) - len(items))
        return out

    def element(self, text: str) -> bytes | Address | _Byte:
        kind = self.kind
        if m := _MASKED.match(text):
            if kind.bits != 8:
                raise self.fail(f"{text!r} needs 8-bit elements")
            return _Byte(len(m.group(1)) // 2, self.address(m.group(2)))
        if _ADDRESS.match(text):
            if kind.bits != 64 or kind.kind == "f":
                raise self.fail(f"the address {text!r} needs 64-bit integer elements")
            return self.address(text)
        bits = literal_bits(text, kind)
        if bits is None:
            raise self.fail(f"the initial value {text!r} is no .{kind.name}")
        return (bits & ((1 << kind.bits) - 1)).to_bytes(kind.bits // 8, "little")

    def address(self, text: str) -> Address:
        m = _ADDRESS.match(text.strip())
        if not m:
            raise self.fail(f"cannot read the address {text!r}")
        return Address(m.group(1) or m.group(2), int(m.group(3) or 0), m.group(1) is not None)

    def joined(self, items: list[bytes | Address | _Byte]) -> tuple[bytes | Address, ...]:
        """Runs of bytes as one piece, and eight bytes of one address as that address."""
        out: list[bytes | Address] = []
        at = 0
        while at < len(items):
            item = items[at]
            if isinstance(item, _Byte):
                if items[at : at + 8] != [_Byte(i, item.address) for i in range(8)]:
                    raise self.fail(f"part of the address of {item.address.symbol!r}")
                out.append(item.address)
                at += 8
                continue
            if isinstance(item, bytes) and out and isinstance(out[-1], bytes):
                out[-1] += item
            else:
                out.append(item)
            at += 1
        return tuple(out)


def _nested(text: str) -> _Nested:
    if text.startswith("{") and text.endswith("}"):
        return [_nested(item) for item in split_operands(text[1:-1])]
    return text


def literal_bits(text: str, kind: PtxType) -> int | None:
    """The bit pattern of a literal of type `kind`; None for what is no such literal."""
    if re.match(r"0[fFdD]", text):
        digits = 8 if text[1] in "fF" else 16
        if not re.match(rf"[0-9a-fA-F]{{{digits}}}$", text[2:]):
            return None
        if kind.kind != "f":
            return int(text[2:], 16)
        value = struct.unpack(">f" if digits == 8 else ">d", bytes.fromhex(text[2:]))[0]
    elif kind.kind == "f":
        if not _DECIMAL.match(text):
            return None
        value = float(text)
    else:
        return integer(text) if kind.is_integer and _INTEGER.match(text) else None
    if kind.bits == 32:
        value = ctypes.c_float(value).value  # to infinity where struct would raise
    return int.from_bytes(struct.pack("<f" if kind.bits == 32 else "<d", value), "little")

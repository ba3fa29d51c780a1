"""A traced score as C: named locals for what is used twice or would be long, then the expression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvgen.expr.score_trace import FULL, WORD, Value

# Text of an expression beyond which its parts become locals.
_LONG: Final = 72
_FUNCTIONS: Final = {
    "exp": "expf", "exp2": "exp2f", "log": "logf", "log2": "log2f", "tanh": "tanhf", "sqrt": "sqrtf", "abs": "fabsf",
    "minimum": "fminf", "maximum": "fmaxf", "floor": "floorf",
}  # fmt: skip
# How tightly C's operators bind; what is not here is an atom or a call.
_TIGHT: Final = {
    "where": 1, "|": 2, "&": 3, "==": 4, "!=": 4, "<": 5, "<=": 5, ">": 5, ">=": 5, "+": 6, "-": 6, "*": 7, "%": 7, "//": 7,
}  # fmt: skip
# The axes that parts of a place are always inside of.
_EXTENTS: Final = {"q_head": "q_heads", "kv_head": "kv_heads", "row": "T", "b": "B"}
_UNARY: Final = 8
_ATOM: Final = 9
_C_LOGIC: Final = {"&": "&&", "|": "||", "//": "/"}


@dataclass(frozen=True)
class Elements:
    """How a kernel reads a tensor: the array, the conversion of an element, its shape, and the extents: whole numbers or names.

    Arrays and names are fields of struct Inputs.
    """

    array: str
    convert: str
    shape: tuple[int | str, ...]
    extents: tuple[int | str, ...]


@dataclass(frozen=True)
class Names:
    """Names of a function's arguments in struct Inputs, and the heads it is for (none yet: 0)."""

    tensors: Mapping[str, Elements]
    scalars: Mapping[str, str]
    q_heads: int
    group: int


def float_literal(value: float) -> str:
    """An f32 as C."""
    if math.isinf(value):
        return "-infinity()" if value < 0 else "infinity()"
    return f"{value!r}f"


def _extent(extent: int | str) -> str:
    return f"in.{extent}" if isinstance(extent, str) else str(extent)


def floors(lines: Sequence[str]) -> bool:
    """True: statements divide whole numbers that may be negative, by floor_div or floor_mod."""
    return any("floor_div(" in line or "floor_mod(" in line for line in lines)


class Printer:
    """The statements that compute `root`: `lines` of locals, then `result`."""

    def __init__(self, root: Value, names: Names) -> None:
        self._names = names
        self._uses: dict[int, int] = {}
        self._done: dict[int, tuple[str, int]] = {}
        self.lines: list[str] = []
        self._count(root)
        self._prepare(root)
        self.result = self._written(root)[0]

    def _count(self, root: Value) -> None:
        waiting = [root]
        while waiting:
            value = waiting.pop()
            self._uses[id(value)] = self._uses.get(id(value), 0) + 1
            if self._uses[id(value)] == 1:
                waiting += value.args

    def _prepare(self, root: Value) -> None:
        """Write what `root` is computed from, arguments first and in their order: without recursion, for a loop of the user's may
        nest as deep as it likes."""
        waiting = [(root, False, False)]
        while waiting:
            value, local, ready = waiting.pop()
            if id(value) in self._done:
                continue
            if ready:
                self._text(value, local=local)
                continue
            guarded = self._guarded(value) if value.op == "load" else [False] * len(value.args)
            waiting += [(value, local, True)] if value is not root else []
            waiting += reversed([(arg, asked, False) for arg, asked in zip(value.args, guarded, strict=True)])

    def _text(self, value: Value, *, local: bool = False) -> tuple[str, int]:
        """(C, how tightly it binds); a local where one is asked for, or the text is needed again or long."""
        if id(value) in self._done:
            return self._done[id(value)]
        text, tight = self._written(value)
        if value.args and (local or self._uses[id(value)] > 1 or len(text) > _LONG):
            kind = {"float": "float", "condition": "bool"}.get(value.kind) or _integer(value)
            name = f"t{len(self.lines)}"
            self.lines.append(f"const {kind} {name} = {text};")
            text, tight = name, _ATOM
        self._done[id(value)] = (text, tight)
        return text, tight

    def _in(self, value: Value, level: int) -> str:
        text, tight = self._text(value)
        return f"({text})" if tight < level else text

    def _written(self, value: Value) -> tuple[str, int]:
        op, args = value.op, value.args
        if op == "literal":
            return self._literal(value)
        if op == "s":
            return "s", _ATOM
        if op == "scalar":
            return f"in.{self._names.scalars[value.payload]}", _ATOM
        if op == "at":
            return self._at(value.payload)
        if op == "load":
            return self._load(value)
        if op == "where":
            condition = self._in(args[0], _TIGHT["where"] + 1)
            yes, no = (self._operand(a, value, _TIGHT["where"] + 1) for a in args[1:])
            return f"{condition} ? {yes} : {no}", _TIGHT["where"]
        if op == "float":
            return f"(float){self._in(args[0], _UNARY)}", _UNARY
        if op in ("negate", "~"):
            return f"{'-' if op == 'negate' else '!'}{self._in(args[0], _ATOM)}", _UNARY
        if value.kind == "int":
            return self._whole(value)
        if op == "/":
            # Within 2 ulp; the exact one is a call.
            return f"__fdividef({self._in(args[0], 0)}, {self._in(args[1], 0)})", _ATOM
        if op in _TIGHT:
            level, sign = _TIGHT[op], _C_LOGIC.get(op, op)
            # A comparison of whole numbers is signed where one of them may be negative.
            whole = op not in ("&", "|") and args[0].kind == "int"
            signed = whole and any(a.bounds[0] < 0 for a in args) and op not in ("==", "!=")
            # && in || is parenthesised, as compilers like it.
            low = _TIGHT["&"] + 1 if op == "|" and "&" in (args[0].op, args[1].op) else level
            levels = zip(args, (low, max(low, level + 1)), strict=True)
            a, b = (self._signed(x, n) if signed else self._in(x, n) for x, n in levels)
            return f"{a} {sign} {b}", level
        return f"{_FUNCTIONS[op]}({', '.join(self._in(a, 0) for a in args)})", _ATOM

    def _literal(self, value: Value) -> tuple[str, int]:
        if value.kind == "condition":
            return ("true" if value.payload else "false"), _ATOM
        text = float_literal(value.payload) if value.kind == "float" else str(value.payload)
        if text == str(FULL[0]):
            return "(-2147483647 - 1)", _ATOM
        return text, _UNARY if text.startswith("-") else _ATOM

    def _at(self, name: str) -> tuple[str, int]:
        group = self._names.group
        if name != "kv_head" or not group:
            return f"at.{name}", _ATOM
        return ("at.q_head", _ATOM) if group == 1 else (f"at.q_head / {group}", _TIGHT["//"])

    # Whole numbers -------------------------------------------------------------------------------------------------

    def _signed(self, value: Value, level: int) -> str:
        """As int32_t."""
        if value.op == "literal" or value.bounds[0] < 0:
            return self._in(value, level)
        return f"(int32_t){self._in(value, _UNARY)}"

    def _bits(self, value: Value, level: int) -> str:
        """As uint32_t, of which one operand makes the others such."""
        if value.op == "literal" or value.bounds[0] >= 0:
            return self._in(value, level)
        return f"(uint32_t){self._in(value, _UNARY)}"

    def _operand(self, value: Value, of: Value, level: int) -> str:
        if of.kind != "int":
            return self._in(value, level)
        return self._signed(value, level) if of.bounds[0] < 0 else self._bits(value, level)

    def _whole(self, value: Value) -> tuple[str, int]:
        op, args = value.op, value.args
        if op in ("+", "-", "*"):
            level = _TIGHT[op]
            text = f"{self._bits(args[0], level)} {op} {self._bits(args[1], level + 1)}"
            return (f"(int32_t)({text})", _UNARY) if value.bounds[0] < 0 else (text, level)
        if op in ("//", "%"):
            if args[0].bounds[0] < 0:
                name = "floor_div" if op == "//" else "floor_mod"
                text = f"{name}({self._in(args[0], 0)}, {args[1].payload})"
                return (text, _ATOM) if value.bounds[0] < 0 else (f"(uint32_t){text}", _UNARY)
            return f"{self._in(args[0], _TIGHT[op])} {_C_LOGIC.get(op, op)} {args[1].payload}", _TIGHT[op]
        if op == "abs":
            return f"(uint32_t)abs({self._in(args[0], 0)})", _UNARY
        narrow = any(a.bounds[0] < 0 for a in args)
        texts = [self._signed(a, 0) if narrow else f"{self._in(a, 0)}{'u' * (a.op == 'literal')}" for a in args]
        text = f"{op[:3]}({', '.join(texts)})"
        return (f"(uint32_t){text}", _UNARY) if narrow and value.bounds[0] >= 0 else (text, _ATOM)

    # Tensors -------------------------------------------------------------------------------------------------------

    def _load(self, value: Value) -> tuple[str, int]:
        tensor, times, plus = self._names.tensors[value.payload], _TIGHT["*"], _TIGHT["+"]
        sizes = [e for e in tensor.extents if isinstance(e, int)]
        narrow = len(sizes) == len(tensor.extents) and math.prod(sizes) <= WORD[1]
        one = len(value.args) == 1
        axes = list(zip(value.args, tensor.shape, tensor.extents, strict=True))
        guarded = self._guarded(value)
        for index, asked in zip(value.args, guarded, strict=True):
            self._text(index, local=asked)
        at = self._bits(value.args[0], 0 if one else times if narrow else _UNARY)
        at = at if one or narrow else f"(uint64_t){at}"
        for axis, index in enumerate(value.args[1:], start=1):
            at = f"{at if axis == 1 else f'({at})'} * {_extent(tensor.extents[axis])} + {self._bits(index, plus + 1)}"
        text, tight = f"{tensor.convert}(in.{tensor.array}[{at}])", _UNARY
        if not tensor.convert:
            text, tight = f"in.{tensor.array}[{at}]", _ATOM
        places = zip(axes, guarded, strict=True)
        guards = [
            f"{self._bits(index, _TIGHT['<'])} < {_extent(extent)}" for (index, _, extent), asked in places if asked
        ]
        if not guards:
            return text, tight
        return f"{' && '.join(guards)} ? {text} : {'0.0f' if value.kind == 'float' else '0'}", _TIGHT["where"]

    def _guarded(self, load: Value) -> list[bool]:
        """One bool an index: it may lie outside of its axis."""
        shape = self._names.tensors[load.payload].shape
        return [not self._fits(index, axis) for index, axis in zip(load.args, shape, strict=True)]

    def _fits(self, index: Value, axis: int | str) -> bool:
        """True: the index is inside of the axis whatever memory holds."""
        if index.op == "at" and isinstance(axis, str):
            return _EXTENTS.get(str(index.payload)) == axis
        if not isinstance(axis, int):
            return False
        if index.op == "at" and index.payload in ("q_head", "kv_head") and self._names.group:
            return self._names.q_heads // (self._names.group if index.payload == "kv_head" else 1) <= axis
        return index.bounds[0] >= 0 and index.bounds[1] < axis


def _integer(value: Value) -> str:
    return "int32_t" if value.bounds[0] < 0 else "uint32_t"

"""Families of opcodes: one kernel each, which runs every form on every input; a form's PTX and its meaning side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.numbers import Array, bits_of, decode, encode

_C: Final = {8: "unsigned", 16: "unsigned short", 32: "unsigned", 64: "unsigned long long"}
_CONSTRAINT: Final = {8: "r", 16: "h", 32: "r", 64: "l"}
_MOST: Final = 4  # numbers in a word


@dataclass(frozen=True)
class Form:
    """One opcode form: `ptx` writes %0 and reads %1, %2, ... of the types in `operands`, taken from the low bits of words.

    "_" is an operand that is not read. `reference` maps Python numbers (floats for float types) to one of `result`'s type;
    for a float type an int is a bit pattern. With packed operands, "f16x2", it is called for each half; it gives a tuple,
    low half first, where only the result is packed.
    """

    ptx: str
    operands: tuple[str, ...]
    result: str
    reference: Callable[..., Any]
    rule: Rule


@dataclass
class Family:
    """Forms over the same words: `words` are up to three arrays of 32 or 64-bit words of one length."""

    name: str
    words: tuple[Array, ...]
    forms: list[Form] = field(default_factory=list)
    _written: ClassVar[tuple[str, ...]] = ("out",)

    def add(self, ptx: str, operands: str, result: str, reference: Callable[..., Any], **rule: Any) -> None:
        """One more form; `rule` are fields of Rule."""
        self.forms.append(Form(ptx, tuple(operands.split()), result, reference, Rule(*split(result), **rule)))

    @property
    def count(self) -> int:
        """The number of threads."""
        return len(self.words[0])

    def inputs(self) -> dict[str, Array]:
        """The kernel's arrays before the launch, in its parameters' order."""
        out = np.zeros((len(self.forms), self.count), self.words[0].dtype)
        return {**{f"in{i}": words for i, words in enumerate(self.words)}, "out": out}

    def wanted(self, arrays: Mapping[str, Array]) -> dict[str, Wanted]:
        """What they must be afterwards."""
        words = [arrays[f"in{i}"] for i in range(len(self.words))]
        return {"out": self._wanted([self._results(form, words) for form in self.forms])}

    def cuda(self) -> str:
        """The kernel's text: output [form, thread]."""
        word = _C[self._width]
        names = "abc"[: len(self.words)]
        params = [f"const {word}* in_{n}" for n in names] + [f"{word}* {n}" for n in self._written]
        lines = [f'extern "C" __global__ void {self.name}({", ".join(params)}) {{']
        lines.append("  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;")
        lines.append(f"  const {word} {', '.join(f'{n} = in_{n}[i]' for n in names)};")
        lines += [f"  {self._statement(k, form)}" for k, form in enumerate(self.forms)]
        return "\n".join([*lines, "}", ""])

    @property
    def _width(self) -> int:
        return 8 * int(self.words[0].itemsize)

    def _statement(self, k: int, form: Form) -> str:
        bits = width(form.result)
        operands = [self._operand(n, o) for n, o in zip("abc", form.operands, strict=False)]
        asm = f'asm volatile("{form.ptx}" : "={_CONSTRAINT[bits]}"(d) : {", ".join(operands)});'
        return f"{{ {_C[bits]} d; {asm} out[{k} * n + i] = {'(unsigned char)d' if bits == 8 else 'd'}; }}"

    def _operand(self, name: str, kind: str) -> str:
        bits = self._width if kind == "_" else width(kind)
        return f'"{_CONSTRAINT[bits]}"(({_C[bits]}){name})'

    def _results(self, form: Form, words: Sequence[Array]) -> list[Sequence[Any]]:
        """The numbers in each result."""
        columns = [numbers(o, w) for o, w in zip(form.operands, words, strict=False) if o != "_"]
        found: list[Sequence[Any]] = []
        for row in zip(*columns, strict=True):
            parts = [form.reference(*values) for values in zip(*row, strict=True)]
            found.append(parts[0] if isinstance(parts[0], tuple) else parts)
        return found

    def _wanted(self, results: list[list[Sequence[Any]]]) -> Wanted:
        bits = np.array(
            [[packed(form.result, parts) for parts in row] for form, row in zip(self.forms, results, strict=True)],
            self.words[0].dtype,
        )
        exact = np.full((*bits.shape, _MOST), math.nan)
        for k, (form, row) in enumerate(zip(self.forms, results, strict=True)):
            if form.rule.close:
                exact[k, :, : form.rule.count] = row
        return Wanted(bits, tuple(f.rule for f in self.forms), exact)


class WarpFamily(Family):
    """Forms whose result depends on other lanes: `reference` maps the 32 lanes' numbers, operand by operand, to 32."""

    def _results(self, form: Form, words: Sequence[Array]) -> list[Sequence[Any]]:
        columns = [[x for (x,) in numbers(o, w)] for o, w in zip(form.operands, words, strict=False) if o != "_"]
        found: list[Sequence[Any]] = []
        for start in range(0, self.count, 32):
            found += [(x,) for x in form.reference(*(c[start : start + 32] for c in columns))]
        return found


@dataclass
class MemoryFamily(Family):
    """Atomics on a cell for every form and thread, `[cell]` in PTX, which holds `cells` before.

    `reference` maps what lies there, and the operands, to what lies there afterwards. The result is what was there: forms
    that return nothing set %0 to 0 themselves.
    """

    cells: Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    _written: ClassVar[tuple[str, ...]] = ("cells", "out")

    def inputs(self) -> dict[str, Array]:
        arrays = super().inputs()
        return {
            **{n: a for n, a in arrays.items() if n != "out"},
            "cells": np.tile(self.cells, (len(self.forms), 1)),
            "out": arrays["out"],
        }

    def wanted(self, arrays: Mapping[str, Array]) -> dict[str, Wanted]:
        words = [arrays[f"in{i}"] for i in range(len(self.words))]
        cells = arrays["cells"]
        after = []
        for form, row in zip(self.forms, cells, strict=True):
            whole = Form(form.ptx, (form.result, *form.operands), form.result, form.reference, form.rule)
            after.append(self._results(whole, [row, *words]))
        returns = np.array([[form.ptx.find("red.") < 0] for form in self.forms])
        return {"cells": self._wanted(after), "out": Wanted(cells * returns, Rule(f"b{self._width}"))}

    def _statement(self, k: int, form: Form) -> str:
        address = f'"l"(cells + {k} * n + i) : "memory");'
        ptx = form.ptx.replace("[cell]", f"[%{len(form.operands) + 1}]")
        text = super()._statement(k, Form(ptx, form.operands, form.result, form.reference, form.rule))
        return text.replace("); out[", f", {address} out[")


def split(kind: str) -> tuple[str, int]:
    """The type and number of a packed type's parts: ("f16", 2) for "f16x2"."""
    single, _, count = kind.partition("x")
    return single, int(count or 1)


def width(kind: str) -> int:
    """Bits of a value, all parts."""
    single, count = split(kind)
    return bits_of(single) * count


def numbers(kind: str, words: Array) -> list[tuple[Any, ...]]:
    """The numbers in each word: one, or those of a packed type, the low one first."""
    single, count = split(kind)
    bits = bits_of(single)
    return list(zip(*(decode(single, words >> bits * i & (1 << bits) - 1) for i in range(count)), strict=True))


def packed(kind: str, parts: Sequence[Any]) -> int:
    """The pattern of a word's numbers."""
    single, _ = split(kind)
    return sum(encode(single, value) << i * bits_of(single) for i, value in enumerate(parts))

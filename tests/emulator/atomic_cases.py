"""atom and red: every operation, type, width, order and state space, the old value as well as the new one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from tests.emulator.cases import Suite
from tests.emulator.exact import BF16, F16, F32, F64
from tests.emulator.float_cases import ADD, dotted, exactly, flush, pick
from tests.emulator.memory_cases import SCOPES, SHARED, bits, dotted_space, hinted, places, some, vector

SUITE = Suite("atomic", slots=True)
add = SUITE.add
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
INTEGER_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[int, int], int]]] = {
    "add": (("u32", "s32", "u64"), operator.add),
    "min": (("u32", "s32", "u64", "s64"), min),
    "max": (("u32", "s32", "u64", "s64"), max),
    "and": (("b32", "b64"), operator.and_),
    "or": (("b32", "b64"), operator.or_),
    "xor": (("b32", "b64"), operator.xor),
    "exch": (("b32", "b64"), lambda o, b: b),
    "inc": (("u32",), lambda o, b: 0 if o >= b else o + 1),
    "dec": (("u32",), lambda o, b: b if o == 0 or o > b else o - 1),
}
SPACES = ("", "global", *SHARED)


def operations(opcode: str) -> Iterator[tuple[str, ...]]:
    """(order, space, operation, width, type)"""
    sems = ("", "relaxed", "acquire", "release", "acq_rel") if opcode == "atom" else ("", "relaxed", "release")
    orders = [".".join(filter(None, pair)) for pair in itertools.product(sems, ("", *SCOPES))]
    for order, space in itertools.product(orders, SPACES):
        for op, (kinds, _) in INTEGER_OPERATIONS.items():
            if op != "exch" or opcode == "atom":
                yield from ((order, space, op, "", kind) for kind in kinds)
        yield from ((order, space, "add", "", kind) for kind in ("f32", "f64"))
        yield from ((order, space, "add.noftz", "", kind) for kind in HALVES)
        if opcode == "atom":
            yield from ((order, space, "cas", "", kind) for kind in ("b16", "b32", "b64"))
        if space in ("", "global"):
            yield from ((order, space, "add", width, "f32") for width in ("v2", "v4"))
            for op, width, kind in itertools.product(("add", "min", "max"), ("v2", "v4", "v8"), HALVES):
                if width != "v8" or not kind.endswith("x2"):
                    yield order, space, f"{op}.noftz", width, kind


def combined(op: str, kind: str, in_global: bool) -> Callable[..., Any]:
    name = op.partition(".")[0]
    if name == "cas":
        return lambda o, b, c, e: c if o == b else o
    if kind in FORMATS or kind in HALVES:
        if name != "add":
            return lambda o, b: pick((o, b), name == "max", False)
        sum_ = exactly(ADD, FORMATS[kind.removesuffix("x2")])
        return (lambda o, b: flush(sum_(flush(o), flush(b)))) if kind == "f32" and in_global else sum_
    return INTEGER_OPERATIONS[name][1]


def results(size: int, kind: str, count: int) -> list[str]:
    prefix = {2: "%rs", 4: "%f" if kind == "f32" else "%r", 8: "%fd" if kind == "f64" else "%rd"}[size]
    first = {"%f": 14, "%fd": 14, "%r": 64}.get(prefix, 24)
    return [f"{prefix}{first + i}" for i in range(count)]


# Elements in memory are a, c, a, ... and the operands b, e, b, ...; each case looks at one element.
for opcode in ("atom", "red"):
    for n, (order, space, op, width, kind) in enumerate(some(opcode, operations(opcode))):
        count = int(width[1:] if width else 1)
        at = n % count
        k = f"u{kind[1:]}" if kind[0] == "b" and kind not in HALVES else kind
        size = {"f16x2": 4, "bf16x2": 4, "f16": 2, "bf16": 2}.get(kind) or bits(kind) // 8
        names = results(size, kind, count)
        hint, policy = hinted("st", "relaxed", space, n) if op != "cas" else ("", "")
        words = f"{opcode}{dotted(order, space, op, 'L2::cache_hint' if policy else '', width)}.{kind}"
        given = "{b}, {c}" if op == "cas" else vector([("{b}", "{e}")[i % 2] for i in range(count)], width)
        for place in places(space)[: 1 if width else 2]:
            base, state = place.strip("[]"), dotted_space(space)
            code = ""
            for i in range(count):
                code += f"st{state}.b{8 * size} [{base}+{i * size}], {('{a}', '{c}')[i % 2]}; "
            target = f"{vector(names, width)}, " if opcode == "atom" else ""
            code += f"{words} {target}{place}, {given}{policy};"
            old, operand = (0, 1) if at % 2 == 0 else (2, 3)
            if opcode == "atom":
                kept = lambda *v, i=old: v[i]  # noqa: E731
                add(f"{code} mov.b{8 * size} {{d}}, {names[at]};", f"{k} {k} {k} {k}", k, kept, canonical=False)
            function = combined(op, kind, place == "[%rd20]")
            changed = function if op == "cas" else lambda *v, f=function, i=old, j=operand: f(v[i], v[j])
            code += f" ld{state}.b{8 * size} {{d}}, [{base}+{at * size}];"
            add(code, f"{k} {k} {k} {k}", k, changed, canonical=False)

WHOLE = "u64 u64 u64 u64"
for space in SPACES:
    for place, (i, part) in itertools.product(places(space), enumerate(("{d}, _", "_, {d}"))):
        state = dotted_space(space)
        fill = "mov.b128 %q1, {{ {a}, {b} }}; mov.b128 %q2, {{ {a}, {c} }}; mov.b128 %q3, {{ {e}, {a} }};"
        fill += f" st{state}.b128 {place}, %q1;"
        was = f"mov.b128 {{{{ {part} }}}}, %q0;"
        new = f"ld{state}.b128 %q0, {place}; {was}"
        swap, exchange = f"atom{state}.cas.b128 %q0, {place}, %q2, %q3;", f"atom{state}.exch.b128 %q0, {place}, %q3;"
        add(f"{fill} {swap} {was}", WHOLE, "u64", lambda *v, i=i: v[i])
        add(f"{fill} {swap} {new}", WHOLE, "u64", lambda a, b, c, e, i=i: ((e, a) if b == c else (a, b))[i])
        add(f"{fill} {exchange} {was}", WHOLE, "u64", lambda *v, i=i: v[i])
        add(f"{fill} {exchange} {new}", WHOLE, "u64", lambda a, b, c, e, i=i: (e, a)[i])

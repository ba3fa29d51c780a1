"""A score function as an expression: the user's Python, run once on values that record what is done to them.

Whole numbers are recorded with bounds. They are 32 bits in C: unsigned where the bounds say that they are never negative,
else int32_t; the bounds hold whatever device memory has, so that an index within them needs no guard.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Final, Literal, NoReturn

from kvgen.expr.score_errors import FUNCTIONS, refuse

ValueKind = Literal["float", "int", "condition"]
FULL: Final = (-(2**31), 2**31 - 1)
WORD: Final = (0, 2**32 - 1)
MOST: Final = 4096  # operations of a score, of which each is a statement of CUDA or a part of one
F32_MAX: Final = 3.4028235677973366e38  # what rounds to a finite f32 lies below
# What `at` has, with bounds: of the call's own shape, or of what the cache's lengths may be. kv_head follows from q_head.
PLACES: Final = {
    "b": (0, 2**31 - 1), "q_head": (0, 65535), "kv_head": (0, 65535), "row": (0, 2**31 - 1), "i": (0, 2**31 - 1),
    "position": WORD, "token": WORD, "tokens": WORD,
}  # fmt: skip
_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "true_divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod, "negative": operator.neg,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne, "absolute": operator.abs,
}  # fmt: skip


class Graph:
    """The values of one run, each distinct one once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Value] = {}

    def value(
        self, kind: ValueKind, op: str, args: Sequence[Value] = (), payload: Any = None, bounds: tuple[int, int] = FULL
    ) -> Value:
        """The value of an operation, `bounds` where it is whole."""
        # 1 == 1.0 and 0.0 == -0.0, which are different literals.
        key = (kind, op, tuple(id(a) for a in args), repr(payload))
        if key not in self._known:
            if len(self._known) == MOST:
                refuse(
                    f"got more than {MOST} different operations; a score of that many is computed for every key; use a tensor"
                )
            self._known[key] = Value(self, kind, op, tuple(args), payload, bounds)
        return self._known[key]


def wrapped(low: int, high: int) -> tuple[int, int]:
    """The bounds of a whole number that would have these, in 32 bits."""
    return (low, high) if (low >= 0 and high <= WORD[1]) or (low >= FULL[0] and high <= FULL[1]) else FULL


def signed(value: Value) -> tuple[int, int]:
    """The bounds of the same 32 bits as int32_t."""
    return value.bounds if value.bounds[1] <= FULL[1] else FULL


class Value:
    """A number or a condition that depends on where a score stands.

    `op` is "s", "at", "scalar", "literal", "load", an operator or a function; `payload` its name or number.
    """

    __slots__ = ("args", "bounds", "graph", "kind", "op", "payload")

    def __init__(
        self, graph: Graph, kind: ValueKind, op: str, args: tuple[Value, ...], payload: Any, bounds: tuple[int, int]
    ) -> None:
        self.graph, self.kind, self.op, self.args, self.payload, self.bounds = graph, kind, op, args, payload, bounds

    # Arithmetic ----------------------------------------------------------------------------------------------------

    def _arithmetic(self, op: str, other: Any, *, swapped: bool = False) -> Value:
        a, b = (self, lift(self.graph, other, op)) if not swapped else (lift(self.graph, other, op), self)
        if op in ("//", "%"):
            return _divided(op, a, b)
        numbers(op, a, b)
        if op == "/" or "float" in (a.kind, b.kind):
            return self.graph.value("float", op, (to_float(a), to_float(b)))
        found = [_OPERATOR[op](x, y) for x in a.bounds for y in b.bounds]
        return self.graph.value("int", op, (a, b), bounds=wrapped(min(found), max(found)))

    def __add__(self, other: Any) -> Value:
        return self._arithmetic("+", other)

    def __radd__(self, other: Any) -> Value:
        return self._arithmetic("+", other, swapped=True)

    def __sub__(self, other: Any) -> Value:
        return self._arithmetic("-", other)

    def __rsub__(self, other: Any) -> Value:
        return self._arithmetic("-", other, swapped=True)

    def __mul__(self, other: Any) -> Value:
        return self._arithmetic("*", other)

    def __rmul__(self, other: Any) -> Value:
        return self._arithmetic("*", other, swapped=True)

    def __truediv__(self, other: Any) -> Value:
        return self._arithmetic("/", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._arithmetic("/", other, swapped=True)

    def __floordiv__(self, other: Any) -> Value:
        return self._arithmetic("//", other)

    def __rfloordiv__(self, other: Any) -> Value:
        return self._arithmetic("//", other, swapped=True)

    def __mod__(self, other: Any) -> Value:
        return self._arithmetic("%", other)

    def __rmod__(self, other: Any) -> Value:
        return self._arithmetic("%", other, swapped=True)

    def __neg__(self) -> Value:
        numbers("-", self)
        if self.kind == "float":
            return self.graph.value("float", "negate", (self,))
        return lift(self.graph, 0, "-") - self

    def __pos__(self) -> Value:
        numbers("+", self)
        return self

    def __abs__(self) -> Value:
        return call("abs", self)

    # Conditions ----------------------------------------------------------------------------------------------------

    def _compare(self, op: str, other: Any) -> Value:
        a, b = self, lift(self.graph, other, op)
        numbers(op, a, b)
        if "float" in (a.kind, b.kind):
            a, b = to_float(a), to_float(b)
        return self.graph.value("condition", op, (a, b))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self._compare("==", other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._compare("!=", other)

    __hash__ = object.__hash__

    def _logic(self, op: str, other: Any) -> Value:
        b = lift(self.graph, other, op, condition=True)
        if self.kind != "condition" or b.kind != "condition":
            refuse(f"got {op} on numbers; &, | and ~ combine conditions, such as (at.token > 3) & (s > 0.0)")
        return self.graph.value("condition", op, (self, b))

    def __and__(self, other: Any) -> Value:
        return self._logic("&", other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Value:
        return self._logic("|", other)

    __ror__ = __or__

    def __invert__(self) -> Value:
        if self.kind != "condition":
            refuse("got ~ on a number; &, | and ~ combine conditions, such as ~(at.token > 3)")
        return self.graph.value("condition", "~", (self,))

    # What an expression cannot be --------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        refuse(
            "got a branch that depends on a score or its place (if, while, and, or, not, a < b < c, min() or max()); a kernel "
            "evaluates one expression for all scores; write kvgen.score.where(condition, a, b), combine conditions with &, "
            "| and ~, and take kvgen.score.minimum or maximum"
        )

    def _number(self) -> NoReturn:
        refuse(
            "got a conversion to a Python number (float(), int(), a function of math, range() or an index of a list); scores "
            f"and places are known on the device only; take the functions of kvgen.score: {', '.join(FUNCTIONS)}"
        )

    def __float__(self) -> float:
        self._number()

    def __int__(self) -> int:
        self._number()

    def __index__(self) -> int:
        self._number()

    def __pow__(self, other: Any) -> Value:
        refuse("got **; write x * x, or kvgen.score.exp2(y * kvgen.score.log2(x))")

    __rpow__ = __pow__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"got .{name} of a number; the functions of kvgen.score take it: {', '.join(FUNCTIONS)}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        found = _OPERATORS.get(ufunc.__name__)
        if method == "__call__" and found is not None and not options:
            return found(*(self._plain(x) for x in inputs))
        _foreign(ufunc.__name__)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _foreign(function.__name__)

    def _plain(self, x: Any) -> Any:
        return x if isinstance(x, Value) else lift(self.graph, x, "a function of NumPy")


_OPERATOR: Final[dict[str, Callable[[int, int], int]]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _foreign(name: str) -> NoReturn:
    own = name if name in FUNCTIONS else ""
    instead = f"kvgen.score.{own}" if own else f"the functions of kvgen.score ({', '.join(FUNCTIONS)})"
    refuse(f"got numpy.{name} of a score or its place, which are known on the device only; take {instead}")


def describe(value: Any) -> str:
    """The value's name in messages."""
    if isinstance(value, TensorArgument):
        return f"the tensor {value.name} without an index"
    if isinstance(value, Value):
        return {"float": "a number", "int": "a whole number", "condition": "a condition"}[value.kind]
    return f"{type(value).__name__} {value!r:.40}"


def lift(graph: Graph, given: Any, op: str, *, condition: bool = False) -> Value:
    """`given` as a value: a traced one, or a Python number."""
    if isinstance(given, Value):
        return given
    if isinstance(given, TensorArgument):
        refuse(f"got the tensor {given.name} in {op}; take an element of it, as in {given.name}[at.q_head]")
    if isinstance(given, bool) and condition:
        return graph.value("condition", "literal", payload=given)
    if isinstance(given, bool) or not isinstance(given, Real):
        refuse(f"got {describe(given)} in {op}; it takes numbers, and what follows from s, at, tensors and scalars")
    if isinstance(given, Integral):
        number = int(given)
        if not FULL[0] <= number <= FULL[1]:
            refuse(f"got {number} in {op}; whole numbers have 32 bits; write {number}.0 for a number of f32")
        return graph.value("int", "literal", payload=number, bounds=(number, number))
    real = float(given)
    if math.isnan(real) or F32_MAX <= abs(real) < math.inf:
        refuse(f"got {real} in {op}; numbers are f32: below 3.4028235e38, or an infinity")
    return graph.value("float", "literal", payload=real)


def numbers(op: str, *values: Value) -> None:
    """Refuse conditions."""
    if any(v.kind == "condition" for v in values):
        refuse(f"got a condition in {op}, which takes numbers; write kvgen.score.where(condition, 1.0, 0.0)")


def to_float(value: Value) -> Value:
    """A number as f32."""
    if value.kind == "float":
        return value
    if value.op == "literal":
        return value.graph.value("float", "literal", payload=float(value.payload))
    return value.graph.value("float", "float", (value,))


def _divided(op: str, a: Value, b: Value) -> Value:
    numbers(op, a, b)
    if "float" in (a.kind, b.kind) or b.op != "literal" or b.payload < 1:
        hint = "kvgen.score.floor(a / b)" if op == "//" else "a - b * kvgen.score.floor(a / b)"
        shown = b.payload if b.op == "literal" else describe(b)
        refuse(
            f"got {op} of {describe(a)} by {shown}; {op} divides whole numbers by a constant from 1 on; otherwise write {hint}"
        )
    n, (low, high) = int(b.payload), a.bounds
    bounds = (low // n, high // n) if op == "//" else (0, n - 1) if low < 0 else (0, min(high, n - 1))
    return a.graph.value("int", op, (a, b), bounds=bounds)


def call(name: str, *given: Any) -> Value:
    """A function of kvgen.score on values, at least one of which is traced."""
    graph = next(x.graph for x in given if isinstance(x, Value))
    if name == "where":
        return _chosen(graph, *given)
    values = [lift(graph, x, name) for x in given]
    numbers(name, *values)
    if name == "floor" and values[0].kind == "int":
        return values[0]
    if name in ("abs", "minimum", "maximum") and all(v.kind == "int" for v in values):
        bounds = [v.bounds if all(w.bounds[0] >= 0 for w in values) else signed(v) for v in values]
        if name == "abs":
            low, high = bounds[0]
            if low >= 0:
                return values[0]
            return graph.value("int", name, values, bounds=(max(-high, 0), max(-low, high)))
        choose = min if name == "minimum" else max
        joined = (choose(low for low, _ in bounds), choose(high for _, high in bounds))
        return graph.value("int", name, values, bounds=joined)
    return graph.value("float", name, [to_float(v) for v in values])


def _chosen(graph: Graph, condition: Any, a: Any, b: Any) -> Value:
    asked = lift(graph, condition, "where", condition=True)
    if asked.kind != "condition":
        refuse(f"got {describe(asked)} as where's condition; write where(x > 0, a, b)")
    yes, no = lift(graph, a, "where", condition=True), lift(graph, b, "where", condition=True)
    if yes.kind == no.kind == "condition":
        return (asked & yes) | (~asked & no)
    numbers("where", yes, no)
    if "float" in (yes.kind, no.kind):
        return graph.value("float", "where", (asked, to_float(yes), to_float(no)))
    both = (yes, no)
    bounds = [v.bounds if all(w.bounds[0] >= 0 for w in both) else signed(v) for v in both]
    joined = (min(low for low, _ in bounds), max(high for _, high in bounds))
    return graph.value("int", "where", (asked, yes, no), bounds=joined)


class Place:
    """`at` of a traced function."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in PLACES:
            near = difflib.get_close_matches(name, PLACES, n=1)
            refuse(f"got at.{name}; at has {', '.join(PLACES)}{f'; did you mean at.{near[0]}?' if near else ''}")
        return self._graph.value("int", "at", payload=name, bounds=PLACES[name])


class TensorArgument:
    """A tensor of the score's own: `name[index, ...]` is an element of it, 0 outside of its shape."""

    def __init__(
        self, graph: Graph, name: str, kind: ValueKind, shape: tuple[int | str, ...], bounds: tuple[int, int]
    ) -> None:
        self._graph, self.name, self._kind, self.shape, self._bounds = graph, name, kind, shape, bounds

    def __getitem__(self, index: Any) -> Value:
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != len(self.shape):
            refuse(f"got {self.name} with {len(given)} indices; its shape is [{', '.join(map(str, self.shape))}]")
        found = []
        for axis, one in zip(self.shape, given, strict=True):
            if isinstance(one, slice) or one is Ellipsis or one is None:
                refuse(f"got a slice of {self.name}; an index is a whole number on every axis")
            value = lift(self._graph, one, f"an index of {self.name}")
            if value.kind != "int":
                refuse(f"got {describe(value)} as an index of {self.name}; indices are whole numbers")
            if value.op == "literal" and (value.payload < 0 or (isinstance(axis, int) and value.payload >= axis)):
                refuse(f"got {value.payload} as an index of {self.name}, whose axis has {axis} elements from 0 on")
            found.append(value)
        return self._graph.value(self._kind, "load", found, self.name, self._bounds)

    def _bare(self, *other: Any) -> NoReturn:
        refuse(f"got the tensor {self.name} without an index; take an element of it, as in {self.name}[at.q_head]")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _bare
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __iter__ = __bool__ = _bare

    def __array_ufunc__(self, *inputs: Any, **options: Any) -> Any:
        self._bare()

"""Score modifications: what happens to s = scale * (q . k) before the softmax, by fields or by a Python function."""

from __future__ import annotations

import inspect
import keyword
import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_serializer, field_validator, model_validator

from kvgen.expr.score_c import Elements, Names, Printer
from kvgen.expr.score_errors import TraceError
from kvgen.expr.score_trace import FULL, WORD, Graph, Place, TensorArgument, Value, ValueKind, describe, lift, to_float
from kvgen.schema.base import Spec, zero_is_none
from kvgen.schema.sources import shown_path

TensorName = Literal["f32", "f16", "bf16", "i32", "u32", "i8", "u8"]
ScalarName = Literal["f32", "i32", "u32"]
_BOUNDS: Final = {"i8": (-128, 127), "u8": (0, 255), "i32": FULL, "u32": WORD}
_ARGUMENT: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
# Axes of the launcher's other arrays, of which a tensor would have to be as long.
_AXES: Final = {"K": "bias and mask", "P": "page_lists", "W": "workspace"}
# Functions of kvgen.score, which other libraries have by the same names.
_FUNCTIONS: Final = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "abs", "minimum", "maximum", "floor", "where")
_RESERVED: Final = ("cache", "stream", "self", "errors", "workspace", "object")


class Tensor(Spec):
    """A tensor that a score function reads: a contiguous array, an argument of the launcher.

    `shape` has whole numbers, "q_heads", "kv_heads", "T" (rows of q), "B" (requests), and names of your own, which take
    their size from the call. K, P and W are axes of other arguments.
    """

    dtype: TensorName
    """Element type of the array."""
    shape: tuple[int | str, ...] = Field(min_length=1, max_length=8, strict=False)
    """Extents: whole numbers, "q_heads", "kv_heads", "T" (rows of q), "B" (requests), or names other than
    K, P and W that take their size from the call.
    """

    def __init__(self, dtype: TensorName, shape: tuple[int | str, ...] | list[int | str]) -> None:
        self._fill(dtype=dtype, shape=shape)

    @field_validator("shape")
    @classmethod
    def _axes(cls, value: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for axis in value:
            if isinstance(axis, int) and not 1 <= axis < 2**31:
                raise ValueError(f"shape: got {axis}; a dimension is at least 1 and below 2^31")
            if isinstance(axis, str) and (not _ARGUMENT.fullmatch(axis) or keyword.iskeyword(axis)):
                raise ValueError(
                    f"shape: got {axis!r}; a dimension is a whole number or a name such as 'q_heads' or 'T'"
                )
            if isinstance(axis, str) and axis in _AXES:
                raise ValueError(f"shape: got {axis!r}, which is an axis of {_AXES[axis]}; choose another name")
        return value

    @property
    def kind(self) -> ValueKind:
        """Kind of an element in a score function."""
        return "int" if self.dtype in _BOUNDS else "float"

    @property
    def bounds(self) -> tuple[int, int]:
        """The values of an element that is whole."""
        return _BOUNDS.get(self.dtype, FULL)


class _Names(dict[str, Any]):
    """A mapping that a frozen spec can be compared and hashed by."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@dataclass(frozen=True)
class Function:
    """A score function: what it computes as C over symbolic names, by which it is compared, and itself."""

    text: tuple[str, ...]
    call: Callable[..., Any] = field(compare=False, repr=False)
    root: Value = field(compare=False, repr=False)

    def statements(self, names: Names) -> Iterator[str]:
        """C that sets `s`."""
        printer = Printer(self.root, names)
        yield from printer.lines
        yield f"s = {printer.result};"


class Score(Spec):
    """Changes of every score s = scale * (q . k), in this order:

    1. `softcap=cap`: s = cap * tanh(s / cap) (Gemma 2).
    2. `alibi`: s += alibi_slopes[q_head] * (token - position), argument `alibi_slopes`, f32 `[q_heads]`. That is the
       paper's form; engines that add slope * token instead differ by a constant per row: not in the output, but in the LSE.
    3. `relative=extent`: s += relative_bias[row, q_head, position - token] where that distance is in [0, extent), argument
       `relative_bias` `[T, q_heads, extent]`, in the cache's dtype or, with `relative_dtype="f32"`, in f32.
    4. `bias`: s += bias[row, token], argument `bias`, f32 `[T, K]`, whose rows may be strided. -inf hides the token,
       whatever its score, and so does every token from K on.
    5. `function(s, at, ...)`: the score that this Python function returns. It is run once, on values that record what is
       done to them, and becomes C. `at` says where the score stands: b (request), q_head, kv_head, row (of q), i (the row
       among its request's), position (of the row), token (of the key) and tokens (of the request), whole numbers below
       2^31. It may use + - * / on numbers, // and % on whole ones by constants, comparisons, & | ~ on conditions, and
       exp, exp2, log, log2, tanh, sqrt, abs, minimum, maximum, floor and where of `kvgen.score`; a result of -inf hides
       the token. Its other parameters are the names of `tensors` and `scalars`, arguments of the launcher; a tensor's
       elements outside of its shape are 0. Numbers are f32, divisions within 2 ulp; whole numbers have 32 bits.
    """

    softcap: Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False)] | None = None
    """Cap of the scores: s = softcap * tanh(s / softcap). None: no cap."""
    alibi: bool = False
    """True: the call brings `alibi_slopes`, f32 `[q_heads]`, and s += slope * (token - position)."""
    relative: Annotated[Annotated[int, Field(ge=1, le=2**31 - 1)] | None, BeforeValidator(zero_is_none)] = None
    """Distances that have a bias: the call brings `relative_bias[T, q_heads, relative]`, added where 0 <= position -
    token < relative. None or 0: no such bias.
    """
    relative_dtype: Literal["same", "f32"] = "same"
    """Element type of `relative_bias`: "same" as the cache's `dtype`, or "f32"."""
    bias: bool = False
    """True: the call brings `bias`, f32 `[T, K]`, and s += bias[row, token]; -inf hides the token, and so does a token
    from K on.
    """
    tensors: Mapping[str, Tensor] = Field(default_factory=_Names)
    """Arrays that `function` reads, by the name of its parameter; each is an argument of the launcher."""
    scalars: Mapping[str, ScalarName] = Field(default_factory=_Names)
    """Numbers that `function` takes, by the name of its parameter: "f32", "i32" or "u32"; each is an argument of the
    launcher.
    """
    function: Function | Callable[..., Any] | None = None
    """Python function f(s, at, ...) that returns the new score. It is run once, on values that record what is done to
    them, and becomes CUDA. None: no function.
    """

    @field_validator("tensors", "scalars")
    @classmethod
    def _named(cls, value: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        for name in value:
            if not _ARGUMENT.fullmatch(name) or keyword.iskeyword(name) or name in _RESERVED:
                raise ValueError(
                    f"{info.field_name}: got {name!r}; it is an argument of a Python function: letters, digits and _, a "
                    f"letter first, at most 40 characters, no Python keyword, and none of {', '.join(_RESERVED)}"
                )
        return _Names(value)

    @field_validator("function", mode="plain")
    @classmethod
    def _traced(cls, value: Any, info: ValidationInfo) -> Function | None:
        if value is None or isinstance(value, Function):
            return value
        if not isinstance(value, FunctionType):
            named = getattr(value, "__name__", "")
            offered = f", which may call kvgen.score.{named}" if named in _FUNCTIONS else ""
            raise ValueError(
                f"function: got {value!r:.80}; it is a Python function, def my_score(s, at): return ...{offered}"
            )
        if "tensors" not in info.data or "scalars" not in info.data:
            return None  # whose own mistakes are told
        try:
            return trace(value, info.data["tensors"], info.data["scalars"])
        except TraceError as error:
            raise ValueError(_located(error)) from error

    @model_validator(mode="after")
    def _read_by_somebody(self) -> Score:
        if self.function is None and (self.tensors or self.scalars):
            name = next(iter({**self.tensors, **self.scalars}))
            raise ValueError(
                f"{'tensors' if name in self.tensors else 'scalars'}: got {name!r} without a function, which alone reads "
                "it; give function=..., or leave it out"
            )
        if self.relative is None and self.relative_dtype != "same":
            raise ValueError(
                f"relative_dtype: got {self.relative_dtype!r} without relative; it is the dtype of its argument; leave it out"
            )
        return self

    @property
    def traced(self) -> Function | None:
        """The function as it was traced."""
        assert self.function is None or isinstance(self.function, Function)
        return self.function

    @property
    def numbered(self) -> str | None:
        """The head, "q_head" or "kv_head", whose number the function computes with; None where it only finds elements on axes
        of that many heads by it."""
        waiting, seen = [self.traced.root] if self.traced is not None else [], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if value.op == "at" and value.payload in ("q_head", "kv_head"):
                return str(value.payload)
            axes = self.tensors[value.payload].shape if value.op == "load" else (None,) * len(value.args)
            waiting += [
                each
                for axis, each in zip(axes, value.args, strict=True)
                if not (each.op == "at" and axis == f"{each.payload}s")
            ]
        return None

    @field_serializer("function")
    def _as_text(self, value: Function | None) -> list[str] | None:
        return None if value is None else list(value.text)


def _located(error: TraceError) -> str:
    """`function: specs/x.py:12 (`return s ** 2`): got ...`."""
    text = linecache.getline(error.file, error.line).strip()
    return f"function: {shown_path(error.file)}:{error.line}{f' (`{text}`)' if text else ''}: {error.message}"


def trace(function: FunctionType, tensors: Mapping[str, Tensor], scalars: Mapping[str, str]) -> Function:
    """The function as an expression; raises TraceError with the line that is none."""
    graph = Graph()
    known: dict[str, Any] = {n: TensorArgument(graph, n, t.kind, t.shape, t.bounds) for n, t in tensors.items()}
    for name, kind in scalars.items():
        if name in known:
            raise ValueError(f"scalars: got {name!r}, which is a tensor too; every argument has a name of its own")
        known[name] = graph.value("float" if kind == "f32" else "int", "scalar", (), name, _BOUNDS.get(kind, FULL))
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    taken = _parameters(function, known)
    try:
        found = function(graph.value("float", "s"), Place(graph), **{name: known[name] for name in taken})
        if isinstance(found, (bool, TensorArgument)) or (isinstance(found, Value) and found.kind == "condition"):
            hint = "; write where(condition, s, float('-inf')) to hide a token" if isinstance(found, Value) else ""
            raise TraceError(
                file, line, f"got {describe(found)} from {function.__name__}; it returns the new score{hint}"
            )
        if found is None:
            raise TraceError(
                file, line, f"got nothing from {function.__name__}; it returns the new score: end it with return s"
            )
        root = to_float(lift(graph, found, f"what {function.__name__} returns"))
    except TraceError:
        raise
    except Exception as error:
        at = line
        step = error.__traceback__
        while step is not None:
            at = step.tb_lineno if step.tb_frame.f_code.co_filename == file else at
            step = step.tb_next
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        message = f"got {said}; a score function computes with s, at, its tensors and scalars"
        raise TraceError(file, at, message) from error
    symbols = Names({n: Elements(n, "", t.shape, t.shape) for n, t in tensors.items()}, {n: n for n in scalars}, 0, 0)
    printer = Printer(root, symbols)
    return Function((*printer.lines, f"s = {printer.result};"), function, root)


def _parameters(function: FunctionType, known: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that the function takes besides s and at: all tensors and scalars, and no others without a default."""
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    parameters = list(inspect.signature(function).parameters.values())
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if len(parameters) < 2 or any(p.kind is not named[0] for p in parameters[:2]):
        raise TraceError(file, line, f"got {function.__name__}{inspect.signature(function)}; it takes (s, at) first")
    for p in parameters[2:]:
        if p.kind not in named or (p.name not in known and p.default is inspect.Parameter.empty):
            names = ", ".join(known) or "none"
            raise TraceError(
                file,
                line,
                f"got the parameter {p.name}; it must be one of tensors and scalars ({names}), or have a default",
            )
    unread = [name for name in known if name not in {p.name for p in parameters[2:]}]
    if unread:
        raise TraceError(
            file, line, f"got no parameter {unread[0]}, which tensors or scalars have; take it, or leave it out there"
        )
    return tuple(p.name for p in parameters[2:] if p.name in known)

"""docs/spec_reference.md: every spec model with its fields, from the models and the docstrings under their fields."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docpages.blocks import markdown
from kvgen import ops
from kvgen.layout.dtypes import DTYPES
from kvgen.schema import (
    arguments,
    cache,
    cache_fields,
    interleave,
    kernel_set,
    keys,
    mask,
    model,
    norm,
    position_scale,
    quant,
    ragged,
    score,
    state,
)
from kvgen.schema import tables as page_tables
from kvgen.schema.base import Spec
from kvgen.schema.field_docs import field_docs

_HEAD: Final = """# Spec reference

Every field of every model that a spec may use. A spec is a Python file in the folder `specs`, with a variable `kernels`. All models are
keyword-only, frozen, and refuse unknown fields. Names are imported from `kvgen`; operations and the parameters of `Custom` are in
`kvgen.ops`, page tables and `Layout` in `kvgen` as well.

A shape such as `[T, q_heads, head_dim]` is in elements, slowest axis first: B is the number of requests of a batch, T the number of new
or query rows of a step.

<!-- Written by `python -m docpages` from the models. -->
"""

_GROUPS: Final[tuple[tuple[str, tuple[type[Spec], ...]], ...]] = (
    ("The set", (kernel_set.KernelSet,)),
    ("Caches", (cache.Paged, cache.Continuous, cache.Latent, ragged.Ragged, state.State, cache_fields.Layout)),
    (
        "Page tables",
        (
            page_tables.Dense,
            page_tables.CSR,
            page_tables.PerKV,
            page_tables.Indirect,
            page_tables.Mapped,
            page_tables.Ring,
            interleave.Interleave,
        ),
    ),
    ("Quantization", (quant.Quant, quant.Block)),
    ("Attention", (mask.Mask, keys.Keys, score.Score, score.Tensor)),
    ("Norms, and factors of q", (norm.RmsNorm, norm.LayerNorm, position_scale.PositionScale)),
    (
        "Facts of a model",
        (
            model.Model,
            model.Rope,
            model.LinearScaling,
            model.Llama3Scaling,
            model.YarnScaling,
            model.LongRopeScaling,
            model.Mla,
        ),
    ),
    ("Parameters of a kernel of your own", (arguments.Array, arguments.Scalar, arguments.Size, arguments.TensorMap)),
)


def spec_reference() -> str:
    """The page."""
    groups = [*_GROUPS, ("Operations", operations())]
    parts = [_HEAD]
    for title, models in groups:
        parts.append(f"\n## {title}\n")
        parts += [_section(m) for m in models]
    return "".join(parts)


def operations() -> tuple[type[Spec], ...]:
    """The operations of kvgen.ops, by name."""
    return tuple(sorted((*ops.ALL, ops.Custom), key=lambda o: o.__name__))


def _section(model: type[Spec]) -> str:
    doc = markdown(inspect.cleandoc(model.__doc__ or ""))
    docs = field_docs(model)
    shown = [name for name in model.model_fields if name != "kind"]
    fields = "".join(_field(name, model.model_fields[name], docs[name]) for name in shown)
    return f"\n### {model.__name__}\n\n{doc}\n\n{fields or 'It has no fields.' + chr(10)}"


def _field(name: str, field: FieldInfo, doc: str) -> str:
    rule = _rule(field.metadata)
    need = "required" if field.is_required() else f"default `{_default(field)}`"
    return f"- **`{name}`**: `{_type(field.annotation)}`{f' {rule}' if rule else ''}, {need}. {markdown(doc)}\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "..." if value is PydanticUndefined else _value(value)


def _value(value: Any) -> str:
    if isinstance(value, Spec):
        given = ", ".join(
            f"{n}={_value(getattr(value, n))}" for n in type(value).model_fields if n in value.model_fields_set
        )
        return f"{type(value).__name__}({given})"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(k)}: {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(_value(v) for v in value)}{',' if len(value) == 1 else ''})"
    return repr(value)


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if origin is Annotated:
        rule = _rule([m for f in inner[1:] for m in (f.metadata if isinstance(f, FieldInfo) else [f])])
        return _type(inner[0]) + (f" {rule}" if rule else "")
    if origin is Literal:
        # typing keeps one object for literals of the same values, in the order of whichever module came first.
        order = list(DTYPES)
        return " | ".join(_value(v) for v in (sorted(inner, key=order.index) if set(inner) <= set(order) else inner))
    if origin in (Union, types.UnionType):
        return " | ".join(_type(a) for a in inner)
    if origin is tuple:
        return f"tuple[{', '.join('...' if a is Ellipsis else _type(a) for a in inner)}]"
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        return name if name == "Callable" else f"{name}[{', '.join(_type(a) for a in inner)}]"
    name = getattr(annotation, "__name__", str(annotation))
    return "Cache" if name == "AnyCache" else name


def _rule(metadata: list[Any]) -> str:
    """The bounds among pydantic's metadata, as ">= 1, <= 1024"."""
    words = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    return ", ".join(f"{sign} {_bound(getattr(m, key))}" for m in metadata for key, sign in words if hasattr(m, key))


def _bound(value: float) -> str:
    """Powers of two and what lies one below them as such; other numbers as they are."""
    if isinstance(value, int) and value >= 4096:
        for number, end in ((value, ""), (value + 1, " - 1")):
            if number & (number - 1) == 0:
                return f"2^{number.bit_length() - 1}{end}"
    return f"{value:g}" if isinstance(value, float) else str(value)

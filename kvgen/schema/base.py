"""The base of every spec model, and how its mistakes are worded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from kvgen.errors import FieldError, SpecError
from kvgen.schema.field_docs import field_docs
from kvgen.schema.hints import FIELDS, called, example, wanted

_SHOWN: Final = 80  # characters of a value in a message
_MODELS: Final = "\0"  # in a line, until all members of a union are known


def zero_is_none(value: Any) -> Any:
    """A field's value before it is checked: 0 stands for None, as engines and config files write "no window"."""
    return None if type(value) is int and value == 0 else value


def as_written(value: Any) -> str:
    """A field's value as a spec has it, with the fields that are not at their defaults: Mask(window=1024)."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {as_written(item)}' for key, item in value.items())}}}"
    if not isinstance(value, Spec):
        return "none" if value is None else getattr(value, "__name__", None) or repr(value)
    fields = type(value).model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    given = [(name, getattr(value, name)) for name in fields if getattr(value, name) != defaults[name]]
    return f"{type(value).__name__}({', '.join(f'{name}={as_written(item)}' for name, item in given)})"


class Spec(BaseModel):
    """Frozen, keyword-only, refusing unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, defer_build=True)

    def _fill(self, **fields: Any) -> None:
        """Make the spec of its fields; raises FieldError, in kvgen's words, for those that are wrong."""
        try:
            BaseModel.__init__(self, **fields)
        except ValidationError as error:
            raise FieldError(located(error)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Another spec with these fields changed, checked as any other: raises SpecError for a field or a value that is none.

        deep changes nothing: specs are frozen.
        """
        return type(self)(**({name: getattr(self, name) for name in self.model_fields_set} | dict(update or {})))

    if not TYPE_CHECKING:  # type checkers have the fields as keyword arguments, and no assignment to them

        def __init__(self, /, *given: Any, **fields: Any) -> None:
            name = type(self).__name__
            if given:
                fields_of = type(self).model_fields
                first = [n for n, field in fields_of.items() if field.is_required()] or list(fields_of)
                known = ", ".join(f"{field}=..." for field in first[:3])
                raise SpecError(
                    f"{name}: got {_shown(given[0])} by position; a spec takes its fields by name, as in {name}({known})"
                )
            self._fill(**fields)

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                return super().__setattr__(name, value)
            what = f"{type(self).__name__}.{name}"
            raise SpecError(
                f"{what}: got {_shown(value)} for a spec that is made; specs are frozen; make another, as by "
                f"model_copy(update={{{name!r}: ...}})"
            )


def _docs(title: str) -> dict[str, str]:
    """The fields of the spec model called `title`, which is all that a ValidationError says of its model; what each is."""
    families = [Spec]
    for model in families:
        families += model.__subclasses__()
    found = next((m for m in families if m.__name__ == title), None)
    return {} if found is None else dict.fromkeys(found.model_fields, "") | field_docs(found)


def located(error: ValidationError) -> list[tuple[str, str]]:
    """(the constructor's argument, line) of each mistake; the argument is "" where none is to blame.

    A line has field, value, rule and what would be right; an unknown field lists the known ones.
    """
    found: list[tuple[str, str]] = []
    unions: dict[str, list[str]] = {}  # what a field may be, where each member of a union has a complaint of its own
    items = error.errors(include_url=False, include_context=True)
    said: set[str] = set()
    specs = {_path(item, error.title) for item in items if item["type"] == "model_type"}
    for item in items:
        path = _path(item, error.title)
        kind = item["type"]
        if kind == "too_short" and any(earlier.startswith(f"{path}.") for earlier, _ in found):
            continue  # items that were refused are not counted; they have lines of their own
        if path in specs and kind in ("model_type", "literal_error"):
            unions.setdefault(path, []).append(item["ctx"]["class_name" if kind == "model_type" else "expected"])
            if kind != "model_type" or path in said:
                continue
            said.add(path)
        line = _line(item, path, error.title)
        if (path, line) not in found:
            found.append((path, line))
    ends = {path: _models(names) for path, names in unions.items()}
    return [
        ("" if path == error.title else path.split(".")[0], line.replace(_MODELS, ends.get(path, "")))
        for path, line in found
    ]


def _path(item: ErrorDetails, title: str) -> str:
    # Union members add their type names to the path; a reader wants fields and list positions only.
    path = (
        ".".join(str(p) for p in item["loc"] if not isinstance(p, str) or (p.islower() and p.isidentifier())) or title
    )
    named = _named(item)
    return item["msg"].removeprefix("Value error, ").split(":")[0] if named else path


def _named(item: ErrorDetails) -> bool:
    """Whether a validator's message begins with the field that it blames."""
    message = item["msg"].removeprefix("Value error, ")
    return item["type"] == "value_error" and ": " in message.split(" ")[0] + " "


def _line(item: ErrorDetails, path: str, title: str) -> str:
    message = item["msg"].removeprefix("Value error, ")
    kind = item["type"]
    if kind == "extra_forbidden":
        return f"{title}.{path}: unknown field; {_known(title, path)}"
    if kind == "missing":
        about = _docs(title).get(path, "")
        return f"{title}.{path}: missing; this field has no default{f'. {about}' if about else ''}"
    if kind == "value_error":
        return message if _named(item) else f"{title}.{path}: {message}"
    value = item["input"]
    said = f"{title}.{path}: got {_shown(value)}; "
    if kind == "model_type":
        if isinstance(value, type) and issubclass(value, Spec):
            return f"{said}it must be {_MODELS}; call it: {called(value.__name__)}"
        return f"{said}it must be {_MODELS}{example(item, title, path)}"
    return f"{said}{wanted(item, title, path)}"


def _models(names: list[str]) -> str:
    """ "a Rope or 'model'": what a field may be, of the members of a union."""
    shown = {"Op": "operation of kvgen.ops", "AnyCache": "Cache"}
    text = " or ".join(shown.get(name, name) for name in names)
    return text if text[0] == "'" else f"an {text}" if text[0] in "AEIOUo" or text.startswith("Rms") else f"a {text}"


def _known(title: str, name: str) -> str:
    known = list(_docs(title))
    near = [FIELDS[name]] if FIELDS.get(name) in known else difflib.get_close_matches(name, known, n=1)
    return f"{title} has {', '.join(known)}{f'; did you mean {near[0]}?' if near else ''}"


def _shown(value: object) -> str:
    try:
        text = repr(value) if not isinstance(value, type) else f"the class {value.__name__}"
    except RecursionError:
        text = f"a {type(value).__name__} nested too deep to be shown"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."

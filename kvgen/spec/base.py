"""The base of every spec model, and how its mistakes are worded."""

from __future__ import annotations

import difflib
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

_SHOWN: Final = 80  # characters of a value in a message


class Spec(BaseModel):
    """Frozen, keyword-only, refusing unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


def _fields(title: str) -> list[str]:
    """The field names of the spec model called `title`, which is all that a ValidationError says of its model."""
    families = [Spec]
    for model in families:
        families += model.__subclasses__()
    return next((list(m.model_fields) for m in families if m.__name__ == title), [])


def explain(error: ValidationError) -> list[str]:
    """One line per mistake: field, value, rule; unknown fields list the known ones."""
    return [line for _, line in located(error)]


def located(error: ValidationError) -> list[tuple[str, str]]:
    """(the constructor's argument, line) of each mistake; the argument is "" where none is to blame."""
    found: dict[tuple[str, str], str] = {}
    for item in error.errors(include_url=False, include_context=True):
        # Union members add their type names to the path; a reader wants fields and list positions only.
        path = ".".join(str(p) for p in item["loc"] if not isinstance(p, str) or p.islower()) or error.title
        message = item["msg"].removeprefix("Value error, ")
        kind = item["type"]
        if kind == "too_short" and any(earlier.startswith(f"{path}.") for earlier, _ in found):
            continue  # items that were refused are not counted; they have lines of their own
        if kind == "extra_forbidden":
            line = f"{error.title}.{path}: unknown field; {_known(error.title, path)}"
        elif kind == "missing":
            line = f"{error.title}.{path}: missing; this field has no default"
        elif kind == "value_error":
            named = ": " in message.split(" ")[0] + " "
            line = message if named else f"{error.title}.{path}: {message}"
            path = message.split(":")[0] if named else path
        else:
            line = f"{error.title}.{path}: got {_shown(item['input'])}; {message[0].lower()}{message[1:]}"
            line += _hint(item["input"], kind)
        if kind == "model_type" and (path, kind) in found:
            found[path, kind] += f" or {item['ctx']['class_name']}"  # the next member of the same union
        else:
            found[path, kind if kind == "model_type" else line] = line
    return [("" if path == error.title else path.split(".")[0], line) for (path, _), line in found.items()]


def _known(title: str, name: str) -> str:
    known = _fields(title)
    near = difflib.get_close_matches(name, known, n=1)
    return f"{title} has {', '.join(known)}{f'; did you mean {near[0]}?' if near else ''}"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, type) else f"the class {value.__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _hint(value: object, kind: str) -> str:
    if kind == "model_type" and isinstance(value, type) and issubclass(value, Spec):
        return f"; call it: {value.__name__}()"
    if kind in ("model_attributes_type", "union_tag_invalid", "union_tag_not_found"):
        return "; use one of its classes, such as Dense() or CSR()"
    return ""

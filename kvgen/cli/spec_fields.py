"""Fields of specs that differ between two versions of a project: "llama3_8b: cache.page_size 16 -> 64"."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel

from kvgen.errors import SpecError
from kvgen.files import named
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.loader import load_text, spec_files

if TYPE_CHECKING:
    from kvgen.cli.project import Project

_LONGEST: Final = 60  # characters of a value


@dataclass(frozen=True)
class FieldChange:
    """A field of a set: its path from the KernelSet on ("ops.decode.split"; "" for the whole set), and its values as Python
    writes them; None on the side that does not have it. Of a whole set that one side has, the value is a name of it."""

    set: str
    field: str
    before: str | None
    after: str | None

    @property
    def text(self) -> str:
        """Without the set's name."""
        if self.before is None or self.after is None:
            step, value = ("new", self.after) if self.before is None else ("removed", self.before)
            return f"{self.field} {step}: {value}" if self.field else f"{step}"
        return f"{self.field} {self.before} -> {self.after}"


@dataclass(frozen=True)
class SpecChanges:
    """The fields that differ, by set; and the spec files of the older version that do not load: path -> the first mistake."""

    fields: list[FieldChange]
    broken: dict[str, str]


def spec_changes(project: Project, before: Mapping[str, str], *, whole: bool) -> SpecChanges:
    """The project's sets against those of older spec files, given as texts by name; with `whole`, sets that are gone as well.

    Files that older specs read (`source=`, `include_dirs=`) are the project's present ones.
    """
    folder, root = project.config.specs, project.config.root
    place = folder.relative_to(root).as_posix()
    now = {file.path.name: file.path.read_text("utf-8", "replace") for file in spec_files(folder, root)}
    old: dict[str, KernelSet] = {}
    broken: dict[str, str] = {}
    for name, text in before.items():
        if text != now.get(name):
            try:
                loaded = load_text(text, folder / name, f"{place}/{name}", root)
                old |= {item.kernels.name: item.kernels for item in loaded}
            except SpecError as error:
                broken[f"{place}/{name}"] = str(error).splitlines()[0]
    changed = {f"{place}/{name}" for name, text in now.items() if text != before.get(name)} - broken.keys()
    found: list[FieldChange] = []
    for item in project.sets:
        was = old.pop(item.kernels.name, None)
        if was is not None:
            found += fields_between(was, item.kernels)
        elif item.source in changed:
            found.append(FieldChange(item.kernels.name, "", None, item.source))
    known = {name for item in project.broken for name in item.names}
    if whole:
        found += [FieldChange(name, "", name, None) for name in old if name not in known]
    return SpecChanges(sorted(found, key=lambda change: change.set), broken)


def fields_between(before: KernelSet, after: KernelSet) -> list[FieldChange]:
    """The fields that differ between two versions of a set."""
    return [FieldChange(after.name, *step) for step in _steps("", before, after)]


def _steps(path: str, before: object, after: object) -> Iterator[tuple[str, str | None, str | None]]:
    """(field, value before, value after) of what differs, as deep as both sides have fields of the same names."""
    if before == after and type(before) is type(after):
        return
    parts, others = _parts(before), _parts(after)
    if parts is None or others is None:
        yield path, _value(before), _value(after)
        return
    names = dict.fromkeys((*parts, *others))
    if type(before) is not type(after) and isinstance(before, BaseModel) and isinstance(after, BaseModel):
        yield path, type(before).__name__, type(after).__name__
        stated = before.model_fields_set | after.model_fields_set  # other values follow from the class
        names = dict.fromkeys(name for name in names if name in stated)
    for name in names:
        inner = f"{path}.{name}" if path else name
        if name in parts and name in others:
            yield from _steps(inner, parts[name], others[name])
        else:
            here = name in parts
            value = _value(parts[name] if here else others[name])
            yield inner, value if here else None, None if here else value


def _parts(value: object) -> dict[str, object] | None:
    """The fields of a model; operations of a tuple by their names, other models of a tuple by number. None for a plain value."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, tuple) and value and all(isinstance(item, Op) for item in value):
        return {item.name: item for item in value if isinstance(item, Op)}
    if isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return None


def _value(value: object) -> str:
    """A value as a spec would have it, cut where it is long; of a model the fields that the spec states."""
    if isinstance(value, BaseModel):
        stated = (
            f"{name}={_value(getattr(value, name))}"
            for name in type(value).model_fields
            if name in value.model_fields_set
        )
        text = f"{type(value).__name__}({', '.join(stated)})"
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, tuple):
        text = f"[{', '.join(map(_value, value))}]"
    else:
        text = repr(value)
    text = named(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

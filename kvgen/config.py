"""`[tool.kvgen]`: where a project keeps its specs and its generated code."""

from __future__ import annotations

import difflib
import keyword
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgen.errors import ConfigError, ToolError
from kvgen.files import kind_of, link_below, named, read_text, reason, target_of
from kvgen.version import __version__

_SIZE_LIMIT: Final = 1 << 22  # bytes; a pyproject.toml has a few KiB
_KEYS: Final = ("specs", "out", "requires", "nvrtc")


@dataclass(frozen=True)
class Config:
    """A project's settings; paths are absolute, `specs` and `out` lie inside `root`."""

    root: Path
    specs: Path
    out: Path
    requires: str | None = None
    nvrtc: str | None = None

    @property
    def package(self) -> str:
        """The import path of `out`: its folders below the root, without a leading `src`."""
        parts = self.out.relative_to(self.root).parts
        return ".".join(parts[1:] if parts[:1] == ("src",) else parts)


def _section(path: Path) -> dict[str, Any] | None:
    try:
        data = tomllib.loads(read_text(path, limit=_SIZE_LIMIT))
    except ToolError as error:
        raise ConfigError(str(error)) from error
    except RecursionError:
        raise ConfigError(f"{named(path)}: not valid TOML: nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError(f"{named(path)}: not valid TOML: {error}") from error
    tool = data.get("tool", {})
    section = tool.get("kvgen") if isinstance(tool, dict) else None
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{path}: tool.kvgen: got {section!r}; it must be a table")
    return section


def _inside(root: Path, key: str, value: Any, source: str) -> Path:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{source}: tool.kvgen.{key}: got {value!r}; it must be a path inside the project")
    given = Path(os.path.normpath(root / value))
    path = given.resolve()
    if not all(p.is_relative_to(root) and p != root for p in (given, path)):
        raise ConfigError(f"{source}: tool.kvgen.{key}: got {value!r}; it must be a folder below {named(root)}")
    return path


def _written(root: Path, value: Any, source: str) -> Path:
    """The folder that kvgen writes to: no part of it may be a link, which may lead out of the project, now or later."""
    if isinstance(value, str) and value.isprintable():
        path = Path(os.path.normpath(root / value))
        link = link_below(root, path.relative_to(root).as_posix()) if path.is_relative_to(root) else None
        if link is not None:
            raise ConfigError(
                f"{source}: tool.kvgen.out: got {value!r}; {named(link)} is a link to {target_of(link)}, and nothing is written "
                "through a link; put a folder there, or name the folder itself"
            )
    return _inside(root, "out", value, source)


def _check_requires(wanted: str, source: str) -> None:
    """Raise ConfigError where `requires` is no version specifier (PEP 440), or one that this kvgen does not meet."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        specifiers = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise ConfigError(
            f"{source}: tool.kvgen.requires: got {wanted!r}; it must be a version specifier; for example '>=0.1,<0.2'"
        ) from None
    if not specifiers.contains(__version__, prereleases=True):
        raise ConfigError(
            f"{source}: tool.kvgen.requires: got {wanted!r}, but this is kvgen {__version__}; "
            f"`pip install 'kvgen{specifiers}'`, or change what the project requires"
        )


def find_config(start: Path | None = None) -> Config:
    """The settings of the nearest pyproject.toml with a `[tool.kvgen]` table, at or above `start` (the working folder)."""
    try:
        here = (start or Path.cwd()).resolve()
    except OSError as error:
        raise ConfigError(f"the working folder: cannot be looked at ({reason(error)}); go to the project") from error
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        section = _section(file) if kind_of(file) != "missing" else None
        if section is None:
            continue
        source = named(file)
        unknown = sorted(set(section) - set(_KEYS))
        if unknown:
            near = difflib.get_close_matches(unknown[0], _KEYS, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{source}: tool.kvgen.{unknown[0]}: unknown key; the keys are {', '.join(_KEYS)}{meant}")
        for key in ("requires", "nvrtc"):
            if not isinstance(section.get(key, ""), str):
                raise ConfigError(f"{source}: tool.kvgen.{key}: got {section[key]!r}; it must be a string")
        if "requires" in section:
            _check_requires(section["requires"], source)
        config = Config(
            root=folder,
            specs=_inside(folder, "specs", section.get("specs", "specs"), source),
            out=_written(folder, section.get("out", "generated"), source),
            requires=section.get("requires"),
            nvrtc=section.get("nvrtc"),
        )
        if config.out.is_relative_to(config.specs) or config.specs.is_relative_to(config.out):
            raise ConfigError(
                f"{source}: tool.kvgen.out: got {section.get('out', 'generated')!r} beside specs "
                f"{section.get('specs', 'specs')!r}; generated code and specs need folders apart"
            )
        bad = [p for p in config.package.split(".") if not p.isidentifier() or keyword.iskeyword(p)]
        if bad:
            raise ConfigError(
                f"{source}: tool.kvgen.out: got {section.get('out', 'generated')!r}; generated code is imported, so every folder "
                f"of the path must be a Python identifier, which {bad[0]!r} is not; use letters, digits and _, as in "
                f"{re.sub(r'[^0-9a-zA-Z_]', '_', bad[0])!r}"
            )
        return config
    raise ConfigError(
        f"{named(here)}: no pyproject.toml with a [tool.kvgen] table here or above; add one, for example:\n"
        '[tool.kvgen]\nspecs = "specs"\nout = "generated"'
    )

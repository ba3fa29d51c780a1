"""`[tool.kvgen]`: where a project keeps its specs and its generated code."""

from __future__ import annotations

import keyword
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgen.errors import ConfigError

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
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    tool = data.get("tool", {})
    section = tool.get("kvgen") if isinstance(tool, dict) else None
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{path}: tool.kvgen: got {section!r}; it must be a table")
    return section


def _inside(root: Path, key: str, value: Any, source: Path) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{source}: tool.kvgen.{key}: got {value!r}; it must be a path inside the project")
    path = (root / value).resolve()
    if not path.is_relative_to(root) or path == root:
        raise ConfigError(f"{source}: tool.kvgen.{key}: got {value!r}; it must be a folder below {root}")
    return path


def find_config(start: Path | None = None) -> Config:
    """The settings of the nearest pyproject.toml with a `[tool.kvgen]` table, at or above `start` (the working folder)."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        source = folder / "pyproject.toml"
        section = _section(source) if source.is_file() else None
        if section is None:
            continue
        unknown = sorted(set(section) - set(_KEYS))
        if unknown:
            raise ConfigError(f"{source}: tool.kvgen.{unknown[0]}: unknown key; the keys are {', '.join(_KEYS)}")
        for key in ("requires", "nvrtc"):
            if not isinstance(section.get(key, ""), str):
                raise ConfigError(f"{source}: tool.kvgen.{key}: got {section[key]!r}; it must be a string")
        config = Config(
            root=folder,
            specs=_inside(folder, "specs", section.get("specs", "specs"), source),
            out=_inside(folder, "out", section.get("out", "generated"), source),
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
                f"{source}: tool.kvgen.out: {bad[0]!r} is no Python identifier; generated code is imported"
            )
        return config
    raise ConfigError(
        f"{here}: no pyproject.toml with a [tool.kvgen] table here or above; add one, for example:\n"
        '[tool.kvgen]\nspecs = "specs"\nout = "generated"'
    )

"""A rendered set as a module: written to a folder of its own for people to read, run from the text at hand."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Final

from kvgen.codegen.emit import File, launchers_of, write_file
from kvgen.errors import ToolError
from kvgen.files import named, reason
from kvgen.runtime.module import run_launchers

GENERATED: Final = "generated"  # as messages name the files that kvgen writes
_ELSEWHERE: Final = "set KVGEN_CACHE_DIR to a folder that can be written"


def key_of(files: tuple[File, ...]) -> str:
    """32 hexadecimal digits of a digest of the files: paths and texts."""
    return hashlib.sha256(repr([(f.path, f.text) for f in files]).encode()).hexdigest()[:32]


@functools.cache
def imported(folder: Path, name: str, files: tuple[File, ...]) -> ModuleType:
    """The set `name` of `files`, written below `folder` where it is not yet, and imported."""
    key = key_of(files)
    home = folder / "kernels" / key
    texts = {f.path: f.text for f in files}
    try:
        if not home.is_dir():
            _write(home, files)
        for file in files:  # for people to read; what runs is `texts`
            write_file(home / GENERATED, file)
    except OSError as error:
        raise ToolError(f"{named(home)}: cannot be written ({reason(error)}); {_ELSEWHERE}") from error
    except ToolError as error:
        raise ToolError(f"{error}; {_ELSEWHERE}") from error
    path = home / GENERATED / name / "__init__.py"
    module = run_launchers(f"_kvgen_kernel_{key}", path, launchers_of(name, {f.path: f for f in files}))
    module._MODULE.texts = texts
    return module


def _write(home: Path, files: tuple[File, ...]) -> None:
    """All of it in one step, so that another process sees the whole folder or none."""
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as made:
        for file in files:
            write_file(Path(made) / "new" / GENERATED, file)
        try:
            (Path(made) / "new").rename(home)
        except OSError:
            if not home.is_dir():  # another process was first
                raise

"""Folders of kernels compiled ahead of time: `DIR/<set>/<kernel>.<arch>.cubin` and `DIR/manifest.json`.

The manifest ties each cubin to the digest of the text it was compiled from, so a launcher generated from other text
refuses it instead of running it. What the manifest says is data from outside: paths in it never leave the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kvgen.compile.nvrtc import nvrtc_version
from kvgen.compile.program import Image
from kvgen.compile.resources import Resources
from kvgen.errors import ArgumentError, ToolError

_SCHEMA: Final = 1
_MANIFEST: Final = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ManifestEntry:
    """One cubin. `file` is relative to the folder; `digest` is of the text it came from, `sha256` of its own bytes."""

    set: str
    kernel: str
    arch: str
    entry: str
    file: str
    digest: str
    sha256: str
    nvrtc: str
    resources: Resources


@dataclass(frozen=True)
class Manifest:
    """A folder's manifest, checked in form; no cubin has been read yet."""

    folder: Path
    entries: tuple[ManifestEntry, ...]

    def archs(self, set_name: str, kernel: str) -> list[str]:
        """The targets there is a cubin for."""
        return [e.arch for e in self.entries if (e.set, e.kernel) == (set_name, kernel)]

    def entry(self, set_name: str, kernel: str, arch: str) -> ManifestEntry | None:
        """The entry of one cubin, or None."""
        for entry in self.entries:
            if (entry.set, entry.kernel, entry.arch) == (set_name, kernel, arch):
                return entry
        return None


def _mend(folder: Path) -> str:
    return f"`kvgen compile -o {folder}` makes it anew"


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a reader sees the old bytes or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes it private; these folders are packed and shipped
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_folder(folder: Path, images: Iterable[Image], digests: Mapping[str, str]) -> Manifest:
    """Write cubins and manifest; `digests` gives `text_digest` of each unit by its name ("<set>/<kernel>").

    Sets among the images replace what the folder had of them; other sets stay. Raises ArgumentError for images that
    are no cubins, have no digest, or are given twice, and ToolError when the folder cannot be written.
    """
    major, minor = nvrtc_version()
    entries: dict[str, ManifestEntry] = {}
    data: dict[str, bytes] = {}
    for image in images:
        if image.kind != "cubin" or image.resources is None:
            raise ArgumentError(f"images: got {image.kind} of {image.unit_name}; only cubins are kept in a folder")
        set_name, _, kernel = image.unit_name.partition("/")
        if not (_NAME.fullmatch(set_name) and _NAME.fullmatch(kernel)):
            raise ArgumentError(f"images: got a unit called {image.unit_name!r}; it must be <set>/<kernel>")
        if image.unit_name not in digests:
            raise ArgumentError(f"digests: nothing for {image.unit_name}; every image needs the digest of its text")
        file = f"{set_name}/{kernel}.{image.arch}.cubin"
        if file in entries:
            raise ArgumentError(f"images: {image.unit_name} for {image.arch} is given twice; each may occur once")
        entries[file] = ManifestEntry(
            set=set_name,
            kernel=kernel,
            arch=image.arch,
            entry=image.entry,
            file=file,
            digest=digests[image.unit_name],
            sha256=hashlib.sha256(image.data).hexdigest(),
            nvrtc=f"{major}.{minor}",
            resources=image.resources,
        )
        data[file] = image.data
    replaced = {entry.set for entry in entries.values()}
    dropped: list[str] = []
    for old in _previous(folder):
        if old.set not in replaced:
            entries[old.file] = old
        elif old.file not in entries:
            dropped.append(old.file)
    manifest = Manifest(folder, tuple(entries[file] for file in sorted(entries)))
    kernels = [dataclasses.asdict(entry) for entry in manifest.entries]
    try:
        for file, cubin in data.items():
            _write(folder / file, cubin)
        # After the cubins: a crash in between leaves digests that do not fit, which `find` refuses.
        _write(folder / _MANIFEST, (json.dumps({"schema": _SCHEMA, "kernels": kernels}, indent=1) + "\n").encode())
        for file in dropped:
            (folder / file).unlink(missing_ok=True)
    except OSError as error:
        raise ToolError(f"{folder}: cannot be written ({error.strerror}: {error.filename})") from error
    return manifest


def _previous(folder: Path) -> tuple[ManifestEntry, ...]:
    try:
        return read_folder(folder).entries
    except ToolError:  # none yet, or one that only writing it anew can mend
        return ()


def _entry_from(fields: Any) -> ManifestEntry:
    """Raises KeyError, TypeError or ValueError for anything but a well-formed entry."""
    names = [field.name for field in dataclasses.fields(ManifestEntry) if field.name != "resources"]
    texts = {name: fields[name] for name in names}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}: got {value!r}; it must be a string")
    path = PurePosixPath(texts["file"])
    if path.is_absolute() or ".." in path.parts or "\\" in texts["file"] or ":" in texts["file"]:
        raise ValueError(f"file: got {texts['file']!r}; it must stay inside the folder")
    counts = {field.name: fields["resources"][field.name] for field in dataclasses.fields(Resources)}
    for name, value in counts.items():
        if not isinstance(value, int):
            raise TypeError(f"resources.{name}: got {value!r}; it must be an integer")
    return ManifestEntry(**texts, resources=Resources(**counts))


def read_folder(folder: Path) -> Manifest:
    """Read and check `DIR/manifest.json`; ToolError when it is missing, of another schema or malformed."""
    path = folder / _MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ToolError(f"{path}: cannot be read ({error.strerror}); {_mend(folder)}") from error
    except ValueError as error:
        raise ToolError(f"{path}: is not JSON ({error}); {_mend(folder)}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != _SCHEMA:
        raise ToolError(f"{path}: got schema {schema!r}; this kvgen reads schema {_SCHEMA}; {_mend(folder)}")
    try:
        entries = tuple(_entry_from(fields) for fields in content["kernels"])
    except KeyError as error:
        raise ToolError(f"{path}: has no field {error}; {_mend(folder)}") from error
    except (TypeError, ValueError) as error:
        raise ToolError(f"{path}: {error}; {_mend(folder)}") from error
    return Manifest(folder, entries)


def find(manifest: Manifest, set_name: str, kernel: str, arch: str, digest: str) -> bytes:
    """The cubin of one kernel for one target.

    Raises ToolError, naming the file and the command that mends it, when there is none, when it was compiled from
    text with another `digest`, or when its bytes are not those that were written.
    """
    folder = manifest.folder
    entry = manifest.entry(set_name, kernel, arch)
    if entry is None:
        have = ", ".join(manifest.archs(set_name, kernel)) or "no target"
        raise ToolError(
            f"{folder / _MANIFEST}: has no cubin of {set_name}/{kernel} for {arch} (it has {have}); {_mend(folder)}"
        )
    path = folder / entry.file
    if entry.digest != digest:
        raise ToolError(
            f"{path}: was compiled from text with digest {entry.digest[:12]}, the launcher was generated with "
            f"{digest[:12]}; {_mend(folder)}"
        )
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ToolError(f"{path}: leads out of the folder, to {path.resolve()}; {_mend(folder)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ToolError(f"{path}: cannot be read ({error.strerror}); {_mend(folder)}") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ToolError(f"{path}: its bytes are not those that were compiled; {_mend(folder)}")
    return data

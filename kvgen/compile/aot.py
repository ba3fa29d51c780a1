"""Folders of kernels compiled ahead of time: `DIR/<set>/<kernel>.<arch>.cubin`, their launchers, and `DIR/manifest.json`.

The manifest ties each cubin to the digest of the text it was compiled from, so a launcher generated from other text
refuses it instead of running it. `DIR/<set>/launchers.py` and `_table.py` are the set's generated package, for `kvgen.load`
by name or digest; the set's digest covers them and the texts of all kernels. What the manifest says is data from outside:
paths in it never leave the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from kvgen.compile.nvrtc import nvrtc_version
from kvgen.compile.program import Image
from kvgen.compile.resources import Resources, resources_from
from kvgen.errors import ArgumentError, ToolError
from kvgen.files import kind_of, locked, named, read_bytes, remove_inside, remove_left_overs, write_inside
from kvgen.json_file import parse_object, shown
from kvgen.version import ABI

_SCHEMA: Final = 1
_MANIFEST: Final = "manifest.json"
_LOCK: Final = ".manifest.lock"
_LAUNCHERS: Final = "launchers.py"
_TABLE: Final = "_table.py"  # as launchers import it
_MANIFEST_LIMIT: Final = 1 << 26  # bytes; an entry has half a KiB
_CUBIN_LIMIT: Final = 1 << 28
_LAUNCHERS_LIMIT: Final = 1 << 24
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


class Launchers(NamedTuple):
    """The Python texts of a generated package: its `__init__.py`, and the `_table.py` that it imports."""

    text: str
    table: str


@dataclass(frozen=True)
class ManifestSet:
    """The launchers of one set. `file` is relative to the folder and `sha256` of its bytes; `table` and `table_sha256` are those
    of the module with their machine data; `abi` is the runtime's that they were generated for; `kernels` has the digest of every
    kernel's text, compiled or not; `digest` is of all of that. `by_arch` has the kernel that runs in a kernel's place, by
    architecture. `tp` is how many GPUs share the heads of the set called `whole`, of which this set has one GPU's; 1 and "" of a
    set that is no shard."""

    set: str
    file: str
    digest: str
    sha256: str
    abi: int
    kernels: dict[str, str]
    by_arch: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    tp: int = 1
    whole: str = ""
    table: str = ""
    table_sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """A folder's manifest, checked in form; no cubin and no launcher has been read yet."""

    folder: Path
    entries: tuple[ManifestEntry, ...]
    sets: tuple[ManifestSet, ...] = ()

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
    return f"`kvgen compile -o {named(folder)}` makes it anew"


def set_digest(sha256: str, table_sha256: str, kernels: Mapping[str, str]) -> str:
    """The digest of a set, 64 hexadecimal digits: of the digests of its launchers and their table, and of its kernels' texts by
    name."""
    return hashlib.sha256(json.dumps([sha256, table_sha256, sorted(kernels.items())]).encode()).hexdigest()


def _set_of(
    name: str,
    launchers: Launchers,
    digests: Mapping[str, str],
    by_arch: Mapping[str, Mapping[str, str]],
    shards: Mapping[str, tuple[str, int]],
) -> ManifestSet:
    sha256, table_sha256 = (hashlib.sha256(text.encode()).hexdigest() for text in launchers)
    own = f"{name}/"
    kernels = {unit.removeprefix(own): digest for unit, digest in digests.items() if unit.startswith(own)}
    others = {unit.removeprefix(own): dict(one) for unit, one in by_arch.items() if unit.startswith(own)}
    whole, tp = shards.get(name, ("", 1))
    return ManifestSet(
        set=name,
        file=f"{own}{_LAUNCHERS}",
        digest=set_digest(sha256, table_sha256, kernels),
        sha256=sha256,
        abi=ABI,
        kernels=kernels,
        by_arch=others,
        tp=tp,
        whole=whole,
        table=f"{own}{_TABLE}",
        table_sha256=table_sha256,
    )


def write_folder(
    folder: Path,
    images: Iterable[Image],
    digests: Mapping[str, str],
    launchers: Mapping[str, Launchers] | None = None,
    by_arch: Mapping[str, Mapping[str, str]] | None = None,
    shards: Mapping[str, tuple[str, int]] | None = None,
) -> Manifest:
    """Write cubins, launchers and manifest; `digests` gives `text_digest` of each unit by its name ("<set>/<kernel>"), and
    `launchers` the texts of a set's generated package by the set's name: its kernels must all be in `digests`. `by_arch` has of
    a unit, by architecture, the kernel in its place; `shards` of a set that is one GPU's part of another its name and how many
    GPUs share it.

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
    sets = {name: _set_of(name, text, digests, by_arch or {}, shards or {}) for name, text in (launchers or {}).items()}
    for name, texts in (launchers or {}).items():
        data |= {sets[name].file: texts.text.encode(), sets[name].table: texts.table.encode()}
    with locked(folder, _LOCK):  # from the old manifest to the new one: no other process's sets get lost
        return _replace_sets(folder, entries, sets, data)


def _replace_sets(
    folder: Path, entries: dict[str, ManifestEntry], sets: dict[str, ManifestSet], data: Mapping[str, bytes]
) -> Manifest:
    """Write these sets in place of what the folder had of them; `data` has every file's bytes."""
    replaced = {entry.set for entry in entries.values()} | set(sets)
    dropped: list[str] = []
    previous = _previous(folder)
    for old in previous.entries:
        if old.set not in replaced:
            entries[old.file] = old
        elif old.file not in entries:
            dropped.append(old.file)
    for before in previous.sets:
        if before.set not in replaced:
            sets[before.set] = before
        elif before.set not in sets:
            dropped += [file for file in (before.file, before.table) if file]
    manifest = Manifest(
        folder, tuple(entries[file] for file in sorted(entries)), tuple(sets[name] for name in sorted(sets))
    )
    content = {
        "schema": _SCHEMA,
        "sets": [dataclasses.asdict(each) for each in manifest.sets],
        "kernels": [dataclasses.asdict(entry) for entry in manifest.entries],
    }
    for place in ("", *sorted(replaced)):
        remove_left_overs(folder, place)
    for file, raw in data.items():
        write_inside(folder, file, raw)
    # After the files: a crash in between leaves digests that do not fit, which `find` and `read_launchers` refuse.
    write_inside(folder, _MANIFEST, (json.dumps(content, indent=1) + "\n").encode())
    for file in dropped:
        if kind_of(folder / file) != "missing":
            remove_inside(folder, file)
    return manifest


def _previous(folder: Path) -> Manifest:
    try:
        return read_folder(folder)
    except ToolError:  # none yet, or one that only writing it anew can mend
        return Manifest(folder, ())


def _texts(fields: Any, names: Iterable[str]) -> dict[str, str]:
    """These fields; raises KeyError, TypeError or ValueError where one is missing or no line of text."""
    texts = {name: fields[name] for name in names}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}: got {shown(value)}; it must be a string")
        if not value.isprintable():
            raise ValueError(f"{name}: got {shown(value)}; it must be one line of text")
    for name in ("file", "table"):
        if name in texts:
            _stays_inside(name, texts[name])
    return texts


def _stays_inside(name: str, file: str) -> None:
    """Raises ValueError for the path of a file outside the folder."""
    path = PurePosixPath(file)
    if path.is_absolute() or not path.parts or ".." in path.parts or re.search(r"[\\:]", file):
        raise ValueError(f"{name}: got {shown(file)}; it must stay inside the folder")


def _entry_from(fields: Any) -> ManifestEntry:
    """Raises KeyError, TypeError or ValueError for anything but a well-formed entry."""
    names = [field.name for field in dataclasses.fields(ManifestEntry) if field.name != "resources"]
    return ManifestEntry(**_texts(fields, names), resources=resources_from(fields["resources"]))


def _set_from(fields: Any) -> ManifestSet:
    """Raises KeyError, TypeError or ValueError for anything but a well-formed set."""
    tabled = ("table", "table_sha256") if "table" in fields else ()  # which older folders lack
    texts = _texts(fields, ("set", "file", "digest", "sha256", *tabled))
    abi, kernels, tp = fields["abi"], fields["kernels"], fields.get("tp", 1)  # which older folders lack
    for name, number in (("abi", abi), ("tp", tp)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: got {shown(number)}; it must be a whole number")
    whole = _texts({"whole": fields.get("whole", "")}, ("whole",))["whole"]
    if not isinstance(kernels, dict):
        raise TypeError(f"kernels: got {shown(kernels)}; it must be an object of digests")
    by_arch = fields.get("by_arch", {})  # which older folders lack
    if not (isinstance(by_arch, dict) and all(isinstance(one, dict) for one in by_arch.values())):
        raise TypeError(f"by_arch: got {shown(by_arch)}; it must be an object of kernels by architecture")
    others = {kernel: _texts(one, list(one)) for kernel, one in by_arch.items()}
    return ManifestSet(**texts, abi=abi, kernels=_texts(kernels, list(kernels)), by_arch=others, tp=tp, whole=whole)


def read_folder(folder: Path) -> Manifest:
    """Read and check `DIR/manifest.json`; ToolError when it is missing, of another schema or malformed."""
    try:
        return parse_manifest(folder, read_bytes(folder / _MANIFEST, limit=_MANIFEST_LIMIT))
    except ToolError as error:
        raise ToolError(f"{error}; {_mend(folder)}") from error


def parse_manifest(folder: Path, data: bytes) -> Manifest:
    """The manifest of a folder that has these bytes; ToolError when it is of another schema or malformed."""
    path = named(folder / _MANIFEST)
    content = parse_object(data, path)
    schema = content.get("schema")
    if schema != _SCHEMA:
        raise ToolError(f"{path}: got schema {shown(schema)}; this kvgen reads schema {_SCHEMA}")
    try:
        entries = tuple(_entry_from(fields) for fields in content["kernels"])
        sets = tuple(_set_from(fields) for fields in content.get("sets", ()))
    except KeyError as error:
        raise ToolError(f"{path}: has no field {error}") from error
    except (TypeError, ValueError) as error:
        raise ToolError(f"{path}: {error}") from error
    return Manifest(folder, entries, sets)


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
            f"{named(folder / _MANIFEST)}: has no cubin of {set_name}/{kernel} for {arch} (it has {have}); {_mend(folder)}"
        )
    path = named(folder / entry.file)
    if entry.digest != digest:
        raise ToolError(
            f"{path}: was compiled from text with digest {entry.digest[:12]}, the launcher was generated with "
            f"{digest[:12]}; {_mend(folder)}"
        )
    data = _read(folder, entry.file, _CUBIN_LIMIT)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ToolError(f"{path}: its bytes are not those that were compiled; {_mend(folder)}")
    return data


def read_launchers(manifest: Manifest, each: ManifestSet) -> Launchers:
    """The texts of a set's launchers. Raises ToolError where a file, or what the manifest says of the set, is not what was
    written."""
    folder = manifest.folder
    if set_digest(each.sha256, each.table_sha256, each.kernels) != each.digest:
        raise ToolError(
            f"{named(folder / _MANIFEST)}: {each.set} has digest {shown(each.digest)}, which is not that of its launchers and "
            f"kernels; {_mend(folder)}"
        )
    texts = []
    for file, sha256 in ((each.file, each.sha256), (each.table, each.table_sha256)):
        data = _read(folder, file, _LAUNCHERS_LIMIT)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ToolError(f"{named(folder / file)}: its bytes are not those that were written; {_mend(folder)}")
        texts.append(data.decode())
    return Launchers(*texts)


def _read(folder: Path, file: str, limit: int) -> bytes:
    """A file of the folder; ToolError where it is missing, too large, or leads out of the folder."""
    end = os.path.realpath(folder / file)
    if not Path(end).is_relative_to(os.path.realpath(folder)):
        raise ToolError(f"{named(folder / file)}: leads out of the folder, to {named(end)}; {_mend(folder)}")
    try:
        return read_bytes(folder / file, limit=limit)
    except ToolError as error:
        raise ToolError(f"{error}; {_mend(folder)}") from error

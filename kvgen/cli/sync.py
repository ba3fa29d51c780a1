"""The output folder against what the specs give: the comparison behind `build` and `check`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from kvgen.cli.ondisk import CRLF, distrusted, in_its_place, names_on_disk, read_generated, source_of
from kvgen.cli.project import RESOURCES, Project
from kvgen.cli.resources_json import edited as record_edited
from kvgen.cli.resources_json import is_recorded, problem
from kvgen.codegen.emit import banner_digest, body_digest, body_of, kernel_files
from kvgen.codegen.sets_page import PATH as PAGE
from kvgen.compile import Manifest, read_folder, text_digest
from kvgen.errors import ToolError
from kvgen.files import FileKind, is_left_over, is_temporary, kind_of, named
from kvgen.runtime.module import CUBINS

State = Literal["missing", "extra", "stale", "edited"]
Mend = Literal["build", "record", "cubins", "move"]

# A user may turn the output folder into a regular package and tell git about it; those files are none of kvgen's business.
_USERS: Final = ("__init__.py", "py.typed", ".gitattributes", ".gitignore")
_PLACE: Final = "a folder is in its place; move it out of this folder"


@dataclass(frozen=True)
class Finding:
    """One name that is not what the specs give: its path below the output folder, and what mends it.

    `mend` is `kvgen build`, `kvgen compile --record`, `kvgen compile -o` of the folder of cubins, or the user ("move") where
    kvgen wrote nothing of the kind.
    `by_hand` says that somebody's work would be lost, so that the command needs --force.
    """

    path: str
    state: State
    note: str
    mend: Mend = "build"
    by_hand: bool = False


def by_hand(path: str, text: str | None) -> str | None:
    """The sign that a file's text is not as kvgen wrote it, be it a banner or a digest that is gone; None where it is."""
    if text is None:
        return "it is no UTF-8"
    if path.rpartition("/")[2] == RESOURCES:
        return record_edited(text)
    text = text.replace("\r\n", "\n")
    digest = banner_digest(text)
    if digest is None:
        return "it has no banner of kvgen's"
    return None if digest == body_digest(body_of(text)) else "its text does not match the digest in its banner"


def difference(path: str, text: str | None, expected: str) -> tuple[State, str] | None:
    """How a file that is there, under the path `path`, differs from the text that it should have."""
    if text == expected:
        return None
    if text is not None and text.replace("\r\n", "\n") == expected:
        return "edited", CRLF
    note = by_hand(path, text)
    return ("edited", note) if note else ("stale", "intact, but the specs or templates now give something else")


def written_by_kvgen(path: Path) -> bool:
    """True: a file carries kvgen's banner, edited since or not, or is one of its resources.json."""
    text = read_generated(path) if kind_of(path) == "file" else None
    if text is None:
        return False
    return is_recorded(text) if path.name == RESOURCES else banner_digest(text.replace("\r\n", "\n")) is not None


def _compare(path: Path, shown: str, expected: str) -> Finding | None:
    kind = kind_of(path)
    if kind == "missing":
        return Finding(shown, "missing", "the specs give it, the folder lacks it")
    if kind == "folder":
        return Finding(shown, "edited", _PLACE, "move")
    if kind != "file":
        return Finding(shown, "edited", in_its_place(path, kind), by_hand=True)
    found = difference(shown, read_generated(path), expected)
    return Finding(shown, *found, by_hand=found[0] == "edited" and found[1] != CRLF) if found else None


def _compare_record(project: Project, name: str) -> Finding | None:
    path = project.config.out / name / RESOURCES
    trouble, shown = problem(project, name), f"{name}/{RESOURCES}"
    if trouble is None:
        return None
    state, note = trouble
    if kind_of(path) == "folder":
        return Finding(shown, "edited", _PLACE, "move")
    return Finding(shown, state, note, "record", by_hand=state == "edited" and note != CRLF)


def cubins_of(project: Project) -> Manifest | None:
    """The folder of cubins beside a project's sets, which packages of it look in first. None where there is none."""
    folder = project.config.out / CUBINS
    return read_folder(folder) if kind_of(folder / "manifest.json") != "missing" else None


def without_cubin(project: Project, manifest: Manifest, names: Collection[str]) -> Iterator[tuple[str, str, bool]]:
    """(set/kernel, architecture, whether there is one of another text) of each kernel of these sets that has no cubin."""
    for s in project.sets:
        digests = {unit.name: text_digest(unit.text) for unit in project.units[s.kernels.name]}
        for kernel, archs in kernel_files(s) if s.kernels.name in names else ():
            for arch in archs:
                entry = manifest.entry(s.kernels.name, kernel.name, arch)
                if entry is None or entry.digest != digests[f"{s.kernels.name}/{kernel.name}"]:
                    yield f"{s.kernels.name}/{kernel.name}", arch, entry is not None


def _compare_cubins(project: Project) -> Finding | None:
    """The cubins beside the sets, where one was made of another text: launchers would refuse it."""
    shown = f"{CUBINS}/manifest.json"
    try:
        manifest = cubins_of(project)
    except ToolError as error:
        return Finding(shown, "edited", str(error), "cubins")
    if manifest is None:
        return None
    stale = [f"{name} {arch}" for name, arch, old in without_cubin(project, manifest, project.names) if old]
    if not stale:
        return None
    more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
    return Finding(shown, "stale", f"{stale[0]}{more}: compiled from another text", "cubins")


def _extra(out: Path, path: str, kind: FileKind, sources: Collection[str]) -> Finding | None:
    """A name that no spec gives; None where it is bytecode that Python keeps in step with one of the `sources`."""
    source = source_of(path)
    if source is not None:
        note = distrusted(out / path) if source in sources else "bytecode without a source of kvgen's beside it"
        return Finding(path, "extra", note) if note else None
    if kind == "folder":
        return Finding(path, "extra", "an empty folder")
    if kind == "file" and is_temporary(path):  # one that is no left-over is being written by another process
        return Finding(path, "extra", "left over from a write that was stopped") if is_left_over(out / path) else None
    if kind == "file" and written_by_kvgen(out / path):
        note = by_hand(path, read_generated(out / path))
        if note is None:
            return Finding(path, "extra", "no spec gives it any more")
        return Finding(path, "extra", f"no spec gives it any more, and {note}", by_hand=True)
    what = "not written by kvgen" if kind == "file" else f"a {kind}, not made by kvgen"
    return Finding(path, "extra", f"{what}; move it out of this folder", "move")


def findings(project: Project, sets: set[str] | None = None) -> list[Finding]:
    """Every difference, by path; with `sets`, only those of these sets, of the device library and of the list of sets."""

    def wanted(path: str) -> bool:
        top = path.split("/", 1)[0]
        return (
            sets is None
            or top in sets
            or path in ("device", PAGE, f"{CUBINS}/manifest.json")
            or (top == "device" and path in project.files)
        )

    return sorted((f for f in _all(project, wanted) if wanted(f.path)), key=lambda f: f.path)


def _all(project: Project, wanted: Callable[[str], bool]) -> Iterator[Finding]:
    out = project.config.out
    if kind_of(out) not in ("folder", "missing"):
        raise ToolError(f"{named(out)}: cannot be written: a {kind_of(out)} is in the folder's place; move it")
    records = {f"{s.kernels.name}/{RESOURCES}": s.kernels.name for s in project.sets}
    tops = {path.split("/", 1)[0] for path in project.files if "/" in path}
    astray = {top for top in sorted(tops) if kind_of(out / top) not in ("folder", "missing")}
    for top in sorted(astray):
        kind = kind_of(out / top)
        yield Finding(top, "edited", f"{in_its_place(out / top, kind)}; put a folder there", "move")
    for path, file in project.files.items():
        found = None if path.split("/", 1)[0] in astray else _compare(out / path, path, file.text)
        if found:
            yield found
    for name in records.values():
        found = None if name in astray else _compare_record(project, name)
        if found:
            yield found
    cubins = _compare_cubins(project)
    if cubins:
        yield cubins
    known = {*project.files, *records, *astray}
    if kind_of(out / CUBINS / "manifest.json") == "file":
        known.add(CUBINS)
    folders = {parent.as_posix() for path in known for parent in PurePosixPath(path).parents}
    sources = known | {path for path in _USERS if kind_of(out / path) == "file"}
    for path, kind in names_on_disk(out):
        if not wanted(path) or (
            kind == "folder" and path in folders
        ):  # an empty one: its files are missing, and found already
            continue
        steps = path.split("/")  # a known name above is a folder in a file's place, and found already
        if any("/".join(steps[:end]) in known for end in range(1, len(steps) + 1)):
            continue
        found = None if path in _USERS and kind == "file" else _extra(out, path, kind, sources)
        if found:
            yield found

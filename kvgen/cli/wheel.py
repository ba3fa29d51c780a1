"""A project's generated packages inside a wheel: is every file of theirs in it, and the same? Nothing is unpacked.

The wheel is data from outside: what it says of sizes is not believed, its names are only compared, never opened.
"""

from __future__ import annotations

import re
import stat
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvgen.cli.ondisk import LIMIT, read_generated, source_of
from kvgen.cli.project import RESOURCES, Project
from kvgen.cli.sync import Finding, difference
from kvgen.codegen.emit import banner_digest, kernel_files
from kvgen.errors import ToolError
from kvgen.files import FileKind, kind_of, named, opened
from kvgen.runtime.module import CUBINS, PACKAGE_DATA

_WHEEL_LIMIT: Final = 1 << 30  # bytes of the file, and of all that is read out of it
_NAMES_LIMIT: Final = 1 << 17
_BROKEN: Final = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError, ValueError)

_SETUPTOOLS: Final = PACKAGE_DATA.replace("] ", "]\n", 1)
_PACKED: Final = {  # the line that has a backend pack such files, by the first word of a wheel's Generator
    "setuptools": _SETUPTOOLS,
    "bdist_wheel": _SETUPTOOLS,
    "hatchling": '[tool.hatch.build.targets.wheel]\nartifacts = ["*.cu", "*.cuh", "*.cubin", "*.json"]',
    "poetry-core": '[tool.poetry]\ninclude = [{{ path = "{out}/**/*", format = "wheel" }}]',
}
_FOUND: Final = (  # device/ and include/ have no __init__.py: packages to setuptools only where namespaces are looked for
    '[tool.setuptools.packages.find]\nwhere = ["{where}"]\ninclude = ["{top}*"]\nnamespaces = true'
)


@dataclass
class Wheel:
    """An open wheel: its files by name, the program that packed it, as "setuptools", and how many bytes may yet be read."""

    archive: zipfile.ZipFile
    files: dict[str, zipfile.ZipInfo]
    generator: str = ""
    left: int = field(default_factory=lambda: _WHEEL_LIMIT)

    def text(self, name: str) -> str | None:
        """A file's text; None where it is not UTF-8, or larger than any generated file."""
        with self.archive.open(self.files[name]) as file:
            data = file.read(min(LIMIT, self.left) + 1)  # what its header says of its size may be wrong
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"more than {_WHEEL_LIMIT >> 20} MiB to read")
        try:
            return data.decode("utf-8") if len(data) <= LIMIT else None
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class Checked:
    """Faults of a wheel, the sets that it has, the lines of pyproject.toml that mend what is missing, and of how many
    kernels and architectures there is a cubin in it, or none."""

    findings: list[Finding]
    sets: list[str]
    mend: str | None
    with_cubin: int = 0
    without_cubin: int = 0

    @property
    def facts(self) -> dict[str, int]:
        """The counts, for programs."""
        return {"with_cubin": self.with_cubin, "without_cubin": self.without_cubin}

    @property
    def cubins(self) -> str:
        """The counts in words."""
        every = self.with_cubin + self.without_cubin
        if not self.without_cubin:
            return f"{every} cubins, one a kernel and architecture"
        said = f"{self.without_cubin} of {every} kernels, counted by architecture, have no cubin in it"
        return f"{said}: NVRTC compiles them at the first launch"


def check_wheel(path: Path, project: Project, sets: set[str] | None) -> Checked:
    """Compare the generated packages in a wheel with what the specs give; `sets` are those that it must have.

    Raises ToolError for what is no wheel, or one that cannot be read.
    """
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            return _compare(_open(archive), project, sets)
    except ToolError as error:
        raise ToolError(f"--wheel: {error}; give the path of a wheel, as dist/engine-1.0-py3-none-any.whl") from error
    except _BROKEN as error:
        raise ToolError(
            f"--wheel: {named(path)}: cannot be read as a wheel ({named(str(error))}); build it anew"
        ) from error


def _open(archive: zipfile.ZipFile) -> Wheel:
    files: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        if name in files:
            raise ValueError(f"{name} is in it twice")
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise ValueError(f"{name} would be installed outside")
        if not info.is_dir():
            files[name] = info
    if len(files) > _NAMES_LIMIT:
        raise ValueError(f"more than {_NAMES_LIMIT} files")
    facts = [name for name in files if re.fullmatch(r"[^/]+\.dist-info/WHEEL", name)]
    if len(facts) != 1:
        raise ValueError(f"it has {len(facts)} files *.dist-info/WHEEL, a wheel has one")
    wheel = Wheel(archive, files)
    match = re.search(r"^Generator: *([\w-]+)", wheel.text(facts[0]) or "", re.MULTILINE)
    wheel.generator = match[1].lower() if match else ""
    return wheel


def _roots(wheel: Wheel, project: Project) -> list[str]:
    """The folders of the wheel that are output folders of this project, by the sets in them."""
    names = {s.kernels.name for s in project.sets}
    found = set()
    for path in wheel.files:
        match = re.fullmatch(r"((?:[^/]+/)*)([^/]+)/__init__\.py", path)
        if match and match[2] in names and banner_digest(wheel.text(path) or ""):
            found.add(match[1])
    return sorted(found)


def _compare(wheel: Wheel, project: Project, sets: set[str] | None) -> Checked:
    roots, found, have = _roots(wheel, project), list[Finding](), set[str]()
    every = lacking = 0
    if not roots:
        out = project.config.package.replace(".", "/")
        found.append(Finding(f"{out}/", "missing", "no generated package of this project is in the wheel", "move"))
    for root in roots:
        tops = {path.removeprefix(root).split("/")[0] for path in wheel.files if path.startswith(root)}
        present = sorted((tops & {s.kernels.name for s in project.sets}) | (sets or set()))
        have |= set(present)
        found += _differences(wheel, project, root, {"device", *present})
        wrong, none = _cubins(wheel, project, root, present)
        found += wrong
        every += sum(len(archs) for s in project.sets if s.kernels.name in present for _, archs in kernel_files(s))
        lacking += none
    mend = _mend(wheel, project, found)
    return Checked(sorted(found, key=lambda f: f.path), sorted(have), mend, every - lacking, lacking)


def _cubins(wheel: Wheel, project: Project, root: str, names: Collection[str]) -> tuple[list[Finding], int]:
    """Findings about the cubins beside the sets in a wheel, and how many kernels of these sets, by architecture, have none."""
    from kvgen.cli.sync import cubins_of, without_cubin
    from kvgen.compile import Manifest, parse_manifest

    folder = f"{root}{CUBINS}"
    manifest, own = Manifest(Path(folder), ()), cubins_of(project)
    found = []
    if f"{folder}/manifest.json" in wheel.files:
        try:
            text = wheel.text(f"{folder}/manifest.json")
            manifest = parse_manifest(Path(folder), (text or "").encode())
        except ToolError as error:
            found.append(Finding(f"{folder}/manifest.json", "edited", str(error), "move"))
    elif own is not None and own.entries:
        found.append(Finding(f"{folder}/manifest.json", "missing", "the project has it, the wheel lacks it", "move"))
    have = tuple(entry for entry in manifest.entries if f"{folder}/{entry.file}" in wheel.files)
    for entry in manifest.entries:
        if entry not in have:
            note = "the manifest beside it names it, the wheel lacks it"
            found.append(Finding(f"{folder}/{entry.file}", "missing", note, "move"))
    lacking = list(without_cubin(project, Manifest(Path(folder), have), names))
    for name, arch, old in lacking:
        if old:
            note = "compiled from another text: launchers refuse it; compile anew, then build the wheel"
            found.append(Finding(f"{folder}/{name}.{arch}.cubin", "stale", note, "move"))
    return found, len(lacking)


def _differences(wheel: Wheel, project: Project, root: str, tops: set[str]) -> Iterator[Finding]:
    expected = {path: file.text for path, file in project.files.items() if path.split("/")[0] in tops}
    for top in tops - {"device"}:
        record = project.config.out / top / RESOURCES
        text = read_generated(record) if kind_of(record) == "file" else None
        if text is not None:
            expected[f"{top}/{RESOURCES}"] = text
    for path, text in expected.items():
        info = wheel.files.get(root + path)
        kind: FileKind = "missing" if info is None else "link" if stat.S_ISLNK(info.external_attr >> 16) else "file"
        if kind == "missing":
            yield Finding(root + path, "missing", "the project has it, the wheel lacks it", "move")
        elif kind == "link":
            yield Finding(root + path, "edited", "a link is in its place", "move")
        else:
            trouble = difference(path, wheel.text(root + path), text)
            if trouble:
                yield Finding(root + path, *trouble, mend="move")
    for name in wheel.files:
        path = name.removeprefix(root)
        if name.startswith(root) and path.split("/")[0] in tops and path not in expected and "/" in path:
            note = "bytecode, which Python may run instead of its source" if source_of(path) else "not of this project"
            yield Finding(name, "extra", f"{note}; leave it out of the wheel", "move")


def _mend(wheel: Wheel, project: Project, found: list[Finding]) -> str | None:
    """The next step: lines of pyproject.toml where files are missing, else a wheel built from what `kvgen build` wrote."""
    missing = [f.path for f in found if f.state == "missing"]
    if not found:
        return None
    out = project.config.out.relative_to(project.config.root)
    if not missing and all(f"/{CUBINS}/" in f"/{f.path}" for f in found):
        return f"kvgen compile -o {out.as_posix()}/{CUBINS}, then build the wheel"
    if not missing:
        return "kvgen build, then build the wheel from a clean folder"
    lines = []
    if any("/device/" not in f"/{path}" and "/include/" not in path for path in missing):
        lines.append(_PACKED.get(wheel.generator, ""))
    unfound = any("/device/" in f"/{path}" or "/include/" in path for path in missing)
    if _PACKED.get(wheel.generator) == _SETUPTOOLS and unfound and not any(path.endswith(".cu") for path in missing):
        lines.append(_FOUND)
    text = "\n".join(lines).format_map(
        {
            "out": out.as_posix(),
            "where": "src" if out.parts[0] == "src" else ".",
            "top": project.config.package.split(".")[0],
        }
    )
    return f"in pyproject.toml:\n{text}" if text else f"have the build backend pack all of {out.as_posix()}"

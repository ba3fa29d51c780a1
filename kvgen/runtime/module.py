"""A generated package's code: its kernels' texts, and the cubin or PTX made of them."""

from __future__ import annotations

import os
import sys
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from kvgen.errors import DeviceError, KvgenError, ToolError
from kvgen.runtime.abi import ABI
from kvgen.runtime.first_compile import told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.compile import Launchers, Manifest, Unit
    from kvgen.emulator import Kernel as EmulatedKernel
    from kvgen.emulator import Mode

PACKAGE_DATA: Final = '[tool.setuptools.package-data] "*" = ["*.cu", "*.cuh", "*.cubin", "*.json"]'
CUBINS: Final = "cubins"  # the folder beside the sets of an output folder that has their cubins
_SIZE_LIMIT: Final = 1 << 24  # bytes of a generated file


class Shipped(NamedTuple):
    """The folder of cubins that a set was loaded from, as it was then, and the digests of its kernels' texts by kernel."""

    manifest: Manifest
    digests: Mapping[str, str]


class Module:
    """One generated set: `name`, its folder and the architectures its spec lists."""

    def __init__(self, name: str, init_file: str, *, arch: tuple[str, ...], abi: int) -> None:
        if abi != ABI:
            newer = "kvgen build" if abi < ABI else "pip install --upgrade kvgen"
            raise KvgenError(f"{name}: generated for runtime ABI {abi}, this kvgen has {ABI}; run `{newer}`")
        self.name = name
        self.arch = arch
        self.texts: Mapping[str, str] | None = (
            None  # by path below the output folder; None: the files beside `init_file`
        )
        self.shipped: Shipped | None = None  # where it has cubins and no texts
        self._init_file = init_file
        self._kernels: dict[str, str] = {}
        self._families: dict[
            str, tuple[str, Mapping[str, str]]
        ] = {}  # by file: a kernel's file, and others by architecture

    def __repr__(self) -> str:
        return f"Module({self.name})"

    @cached_property
    def folder(self) -> Path:
        """Where the kernels' texts lie."""
        return Path(self._init_file).resolve().parent

    @property
    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(file, entry) of each kernel that the package names and that has been built; nothing else in the folder counts."""
        from kvgen.files import kind_of

        held = self.texts is not None or self.shipped is not None
        built = (f for f in sorted(self._kernels) if held or kind_of(self.folder / f) != "missing")
        return tuple((file, self._kernels[file]) for file in built)

    def target(self, capability: tuple[int, int]) -> str:
        """The best of its architectures for a GPU of this compute capability; raises DeviceError where none runs there."""
        from kvgen.compile import select_arch
        from kvgen.files import named

        try:
            return select_arch(capability, self.arch)
        except DeviceError as error:
            if self.shipped is None:
                raise
            folder = named(self.shipped.manifest.folder)
            raise DeviceError(f"{self.name}: loaded from {folder}: {error}") from None

    def add(self, file: str, entry: str, by_arch: Mapping[str, str]) -> None:
        """Say that the package has a kernel `entry` in `file`, on some architectures in the files that `by_arch` names."""
        for each in (file, *by_arch.values()):
            self._kernels[each] = entry
            self._families[each] = (file, by_arch)

    def runs(self, file: str, arch: str) -> bool:
        """True if `file` is the kernel's file for `arch`."""
        base, by_arch = self._families[file]
        return by_arch.get(arch, base) == file

    def unit(self, file: str, entry: str) -> Unit:
        """The self-contained text of one kernel. Raises DeviceError where a file of it is missing."""
        from kvgen.compile import Unit
        from kvgen.compile.flatten import flatten

        out = self.folder.parent
        text = flatten(f"{out.name}/{self.name}/{file}", lambda path: self._text(path.removeprefix(f"{out.name}/")))
        return Unit(f"{self.name}/{Path(file).stem}", entry, text)

    def require(self, path: str) -> None:
        """Raise DeviceError where a file of the output folder is missing, with what brings it back."""
        from kvgen.files import kind_of, named

        out = self.folder.parent
        if self.shipped is not None:
            folder = named(self.shipped.manifest.folder)
            raise DeviceError(
                f"{self.name}: got host arrays; it was loaded from {folder}, which has cubins for GPUs and no CUDA text, of "
                "which the CPU machine's code is made; pass arrays on a GPU, or import the generated package"
            )
        if self.texts is None and kind_of(out / path) == "missing":
            raise DeviceError(
                f"{self.name}: {path} is missing from {named(out)}; in a project, run `kvgen build`; in a wheel, have it packed, "
                f"for setuptools by these lines of pyproject.toml: {PACKAGE_DATA}; `kvgen check --wheel` looks"
            )

    def _text(self, path: str) -> str:
        if self.texts is not None:
            return self.texts[path]
        from kvgen.files import read_text

        self.require(path)
        try:
            return read_text(self.folder.parent / path, limit=_SIZE_LIMIT)
        except ToolError as error:
            raise DeviceError(f"{self.name}: {error}; run `kvgen build`") from error


def run_launchers(title: str, path: Path, launchers: Launchers) -> ModuleType:
    """The package that a set's launchers give, imported as `title`; `path` is what messages call its text.

    Neither the files nor bytecode beside them is read: what runs is what was checked.
    """
    package, table = ModuleType(title), ModuleType(f"{title}._table")
    package.__path__ = []  # no other submodule is looked for
    setattr(package, "_table", table)  # noqa: B010 - a module's type has no such attribute
    try:
        for module, place, text in (
            (table, path.with_name("_table.py"), launchers.table),
            (package, path, launchers.text),
        ):
            module.__file__, sys.modules[module.__name__] = str(place), module
            exec(compile(text, place, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        for module in (package, table):
            sys.modules.pop(module.__name__, None)
        raise
    return package


def _beside(module: Module) -> Manifest | None:
    """The folder of cubins that a generated package brings: `cubins` beside its sets. None where there is none."""
    from kvgen.compile import read_folder
    from kvgen.files import kind_of

    if module.texts is not None:
        return None
    folder = module.folder.parent / CUBINS
    return read_folder(folder) if kind_of(folder / "manifest.json") != "missing" else None


@lru_cache(maxsize=None)  # noqa: UP033 - one entry a kernel and architecture
def _cubin(module: Module, file: str, entry: str, arch: str, cubins: str | None) -> bytes:
    from kvgen.compile import compile_unit, default_cache, find, jit_allowed, read_folder, text_digest

    if module.shipped is not None:
        manifest, digests = module.shipped
        return find(manifest, module.name, Path(file).stem, arch, digests.get(Path(file).stem, "none"))
    unit = module.unit(file, entry)
    beside = _beside(module)
    if beside is not None and beside.entry(module.name, Path(file).stem, arch) is not None:
        return find(beside, module.name, Path(file).stem, arch, text_digest(unit.text))
    if cubins:
        return find(read_folder(Path(cubins)), module.name, Path(file).stem, arch, text_digest(unit.text))
    if not jit_allowed():
        packed = f", or pack {CUBINS}/ beside the package with a cubin for {arch}" if module.texts is None else ""
        raise DeviceError(
            f"{module.name}/{file}: KVGEN_NO_JIT is set and $KVGEN_CUBINS names no folder; run `kvgen compile -o DIR` and "
            f"set KVGEN_CUBINS=DIR{packed}"
        )
    ahead = "`kvgen compile -o DIR` compiles ahead, KVGEN_CUBINS=DIR uses it."
    with told(f"{module.name}/{Path(file).stem}", arch, "NVRTC, CUDA to machine code,", ahead):
        return compile_unit(unit, arch, cache=default_cache()).data


def cubin(module: Module, file: str, entry: str, capability: tuple[int, int]) -> bytes:
    """The kernel for a GPU of this compute capability: from the cubins beside the package, where they have it; else from
    $KVGEN_CUBINS, or compiled now (and cached)."""
    return _cubin(module, file, entry, module.target(capability), os.environ.get("KVGEN_CUBINS"))


def cpu_kernel(module: Module, file: str, entry: str, arch: str, mode: Mode) -> EmulatedKernel:
    """The kernel for the CPU machine. Each is an object of its own, so that a set costs what is launched of it."""
    from kvgen.compile import quick_on_cpu

    return _cpu_kernel(module, file, entry, arch, mode, quick_on_cpu())


@lru_cache(maxsize=None)  # noqa: UP033 - one entry a kernel, architecture and mode
def _cpu_kernel(module: Module, file: str, entry: str, arch: str, mode: Mode, quick: bool) -> EmulatedKernel:
    from kvgen.compile import cache_folder, compile_unit, default_cache, jit_allowed
    from kvgen.emulator import EmulatorError, build

    if not jit_allowed():
        raise DeviceError(
            f"{module.name}: KVGEN_NO_JIT is set; the CPU machine compiles PTX and C at run time; unset it to use host arrays"
        )
    unit = module.unit(file, entry)
    ahead = f"{cache_folder()} keeps it for later processes; for GPUs `kvgen compile -o DIR` compiles ahead."
    try:
        with told(f"{module.name}/{Path(file).stem}", arch, "NVRTC, CUDA to PTX,", ahead) as stage:
            image = compile_unit(unit, arch, "ptx", cache=default_cache(), quick=quick)
            stage.name = "the host compiler, PTX to this CPU's code,"
            return build([image.data.decode()], mode=mode).kernels[entry]
    except EmulatorError as error:  # no host compiler, or PTX that the CPU machine does not know
        raise DeviceError(f"{module.name}/{file} on the CPU machine: {error}") from error

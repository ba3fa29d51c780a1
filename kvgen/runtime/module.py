"""A generated package's code: its kernels' texts, and the cubin or PTX made of them."""

from __future__ import annotations

import os
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvgen.errors import DeviceError, KvgenError
from kvgen.runtime.abi import ABI

if TYPE_CHECKING:
    from kvgen.compile import Job, Unit
    from kvgen.emulator import Library


class Module:
    """One generated set: `name`, its folder and the architectures its spec lists."""

    def __init__(self, name: str, init_file: str, *, arch: tuple[str, ...], abi: int) -> None:
        if abi != ABI:
            newer = "kvgen build" if abi < ABI else "pip install --upgrade kvgen"
            raise KvgenError(f"{name}: generated for runtime ABI {abi}, this kvgen has {ABI}; run `{newer}`")
        self.name = name
        self.arch = arch
        self._init_file = init_file

    @cached_property
    def folder(self) -> Path:
        """Where the kernels' texts lie."""
        return Path(self._init_file).resolve().parent

    @cached_property
    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(file, entry) of each kernel of the set."""
        return tuple((path.name, self._entry(path)) for path in sorted(self.folder.glob("*.cu")))

    def _entry(self, path: Path) -> str:
        from kvgen.signature import read_signature

        signature = read_signature(path.read_text(encoding="utf-8"))
        return signature.entry if signature else f"{self.name}_{path.stem}"

    def unit(self, file: str, entry: str) -> Unit:
        """The self-contained text of one kernel."""
        from kvgen.compile import Unit
        from kvgen.flatten import flatten

        root = self.folder.parent

        def read(path: str) -> str:
            try:
                return (root.parent / path).read_text(encoding="utf-8")
            except OSError as error:
                raise DeviceError(f"{self.name}: cannot read {path}: {error.strerror}; run `kvgen build`") from error

        return Unit(f"{self.name}/{Path(file).stem}", entry, flatten(f"{root.name}/{self.name}/{file}", read))


@lru_cache(maxsize=None)  # noqa: UP033 - one entry a kernel and architecture
def _cubin(module: Module, file: str, entry: str, arch: str, cubins: str | None) -> bytes:
    from kvgen.compile import compile_unit, default_cache, find, jit_allowed, read_folder, text_digest

    unit = module.unit(file, entry)
    if cubins:
        return find(read_folder(Path(cubins)), module.name, Path(file).stem, arch, text_digest(unit.text))
    if not jit_allowed():
        raise DeviceError(
            f"{module.name}/{file}: KVGEN_NO_JIT is set and $KVGEN_CUBINS names no folder; run `kvgen compile -o DIR` and "
            "set KVGEN_CUBINS=DIR"
        )
    return compile_unit(unit, arch, cache=default_cache()).data


def cubin(module: Module, file: str, entry: str, capability: tuple[int, int]) -> bytes:
    """The kernel for a GPU of this compute capability: from $KVGEN_CUBINS, or compiled now (and cached)."""
    from kvgen.compile import select_arch

    return _cubin(module, file, entry, select_arch(capability, module.arch), os.environ.get("KVGEN_CUBINS"))


@lru_cache(maxsize=None)  # noqa: UP033 - one entry a set, architecture and mode
def cpu_library(module: Module, arch: str, mode: Literal["fast", "check"]) -> Library:
    """All of a set's kernels for the CPU machine: one run of the host compiler serves them all."""
    from kvgen.compile import compile_many, default_cache, jit_allowed
    from kvgen.emulator import EmulatorError, build

    if not jit_allowed():
        raise DeviceError(
            f"{module.name}: KVGEN_NO_JIT is set; the CPU machine compiles PTX and C++ at run time; unset it to use NumPy arrays"
        )
    jobs: list[Job] = [(module.unit(file, entry), arch, "ptx") for file, entry in module.kernels]
    images = compile_many(jobs, cache=default_cache())
    try:
        return build([i.data.decode() for i in images], mode=mode)
    except EmulatorError as error:  # no host compiler, or PTX that the CPU machine does not know
        raise DeviceError(f"{module.name} on the CPU machine: {error}") from error

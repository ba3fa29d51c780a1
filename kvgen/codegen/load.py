"""`kvgen.load`: a kernel set as a module in memory, without a project or generated files of one's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from kvgen.codegen.emit import File, render_all, units_of
from kvgen.codegen.package import GENERATED, imported, key_of
from kvgen.compile import cache_folder, compile_many, default_cache, text_digest, write_folder
from kvgen.compile.aot import Manifest
from kvgen.errors import SpecError
from kvgen.spec.kernel_set import Arch, KernelSet
from kvgen.spec.loader import LoadedSet

_LOADED: Final = dict[tuple[str, str], ModuleType]()  # a cache: the module of each spec and name
_LOCK: Final = threading.Lock()


def load(kernels: KernelSet, *, name: str | None = None, arch: Sequence[Arch] | None = None) -> ModuleType:
    """A module with what `kvgen build` writes for this set: `Cache` and one typed launcher an operation.

        llama = kvgen.load(KernelSet(q_heads=32, cache=Paged(...), ops=[ops.Append(), ops.Decode()]))
        llama.append(llama.Cache(pool, lengths=..., page_table=...)[0], k, v, row_offsets)

    name: the set's, by default the spec's, else `set_` and the first digits of its digest. arch: the architectures to compile
    for, by default the spec's. Equal specs give the same module in a process. A kernel is compiled at its first launch, once
    for all threads and processes that share `KVGEN_CACHE_DIR`; or it comes from `KVGEN_CUBINS`, a folder of `compile_ahead`,
    which `KVGEN_NO_JIT=1` makes a must. The text lies in the folder of `KVGEN_CACHE_DIR`, for people and debuggers.

    Raises SpecError for what `kvgen build` would refuse, ToolError where that folder cannot be written.
    """
    loaded, files = _rendered(kernels, name, arch)
    texts = tuple(files.values())
    key = (loaded.kernels.name, key_of(texts))
    with _LOCK:
        if key not in _LOADED:
            _LOADED[key] = imported(cache_folder(), loaded.kernels.name, texts)
        return _LOADED[key]


def compile_ahead(
    folder: str | Path, *kernels: KernelSet, name: str | None = None, arch: Sequence[Arch] | None = None
) -> Manifest:
    """Compile sets for `load` into `folder`, which `KVGEN_CUBINS` then names: one cubin a kernel and architecture.

    name and arch as `load` takes them; a name is for one set only. Other sets in the folder stay. Raises SpecError as `load`
    does, CompileError for what NVRTC refuses, ToolError where the folder cannot be written.
    """
    if name is not None and len(kernels) != 1:
        raise SpecError(f"name: got {name!r} for {len(kernels)} sets; a name is one set's; call it once for each")
    jobs, digests = [], {}
    for each in kernels:
        loaded, files = _rendered(each, name, arch)
        for unit in units_of(loaded, files, GENERATED):
            digests[unit.name] = text_digest(unit.text)
            jobs += [(unit, target, "cubin") for target in loaded.kernels.arch]
    images = compile_many(jobs, cache=default_cache())
    return write_folder(Path(folder), images, digests)


def _rendered(kernels: KernelSet, name: str | None, arch: Sequence[Arch] | None) -> tuple[LoadedSet, dict[str, File]]:
    """The set under its name, and its files."""
    if not isinstance(kernels, KernelSet):
        raise SpecError(f"kernels: got {type(kernels).__name__}; load takes a spec; pass a KernelSet")
    try:
        if arch is not None:
            given = [arch] if isinstance(arch, str) else list(arch)
            kernels = KernelSet(**{**dict(kernels), "arch": given})
        named = (kernels if name is None else kernels.model_copy(update={"name": ""})).named(name or "unnamed")
        if not named.name or named.name == "unnamed":
            files = render_all([LoadedSet(named, "kvgen.load", "")])
            named = kernels.named(f"set_{key_of(tuple(files.values()))[:8]}")
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(str(error)) from None
    loaded = LoadedSet(named, "kvgen.load", "")
    return loaded, render_all([loaded])

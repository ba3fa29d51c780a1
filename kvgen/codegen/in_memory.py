"""Specs as modules in memory, without a project or generated files of one's own; and their kernels compiled ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from kvgen.architectures import Arch
from kvgen.codegen.emit import File, kernel_files, kernels_by_arch, launchers_of, render_all, units_of
from kvgen.codegen.package import GENERATED, imported, key_of
from kvgen.compile import archs_given, cache_folder, compile_many, default_cache, text_digest, write_folder
from kvgen.compile.aot import Manifest
from kvgen.errors import SpecError
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import LoadedSet
from kvgen.schema.shard import shard

_LOADED: Final = dict[tuple[str, str], ModuleType]()  # a cache: the module of each spec and name
_LOCK: Final = threading.Lock()


def load_spec(
    kernels: KernelSet, name: str | None = None, arch: Sequence[Arch] | None = None, tp: int | None = None
) -> ModuleType:
    """The module of a spec, as `kvgen.load` describes it."""
    loaded, files = _rendered(kernels, name, arch, 1 if tp is None else tp)
    texts = tuple(files.values())
    key = (loaded.kernels.name, key_of(texts))
    with _LOCK:
        if key not in _LOADED:
            _LOADED[key] = imported(cache_folder(), loaded.kernels.name, texts)
        return _LOADED[key]


def compile_ahead(
    folder: str | Path,
    *kernels: KernelSet,
    name: str | None = None,
    arch: Sequence[Arch] | None = None,
    tp: Sequence[int] = (1,),
) -> Manifest:
    """Compile sets for `load` into `folder`, which `KVGEN_CUBINS` then names: one cubin a kernel and architecture, and the set's
    launchers, so that `load` finds it by name or digest where specs cannot be read.

    name and arch as `load` takes them; a name is for one set only. tp: numbers of GPUs that share the heads; the folder gets a
    shard of every set for each, the set itself for 1. Other sets in the folder stay. `sets` of the result has the digests.
    Raises SpecError as `load` does, CompileError for what NVRTC refuses, ToolError where the folder cannot be written.
    """
    if name is not None and len(kernels) != 1:
        raise SpecError(f"name: got {name!r} for {len(kernels)} sets; a name is one set's; call it once for each")
    jobs, digests, launchers = [], {}, {}
    others: dict[str, dict[str, str]] = {}
    shards: dict[str, tuple[str, int]] = {}
    for each, gpus in ((each, gpus) for each in kernels for gpus in tp):
        loaded, files = _rendered(each, name, arch, gpus)
        launchers[loaded.kernels.name] = launchers_of(loaded.kernels.name, files)
        others |= kernels_by_arch(loaded)
        if gpus != 1:
            shards[loaded.kernels.name] = (name or each.name, gpus)
        for unit, (_, own) in zip(units_of(loaded, files, GENERATED), kernel_files(loaded), strict=True):
            digests[unit.name] = text_digest(unit.text)
            jobs += [(unit, target, "cubin") for target in own]
    images = compile_many(jobs, cache=default_cache())
    return write_folder(Path(folder), images, digests, launchers, others, shards)


def _rendered(
    kernels: KernelSet, name: str | None, arch: Sequence[Arch] | None, tp: int
) -> tuple[LoadedSet, dict[str, File]]:
    """The set of one of `tp` GPUs under its name, and its files."""
    if not isinstance(kernels, KernelSet):
        raise SpecError(
            f"kernels: got {type(kernels).__name__}; load takes a spec, or the name or digest of a set; pass a KernelSet or text"
        )
    if name is not None and not isinstance(name, str):
        raise SpecError(f"name: got {name!r}; pass text, a name in C such as 'llama3_8b'")
    try:
        if arch is not None:
            kernels = KernelSet(**{**dict(kernels), "arch": archs_given(arch)})
        called = kernels if name is None else kernels.called(name)
        part = shard(called, tp)
        named = part.named("unnamed")
        if named.name == "unnamed":
            files = render_all([LoadedSet(named, "kvgen.load", "")])
            named = part.named(f"set_{key_of(tuple(files.values()))[:8]}")
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(str(error)) from None
    loaded = LoadedSet(named, "kvgen.load", "")
    return loaded, render_all([loaded])

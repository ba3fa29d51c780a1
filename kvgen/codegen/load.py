"""`kvgen.load`: a kernel set as a module, of a spec or of a folder of cubins. Without the extra `build` the latter works."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, overload

from kvgen.errors import SpecError
from kvgen.extras import BUILD, missing, needs_build

if TYPE_CHECKING:
    from kvgen.compile import Arch
    from kvgen.schema.kernel_set import KernelSet


@overload
def load(
    kernels: KernelSet, *, name: str | None = None, arch: Sequence[Arch] | None = None, tp: int | None = None
) -> ModuleType: ...
@overload
def load(
    kernels: str,
    *,
    arch: Sequence[Arch] | None = None,
    tp: int | None = None,
    cubins: str | PathLike[str] | None = None,
) -> ModuleType: ...
def load(
    kernels: KernelSet | str,
    *,
    name: str | None = None,
    arch: Sequence[Arch] | None = None,
    tp: int | None = None,
    cubins: str | PathLike[str] | None = None,
) -> ModuleType:
    """A module with what `kvgen build` writes for this set: `Cache` and one typed launcher an operation.

        llama = kvgen.load(KernelSet(q_heads=32, cache=Paged(...), ops=[ops.Append(), ops.Decode()]))
        llama.append(llama.Cache(pool, lengths=..., page_table=...)[0], k, v, row_offsets)

    kernels: a spec, which needs the extra `build`. name: the set's, by default the spec's, else `set_` and the first digits of a
    digest. arch: the architectures to compile for, by default the spec's. tp: how many GPUs share the heads; the module has the
    heads of one of them. Equal specs give the same module in a process. A kernel is compiled at its first launch, once for all
    threads and processes that share `KVGEN_CACHE_DIR`; or it comes from `KVGEN_CUBINS`, a folder of `compile_ahead`, which
    `KVGEN_NO_JIT=1` makes a must. The text lies in the folder of `KVGEN_CACHE_DIR`, for people and debuggers.

        llama = kvgen.load("llama3_8b", cubins="/opt/engine/cubins")

    kernels: the name of a set in the folder `cubins`, by default `KVGEN_CUBINS`, or its digest (all 64 digits or the first 8 or
    more of `manifest.json`). This needs the runtime alone and compiles nothing. The set's launchers are Python code in the
    folder; they run if their bytes have the digest that the manifest has. arch: architectures that must be there. tp:
    how many GPUs share the heads of the set with this name; `kvgen compile --tp` and `compile_ahead(tp=...)` write a set for
    each number.

    Raises SpecError for what `kvgen build` would refuse and for a set that the folder does not have; ToolError where a folder
    cannot be read or written, or is not what was written; ImportError for a spec without the extra `build`.
    """
    if isinstance(kernels, str):
        from kvgen.runtime.shipped import load_shipped

        if name is not None:
            raise SpecError(
                f"name: got {name!r} for a set of a folder of cubins; it has its name from there; leave out name"
            )
        return load_shipped(kernels, cubins, arch, tp)
    if cubins is not None:
        raise SpecError(
            f"cubins: got {cubins!r} beside a spec; kernels of a spec come from the folder that KVGEN_CUBINS names; set it, or "
            "load a set of the folder by its name"
        )
    try:
        from kvgen.codegen.in_memory import load_spec
    except ModuleNotFoundError as error:
        if error.name not in BUILD:
            raise
        raise ImportError(needs_build("kvgen.load of a spec", missing(BUILD)), name=error.name) from None
    return load_spec(kernels, name, arch, tp)

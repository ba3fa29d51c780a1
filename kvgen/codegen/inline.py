"""`kvgen.compile_kernel`: a kernel given as text or as a file, over a cache given as a spec, without a project around them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgen.architectures import DEFAULT_ARCHS, Arch
from kvgen.codegen.emit import render_all, units_of
from kvgen.codegen.package import GENERATED, imported
from kvgen.compile import Job, cache_folder, compile_many, default_cache, jit_allowed, quick_on_cpu
from kvgen.errors import DeviceError, SpecError, ToolError
from kvgen.files import read_bytes
from kvgen.ops.custom import Custom, Rule
from kvgen.plan.entries import entries
from kvgen.runtime.bound import Bound
from kvgen.schema.arguments import Argument
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import LoadedSet

_SIZE_LIMIT: Final = 1 << 24  # bytes of a file of CUDA


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel and the class of its caches: `kernel(kernel.Cache(...)[layer], ...)` checks the arguments and launches.

    `launcher` is what a generated package would have under the kernel's name; `folder` holds that package.
    """

    name: str
    Cache: type[Any]
    launcher: Any  # a generated launcher: its arguments are those of `params`
    folder: Path

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Check the arguments and launch on `stream`."""
        self.launcher(*arguments, **named)

    def bind(self, *arguments: Any, **named: Any) -> Bound:
        """Check the arguments once; the result launches with them when called with a stream."""
        bound: Bound = self.launcher.bind(*arguments, **named)
        return bound


def compile_kernel(
    source: str | os.PathLike[str],
    *,
    cache: Cache,
    grid: Rule | Sequence[Rule],
    params: Sequence[Argument] = (),
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    name: str | None = None,
    q_heads: int | None = None,
    arch: Sequence[Arch] = DEFAULT_ARCHS,
    threads: int = 128,
    shared: int = 0,
    writes: bool = False,
    errors: bool = False,
    doc: str = "",
) -> CompiledKernel:
    """Compile CUDA of your own over `cache`, and import a launcher for it.

    `source` is CUDA, or the path of a file of it: a text with a line break is CUDA. `name` is its entry, by default the
    only extern "C" __global__ function it has. `q_heads` (by default one a kv head) only serves as a word in shapes and
    grid. The other arguments are those of `ops.Custom`. The package lies in the folder of `KVGEN_CACHE_DIR`; the same
    arguments give the same one. Raises SpecError for what `kvgen build` would refuse, CompileError for what NVRTC does.
    """
    if not jit_allowed():
        raise DeviceError("compile_kernel: KVGEN_NO_JIT is set, which forbids compiling at run time; unset it")
    given: dict[str, str] = {}
    text = source if isinstance(source, str) and "\n" in source else ""
    if text:
        given["text"] = text
    else:
        given["source"] = _absolute(source)
    try:
        name = name or _only_entry(text or _peek(given["source"]))
        op = Custom(
            name=name, **given, params=tuple(params), grid=grid, threads=threads, shared=shared, writes=writes,  # type: ignore[arg-type]
            include_dirs=tuple(_absolute(folder, "include_dirs") for folder in include_dirs), errors=errors, doc=doc,
        )  # fmt: skip
        kernels = KernelSet(
            q_heads=cache.kv_heads if q_heads is None else q_heads, cache=cache, ops=(op,), arch=tuple(arch)
        ).named(name)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(str(error)) from None
    loaded = LoadedSet(kernels, "kvgen.compile_kernel", "")
    files = render_all([loaded])
    jobs: list[Job] = [(unit, target, "ptx") for unit in units_of(loaded, files, GENERATED) for target in kernels.arch]
    compile_many(jobs, cache=default_cache(), quick=quick_on_cpu())
    package = imported(cache_folder(), name, tuple(files.values()))
    folder = Path(str(package.__file__)).parent
    return CompiledKernel(name, package.Cache, getattr(package, name), folder)


def _absolute(source: str | os.PathLike[str], field: str = "source") -> str:
    try:
        return str(Path(source).expanduser().absolute())
    except RuntimeError:
        raise SpecError(
            f"{field}: got {os.fspath(source)!r}; no such user's home is known; give the whole path"
        ) from None


def _peek(path: str) -> str:
    try:
        return read_bytes(path, limit=_SIZE_LIMIT).decode("utf-8", "replace")
    except ToolError as error:
        raise ValueError(f"source: got {error}; give CUDA (it has line breaks), or an existing file") from None


def _only_entry(text: str) -> str:
    found = [name for name, is_c in entries(text).items() if is_c]
    if len(found) != 1:
        got = f"{', '.join(found)}" if found else "none"
        raise ValueError(
            f'name: missing; the extern "C" __global__ functions of the text are: {got}; say which, name=...'
        )
    return found[0]

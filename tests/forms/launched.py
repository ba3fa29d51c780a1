"""Which kernels each test launches on the CPU machine.

`install` sees every file that is rendered in this process, every kernel that is made for the CPU machine, and every launch.
Kernels of generated/ and of the user's own are left out: they were rendered elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from kvgen.lowering.cache_header import CacheContext
from tests.forms.form import Subject, subjects

_INCLUDED: Final = re.compile(r'#include "(\w+\.cuh)"')
_NAME: Final = "kvgen_forms"  # of an attribute of kernels


@dataclass(frozen=True, eq=False)
class Rendered:
    """A kernel as it was rendered: its template's context, and those of the cache and of the others that it includes."""

    template: str
    context: object
    cache: CacheContext
    others: dict[str, CacheContext]
    arch: str
    digest: str

    @functools.cached_property
    def subjects(self) -> set[Subject]:
        """What it is made of."""
        return subjects(self.template, self.context, self.cache, self.others, self.arch)


# Template and context of a rendered text, by its digest; empty before `install`.
_files: dict[str, tuple[str, Any]] = {}
_launched: set[Rendered] = set()  # since the test began


def install() -> None:
    """See what is rendered and launched from now on; once in a process."""
    if _files:
        return
    _files["installed"] = ("", None)
    from kvgen.codegen import emit
    from kvgen.emulator import launch
    from kvgen.runtime import cpu

    templated, made, run = emit._templated, cpu.cpu_kernel, launch.Kernel.launch

    def rendered(path: str, spec: str, template: str, context: object, **more: bool | str) -> emit.File:
        file = templated(path, spec, template, context, **more)
        if path.endswith((".cu", ".cuh")):
            _files[_digest(file.text)] = (template, context)
        return file

    def kernel(module: Any, file: str, entry: str, arch: str, mode: Any) -> launch.Kernel:
        found = made(module, file, entry, arch, mode)
        if not hasattr(found, _NAME):
            setattr(found, _NAME, _rendered(module, file, arch))
        return found

    @functools.wraps(run)
    def launched(self: launch.Kernel, *args: Any, **kwargs: Any) -> Any:
        if (kernel := getattr(self, _NAME, None)) is not None:
            _launched.add(kernel)
        return run(self, *args, **kwargs)

    emit._templated = rendered
    cpu.cpu_kernel = kernel
    launch.Kernel.launch = launched  # type: ignore[method-assign]


def _digest(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def _rendered(module: Any, file: str, arch: str) -> Rendered | None:
    """A kernel whose files were rendered here; None of others."""
    text = module._text(f"{module.name}/{file}")
    if _digest(text) not in _files:
        return None
    template, context = _files[_digest(text)]
    headers = [module._text(f"{module.name}/{name}") for name in _INCLUDED.findall(text)]
    contexts = [_files.get(_digest(header), ("", None))[1] for header in headers]
    caches = {c.space: c for c in contexts if isinstance(c, CacheContext)}
    if "" not in caches:
        return None
    return Rendered(template, context, caches.pop(""), caches, arch, _digest(arch, text, *headers))


def begin() -> None:
    """A test begins."""
    _launched.clear()


def kernels() -> set[Rendered]:
    """What it has launched."""
    return set(_launched)

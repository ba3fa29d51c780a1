"""Sets of a folder of cubins as modules, found by name or digest: no spec, no template and no compiler is needed.

The folder's launchers are Python code. What runs is the text whose digest was compared with the manifest's, and the manifest's
with the digest that was asked for, if one was.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kvgen.errors import SpecError, ToolError
from kvgen.files import named
from kvgen.runtime.abi import ABI
from kvgen.runtime.module import Shipped, run_launchers

if TYPE_CHECKING:
    from kvgen.compile import Manifest, ManifestSet

_DIGEST: Final = re.compile(r"[0-9a-f]{8,64}")
_SHOWN: Final = 12  # digits of a digest in messages
_LOADED: Final = dict[tuple[str, str, tuple[str, ...]], ModuleType]()  # by folder, digest and architectures
_LOCK: Final = threading.Lock()


def load_shipped(
    wanted: str,
    cubins: str | os.PathLike[str] | None = None,
    arch: Sequence[str] | None = None,
    tp: int | None = None,
) -> ModuleType:
    """The module of the set whose name or digest is `wanted`, as `kvgen.load` describes it."""
    from kvgen.compile import read_folder, read_launchers

    manifest = read_folder(_folder(wanted, cubins))
    found = _found(manifest, wanted) if tp is None else _shard(manifest, wanted, tp)
    path = manifest.folder / found.file
    if found.abi != ABI:
        mend = f"`kvgen compile -o {named(manifest.folder)}` makes it anew" if found.abi < ABI else "upgrade kvgen here"
        raise ToolError(
            f"{named(path)}: {found.set} was generated for runtime ABI {found.abi}, this kvgen has {ABI}; {mend}"
        )
    archs = _archs(manifest, found, arch)
    key = (os.path.realpath(manifest.folder), found.digest, archs)
    with _LOCK:
        if key not in _LOADED:
            launchers = read_launchers(manifest, found)
            module = run_launchers(f"_kvgen_set_{found.digest[:32]}_{len(_LOADED)}", path, launchers)
            own = module._MODULE
            if own.name != found.set:
                raise ToolError(
                    f"{named(path)}: has launchers of {own.name}; the manifest says {found.set}; {_again(manifest)}"
                )
            own.shipped, own.arch = Shipped(manifest, found.kernels), archs
            _LOADED[key] = module
        return _LOADED[key]


def _folder(wanted: str, cubins: str | os.PathLike[str] | None) -> Path:
    given = os.environ.get("KVGEN_CUBINS") if cubins is None else cubins
    if not given:
        raise SpecError(
            f"kernels: got {wanted!r}, a name or digest, and no folder to find it in; pass cubins=DIR or set KVGEN_CUBINS=DIR, a "
            "folder that `kvgen compile -o DIR` or kvgen.compile_ahead() made"
        )
    if not isinstance(given, (str, os.PathLike)):
        raise SpecError(f"cubins: got {given!r}; pass the path of a folder that `kvgen compile -o DIR` made")
    return Path(given)


def _found(manifest: Manifest, wanted: str) -> ManifestSet:
    """The set that `wanted` names; raises SpecError for another, ToolError where the folder has launchers of none."""
    place, sets = named(manifest.folder / "manifest.json"), {each.set: each for each in manifest.sets}
    if not sets:
        raise ToolError(f"{place}: has launchers of no set, only cubins for launchers elsewhere; {_again(manifest)}")
    if wanted in sets:
        return sets[wanted]
    if _DIGEST.fullmatch(wanted):
        hits = [each for each in manifest.sets if each.digest.startswith(wanted)]
        if len(hits) == 1:
            return hits[0]
        there = ", ".join(f"{each.digest[:_SHOWN]} ({each.set})" for each in hits or manifest.sets)
        if hits:
            raise SpecError(
                f"digest: got {wanted!r}; {place} has several that begin with it: {there}; pass more digits"
            )
        raise SpecError(
            f"digest: got {wanted[:_SHOWN]!r}; {place} has {there}; pass one of those, or compile the spec that has this digest "
            "into the folder"
        )
    near = difflib.get_close_matches(wanted, sets, n=1)
    mend = f"did you mean {near[0]!r}?" if near else "pass one of those, or the first 8 or more digits of a digest"
    raise SpecError(f"name: got {wanted!r}; {place} has {', '.join(sets)}; {mend}")


def _shard(manifest: Manifest, wanted: str, tp: int) -> ManifestSet:
    """The shard of the set called `wanted` for `tp` GPUs; raises SpecError with the numbers of GPUs that there are sets for."""
    sizes = {each.tp: each for each in manifest.sets if (each.whole or each.set) == wanted}
    if tp in sizes:
        return sizes[tp]
    place = named(manifest.folder / "manifest.json")
    if not sizes:
        found = _found(manifest, wanted)  # raises for what the folder does not have
        raise SpecError(
            f"tp: got {tp!r} beside {wanted!r}, which is {found.set} for tp {found.tp}; leave out tp, or pass the name of the "
            "whole set"
        )
    raise SpecError(
        f"tp: got {tp!r}; {place} has {wanted} for tp {', '.join(map(str, sorted(sizes)))}; pass one of those, or compile it "
        f"with `kvgen compile {wanted} --tp {tp} -o {named(manifest.folder)}`"
    )


def _archs(manifest: Manifest, found: ManifestSet, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The architectures for which every kernel of the set is there, or those of `wanted`."""
    from kvgen.compile import ARCHS, archs_given

    place = named(manifest.folder / "manifest.json")
    stand_ins = {other for stands_in in found.by_arch.values() for other in stands_in.values()}
    compiled = {kernel: _compiled(manifest, found, kernel) for kernel in found.kernels if kernel not in stand_ins}
    there = [arch for arch in ARCHS if all(arch in archs for archs in compiled.values() if archs)]
    if not any(compiled.values()) or not there:
        each = "; ".join(f"{kernel}: {', '.join(archs) or 'none'}" for kernel, archs in compiled.items())
        raise ToolError(
            f"{place}: has no architecture that all kernels of {found.set} are compiled for ({each}); {_again(manifest)}"
        )
    if wanted is None:
        return tuple(there)
    asked = archs_given(wanted)
    for arch in asked:
        if arch not in there:
            raise SpecError(
                f"arch: got {arch!r}; {place} has {found.set} for {', '.join(there)}; pass one of those, or compile it with "
                f"`kvgen compile {found.set} --arch {arch} -o {named(manifest.folder)}`"
            )
    return tuple(arch for arch in there if arch in asked)


def _compiled(manifest: Manifest, found: ManifestSet, kernel: str) -> list[str]:
    """The architectures for which there is a cubin of `kernel`, or of the one in its place there."""
    others = found.by_arch.get(kernel, {})
    own = [arch for arch in manifest.archs(found.set, kernel) if arch not in others]
    return own + [arch for arch, other in others.items() if manifest.entry(found.set, other, arch)]


def _again(manifest: Manifest) -> str:
    return f"`kvgen compile -o {named(manifest.folder)}` makes it anew"

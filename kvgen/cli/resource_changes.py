"""Changes of registers, shared memory and instructions between two versions: their recorded facts, compared.

A fact counts for the code that it was measured of: where a kernel's code changed and nobody recorded it anew, the kernel is named
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kvgen.cli.project import RESOURCES
from kvgen.cli.resources_json import Recorded, nvrtc_of, read
from kvgen.codegen.emit import banner_digest
from kvgen.compile import code_digest, text_digest
from kvgen.compile.flatten import flatten
from kvgen.errors import ToolError

State = Literal["changed", "added", "removed", "recorded", "unrecorded"]
Step = tuple[int | None, int | None]


@dataclass(frozen=True)
class Delta:
    """One kernel on one architecture: facts before and after, those that differ.

    "added" and "removed" have one side; "recorded" has one because nobody measured the old code. "unrecorded" is the whole
    kernel, without facts or an architecture: nobody measured the new code. So is a "removed" one that was never measured.
    """

    kernel: str
    arch: str | None
    state: State
    facts: dict[str, Step]


class _Version:
    """One version of the output folder."""

    def __init__(self, texts: Mapping[str, str], out: str) -> None:
        self._texts = texts
        self._out = out
        self.records = {p.partition("/")[0]: read(t) or {} for p, t in texts.items() if p.endswith(f"/{RESOURCES}")}
        # Other people's files lie in the folder, too.
        kernels = (p for p, t in texts.items() if p.endswith(".cu") and p.count("/") == 1 and banner_digest(t))
        self.kernels = {path.removesuffix(".cu") for path in kernels}
        self.digest = cache(self._digest)

    def _digest(self, kernel: str, *, exact: bool = False) -> str | None:
        """Digest of a kernel's code, or with `exact` of its flattened text; None where a header of it is missing."""
        prefix = f"{self._out}/"
        try:
            text = flatten(f"{prefix}{kernel}.cu", lambda path: self._texts[path.removeprefix(prefix)])
        except (KeyError, ToolError):
            return None
        return text_digest(text) if exact else code_digest(text)

    def recorded(self, kernel: str) -> Recorded | None:
        """The record's entry of the kernel's name; its digest may be of other code."""
        top, _, name = kernel.partition("/")
        return self.records.get(top, {}).get(name)

    def facts(self, kernel: str) -> dict[str, dict[str, int]] | None:
        """By architecture; None where nobody measured the code that is there."""
        found = self.recorded(kernel)
        if found is None or kernel not in self.kernels or found.digest != self._digest(kernel, exact=found.exact):
            return None
        return found.facts


def deltas_of(
    old: Mapping[str, str], new: Mapping[str, str], out: str, chosen: Callable[[str], bool] = lambda path: True
) -> list[Delta]:
    """The differences between two versions of the output folder `out`, by path; none where no version has any record.

    `chosen` says of a kernel's path whether it counts; flattening its text takes every file.
    """
    before, after = _Version(old, out), _Version(new, out)
    if not before.records and not after.records:
        return []
    kernels = before.kernels | after.kernels
    sets = {kernel.partition("/")[0] for kernel in kernels}
    moved = {p.partition("/")[0] for p in old.keys() | new.keys() if old.get(p) != new.get(p)}
    if moved <= sets:  # a header that sets share did not change, so neither did a set without a change of its own
        kernels = {kernel for kernel in kernels if kernel.partition("/")[0] in moved}
    return [d for kernel in sorted(kernels) if chosen(f"{kernel}.cu") for d in _of_kernel(kernel, before, after)]


def _of_kernel(kernel: str, before: _Version, after: _Version) -> list[Delta]:
    was, now = before.facts(kernel), after.facts(kernel)
    if kernel not in after.kernels:
        return _one_sided(kernel, "removed", was or {}) or [Delta(kernel, None, "removed", {})]
    if now is None:
        same = was is None and kernel in before.kernels and before.digest(kernel) == after.digest(kernel)
        return [] if same else [Delta(kernel, None, "unrecorded", {})]
    if was is None:
        return _one_sided(kernel, "recorded" if kernel in before.kernels else "added", now)
    found = _one_sided(kernel, "removed", {arch: was[arch] for arch in was if arch not in now})
    found += _one_sided(kernel, "added", {arch: now[arch] for arch in now if arch not in was})
    for arch in was.keys() & now.keys():
        # What only one of two forms of resources.json has says nothing about a change.
        steps = {what: (was[arch][what], n) for what, n in now[arch].items() if was[arch].get(what, n) != n}
        found += [Delta(kernel, arch, "changed", dict[str, Step](steps))] if steps else []
    return sorted(found, key=lambda delta: delta.arch or "")


def _one_sided(kernel: str, state: State, facts: Mapping[str, Mapping[str, int]]) -> list[Delta]:
    def steps(counts: Mapping[str, int]) -> dict[str, Step]:
        return {what: (n, None) if state == "removed" else (None, n) for what, n in counts.items()}

    return [Delta(kernel, arch, state, steps(counts)) for arch, counts in sorted(facts.items())]


def compilers(texts: Mapping[str, str], chosen: Callable[[str], bool] = lambda path: True) -> list[str]:
    """The NVRTCs that the records of a version name."""
    found = (nvrtc_of(text) for path, text in texts.items() if path.endswith(f"/{RESOURCES}") and chosen(path))
    return sorted({name for name in found if name})

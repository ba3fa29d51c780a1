"""Findings of `kvgen diff` in the order in which they are read: fields of specs, hunks, kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvgen.cli.verdicts import cycles

if TYPE_CHECKING:
    from kvgen.cli.hunks import Hunk
    from kvgen.cli.resource_changes import Delta
    from kvgen.cli.spec_fields import SpecChanges


_FILES: Final = 6  # names of files that have a hunk


@dataclass(frozen=True)
class Report:
    """`origins` has of each hunk the template lines that its added lines come from; `nvrtc` the compilers that the records of
    both sides name."""

    specs: SpecChanges
    hunks: list[Hunk]
    origins: list[tuple[str, ...]]
    deltas: list[Delta]
    nvrtc: tuple[list[str], list[str]]

    @property
    def recompiled(self) -> bool:
        """Facts of both sides are there, and two compilers made them."""
        before, after = self.nvrtc
        return bool(before and after and before != after)

    @property
    def empty(self) -> bool:
        """Generated code, records and specs are the same on both sides."""
        return not (self.specs.fields or self.hunks or self.deltas or self.recompiled)

    def as_json(self) -> dict[str, Any]:
        """The report for a program."""
        return {
            "fields": [
                {"set": c.set, "field": c.field, "before": c.before, "after": c.after} for c in self.specs.fields
            ],
            "broken": [{"spec": spec, "message": message} for spec, message in self.specs.broken.items()],
            "hunks": [
                {
                    "files": hunk.files,
                    "state": hunk.state,
                    "origins": list(origins),
                    "numbers": [{"numbers": list(n), "files": files} for n, files in hunk.variants.items() if n],
                    "header": hunk.header,
                    "text": "\n".join(hunk.lines),
                }
                for hunk, origins in zip(self.hunks, self.origins, strict=True)
            ],
            "resources": [
                {"kernel": d.kernel, "arch": d.arch, "state": d.state, "verdict": _verdict(d), "facts": d.facts}
                for d in self.deltas
            ],
            "nvrtc": list(self.nvrtc),
        }


def _verdict(delta: Delta) -> str | None:
    found = cycles(delta.facts)
    return found.text if found else None


def same_fields(specs: SpecChanges) -> list[tuple[str, list[str]]]:
    """Each change of a field, and the sets that have it."""
    found: dict[str, list[str]] = {}
    for change in specs.fields:
        found.setdefault(change.text, []).append(change.set)
    return list(found.items())


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def about_files(hunk: Hunk) -> list[str]:
    """Where else a hunk is, in parts that stay on one line: "149 files of 84 sets:", "decode.cu x84,", "extend.cu x65"; nothing
    where it is in one file."""
    files = hunk.files
    if len(files) == 1:
        return []
    sets = {file.rpartition("/")[0] for file in files}
    names = Counter(file.rpartition("/")[2] for file in files).most_common()
    parts = [f"{name} x{n}," if n > 1 else f"{name}," for name, n in names[:_FILES]]
    parts += [f"and {len(names) - _FILES} more"] if len(names) > _FILES else []
    return [
        f"{len(files)} files of {len(sets)} set{'s' if len(sets) > 1 else ''}:",
        *parts[:-1],
        parts[-1].removesuffix(","),
    ]


def about_numbers(hunk: Hunk) -> list[tuple[str, int, list[str]]]:
    """(numbers, how many files, their folders' names), of the numbers in which the files of a hunk differ; the most frequent
    first."""
    counts = ((" ".join(numbers), len(files), files) for numbers, files in hunk.variants.items() if numbers)
    return [
        (numbers, n, list(dict.fromkeys(file.split("/")[-2] if "/" in file else file for file in files)))
        for numbers, n, files in sorted(counts, key=lambda item: -item[1])
    ]

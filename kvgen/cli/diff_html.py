"""The page of `kvgen diff --html`: one file that loads nothing, light or dark as the browser asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from kvgen.cli.diff_report import Report, about_files, about_numbers, same_fields
from kvgen.cli.hunks import Hunk
from kvgen.cli.verdicts import Phrase, phrases, unrecorded
from kvgen.files import named


@dataclass(frozen=True)
class _Hunk:
    """A hunk as the page has it: lines as (sign, text), where else it is, and the numbers that differ."""

    title: str
    state: str
    header: str
    origins: tuple[str, ...]
    lines: list[tuple[str, str]]
    about: str
    files: list[str]
    numbers: list[tuple[str, int, list[str]]]


@dataclass(frozen=True)
class _Kernel:
    """A line of the table of kernels."""

    name: str
    arch: str
    phrases: list[Phrase]


def page(report: Report, against: str | None) -> str:
    """The page, as UTF-8 text that ends in a newline."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("diff.html.j2").read_text(encoding="utf-8"))
    text = template.render(
        title=f"Generated kernels, against {against}"
        if against
        else "Generated kernels: what kvgen build would change",
        fields=same_fields(report.specs),
        broken=report.specs.broken,
        hunks=[_hunk(hunk, origins) for hunk, origins in zip(report.hunks, report.origins, strict=True)],
        kernels=list(_kernels(report)),
        unrecorded=[named(kernel) for kernel in unrecorded(report.deltas)],
        nvrtc=[", ".join(side) for side in report.nvrtc] if report.recompiled else [],
        empty=report.empty,
    )
    return text.rstrip() + "\n"


def _hunk(hunk: Hunk, origins: tuple[str, ...]) -> _Hunk:
    lines = [(line[:1], line[1:]) for line in hunk.lines]
    return _Hunk(
        hunk.files[0],
        hunk.state,
        hunk.header,
        origins,
        lines,
        " ".join(about_files(hunk)),
        hunk.files,
        about_numbers(hunk),
    )


def _kernels(report: Report) -> Iterator[_Kernel]:
    for delta in report.deltas:
        if delta.state != "unrecorded":
            yield _Kernel(named(delta.kernel), named(delta.arch or ""), list(phrases(delta)))

"""The sets of tests/sets: their record is of what they render to, and each template stands in a set that is checked in."""

from __future__ import annotations

import re

import pytest

from kvgen.cli.candidates import others
from kvgen.codegen.emit import kernel_files, render_all
from kvgen.paths import templates_root
from tests import sets
from tests.compile.test_sass import needs_tool
from tests.sets import __main__ as recorder
from tests.sets.__main__ import measure


def test_the_record_is_of_these_kernels() -> None:
    """By the digest of the code, so that comments make nothing stale."""
    now, recorded = sets.digests(), sets.recorded()
    missing, extra = sorted(now.keys() - recorded.keys()), sorted(recorded.keys() - now.keys())
    other = [key for key in now if key in recorded and recorded[key][0] != now[key]]
    assert not missing and not extra and not other, (
        f"record.txt lacks {missing}, has {extra} of no set, and is of other code of {other}; `python -m tests.sets --record`"
    )
    assert len(now) > 100


def test_lines_are_read_as_they_are_written() -> None:
    lines = [text for text in sets.RECORD.read_text(encoding="utf-8").splitlines() if not text.startswith("#")]
    read = [sets.line(key, digest, facts) for key, (digest, facts) in sets.recorded().items()]
    read += [sets.candidates_line(key, cycles) for key, cycles in sets.candidates().items()]
    assert sorted(read, key=lambda text: text.split(" ")[:3]) == lines


@needs_tool
def test_a_line_is_what_compiling_gives() -> None:
    """One small kernel, as --record would write it."""
    recorded = {key: line for key, line in sets.recorded().items() if key.startswith("context_parallel/append ")}
    assert measure(set(recorded)) == recorded and len(recorded) == 1


def test_recording_compiles_what_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other code and new ones; lines of kernels that are gone go; other lines stay."""
    record, candidates = sets.recorded(), sets.candidates()
    changed, new = sorted(record)[:2]
    before = record | {changed: ("0" * sets.DIGITS, record[changed][1]), "gone/append sm_80": record[changed]}
    del before[new]
    asked: list[set[str]] = []
    monkeypatch.setattr(recorder, "measure", lambda keys: asked.append(keys) or {key: record[key] for key in keys})
    monkeypatch.setattr(sets, "digests", lambda: {key: digest for key, (digest, _) in record.items()})
    monkeypatch.setattr(recorder, "compare", lambda item, whole: {})
    found, _, compiled = recorder.brought_up(before, candidates, every=False)
    assert asked == [{changed, new}] and compiled == 2 and found == record


def test_kernels_that_were_not_chosen_bring_their_headers() -> None:
    """A set's own files lack headers that only another candidate includes."""
    (item,) = (item for item in sets.loaded() if item.kernels.name == "deepseek_v4_flash_tp4")
    files = render_all([item])
    found = others(item, files, sets.OUT)
    included = {path for other in found for path in re.findall(r'#line 1 "generated/(device/[^"]+)"', other.unit.text)}
    assert found and not included <= files.keys()


def test_no_set_has_a_name_that_another_one_has() -> None:
    names = [item.kernels.name for item in sets.every()]
    assert len(names) == len(set(names)) and len(sets.checked_in()) < 60


def test_every_kernel_template_stands_in_a_set_that_is_checked_in() -> None:
    """A reviewer of a template sees what becomes of it."""
    root = templates_root()
    templates = {path.relative_to(root).as_posix() for path in (root / "ops").rglob("*.cu.j2")}
    shown = {plan.template for item in sets.checked_in() for plan, _ in kernel_files(item)}
    assert templates <= shown, f"in no set of specs/: {sorted(templates - shown)}"

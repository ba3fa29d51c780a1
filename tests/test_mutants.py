"""`make mutate`'s parts: which mutations there are, which tests are shown one, what is known to change nothing."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests import template_cover
from tests.mutants import Mutant, drawn, mutants
from tests.mutate import EQUIVALENT, ROUNDS, WHOLE, calling, defined, equivalents, judged, rounds, showing
from tests.template_cover import ALIKE, KEPT, ROOT, Cover, Ran


@functools.cache
def every() -> list[Mutant]:
    """All mutants of the templates."""
    return mutants(ROOT / "templates")


def test_every_template_with_code_has_mutants() -> None:
    names = {p.relative_to(ROOT / "templates").as_posix() for p in (ROOT / "templates").rglob("*") if p.is_file()}
    # The launcher is Python; the CPU machine cannot see launch.cuh; pages.j2 and states.j2 have numbers alone.
    without = {
        "launcher/init.py.j2",
        "launcher/table.py.j2",
        "device/base/launch.cuh",
        "places/pages.j2",
        "cache/states.j2",
    }
    # Text that is exported for C++ is compared with the launchers (tests/export); it has no kernel of its own.
    without |= {name for name in names if name.startswith("export/")}
    assert names - {m.template for m in every()} <= without
    for mutant in every():
        assert mutant.before != mutant.after, mutant


def test_every_template_is_drawn() -> None:
    """However few are asked for; as many as asked otherwise, no one twice, and the same for the same seed."""
    templates = {m.template for m in every()}
    for count in (1, len(templates) + 30):
        found = drawn(every(), count, 1)
        assert {m.template for m in found} == templates and len(found) == max(count, len(templates))
        assert len(set(found)) == len(found)
    assert drawn(every(), 90, 1) == drawn(every(), 90, 1) != drawn(every(), 90, 2)


def test_what_changes_nothing_still_exists() -> None:
    """An entry whose line has changed since would hide nothing, or another mutant."""
    known = equivalents(EQUIVALENT.read_text(encoding="utf-8"))
    assert not set(known) - {m.change for m in every()}
    assert all(len(why) > 20 for why in known.values())


def test_equivalents_are_read() -> None:
    text = "# why\n\nops/a.cu.j2\n- x < 1;\n+ x <= 1;\n= x is never 1\n\nops/b.cu.j2\n- y();\n+\n= y does nothing\n"
    assert equivalents(text) == {
        ("ops/a.cu.j2", "x < 1;", "x <= 1;"): "x is never 1",
        ("ops/b.cu.j2", "y();", ""): "y does nothing",
    }
    assert equivalents("# nothing\n") == {}


def covered() -> Cover:
    cover = Cover()
    for n in range(100):
        cover.add("ops/a.cu.j2:10", Ran(f"t.py::f[{n}]", 5.0 + n, f"a{n}"))
        cover.add("ops/a.cu.j2:10", Ran(f"t.py::g{n}", 20.0 + n, f"b{n // 10}"))
    cover.add("ops/a.cu.j2:30", Ran("t.py::h", 1.0, "c"))
    return cover


def mutant(line: int) -> Mutant:
    return Mutant("ops/a.cu.j2", line, "x < 1", "x > 1")


def test_the_cheapest_tests_are_kept_and_few_of_one_function_or_with_the_same_kernels() -> None:
    kept = covered().lines["ops/a.cu.j2:10"]
    assert len(kept) == KEPT and [r.test for r in kept[:ALIKE]] == [f"t.py::f[{n}]" for n in range(ALIKE)]
    assert ALIKE < 10  # tests with the same kernels
    assert [r.test for r in kept[ALIKE : 2 * ALIKE + 1]] == [f"t.py::g{n}" for n in (*range(ALIKE), 10)]


def test_a_mutant_is_shown_tests_of_its_line_one_of_each_function_first() -> None:
    shown = [r.test for r in showing(mutant(10), covered())]
    assert shown[:2] == ["t.py::f[0]", "t.py::g0"] and len(shown) == KEPT
    assert shown.index("t.py::f[1]") > shown.index("t.py::g20")


def test_a_line_without_instructions_has_the_tests_of_the_nearest() -> None:
    assert showing(mutant(28), covered())[0].test == "t.py::h"
    assert showing(mutant(12), covered())[0].test in ("t.py::h", "t.py::f[0]")
    assert not showing(Mutant("ops/b.cu.j2", 1, "", ""), covered())


def test_a_line_that_only_calls_has_the_tests_of_what_it_calls() -> None:
    """Tests of its own template come first; tests of other templates that call the function are left out."""
    header, first, last = defined()["store_pad_heads"][0]
    cover = covered()
    for test in ("t.py::here[1]", "t.py::elsewhere[1]"):
        cover.add(f"{header}:{last - 1}", Ran(test, 60.0, test))
    cover.add("ops/a.cu.j2:30", Ran("t.py::here[1]", 60.0, "t.py::here[1]"))
    here = Mutant("ops/a.cu.j2", 12, "  store_pad_heads<Pad, kThreads>(q_to, cache_slots, rows);", "")
    assert first < last and [r.test for r in calling(here, cover)] == ["t.py::here[1]"]
    assert showing(here, cover)[0].test == "t.py::here[1]"


def test_the_last_round_has_whole_functions() -> None:
    found = list(rounds(showing(mutant(10), covered())))
    assert [len(some) for some in found[:-1]] == list(ROUNDS) and found[0][0] == "t.py::f[0]"
    assert found[-1][0] == "t.py::f" and len(found[-1]) == WHOLE
    assert list(rounds([Ran("t.py::h[1]", 1.0, "c")])) == [["t.py::h[1]"], ["t.py::h"]]


def test_what_is_not_wanted_changes_nothing_about_the_others() -> None:
    left_out = set(drawn(every(), 100, 1)[:5])
    rest = drawn(every(), 100, 1, lambda m: m not in left_out)
    assert not left_out & set(rest) and len(set(rest) & set(drawn(every(), 100, 1))) >= 85


def test_a_condition_at_compile_time_has_the_tests_of_both_sides() -> None:
    here = Mutant("ops/a.cu.j2", 30, "if constexpr (A < B) {", "if constexpr (A > B) {")
    shown = [r.test for r in showing(here, covered())]
    assert shown[0] == "t.py::h" and "t.py::f[0]" in shown and len(shown) == 1 + KEPT


def test_a_record_is_written_and_read_and_merged() -> None:
    cover, other = covered(), Cover()
    cover.rendered = {"ops/a.cu.j2:10"}
    other.add("ops/a.cu.j2:10", Ran("t.py::first", 0.5, "d"))
    other.merge(cover.data())
    assert other.lines["ops/a.cu.j2:10"][0].test == "t.py::first" and other.rendered == cover.rendered
    assert other.lines["ops/a.cu.j2:30"] == cover.lines["ops/a.cu.j2:30"]


def test_a_place_in_generated_code_is_a_line_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of kernels and of the device library, with its banner and without, inlined; lines of generated/ are left out."""
    origins = ("", "", "templates/ops/a.cu.j2:1", "templates/places/rows.j2:7", "specs/x.cu:3")
    monkeypatch.setattr(template_cover, "_origins", {"set/a.cu": origins})
    template_cover._template_lines.cache_clear()
    for place, lines in {
        "package/set/a.cu:3": ["ops/a.cu.j2:1"],
        "package/set/a.cu:4|package/set/a.cu:3": ["places/rows.j2:7", "ops/a.cu.j2:1"],
        "package/set/a.cu:5": [],
        "package/set/a.cu:900": [],
        "package/device/cache/pages.cuh:12": ["device/cache/pages.cuh:10"],
        "templates/device/cache/pages.cuh:12": ["device/cache/pages.cuh:12"],
        "device/cache/pages.cuh:12": ["device/cache/pages.cuh:12"],
        "generated/set/a.cu:3": [],
        "generated/device/cache/pages.cuh:12": [],
    }.items():
        assert list(template_cover._template_lines(place)) == lines, place
    template_cover._template_lines.cache_clear()


def test_a_campaign_goes_on(tmp_path: Path) -> None:
    """Verdicts over other sources, and a line that was cut off, are not taken."""
    file = tmp_path / "mutants.jsonl"
    assert judged(file, "now") == {}
    rows = [
        f'{{"key": "{key}", "mutant": "{name}", "verdict": "killed"}}' for key, name in (("now", "a"), ("old", "b"))
    ]
    file.write_text("\n".join([*rows, '{"key": "now", "mut']), encoding="utf-8")
    assert judged(file, "now") == {"a": "killed"}

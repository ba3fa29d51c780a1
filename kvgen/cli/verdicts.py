"""Verdicts on changed kernels, out of two records: cycles by the model of docs/cycles.md, then every fact that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvgen.cli.resource_changes import Delta, Step
from kvgen.files import named

Tone = Literal["better", "worse", "other", "plain"]

_MACHINE_CODE: Final = "machine_code"  # a digest: what matters is that it differs
_TRIP: Final = "trip_cycles"
_LOADED: Final = "trip_cycles_loaded"
_BYTES: Final = "trip_bytes"
# Of which more is worse, and less; of others neither is.
_COSTS: Final = frozenset(
    (
        *("registers", "spills", "shared", "instructions", _TRIP, _LOADED, "trip_slots", "awaited_loads"),
        *("serialised_products", "setmaxnreg_dropped", "local_accesses", "loop_fences", "dependent_loads"),
    )
)
_GAINS: Final = frozenset(("blocks",))
_FOLDED: Final = (
    "registers",
    "spills",
    "blocks",
    "shared",
    "instructions",
)  # facts that many different kernels are summed up by
_MOST: Final = 4  # different lines of one kernel and architecture


@dataclass(frozen=True)
class Phrase:
    """A part of a line: its text without the step's size, that size, and how to read it."""

    text: str
    size: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Line:
    """One kernel on one architecture, or several of the same name: (title, phrases, the kernels that it is about)."""

    title: str
    phrases: tuple[Phrase, ...]
    kernels: tuple[str, ...]
    note: str = ""


def cycles(facts: Mapping[str, Step]) -> Phrase | None:
    """The model's verdict: percent of cycles a trip, or a byte where a trip brings other bytes than before; None where neither
    changed or one side has no trip."""
    steps = [facts.get(name, (1, 1)) for name in (_TRIP, _LOADED, _BYTES)]
    if not facts.keys() & {_TRIP, _LOADED, _BYTES} or any(not before or not after for before, after in steps):
        return None
    usual, loaded = (_percent(facts, name) for name in (_TRIP, _LOADED))
    unit = "byte" if _BYTES in facts else "trip"
    text = f"model: {_changed(usual)} cycles a {unit}"
    if round(usual) != round(loaded):
        text += f", {_changed(loaded)} where memory is loaded"
    worst = max(usual, loaded)
    tone: Tone = "worse" if worst >= 0.5 else "better" if min(usual, loaded) <= -0.5 else "plain"
    return Phrase(text, tone=tone)


def _percent(facts: Mapping[str, Step], name: str) -> float:
    """By how much cycles grew, for the same bytes."""
    (before, after), (old, new) = facts.get(name, (1, 1)), facts.get(_BYTES, (1, 1))
    assert before and after and old and new
    return 100 * (after / new / (before / old) - 1)


def _changed(percent: float) -> str:
    if abs(percent) < 0.5:
        return "as many"
    return f"{abs(percent):.0f} % {'more' if percent > 0 else 'fewer'}"


def phrases(delta: Delta) -> Iterator[Phrase]:
    """A kernel's line, word by word: the state, the model's verdict, then every fact."""
    facts = delta.facts
    if delta.state != "changed":
        yield Phrase(delta.state)
    elif (verdict := cycles(facts)) is not None:
        yield verdict
    for name, (before, after) in facts.items():
        if (before, after) in ((0, None), (None, 0)):
            continue
        if name == _MACHINE_CODE:
            if delta.state == "changed":
                yield Phrase("other machine code")
        elif before is None or after is None:
            yield Phrase(f"{named(name)} {after if before is None else before}")
        else:
            yield Phrase(f"{named(name)} {before} -> {after} ", f"({after - before:+d})", _tone(name, after - before))


def _tone(name: str, step: int) -> Tone:
    if name not in _COSTS | _GAINS:
        return "other"
    return "worse" if (step > 0) == (name in _COSTS) else "better"


def lines(deltas: Sequence[Delta]) -> list[Line]:
    """The kernels whose recorded facts differ: equal lines of several sets once, and kernels of one name in one line where they
    have more than four different ones."""
    equal: dict[tuple[object, ...], list[Delta]] = {}
    for delta in deltas:
        if delta.state != "unrecorded" and not _same_counts(delta):
            key = (_operation(delta), delta.arch, delta.state, *delta.facts.items())
            equal.setdefault(key, []).append(delta)
    alike: dict[tuple[object, ...], list[list[Delta]]] = {}
    for group in equal.values():
        alike.setdefault((_operation(group[0]), group[0].arch, group[0].state), []).append(group)
    found: list[Line] = []
    for groups in alike.values():
        if len(groups) > _MOST:
            found.append(_summed([delta for group in groups for delta in group]))
            continue
        for group in groups:
            note = f"same in {len(group)} sets" if len(group) > 1 else ""
            names = tuple(delta.kernel for delta in group)
            found.append(Line(_title(names[0], group[0].arch), tuple(phrases(group[0])), names, note))
    return found


def _operation(delta: Delta) -> str:
    """The kernel's name without its set's."""
    return delta.kernel.partition("/")[2]


def _title(kernel: str, arch: str | None) -> str:
    return named(kernel) + (f" {named(arch)}" if arch else "")


def _summed(deltas: Sequence[Delta]) -> Line:
    """Kernels of one name on one architecture: the range of each step over all of them."""
    names = tuple(delta.kernel for delta in deltas)
    title = _title(_operation(deltas[0]), deltas[0].arch)
    if deltas[0].state != "changed":
        return Line(title, (Phrase(f"{deltas[0].state} in {len(names)} sets"),), names)
    parts: list[Phrase] = []
    trips = [(_percent(d.facts, _TRIP), d.kernel.partition("/")[0]) for d in deltas if cycles(d.facts)]
    if trips:
        (least, first), (most, last) = min(trips), max(trips)
        tone: Tone = "worse" if most >= 0.5 else "better" if least <= -0.5 else "plain"
        text = f"model: {_changed(least)} ({named(first)}) to {_changed(most)} ({named(last)}) cycles"
        parts.append(Phrase(text, tone=tone))
    for name in _FOLDED:
        steps = [(after or 0) - (before or 0) for d in deltas for before, after in (d.facts.get(name, (0, 0)),)]
        if any(steps):
            low, high = min(steps), max(steps)
            worst = high if name in _COSTS and high > 0 else low
            parts.append(Phrase(f"{name} ", f"{low:+d} to {high:+d}", _tone(name, worst)))
    code = sum(_MACHINE_CODE in delta.facts for delta in deltas)
    parts.append(Phrase(f"other machine code in {code}"))
    return Line(title, tuple(parts), names, f"{len(names)} sets, --json has each")


def _same_counts(delta: Delta) -> bool:
    return delta.state == "changed" and set(delta.facts) == {_MACHINE_CODE}


def same_counts(deltas: Sequence[Delta]) -> list[str]:
    """The kernels of which, on some architecture, nothing but the machine code differs."""
    return list(dict.fromkeys(delta.kernel for delta in deltas if _same_counts(delta)))


def unrecorded(deltas: Sequence[Delta]) -> list[str]:
    """The kernels whose code nobody has recorded."""
    return [delta.kernel for delta in deltas if delta.state == "unrecorded"]

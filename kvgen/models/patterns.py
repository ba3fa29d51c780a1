"""Which layer of a model is of which kind, as its config.json says or, where it does not, its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvgen.models.family import Family, Pattern
from kvgen.models.fields import Fields
from kvgen.models.outside import LAYERS


def layer_count(fields: Fields, family: Family, counted: int | None) -> int:
    """Layers of the model: the field that counts them, or as many as a list of their kinds has."""
    named = _named(fields, family.pattern)
    if named is not None and (counted is None or family.pattern.letters is not None):
        return len(named[1])
    if counted is None:
        return len(family.pattern.whole)
    if family.cycles is not None:
        stack, (high, highs), (low, lows) = family.cycles
        runs = fields.integer(high, default=highs, high=LAYERS) * (fields.integer(low, default=lows, high=LAYERS) + 1)
        return fields.integer(stack, default=counted, high=LAYERS) * runs
    return counted * family.layers_times


def layer_kinds(fields: Fields, family: Family, layers: int) -> list[str]:
    """The kind of every layer."""
    pattern = family.pattern
    named = _named(fields, pattern)
    if named is not None:
        key, words, meanings = named
        if len(words) != layers:
            fields.fail(key, f"it must be a list; valid: {layers} entries")
        entries = Fields({str(i): word for i, word in enumerate(words)}, fields.name(key))
        kinds = [entries.choice(str(i), meanings, default=pattern.common) for i in range(layers)]
    elif pattern.by_flags is not None:
        roped = rope_flags(fields, pattern, layers)
        kinds = [pattern.by_flags[0] if flag else pattern.by_flags[1] for flag in roped]
    elif pattern.lists and fields.inner(pattern.lists)[0] is not None and _has(fields, pattern.lists):
        kinds = _listed(fields, pattern, layers)
    elif pattern.units or pattern.expanded:
        kinds = _repeated(fields, pattern, layers)
    elif pattern.whole:
        kinds = (list(pattern.whole) * layers)[:layers]
    else:
        kinds = [pattern.special if is_special else pattern.common for is_special in specials(fields, pattern, layers)]
        if pattern.lead:
            kinds = [*pattern.lead, *kinds][:layers]
        if pattern.also is not None and pattern.every is not None:
            kinds = ["local" if i % pattern.every == pattern.also and i else kind for i, kind in enumerate(kinds)]
    if family.last_full and kinds:
        kinds[-1] = "full"
    return kinds


def specials(fields: Fields, pattern: Pattern, layers: int) -> list[bool]:
    """Which layers the pattern's rule calls special, whatever a list of the config says."""
    if pattern.from_layer is not None:
        first = fields.integer("max_window_layers", default=pattern.from_layer, low=0, high=LAYERS)
        return [i >= first for i in range(layers)]
    if pattern.every is None:
        return [False] * layers
    every = pattern.every
    for name in pattern.every_field.split():
        if fields.has(name):
            every = fields.integer(name, high=LAYERS)
            break
    at = pattern.at
    if pattern.at_field:
        at = fields.integer(pattern.at_field, default=pattern.at, low=0, high=LAYERS)
    at = every - 1 if at < 0 else at
    found = [(layers - 1 - i) % every == 0 if pattern.from_end else i % every == at for i in range(layers)]
    if pattern.first < 0:  # the unit's place, but not in the first unit
        found[: -pattern.first] = [False] * min(layers, -pattern.first)
    for i in range(min(pattern.first, layers)):
        found[i] = True
    if pattern.last and found:
        found[-1] = True
    if pattern.until_layer is not None:
        limit = fields.integer("max_window_layers", default=pattern.until_layer, low=0, high=LAYERS)
        found = [special and i < limit for i, special in enumerate(found)]
    return found


def rope_flags(fields: Fields, pattern: Pattern, layers: int) -> list[bool]:
    """Which layers have RoPE: no_rope_layers (1: it has), else all but the last of each unit."""
    if fields.has("no_rope_layers") and fields.values["no_rope_layers"] != []:
        entries = fields.items("no_rope_layers", length=layers)
        named = Fields({str(i): flag for i, flag in enumerate(entries)}, fields.name("no_rope_layers"))
        return [bool(named.integer(str(i), low=0, high=1)) for i in range(layers)]
    every = fields.integer(pattern.every_field, default=pattern.every, high=LAYERS)
    return [(i + 1) % every != 0 for i in range(layers)]


def _has(fields: Fields, path: str) -> bool:
    place, last = fields.inner(path)
    return place is not None and place.has(last)


def _named(fields: Fields, pattern: Pattern) -> tuple[str, Sequence[Any], Mapping[str, str]] | None:
    """(field, a word a layer, what the words mean) where the config has a word for each layer."""
    if pattern.letters is not None and fields.has(pattern.letters[0]) and not any(map(fields.has, pattern.types)):
        key, meanings = pattern.letters
        value = fields.values[key]
        if not isinstance(value, str) or not 1 <= len(value) <= LAYERS:
            fields.fail(key, f"it must be a string; valid: a letter a layer, of {', '.join(meanings)}")
        return key, value, meanings
    for key in pattern.types:
        if fields.has(key):
            value = fields.values[key]
            if not isinstance(value, list) or not 1 <= len(value) <= LAYERS:
                fields.fail(key, f"it must be a list; valid: 1 to {LAYERS} entries, one a layer")
            return key, value, pattern.words
    return None


def _listed(fields: Fields, pattern: Pattern, layers: int) -> list[str]:
    """Layers whose numbers a list has are special."""
    place, key = fields.inner(pattern.lists)
    assert place is not None
    value = place.values[key]
    if not isinstance(value, list) or len(value) > layers:
        place.fail(key, f"it must be a list; valid: at most {layers} entries")
    entries = Fields({str(i): number for i, number in enumerate(value)}, place.name(key))
    found = {
        entries.integer(str(i), low=pattern.base, high=layers - 1 + pattern.base) - pattern.base
        for i in range(len(value))
    }
    return [pattern.special if i in found else pattern.common for i in range(layers)]


def _repeated(fields: Fields, pattern: Pattern, layers: int) -> list[str]:
    """A repeating unit, or units and how often each stands."""
    key = pattern.units or pattern.expanded
    if not fields.has(key):
        return (list(pattern.whole) * layers)[:layers]
    value = fields.values[key]
    words: list[object] = []
    if pattern.units:
        if not isinstance(value, list) or not 1 <= len(value) <= LAYERS:
            fields.fail(key, f"it must be a list; valid: 1 to {LAYERS} entries")
        words = (value * layers)[:layers]
    else:
        for pair in value if isinstance(value, list) else [value]:
            unit, times = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
            if (
                not isinstance(unit, list)
                or not isinstance(times, int)
                or isinstance(times, bool)
                or not 1 <= times <= LAYERS
                or len(unit) > LAYERS
            ):
                fields.fail(
                    key,
                    'it must be a list of units and how often each stands; valid: such as [[["global", "local"], 12]]',
                )
            words += (unit * times)[: layers + 1]
        if len(words) != layers:
            fields.fail(key, f"it names {len(words)} layers; valid: {layers}")
    entries = Fields({str(i): word for i, word in enumerate(words)}, fields.name(key))
    return [entries.choice(str(i), pattern.words, default=pattern.common) for i in range(layers)]

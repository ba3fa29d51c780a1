"""The mode in which launches on host arrays run: what the CPU machine looks for while it computes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvgen.errors import ArgumentError

if TYPE_CHECKING:
    from kvgen.emulator import Mode

VARIABLE: Final = "KVGEN_CPU_MODE"
MODES: Final[tuple[Mode, ...]] = ("fast", "hardware", "check")
DEFAULT: Final[Mode] = "hardware"


def held_mode(given: object, name: str) -> Mode:
    """`given`, if it is a mode; raises ArgumentError, with `name` for what has the value, if it is none."""
    if given not in MODES:
        raise ArgumentError(
            f"{name}: got {given!r}; it is the mode of launches on host arrays: 'fast' checks nothing, 'hardware' finds what a "
            "GPU can get wrong, 'check' all that PTX does not promise; give one of these"
        )
    return given


def environment_mode() -> Mode:
    """The mode that the environment asks for; raises ArgumentError where KVGEN_CPU_MODE is none."""
    return held_mode(os.environ.get(VARIABLE) or DEFAULT, VARIABLE)

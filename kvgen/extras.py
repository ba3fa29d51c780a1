"""The optional packages of kvgen: which extra installs them, and what a user is told who has not installed it.

Generated kernels need the base package alone. Specs, templates and the command line need the extra `build`; compiling and
driving a GPU need `cu13` or `cu12`; disassembling needs `sass`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

BUILD: Final = ("jinja2", "packaging", "pydantic", "rich", "typer")
# What a verb runs: everything renders specs, these compile as well.
COMPILING: Final = ("bench", "compile", "demo", "verify")


def missing(modules: Sequence[str]) -> list[str]:
    """Those of `modules` that this environment does not have; imports none of them."""
    return [name for name in modules if find_spec(name) is None]


def extras_of(verb: str) -> str:
    """The extras that a verb of the command line needs, as pip takes them: `build`, or `build,cu13`."""
    return "build,cu13" if verb in COMPILING else "build"


def needs_build(what: str, absent: Sequence[str], extras: str = "build") -> str:
    """The message where `what` was asked for and packages of the extra `build` are absent."""
    other = " (cu12 for a driver older than 580)" if "cu13" in extras else ""
    return (
        f"{what} needs kvgen's extra {extras.replace(',', ' and ')}: `pip install 'kvgen[{extras}]'`{other}; this "
        f"environment has the runtime of generated kernels alone, without {', '.join(absent)}"
    )

"""The versions of vLLM that kvgen's backend works in, and the adapter of each; checked when the backend is chosen."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal

from kvgen.errors import ToolError

UNTESTED: Final = "KVGEN_VLLM_UNTESTED"


class VersionError(ToolError, ImportError):
    """This vLLM has no adapter. As an ImportError it is what vLLM gives as the reason why a backend cannot be chosen."""


@dataclass(frozen=True)
class Known:
    """A version of vLLM. `adapter`: the module of this package that has its classes; MLA's are in `<adapter>_mla`.

    `how`: "proved", the engine ran with it and made its own tokens (docs/engines/status.json); "read", what the adapter relies
    on is as in a proved version, or differs in what does not matter (docs/engines/signatures.json), and nothing ran.
    """

    version: str
    adapter: str
    how: Literal["proved", "read"]


# Two minor versions at most, in order; each has an adapter of its own where one does not serve both.
KNOWN: Final = (
    Known("0.32.0", "v0_32", "proved"),
    Known("0.33.0", "v0_32", "read"),
)


def adapter() -> str:
    """The module of the adapter for the vLLM of this environment. Raises VersionError where there is none."""
    return adapter_of(import_module("vllm").__version__, untested=os.environ.get(UNTESTED) == "1")


def adapter_of(version: str, *, untested: bool = False) -> str:
    """The module of the adapter for a version such as "0.32.0" or "0.32.0+cu130".

    `untested`: take the adapter of the nearest known version, with a warning, where none is known. Raises VersionError.
    """
    release = version.partition("+")[0]
    for known in KNOWN:
        if release == known.version:
            return known.adapter
    if not untested:
        raise VersionError(
            f"vllm: got version {version}; kvgen's backend serves {_served()}; install one of these, choose another "
            f"--attention-backend, or set {UNTESTED}=1 to try {version} with the adapter of {_nearest(release).version}"
        )
    nearest = _nearest(release)
    warnings.warn(
        f"vllm: version {version} is untested with kvgen; {UNTESTED}=1 takes the adapter of {nearest.version}",
        stacklevel=2,
    )
    return nearest.adapter


def _served() -> str:
    """The known versions, and what is known of each."""
    how = {"proved": "its engine ran with it", "read": "its signatures were compared"}
    return ", ".join(f"{known.version} ({how[known.how]})" for known in KNOWN)


def _nearest(release: str) -> Known:
    """The newest known version that is no newer than `release`, or the oldest."""
    return next((known for known in reversed(KNOWN) if _number(known.version) <= _number(release)), KNOWN[0])


def _number(release: str) -> tuple[int, ...]:
    """The numbers that a version begins with, as "0.32.1.dev3" -> (0, 32, 1)."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, found[0].split("."))) if found else ()

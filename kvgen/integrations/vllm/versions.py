"""The versions of vLLM that kvgen's backend works in, and the adapter of each; checked when the backend is chosen."""

from __future__ import annotations

import functools
import os
import re
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final, Literal

from kvgen.errors import ToolError
from kvgen.integrations.vllm.signatures import changed

UNTESTED: Final = "KVGEN_VLLM_UNTESTED"
_SHOWN: Final = 3  # so many differing names are in the message


class VersionError(ToolError, ImportError):
    """This vLLM has no adapter. As an ImportError it is what vLLM gives as the reason why a backend cannot be chosen."""


@dataclass(frozen=True)
class Known:
    """A version of vLLM. `adapter`: the module of this package that has its classes; MLA's are in `<adapter>_mla`.

    `how`: "proved", the engine ran with it and made its own tokens (docs/engines/status.json); "read", what the adapter relies
    on is as in a proved version, or differs in what does not matter (signatures.json), and nothing ran.
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
    vllm = import_module("vllm")
    file = getattr(vllm, "__file__", None)
    folder = Path(file).parent if file else None
    return adapter_of(vllm.__version__, untested=os.environ.get(UNTESTED) == "1", folder=folder)


def adapter_of(version: str, *, untested: bool = False, folder: Path | None = None) -> str:
    """The module of the adapter for a version such as "0.32.0" or "0.32.0+cu130".

    `folder`: the package of that vLLM. Another release of a known minor version has its adapter if what the adapter relies on is
    in its sources as in the known one's, to the letter. `untested`: take the adapter of the nearest known version, with a
    warning, where none is known. Raises VersionError.
    """
    release = version.partition("+")[0]
    for known in KNOWN:
        if release == known.version:
            return known.adapter
    differs = ""
    for known in KNOWN:
        if folder is not None and _number(release)[:2] == _number(known.version)[:2]:
            found = _changed(folder, known)
            if not found:
                return known.adapter
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            differs = f"; not as in {known.version} is {', '.join(found[:_SHOWN])}{more}"
    if not untested:
        raise VersionError(
            f"vllm: got version {version}{differs}; kvgen's backend serves {_served()}; install one of these, choose another "
            f"--attention-backend, or set {UNTESTED}=1 to try {version} with the adapter of {_nearest(release).version}"
        )
    nearest = _nearest(release)
    warnings.warn(
        f"vllm: version {version} is untested with kvgen; {UNTESTED}=1 takes the adapter of {nearest.version}",
        stacklevel=2,
    )
    return nearest.adapter


@functools.lru_cache
def _changed(folder: Path, known: Known) -> tuple[str, ...]:
    """Names that the adapter relies on and that differ in `folder`; read once a process, in 3 s."""
    return tuple(changed(folder, known.adapter, known.version))


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

"""The backend classes of the vLLM that is installed: the paths that the plugin registers, imported when one is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvgen.integrations.vllm.versions import adapter

# Class -> what its module's name adds to the adapter's.
_MODULES = {"KvgenBackend": "", "KvgenMLABackend": "_mla"}


def __getattr__(name: str) -> Any:
    """A backend class, from the adapter of this vLLM's version. Raises VersionError where there is none."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kvgen.integrations.vllm.{adapter()}{_MODULES[name]}"), name)

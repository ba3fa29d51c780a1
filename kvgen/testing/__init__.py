"""For the tests of whoever uses kernels (docs/testing.md): `Check` and the pytest fixture made of it for generated ones,
`run_ptx` and `tensor_map` for PTX of any other compiler."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.testing.check import Check as Check
    from kvgen.testing.ptx import run_ptx as run_ptx
    from kvgen.testing.ptx import tensor_map as tensor_map

__all__ = ["Check", "run_ptx", "tensor_map"]

_HOME = {"Check": "check", "run_ptx": "ptx", "tensor_map": "ptx"}


def __getattr__(name: str) -> Any:
    # pytest imports the plugin beside this at every start, also for tests that launch nothing.
    if name in _HOME:
        return getattr(import_module(f"kvgen.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvgen.testing' has no attribute {name!r}")

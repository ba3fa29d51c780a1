"""For the tests of whoever uses generated kernels: `Check`, and the pytest fixture made of it (docs/testing.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.testing.check import Check as Check

__all__ = ["Check"]


def __getattr__(name: str) -> Any:
    # pytest imports the plugin beside this at every start, also for tests that launch nothing.
    if name == "Check":
        from kvgen.testing.check import Check

        return Check
    raise AttributeError(f"module 'kvgen.testing' has no attribute {name!r}")

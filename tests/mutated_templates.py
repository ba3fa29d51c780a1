"""A pytest plugin for tests.mutate: renders from the folder in $KVGEN_MUTATED_TEMPLATES instead of templates/."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_mutated_templates() -> None:
    """Point everything that reads templates at the mutated copy, what is imported later too."""
    import kvgen.paths

    folder = Path(os.environ["KVGEN_MUTATED_TEMPLATES"])
    original = kvgen.paths.templates_root
    for module in list(sys.modules.values()):
        if getattr(module, "templates_root", None) is original:
            module.templates_root = lambda: folder  # type: ignore[attr-defined]


def pytest_configure() -> None:
    use_mutated_templates()

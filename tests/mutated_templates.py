"""A pytest plugin for tests.mutate: renders from the folder in $KVGEN_MUTATED_TEMPLATES instead of templates/."""

from __future__ import annotations

import os
from pathlib import Path


def use_mutated_templates() -> None:
    """Point the renderer at the mutated copy."""
    import kvgen.emit
    import kvgen.paths
    import kvgen.render

    folder = Path(os.environ["KVGEN_MUTATED_TEMPLATES"])
    for module in (kvgen.paths, kvgen.render, kvgen.emit):
        module.templates_root = lambda: folder  # type: ignore[attr-defined]


def pytest_configure() -> None:
    use_mutated_templates()

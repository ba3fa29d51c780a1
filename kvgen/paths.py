"""Where kvgen's own files are."""

from __future__ import annotations

from pathlib import Path

from kvgen.errors import ToolError


def templates_root() -> Path:
    """The folder of templates: packaged inside an installed wheel, at the repository's top in an editable install."""
    package = Path(__file__).resolve().parent
    for root in (package / "_templates", package.parent / "templates"):
        if (root / "device").is_dir():
            return root
    raise ToolError(
        f"templates: neither {package / '_templates'} nor {package.parent / 'templates'} exists; reinstall kvgen"
    )

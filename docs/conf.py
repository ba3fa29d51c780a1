"""Sphinx's settings: the pages of this folder as a site. `make docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "kvgen"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "kvgen"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_copyright = False
highlight_language = "text"
smartquotes = False  # a field's value is "f32", not a quotation


def name_files_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """A link to a file outside of this folder, which the site does not have, becomes its path in the repository."""

    def named(link: re.Match[str]) -> str:
        path = Path(app.srcdir, link[2]).resolve()
        if not path.exists():
            raise FileNotFoundError(f"docs/{page}.md: {link[0]}: no such file")
        return f"{link[1]} (`{path.relative_to(Path(app.srcdir).parent).as_posix()}`)"

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)", named, source[0])


def setup(app: Sphinx) -> None:
    """Sphinx calls this first."""
    app.connect("source-read", name_files_outside)

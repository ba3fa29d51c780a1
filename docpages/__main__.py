"""`python -m docpages`: write the pages and blocks that come from the code; with `--check`, compare them and exit 1.

With `--run`, what comes from runs too: README's output of `kvgen demo`, the counts of docs/performance.md. It takes a minute or two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from docpages import cycles, engines, readme, results
from docpages.blocks import filled
from docpages.cli import cli_page
from docpages.models import models_page
from docpages.presets import presets_page
from docpages.spec_reference import spec_reference

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final[dict[str, Callable[[], str]]] = {
    "docs/spec_reference.md": spec_reference,
    "docs/presets.md": presets_page,
    "docs/models.md": models_page,
    "docs/cli.md": cli_page,
    "README.md": lambda: _with_blocks("README.md", readme.BLOCKS),
    "docs/performance.md": lambda: _with_blocks("docs/performance.md", results.BLOCKS),
    "docs/cycles.md": lambda: _with_blocks("docs/cycles.md", cycles.BLOCKS),
    "docs/transformers.md": lambda: _with_blocks("docs/transformers.md", engines.TRANSFORMERS_BLOCKS),
    "docs/vllm.md": lambda: _with_blocks("docs/vllm.md", engines.VLLM_BLOCKS),
}
RUNS: Final = {"README.md": readme.RUNS, "docs/performance.md": results.RUNS}


def _with_blocks(path: str, blocks: dict[str, Callable[[], str]]) -> str:
    return filled((ROOT / path).read_text(encoding="utf-8"), blocks)


def main() -> None:
    """Write what differs; name it."""
    found = []
    if "--run" in sys.argv[1:]:
        for path, blocks in RUNS.items():
            (ROOT / path).write_text(_with_blocks(path, blocks), encoding="utf-8")
    for path, page in PAGES.items():
        text, file = page(), ROOT / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            found.append(path)
            if "--check" not in sys.argv[1:]:
                file.write_text(text, encoding="utf-8")
    print("\n".join(found) or "all pages are as the code says")
    if found and "--check" in sys.argv[1:]:
        sys.exit(1)


if __name__ == "__main__":
    main()

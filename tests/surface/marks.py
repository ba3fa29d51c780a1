"""Which test proves which name of the seed pages; `python -m tests.surface.marks` writes docs/surface.md from it."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

HERE: Final = Path(__file__).parent
DOCUMENT: Final = HERE.parent.parent / "docs" / "surface.md"
HEAD: Final = """\
# The surface of a cache

The names of Modular MAX's KV cache, and what each is in kvgen: for kernels and callers that are ported from MAX. "On the
device" means `templates/device/cache/kv_cache.cuh` and `operands.cuh` over the set's `cache.cuh`. `Cache` is also the
generated class in Python, `RoleCache` is what its `get_key_cache(layer)` and `get_value_cache(layer)` return, and
`TensorOperand` (in `kvgen.runtime`) is a tensor outside of a cache.

Which tokens of a ring are addressable, for `load`, `store`, pointers and `page(b, token)`:

- A token older than the oldest live token, `first_token(length)`, is not. A token whose table column holds another page is
  not.
- A token below the length is addressable if it is in the window and the table has columns for the window. `stored`, gather
  and scatter follow the same rule.
- A token at or beyond the length is addressable only if its page and every page back to the oldest live token have distinct
  table columns, so that a store cannot overwrite a live token. With `lengths="before"` the oldest token counts as gone
  there, since the step's first token pushes it out of the window; so one new token always has a place if the table has
  columns for the window.
- If a step has more tokens than that, `ops.Append` stores the newest ones.

`row_idx` and `populate` give the page in a token's column without this check.

Written by `python -m tests.surface.marks` from `tests/surface/names.toml` and the tests that prove the names.
"""

F = TypeVar("F", bound=Callable[..., Any])
_PROOFS: dict[tuple[str, str], list[str]] = {}


@dataclass(frozen=True)
class Name:
    """A name of a page: what it is here and for which caches, or why it is not."""

    page: str
    name: str
    here: str
    where: str
    reason: str


def proves(page: str, *names: str) -> Callable[[F], F]:
    """Marks a test as the proof of names of a page."""

    def mark(test: F) -> F:
        for name in names:
            found = _PROOFS.setdefault((page, name), [])
            found.append(f"{test.__module__.rpartition('.')[2]}.{test.__name__}")
        return test

    return mark


def names() -> list[Name]:
    """All names, page by page."""
    entries = tomllib.loads((HERE / "names.toml").read_text(encoding="utf-8"))["entry"]
    return [
        Name(e["page"], name, e.get("here", ""), e.get("where", "all"), e.get("reason", ""))
        for e in entries
        for name in e["names"]
    ]


def proofs() -> dict[tuple[str, str], list[str]]:
    """The tests that prove each name, of every module here."""
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(f"tests.surface.{path.stem}")
    return _PROOFS


def document() -> str:
    """docs/surface.md."""
    proven, lines = proofs(), [HEAD]
    for page in dict.fromkeys(n.page for n in names()):
        lines += [f"\n## {page}\n", "| name | here | defined for | test |", "|---|---|---|---|"]
        for n in (n for n in names() if n.page == page):
            tests = ", ".join(f"`{t}`" for t in sorted(proven.get((page, n.name), [])))
            cells = (
                f"`{n.name}`",
                f"not applicable: {n.reason}" if n.reason else n.here,
                "" if n.reason else n.where,
                tests,
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from tests.surface import marks  # the module that the tests import, whose marks these are

    DOCUMENT.write_text(marks.document(), encoding="utf-8")

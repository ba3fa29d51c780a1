"""The rooms: each folder of kvgen has a README with a line a module, which is what the module says of itself."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import kvgen

PACKAGE = Path(kvgen.__file__).parent
ROOMS = sorted(p.parent for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE)
TABLE = "| module | what |\n|---|---|\n"
# Its README tells modules by what they are for, several a line.
OWN = {"emulator", "emulator/runtime"}


def says(path: Path) -> str:
    """The first sentence of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split())


def table(room: Path) -> str:
    """The lines of a room's modules, then of the rooms inside it."""
    modules = [(f"{p.name}", says(p)) for p in sorted(room.glob("*.py")) if p.name != "__init__.py"]
    inside = [(f"{p.name}/", says(p / "__init__.py")) for p in ROOMS if p.parent == room]
    return TABLE + "".join(f"| `{name}` | {what.replace('|', chr(92) + '|')} |\n" for name, what in (*modules, *inside))


@pytest.mark.parametrize("room", ROOMS, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_room_says_what_is_in_it(room: Path) -> None:
    """KVGEN_UPDATE_GOLDEN=1 writes the lines."""
    if room.relative_to(PACKAGE).as_posix() in OWN:
        text = (room / "README.md").read_text(encoding="utf-8")
        assert not [p.name for p in room.glob("*_ops.py") if f"`{p.name}`" not in text]
        return
    readme = room / "README.md"
    if os.environ.get("KVGEN_UPDATE_GOLDEN"):
        title = f"# {room.relative_to(PACKAGE.parent).as_posix()}\n\n{says(room / '__init__.py')}\n\n"
        head = readme.read_text(encoding="utf-8").partition(TABLE)[0] if readme.exists() else title
        readme.write_text(head + table(room), encoding="utf-8")
    assert readme.read_text(encoding="utf-8").endswith("\n" + table(room)), "KVGEN_UPDATE_GOLDEN=1 writes it"
    for path in room.glob("*.py"):
        assert says(path), f"{path.name} has no docstring"

"""Every kind of fault that the runtime can raise is in the README's table and in KernelFault's docstring."""

from __future__ import annotations

import re
from pathlib import Path

from kvgen import emulator
from kvgen.emulator import KernelFault

HERE = Path(emulator.__file__).parent


def test_every_kind_of_fault_is_documented() -> None:
    sources = "".join(p.read_text() for p in (HERE / "runtime").iterdir() if p.suffix in (".cpp", ".h"))
    raised = set(re.findall(r'\bfault(?:_with_states)?\("(\w+)"', sources))
    assert len(raised) > 20
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*$", (HERE / "README.md").read_text(), re.M))))
    assert raised <= table
    documented = set(re.findall(r"\w+", KernelFault.__doc__ or ""))
    assert raised <= documented


def test_every_module_has_a_place_in_the_readme() -> None:
    text = (HERE / "README.md").read_text()
    known = {"__init__", "errors", "ptxtypes", "counters", "classes"}
    modules = {p.stem for p in HERE.glob("*.py")} - known
    assert [m for m in sorted(modules) if f"`{m}.py`" not in text] == []

"""The house's floors: imports run downward only, and what a generated package must not load."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvgen
from kvgen.codegen.emit import render_all, write_file
from kvgen.schema.loader import load_file

PACKAGE = Path(kvgen.__file__).parent
HEAVY = ("jinja2", "pydantic", "numpy", "ml_dtypes", "cuda", "typer", "rich")

# Rooms from the bottom to the top: each imports only rooms before it, for types as well.
ROOMS = (
    "errors", "extras", "version", "architectures", "pages",
    "emulator", "tensor_map", "expr", "layout", "plan", "paths", "files", "json_file", "config",
    "compile", "cycles", "runtime", "torch", "schema", "score", "lowering", "ops", "reference", "cases", "bench", "verify",
    "testing", "codegen", "export", "models", "integrations", "cli", "__main__",
)  # fmt: skip
FLOORS = {room: number for number, room in enumerate(ROOMS, start=1)}


def modules() -> dict[str, Path]:
    """Every module of kvgen by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(("kvgen", *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def statements_of(path: Path, top: bool) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, which is parsed once for all tests."""
    return list(statements(ast.parse(path.read_text(encoding="utf-8")), top=top))


def statements(tree: ast.AST, *, top: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; with `top` only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif top and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from statements(ast.Module([other], []), top=top)
        else:
            yield from statements(node, top=top)


def imports(name: str, *, top: bool = False) -> set[str]:
    """The modules that `name` imports, dotted; names of kvgen down to the module they come from."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in statements_of(path, top):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
        source = ".".join(filter(None, (base, node.module or "")))
        # `from package import module` imports the module; `from module import name` the module that has the name.
        found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in MODULES else source for a in node.names}
    return found


def floor(name: str) -> int:
    """The floor of a module of kvgen, by the first part of its name below `kvgen`."""
    return FLOORS[name.split(".")[1]]


def test_every_module_has_a_floor() -> None:
    unknown = {n.split(".")[1] for n in MODULES if n != "kvgen"} - set(FLOORS)
    assert not unknown, f"give {', '.join(sorted(unknown))} a floor"
    assert len(MODULES) > 40


def test_imports_run_downward() -> None:
    wrong = []
    for name in MODULES:
        for target in sorted(imports(name)) if name != "kvgen" else ():
            if target == "kvgen":  # `from kvgen import Paged` would take whatever floor the name lives on
                if not name.startswith(("kvgen.cli", "kvgen.models", "kvgen.__main__")):
                    wrong.append(f"{name} imports kvgen itself")
            elif target.startswith("kvgen.") and floor(target) > floor(name):
                wrong.append(f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})")
    assert not wrong, "\n".join(wrong)


def circles() -> list[set[str]]:
    """Modules that import each other, directly or through others, types and late imports included."""
    reached = {name: imports(name) & set(MODULES) - {name} for name in MODULES}
    changed = True
    while changed:
        changed = False
        for _name, found in reached.items():
            more = set().union(*(reached[other] for other in found)) - found
            if more:
                found |= more
                changed = True
    return [{n, *(o for o in found if n in reached[o])} for n, found in reached.items() if n in found]


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_a_circle_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"def f():\n    from kvgen.schema import {other}\n")
        monkeypatch.setitem(MODULES, f"kvgen.schema.{name}", path)
    assert {frozenset(c) for c in circles()} == {frozenset({"kvgen.schema.a", "kvgen.schema.b", "kvgen.schema.c"})}


def test_a_module_of_kvgen_that_is_imported_exists() -> None:
    for name in MODULES:
        missing = {t for t in imports(name) if t.split(".")[0] == "kvgen" and t not in MODULES}
        assert not missing, f"{name} imports {missing}"


def test_the_emulator_knows_nothing_of_kvgen() -> None:
    names = [name for name in MODULES if name.startswith("kvgen.emulator")]
    found = {(n, t) for n in names for t in imports(n) if t.split(".")[0] == "kvgen"}
    assert found and not {(n, t) for n, t in found if not t.startswith("kvgen.emulator")}


def test_the_package_itself_is_lazy() -> None:
    assert not {t for t in imports("kvgen", top=True) if t.split(".")[0] == "kvgen"}


def test_only_kvgen_torch_and_integrations_import_torch() -> None:
    found = {name for name in MODULES if "torch" in {t.split(".")[0] for t in imports(name)}}
    assert {name.split(".")[1] for name in found} == {"torch", "integrations"}


def test_kvgen_torch_without_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "torch" or n.startswith("kvgen.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=r"^kvgen\.torch needs PyTorch, which this environment does not have; install it"
    ):
        importlib.import_module("kvgen.torch")


def test_the_transformers_integration_without_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "torch" or n.startswith("kvgen.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^kvgen\.integrations\.transformers needs torch and transformers"):
        importlib.import_module("kvgen.integrations.transformers")


def test_the_runtime_imports_nothing_heavy() -> None:
    names = [name for name in MODULES if name.startswith("kvgen.runtime")]
    assert names and not {(n, t) for n in names for t in imports(n, top=True) if t.split(".")[0] in HEAVY}


def test_the_walk_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "import os.path\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\nelse:\n    import json\n"
        "def f():\n    from kvgen.codegen import emit\n    from ..plan.params import Param\n    from . import cache\n"
    )
    monkeypatch.setitem(MODULES, "kvgen.schema.sample", path)
    always = {"os.path", "typing", "json"}
    assert imports("kvgen.schema.sample", top=True) == always
    assert imports("kvgen.schema.sample") == always | {
        "numpy",
        "kvgen.codegen.emit",
        "kvgen.plan.params",
        "kvgen.schema.cache",
    }


PROBE = """
import json, sys
import {module}
print(json.dumps(sorted({{m.split(".")[0] for m in sys.modules}} & set({heavy!r}))))
"""


def probe(module: str, folder: Path) -> list[str]:
    """The heavy modules that an import of `module` loads, in a fresh interpreter."""
    paths = os.pathsep.join((str(folder), str(PACKAGE.parent)))
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module, heavy=HEAVY)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    loaded: list[str] = json.loads(done.stdout)
    return loaded


SPEC = '''"""A small set."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
)
'''


def test_kvgen_and_generated_packages_load_nothing_heavy(tmp_path: Path) -> None:
    spec = tmp_path / "small.py"
    spec.write_text(SPEC)
    for file in render_all(load_file(spec, "specs/small.py")).values():
        write_file(tmp_path / "kernels_out", file)
    for module in ("kvgen", "kvgen.runtime", "kernels_out.small"):
        loaded = probe(module, tmp_path)
        assert loaded == [], f"import {module} loads {', '.join(loaded)}"

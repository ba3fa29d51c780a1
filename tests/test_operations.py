"""The operations: each is five files of one name, a line in a list and a page of the documentation; nobody else asks for one."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvgen import KernelSet, Paged, ops
from kvgen.cases.operation import Cases, cases_type
from kvgen.errors import SpecError
from kvgen.paths import templates_root
from kvgen.schema.hints import operations_with

ROOT = Path(__file__).resolve().parents[1]
NAMES = [op.kind for op in ops.ALL]
# Modules outside an operation's own files that ask which one an operation is, and why they must.
ASK: Final = {
    "kvgen/cli/bench_cycles.py": "products of prompts that a mask needs, and tiles of rows, which extend alone plans",
    "kvgen/cli/candidates.py": "shapes of the kernels of attention, which can be replaced by one another",
    "kvgen/cli/demo_steps.py": "the demo is the step of a model: seal, append, extend or decode, gather",
    "kvgen/cli/kernel_choice.py": "explains which kernel of attention a set has, and why",
    "kvgen/cli/slow_kernels.py": "warns of attention on CUDA cores, in the words of decode or of extend",
    "kvgen/cli/op_fields.py": "shows the scale that attention takes from its cache",
    "kvgen/models/indexer_text.py": "the operations of an indexer, in the order of a step",
    "kvgen/models/text.py": "the operations that a config.json asks for, in the order of a step",
    "benchmarks/gpu/apart.py": "takes a fused append apart",
    "benchmarks/gpu/launch_one.py": "names the kernels of a workload for a profiler",
    "benchmarks/gpu/set_facts.py": "numbers of append, decode and extend that the timings below hold results with",
    "benchmarks/gpu/timings.py": "a fixed programme of 15 minutes: its choice of operations and of batches",
}


def test_the_list_is_whole() -> None:
    """Every operation that a module of ops/ defines is in the list, Custom aside; and every module defines one."""
    folder = ROOT / "kvgen" / "ops"
    modules = {p.stem for p in folder.glob("*.py")} - {"__init__", "base", "custom"}
    assert modules == set(NAMES) and len(NAMES) == len(modules)


@pytest.mark.parametrize("op", ops.ALL, ids=NAMES)
def test_an_operation_is_five_files_of_one_name(op: type[ops.Append]) -> None:
    name = op.kind
    assert op.__module__ == f"kvgen.ops.{name}"
    tree = ast.parse(Path(importlib.import_module(op.__module__).__file__ or "").read_text(encoding="utf-8"))
    kinds = [n for n in tree.body if isinstance(n, ast.ClassDef) and any("kind" in ast.unparse(s) for s in n.body)]
    assert [k.name for k in kinds] == [op.__name__], "one operation a file"
    templates, problem = (
        templates_root() / "ops",
        name.removesuffix("_decode"),
    )  # mla_mma.cu.j2, mla_sm90.cu.j2 of mla_decode
    families = list(templates.glob(f"{problem}_*.cu.j2")) if "candidates" in dir(op) else []
    assert (templates / f"{name}.cu.j2").is_file() or len(families) > 1, "one template, or one a family of kernels"
    assert callable(getattr(importlib.import_module(f"kvgen.reference.{name}"), name))
    assert issubclass(cases_type(name), Cases) and cases_type(name).__module__ == f"kvgen.cases.{name}"
    assert (ROOT / "tests" / "ops" / f"test_{name}.py").is_file()


@pytest.mark.parametrize("op", ops.ALL, ids=NAMES)
def test_an_operation_is_documented(op: type[ops.Append]) -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md")]
    assert any(f"{op.__name__}`" in page or f"{op.__name__}(" in page for page in pages)


def test_a_word_is_answered_with_its_operation() -> None:
    """In place of operations a spec may get their kinds: each is told the class, pool_tokens that of another name."""
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
    for op in ops.ALL:
        with pytest.raises(SpecError, match=rf"must be an operation of kvgen\.ops, such as ops\.{op.__name__}\(\)"):
            KernelSet(q_heads=8, cache=cache, ops=[op.kind])  # type: ignore[list-item]


@pytest.mark.parametrize("flag", ["ragged", "moves_states", "at_rates", "scores_keys"])
def test_texts_of_operations_say_what_their_classes_do(flag: str) -> None:
    """A refusal names the operations that a cache takes, read from their texts."""
    assert operations_with(flag).split(", ") == [op.kind for op in ops.ALL if getattr(op, flag)]


def asked(text: str) -> Iterator[str]:
    """The places of a module that ask which operation one is: isinstance, a comparison of kinds, a list of them."""
    kinds, classes = {*NAMES, "custom"}, {op.__name__ for op in (*ops.ALL, ops.Custom)}
    if "ops" not in text and not any(f'"{kind}"' in text for kind in kinds):  # not worth parsing
        return
    tree = ast.parse(text)
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvgen.ops")
        for alias in node.names
        if alias.name in classes
    } | {f"ops.{name}" for name in classes}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, types]):
                found = any(ast.unparse(part) in own for part in ast.walk(types))
            case ast.Compare(left, _, others):
                sides = [left, *others]
                named = any(
                    isinstance(s, ast.Name | ast.Attribute) and ast.unparse(s).split(".")[-1] == "kind" for s in sides
                )
                words = (part for side in sides for part in ast.walk(side))
                found = named and any(isinstance(part, ast.Constant) and part.value in kinds for part in words)
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts) | ast.Dict(parts):
                found = len(parts) > 1 and all(isinstance(part, ast.Constant) and part.value in kinds for part in parts)
            case _:
                continue
        if found:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nobody_else_asks_which_operation_one_is() -> None:
    found = {}
    for path in (path for top in ("kvgen", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        places = (
            [] if name.startswith(("kvgen/ops/", "kvgen/cases/")) else list(asked(path.read_text(encoding="utf-8")))
        )
        if places:
            found[name] = places
    more = {name: places for name, places in found.items() if name not in ASK}
    assert not more, f"ask kvgen.cases, lowering or the operation itself instead: {more}"
    assert not set(ASK) - set(found), "these do not ask any more: take them out of ASK"


def test_a_question_is_seen() -> None:
    text = (
        "from kvgen import ops\nfrom kvgen.ops import Decode as D, Extend\nfrom kvgen.plan.params import Pool\n"
        "isinstance(a, D)\nisinstance(a, int | Extend)\nisinstance(a, ops.Seal)\nisinstance(a, Pool)\n"
        "op.kind == 'append'\n'decode' in kind\nkind in ('decode', 'more')\nkind == 'cubin'\n['gather', 'scatter']\n['gather']\n"
    )
    assert [int(place.split()[1][:-1]) for place in asked(text)] == [4, 5, 6, 8, 9, 10, 12]

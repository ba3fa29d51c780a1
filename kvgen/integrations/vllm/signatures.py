"""Signatures of vLLM that an adapter relies on, compared with the record of a known version; nothing is imported.

Compared are, by their syntax trees:

- the members of classes, those inherited included, whose names occur in the adapter: signatures, fields, values;
- the abstract methods of the classes that it derives from;
- the calls of its methods in vLLM's own code.

A name that was not found counts as well: it must be missing in the others. `python -m tests_vllm.signatures` writes the record,
signatures.json, from source distributions of vLLM; `changed` compares a vLLM that is installed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

ROOM: Final = Path(__file__).resolve().parent
RECORD: Final = ROOM / "signatures.json"
# Classes whose objects vLLM hands to an adapter, which need not import them.
RECEIVED: Final = (
    "vllm.config.cache:CacheConfig",
    "vllm.config.compilation:CompilationConfig",
    "vllm.config.scheduler:SchedulerConfig",
    "vllm.config.speculative:SpeculativeConfig",
    "vllm.config.vllm:VllmConfig",
    "vllm.model_executor.layers.attention.attention:Attention",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention",
    "vllm.v1.attention.selector:AttentionSelectorConfig",
    "vllm.v1.kv_cache_interface:AttentionSpec",
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec",
)
# Where vLLM calls backends; what other backends, models and kernels call is their own.
CALLERS: Final = ("config", "distributed", "model_executor/layers/attention", "platforms", "v1")
OTHERS: Final = (
    "v1/attention/backends",
    "v1/attention/ops",
    "platforms/rocm.py",
    "platforms/xpu.py",
    "platforms/tpu.py",
)
# The ends of what stands before the dot where a backend, a builder or an implementation is called; and where one is made.
CALLED: Final = ("impl", "impl_cls", "builder", "builder_cls", "backend", "backend_cls", "backend_class")
MADE: Final = ("impl_cls", "builder_cls")
_MAY_CALL: Final = re.compile(rf"({'|'.join(CALLED)})\s*[.(]")


@dataclass(frozen=True)
class Asked:
    """The names in an adapter: `imports` as "module:name", the `names` of attributes, the `methods` that it defines."""

    imports: tuple[str, ...]
    names: tuple[str, ...]
    methods: tuple[str, ...]


def asked_by(adapter: str) -> Asked:
    """The names that the modules of `adapter` ("v0_32") use, the plugin's part included."""
    imports: set[str] = {"vllm.v1.attention.backends.registry:AttentionBackendEnum"}
    imports.add("vllm.v1.attention.backends.registry:register_backend")
    names: set[str] = {"register", "is_overridden"}
    methods: set[str] = set()
    for path in sorted(ROOM.glob(f"{adapter}*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imports |= {f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)  # getattr(layer, "name", None)
            elif isinstance(node, ast.ClassDef):
                members = {name for item in node.body for name in _named(item)}
                names |= members
                methods |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return Asked(tuple(sorted(imports)), tuple(sorted(names)), tuple(sorted(methods)))


class Sources:
    """The Python files of a vLLM: "vllm/config/cache.py" and the like -> text."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self._trees: dict[str, ast.Module] = {}

    def tree(self, path: str) -> ast.Module:
        """The syntax tree of a file."""
        if path not in self._trees:
            self._trees[path] = ast.parse(self.files[path])
        return self._trees[path]

    def path(self, module: str) -> str | None:
        """The file of a module."""
        plain = module.replace(".", "/")
        return next((p for p in (f"{plain}.py", f"{plain}/__init__.py") if p in self.files), None)

    def find(self, name: str) -> tuple[str, ast.stmt] | None:
        """Where "module:name" is defined, behind any number of imports, and its statement."""
        module, _, wanted = name.partition(":")
        path = self.path(module)
        for node in _statements(self.tree(path)) if path else ():
            if wanted in _named(node):
                return f"{module}:{wanted}", node
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == wanted:
                        return self.find(f"{node.module}:{alias.name}")
        return None

    def lineage(self, name: str) -> list[tuple[str, ast.ClassDef]]:
        """A class of vLLM and the classes of vLLM that it derives from, the nearest first."""
        found = self.find(name)
        if found is None:
            return []
        where, node = found
        if not isinstance(node, ast.ClassDef):
            return []
        module = where.partition(":")[0]
        above = [self.lineage(f"{module}:{ast.unparse(base).split('[')[0]}") for base in node.bases]
        return [(where, node), *(one for line in above for one in line)]

    @cached_property
    def calls(self) -> list[tuple[str, str, str]]:
        """(method, file, text) of the calls of backends, builders and implementations in vLLM's own code."""
        found = []
        for path in sorted(self.files):
            place = path.removeprefix("vllm/")
            if not place.startswith(CALLERS) or place.startswith(OTHERS) or not _MAY_CALL.search(self.files[path]):
                continue
            for node in ast.walk(self.tree(path)):
                if isinstance(node, ast.Call):
                    function = node.func
                    if isinstance(function, ast.Attribute) and ast.unparse(function.value).endswith(CALLED):
                        found.append((function.attr, place, ast.unparse(node)))
                    elif isinstance(function, ast.Name) and function.id in MADE:
                        found.append(("__init__", place, ast.unparse(node)))
        return found


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module, those under `if` and `try` as well."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)
        elif isinstance(node, ast.stmt):
            yield node


def _named(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _text(node: ast.stmt) -> str:
    """A definition without its body: a function's signature with its decorators, a class's bases, an assignment."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
        return f"{decorators}def ({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        return f"class ({', '.join(map(ast.unparse, node.bases))})"
    return ast.unparse(node)


def _set_in_methods(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The attributes that a class's methods give to self: name and annotation, or the value where there is none."""
    for inner in ast.walk(node):
        targets: list[ast.expr]
        if isinstance(inner, ast.AnnAssign):
            targets, text = [inner.target], ast.unparse(inner.annotation)
        elif isinstance(inner, ast.Assign):
            targets, text = inner.targets, ast.unparse(inner.value)
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, text


def found_in(sources: Sources, asked: Asked) -> dict[str, Any]:
    """The definitions in `sources` of all that an adapter asks for: "module:Class.member" and the like -> text."""
    found: dict[str, Any] = {}
    for name in sorted({*asked.imports, *RECEIVED}):
        place = sources.find(name)
        found[name] = _text(place[1]) if place else "missing"
        lineage = sources.lineage(name)
        for _, node in lineage:
            for item in node.body:
                for member in set(_named(item)) & set(asked.names):
                    found.setdefault(f"{name}.{member}", _text(item))
            for member, text in _set_in_methods(node):
                if member in asked.names:
                    texts = found.setdefault(f"{name}.self.{member}", [])
                    if isinstance(texts, list) and text not in texts:
                        texts.append(text)
        abstract = {
            item.name
            for _, node in lineage
            for item in node.body
            if isinstance(item, ast.FunctionDef) and "abstractmethod" in _text(item).partition("def")[0]
        }
        if abstract and name in asked.imports:
            found[f"{name}: abstract"] = sorted(abstract)
    for method in asked.methods:
        calls = sorted({f"{place}: {text}" for name, place, text in sources.calls if name == method})
        if calls:
            found[f"calls of {method}"] = calls
    return found


def differing(first: dict[str, Any], other: dict[str, Any], why: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Differences of two versions: name -> its text in the other, and why that does not matter, where that is known."""
    names = sorted(name for name in {*first, *other} if first.get(name) != other.get(name))
    return {name: {"here": other.get(name), "why": why.get(name)} for name in names}


def known_of(version: str) -> dict[str, Any] | None:
    """The definitions that the record has of a version, such as "0.33.0"; None for a version that it does not have."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    found: dict[str, Any] = record["found"]
    if version == record["version"]:
        return found
    if version not in record["compared"]:
        return None
    other = {name: one["here"] for name, one in record["compared"][version]["differing"].items()}
    return {name: text for name, text in {**found, **other}.items() if text is not None}


def changed(folder: Path, adapter: str, known: str) -> list[str]:
    """Names that an adapter relies on and that differ between the vLLM in `folder`, its package, and the version `known`."""
    files = {}
    for path in sorted(folder.rglob("*.py")):
        files[f"vllm/{path.relative_to(folder).as_posix()}"] = path.read_text(encoding="utf-8", errors="replace")
    here = found_in(Sources(files), asked_by(adapter))
    there = known_of(known)
    return sorted(here) if there is None else list(differing(there, here, {}))

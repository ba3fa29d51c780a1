"""What an adapter relies on of vLLM's Python, compared between versions of vLLM by their sources; neither is imported.

    python -m tests_vllm.signatures vllm-0.32.0.tar.gz vllm-0.33.0.tar.gz

reads source distributions, as on PyPI, and writes docs/engines/signatures.json: for the first version what was found, for the
others what differs from it and why that does not matter (`EXPLAINED`). Compared are, by their syntax trees:

- the members of classes, those inherited included, whose names occur in the adapter: signatures, fields, values;
- the abstract methods of the classes that it derives from;
- the calls of its methods in vLLM's own code.

A name that was not found counts as well: it must be missing in the others. tests/integrations/test_vllm_signatures.py holds
the record to the adapter as it is, and the table of versions to the record.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
ROOM: Final = ROOT / "kvgen" / "integrations" / "vllm"
RECORD: Final = ROOT / "docs" / "engines" / "signatures.json"
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
# Version -> what differs there, and why the adapter serves it none the less.
EXPLAINED: Final[dict[str, dict[str, str]]] = {
    "0.33.0": {
        "calls of __init__": "one more: of a builder of cache configs, which are no metadata",
        "calls of do_kv_cache_update": "MLA's has one more argument, which the adapter takes: skip_scale says that k_scale is 1",
        "calls of get_name": "one more: of MLA's own prefill backends",
        "vllm.config.speculative:SpeculativeConfig.kv_cache_dtype": "a drafter's; the adapter reads that of its layers",
        "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl.do_kv_cache_update": "skip_scale, as in the calls",
    },
}
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


@dataclass(frozen=True)
class Asked:
    """What stands in an adapter: `imports` as "module:name", the `names` of attributes, the `methods` that it defines."""

    imports: tuple[str, ...]
    names: tuple[str, ...]
    methods: tuple[str, ...]


def asked_by(adapter: str) -> Asked:
    """What the modules of `adapter` ("v0_32") ask of vLLM, the plugin's part included."""
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
    """The Python files of a source distribution of vLLM."""

    def __init__(self, path: Path) -> None:
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        self.files: dict[str, str] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                top, _, name = member.name.partition("/")
                if member.isfile() and name.startswith("vllm/") and name.endswith(".py"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    self.files[name] = stream.read().decode("utf-8")
                self.version = top.removeprefix("vllm-")
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
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        where, node = found
        module = where.partition(":")[0]
        above = [self.lineage(f"{module}:{ast.unparse(base).split('[')[0]}") for base in node.bases]
        return [(where, node), *(one for line in above for one in line)]

    @cached_property
    def calls(self) -> list[tuple[str, str, str]]:
        """(method, file, text) of the calls of backends, builders and implementations in vLLM's own code."""
        found = []
        for path in sorted(self.files):
            place = path.removeprefix("vllm/")
            if not place.startswith(CALLERS) or place.startswith(OTHERS):
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
    """What `sources` has of what an adapter asks: "module:Class.member" and the like -> text."""
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
    """What is not the same in two versions: name -> its text in the other, and why that does not matter, where that is known."""
    names = sorted(name for name in {*first, *other} if first.get(name) != other.get(name))
    return {name: {"here": other.get(name), "why": why.get(name)} for name in names}


def main() -> None:
    """Compare the source distributions named on the command line and write the record."""
    first, *others = (Sources(Path(path)) for path in sys.argv[1:])
    adapter = "v" + "_".join(first.version.split(".")[:2])
    asked = asked_by(adapter)
    found = found_in(first, asked)
    record = {
        "adapter": adapter,
        "asked": {"imports": asked.imports, "names": asked.names, "methods": asked.methods},
        "version": first.version,
        "sha256": first.sha256,
        "found": found,
        "compared": {
            other.version: {
                "sha256": other.sha256,
                "differing": differing(found, found_in(other, asked), EXPLAINED.get(other.version, {})),
            }
            for other in others
        },
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for version, compared in record["compared"].items():
        unexplained = [name for name, found in compared["differing"].items() if not found["why"]]
        print(
            f"{version}: {len(found)} compared, {len(compared['differing'])} differ; not explained: {unexplained or 'none'}"
        )


if __name__ == "__main__":
    main()

"""The sets that `kvgen verify` runs: those of the project that were chosen, and those that are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from kvgen.cli.ondisk import LIMIT
from kvgen.cli.project import Project, generated
from kvgen.codegen.load import load
from kvgen.files import read_bytes
from kvgen.schema.kernel_set import KernelSet
from kvgen.verify.drawn import drawn_set, names


@dataclass(frozen=True)
class Verified:
    """One set: its spec and the operations that run. `package` gives its generated module; `digest` the SHA-256 of the generated
    files and whether they are what the spec gives. `spec`: the spec's path, its name, the project's folder and that of generated
    packages; None of a set that is drawn."""

    kernels: KernelSet
    ops: tuple[str, ...]
    package: Callable[[], AbstractContextManager[ModuleType]]
    digest: Callable[[], tuple[str, bool]]
    spec: tuple[str, str, str, str] | None

    @property
    def name(self) -> str:
        """The set's name."""
        return self.kernels.name


def of_project(project: Project) -> list[Verified]:
    """The chosen sets."""
    out, root = project.config.out, project.config.root
    return [
        Verified(
            item.loaded.kernels,
            item.ops,
            partial(generated, out, item.name),
            partial(_digest, project, item.name),
            (str(root / item.loaded.source), item.loaded.source, str(root), str(out)),
        )
        for item in project.chosen
    ]


def drawn_sets(count: int, seed: int) -> list[Verified]:
    """`count` sets of each subject of kvgen.verify.drawn; their modules are those of `kvgen.load`."""
    return [_drawn(drawn_set(name, seed)) for name in names(count)]


def _drawn(kernels: KernelSet) -> Verified:
    ops = tuple(op.name for op in kernels.ops)
    return Verified(kernels, ops, partial(in_memory, kernels), partial(_in_memory_digest, kernels), None)


@contextmanager
def in_memory(kernels: KernelSet) -> Iterator[ModuleType]:
    """The module of a set without a project."""
    yield load(kernels)


def _in_memory_digest(kernels: KernelSet) -> tuple[str, bool]:
    folder, hashed = Path(str(load(kernels).__file__)).parent, hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".cu", ".cuh", ".py")):
        data = read_bytes(path, limit=LIMIT, name=path.name)
        hashed.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return hashed.hexdigest(), True


def _digest(project: Project, name: str) -> tuple[str, bool]:
    hashed, same = hashlib.sha256(), True
    for path, file in project.files.items():
        if not path.startswith((f"{name}/", "device/")):
            continue
        data = read_bytes(project.config.out / path, limit=LIMIT, name=project.shown(path))
        hashed.update(f"{path}\0{len(data)}\0".encode() + data)
        same &= data == file.text.encode()
    return hashed.hexdigest(), same

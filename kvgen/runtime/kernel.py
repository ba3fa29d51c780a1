"""A generated kernel: what launchers check arguments against, and what backends launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from kvgen.plan.params import Array, Count, PoolMap, Scalar, Size, TensorMap
from kvgen.runtime.arrays import ArrayView
from kvgen.runtime.checks import Dims
from kvgen.runtime.module import Module
from kvgen.runtime.packing import ParamKind
from kvgen.runtime.page_pool import PagePool
from kvgen.runtime.params import Param, Struct, kinds_of

Grid = tuple[int, int, int]
Extra = Sequence[tuple[str, ArrayView, bool]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A generated kernel: its file, its parameters behind the cache, the rule for its grid, whether it writes to the pool,
    whether it works on `all_layers` of the cache in one launch, and whether it reads page tables or lengths (`tables`).

    `shared_by_arch`, `threads_by_arch` and `grid_by_arch` are dynamic shared memory, threads and grid of architectures that
    differ, `files` the files of those that have one of their own, with the same entry; where `blocks_by_arch` names one, so
    many blocks a multiprocessor take all work, and no more are launched. `arguments` are what a call brings, in the order of the
    launcher's signature, `places` their places there by name.
    """

    module: Module
    file: str
    entry: str
    params: tuple[Param, ...]
    grid: Callable[[Dims], Grid]
    threads: int
    shared: int
    writes: bool
    all_layers: bool = False
    shared_by_arch: Mapping[str, int] = field(default_factory=dict)
    threads_by_arch: Mapping[str, int] = field(default_factory=dict)
    grid_by_arch: Mapping[str, Callable[[Dims], Grid]] = field(default_factory=dict)
    blocks_by_arch: Mapping[str, int] = field(default_factory=dict)
    tables: bool = True
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[Array | Scalar | Count | TensorMap | Struct, ...] = field(init=False)
    places: Mapping[str, int] = field(init=False)
    kinds: tuple[ParamKind, ...] = field(init=False)

    def __post_init__(self) -> None:
        called = [p for p in self.params if not isinstance(p, (Size, PoolMap)) and not own_pages(p)]
        ordered = [p for p in called if not p.optional] + [p for p in called if p.optional]
        object.__setattr__(self, "arguments", tuple(ordered))
        object.__setattr__(self, "places", {p.name: i for i, p in enumerate(ordered)})
        object.__setattr__(self, "kinds", kinds_of(self.params))
        self.module.add(self.file, self.entry, self.files)

    def file_on(self, arch: str) -> str:
        """The file that has the kernel for this architecture."""
        return self.files.get(arch, self.file)

    def shared_on(self, arch: str) -> int:
        """Dynamic shared memory of a block on this architecture, in bytes."""
        return self.shared_by_arch.get(arch, self.shared)

    def grid_on(self, arch: str, multiprocessors: int, grid: Grid) -> Grid:
        """What is launched of `grid` on this architecture."""
        x, y, z = grid
        most = self.blocks_by_arch.get(arch)
        return (x if most is None else min(x, most * multiprocessors)), y, z

    def threads_on(self, arch: str) -> int:
        """Threads of a block on this architecture."""
        return self.threads_by_arch.get(arch, self.threads)


def own_pages(param: Param) -> TypeGuard[PagePool]:
    """Whether a parameter has the pages of the cache itself, which no call brings."""
    return isinstance(param, PagePool) and not param.argument

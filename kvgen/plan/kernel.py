"""Plans: every decision about one kernel, taken in Python before a template writes any text.

Every kernel's first parameter is the cache, one struct. The table of the others is the single source of a kernel's C
signature, its launcher's signature and docstring, the argument checks, and the CPU machine's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.expr.nodes import Expr
from kvgen.plan.division import Division
from kvgen.plan.params import Param
from kvgen.plan.split_plan import SplitPlan


@dataclass(frozen=True)
class Header:
    """A header of the user's: its copy's place below the set's folder, the path by which messages name it, its text."""

    place: str
    path: str
    text: str


@dataclass(frozen=True)
class Source:
    """CUDA that the user wrote: its text, the path by which messages name it ("<name>" where it has no file), its headers."""

    path: str
    text: str
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of one operation: its template and everything the template reads, or the user's own text.

    `context` is a frozen dataclass whose fields are exactly the template's variables. `params` follow the cache in the
    signature: what the call brings. `grid` is evaluated by the launcher over the dimension names of `params` and of the
    cache's fields; `shared` is dynamic shared memory in bytes. `most_blocks`: so many blocks a multiprocessor take the work of
    all one after the other, and a launch has no more (0: a launch has the whole grid). `writes_pool`: the kernel stores to the
    cache's memory. `all_layers`: the launcher takes the cache with all its layers; the struct is then the first one's.
    `reads_tables`: the kernel reads page tables or lengths; others take a cache without any. A kernel with a `source` has
    neither template nor context. `division` says how the blocks of an attention kernel divide the work, and `split` how the
    workspace is divided that its planner prepares (None: it has no workspace).

    `by_arch` has the kernel of each architecture where not all are this one. All have one entry and the same parameters;
    kernels of one `name` share a file, and `other_files` names the files of other architectures.
    """

    name: str
    entry: str
    template: str
    context: object
    params: tuple[Param, ...]
    grid: tuple[Expr, Expr, Expr]
    threads: int
    shared: int = 0
    most_blocks: int = 0
    writes_pool: bool = False
    all_layers: bool = False
    reads_tables: bool = True
    source: Source | None = None
    division: Division | None = None
    split: SplitPlan | None = None
    other_files: str = ""
    by_arch: tuple[tuple[str, KernelPlan], ...] = ()

    def on(self, arch: str) -> KernelPlan:
        """The kernel that runs on this architecture."""
        return next((plan for name, plan in self.by_arch if name == arch), self)

    def files(self, archs: Sequence[str]) -> tuple[tuple[KernelPlan, tuple[str, ...]], ...]:
        """Each kernel with a file of its own, this one first, and which of these architectures it is for."""
        texts = {plan.name: plan for _, plan in self.by_arch} | {self.name: self}
        ordered = (self.name, *(name for name in texts if name != self.name))
        return tuple((texts[name], tuple(a for a in archs if self.on(a).name == name)) for name in ordered)

    def differing(self, field: str) -> dict[str, Any]:
        """A field's value by architecture, of each whose kernel has another value than this one."""
        own = getattr(self, field)
        return {arch: getattr(plan, field) for arch, plan in self.by_arch if getattr(plan, field) != own}

    def shared_on(self, arch: str) -> int:
        """Dynamic shared memory of a block on this architecture, in bytes."""
        return self.on(arch).shared

    def threads_on(self, arch: str) -> int:
        """Threads of a block on this architecture."""
        return self.on(arch).threads

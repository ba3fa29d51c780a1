"""Plans: every decision about one kernel, taken in Python before a template writes any text.

Every kernel's first parameter is the cache, one struct. The table of the others is the single source of a kernel's C
signature, its launcher's signature and docstring, the argument checks, and the CPU machine's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.expr.nodes import Expr
from kvgen.plan.params import Param


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
    cache's fields; `shared` is dynamic shared memory in bytes, `shared_by_arch` that of architectures that differ.
    `writes_pool`: the kernel stores to the cache's memory. `all_layers`: the launcher takes the cache with all its layers; the
    struct is then the first one's. `reads_tables`: the kernel reads page tables or lengths; others take a cache without any.
    A kernel with a `source` has neither template nor context.
    `elsewhere` has (architecture, kernel): that kernel takes this one's place there, from a file of its own. Both have the same
    entry, parameters and grid; `shared_by_arch` and `threads_by_arch` of this one say what each launch gives.
    `blocks_by_arch`: there so many blocks a multiprocessor take the work of all one after the other, and a launch has no more.
    """

    name: str
    entry: str
    template: str
    context: object
    params: tuple[Param, ...]
    grid: tuple[Expr, Expr, Expr]
    threads: int
    shared: int = 0
    shared_by_arch: tuple[tuple[str, int], ...] = ()
    threads_by_arch: tuple[tuple[str, int], ...] = ()
    blocks_by_arch: tuple[tuple[str, int], ...] = ()
    writes_pool: bool = False
    all_layers: bool = False
    reads_tables: bool = True
    source: Source | None = None
    elsewhere: tuple[tuple[str, KernelPlan], ...] = ()

    def on(self, arch: str) -> KernelPlan:
        """The kernel that runs on this architecture."""
        return dict(self.elsewhere).get(arch, self)

    def files(self, archs: Sequence[str]) -> tuple[tuple[KernelPlan, tuple[str, ...]], ...]:
        """Each kernel with a file of its own, this one first, and which of these architectures it is for."""
        taken = dict(self.elsewhere)
        own = (self, tuple(arch for arch in archs if arch not in taken))
        return (own, *((kernel, (arch,) if arch in archs else ()) for arch, kernel in self.elsewhere))

    def shared_on(self, arch: str) -> int:
        """Dynamic shared memory of a block on this architecture, in bytes."""
        return dict(self.shared_by_arch).get(arch, self.shared)

    def threads_on(self, arch: str) -> int:
        """Threads of a block on this architecture."""
        return dict(self.threads_by_arch).get(arch, self.threads)

"""Lists of ids that operations on whole pages take: pages', and those of scales with a table of their own."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.expr.nodes import Expr, const, var
from kvgen.layout.dtypes import DType
from kvgen.lowering.page_runs import PageRun, PagesContext, page_runs, pages_context, tiles, with_id
from kvgen.plan.params import Array, PagePool, Param, Size
from kvgen.schema.any_cache import AnyCache


@dataclass(frozen=True)
class IdList:
    """One list as C: its array, how many entries it has, the array that says how many of them count, the pages that it
    names, and the pool's size."""

    title: str
    ids: str
    count: str
    live: str
    pages: PagesContext
    size: str


@dataclass(frozen=True)
class IdLists:
    """The lists of an operation: `name`, and scale_`name` where scales have ids of their own. An entry has the axes `entry`."""

    cache: AnyCache
    name: str
    entry: tuple[int, ...] = ()

    @property
    def runs(self) -> dict[str, tuple[PageRun, ...]]:
        """By the name of the list, what its ids find."""
        runs = page_runs(self.cache)
        found = {self.name: with_id(runs, 0), f"scale_{self.name}": with_id(runs, 1)}
        return {name: each for name, each in found.items() if each}

    @property
    def dims(self) -> dict[str, Expr]:
        """By the name of the list, how many entries it has."""
        return {name: var(self._dim(name)) for name in self.runs}

    def params(self, index: DType, docs: tuple[str, str]) -> tuple[Param, ...]:
        """The lists, how many entries they have, and how many of those count; `docs`: of pages, and of scales."""
        found: list[Param] = []
        for name in self.runs:
            doc, optional = docs[name != self.name], name != self.name
            shape: tuple[int | str, ...] = (self._dim(name), *self.entry)
            found.append(
                Array(name, index.name, shape, optional=optional, untrusted=True, doc=doc, field="index_dtype")
            )
        for name in self.runs:
            doc = f"how many of the {name.replace('_', ' ')} count; default: all"
            found.append(
                Array(f"num_{name}", index.name, (1,), optional=True, untrusted=True, doc=doc, field="index_dtype")
            )
            found.append(Size(f"max_{name}", "u32", self._dim(name)))
        return tuple(found)

    def contexts(self, pool: PagePool) -> tuple[IdList, ...]:
        """The lists as templates see them."""
        return tuple(
            IdList(
                title="Value" if name == self.name else "Scale",
                ids=name,
                count=f"max_{name}",
                live=f"num_{name}",
                pages=pages_context(pool, runs),
                size="num_pages" if name == self.name else "num_scale_pages",
            )
            for name, runs in self.runs.items()
        )

    @property
    def tiles(self) -> Expr:
        """Blocks of a layer: tiles of every list."""
        total: Expr = const(0)
        for name, runs in self.runs.items():
            total = total + tiles(runs, self.dims[name])
        return total

    def _dim(self, name: str) -> str:
        return "N" if name == self.name else "NS"

"""Rows of states as operations of one layer take them: ids, rows of bytes, how many of them count."""

from __future__ import annotations

from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS
from kvgen.lowering.page_runs import PagesContext, PairIndex, page_runs, pages_context, pool_param
from kvgen.plan.params import Access, Array, Param, Size
from kvgen.schema.any_cache import AnyCache


def check_states(op: str, cache: AnyCache, instead: str) -> None:
    """Raise ValueError for a cache without states."""
    if not cache.states:
        raise ValueError(
            f"ops: got {op} with {type(cache).__name__}; it is for caches of states, State; {instead} copies tokens"
        )


def state_bytes(cache: AnyCache) -> int:
    """Bytes of a state."""
    (run,) = page_runs(cache)
    return run.nbytes


def states_of(cache: AnyCache) -> PagesContext:
    """The run of bytes that a state is, and how many states share a tile."""
    return pages_context(pool_param(cache, "pages", 1), page_runs(cache))


def state_rows(cache: AnyCache, rows: str, index: PairIndex, *, access: Access, doc: str) -> tuple[Param, ...]:
    """What both take: ids, rows of states, how many of them count."""
    (run,) = page_runs(cache)
    ids, field = dtype(index).name, "index_dtype"
    return (
        Array("ids", ids, ("N",), untrusted=True, doc="states of the rows", field=field),
        Array(
            rows, "u8", ("N", run.nbytes), access=access, align=run.align, strided=True, doc=doc, fields=(None, "bytes")
        ),
        Array("num_ids", ids, (1,), optional=True, untrusted=True, doc="how many ids count; default: all", field=field),
        Size(f"{rows}_stride", "i64", f"{rows}.stride"),
        Size("max_ids", "u32", "N"),
        ERRORS,
    )

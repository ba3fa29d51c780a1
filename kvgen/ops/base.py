"""What operations of one kind have in common: fields, checks, and arguments."""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.new_rows import counts_before
from kvgen.plan.params import Array, Param
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.tables import IndexName

WARPS: Final = 8


# Ids of a request that a warp copies: enough for the trips to overlap, few enough to share a long request out.
COLUMNS: Final = 512


class PageListOp(Op):
    """What both have: the type of the entries, and the entry that is no page."""

    table_dtype: IndexName
    """Element type of the page ids that are written."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""
    fill: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    """Entry for what is no page. None: the first number past the pool."""

    @model_validator(mode="after")
    def _fill_fits(self) -> PageListOp:
        if self.fill == -1 and self.table_dtype == "u32":
            raise ValueError("fill: got -1 with table_dtype='u32', which has no sign; use 'i32' or 'i64', or None")
        return self

    def _index(self, cache: Cache) -> DType:
        return dtype(self.index_dtype or cache.lengths_dtype)


class ChunkOp(Op):
    """What the plan and its reader agree on: what a request's keys are padded to."""

    alignment: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens that each request's keys are padded to a multiple of. None: the page size. 1: no padding."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets` and of the offsets of chunks. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        cache = kernels.kv
        if not cache.latent_part:
            raise ValueError(
                f"ops: got {self.kind} with {type(cache).__name__}; it is for caches of latent rows, Latent; gather copies "
                "rows of others"
            )
        if cache.page_table.drops_tokens:
            raise ValueError(
                f"ops: got {self.kind} with table={type(cache.page_table).__name__}(), which drops keys that a prefill attends "
                "to; use another table"
            )

    def _alignment(self, cache: Cache) -> int:
        if self.alignment is not None:
            return self.alignment
        assert cache.page_tokens is not None
        return cache.page_tokens

    def _index(self, cache: Cache) -> DType:
        return dtype(self.index_dtype or cache.lengths_dtype)

    def _step_offsets(self, cache: Cache) -> tuple[Param, ...]:
        """The rows of this step's tokens, where lengths do not count them."""
        if not counts_before(cache):
            return ()
        doc = "first new row of each request"
        return (Array("row_offsets", self._index(cache).name, ("B+1",), untrusted=True, doc=doc, field="index_dtype"),)

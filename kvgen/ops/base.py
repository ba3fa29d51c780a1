"""What operations of one kind have in common: fields, checks, and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import ClassVar, Final

from pydantic import Field, model_validator

from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.copied_rows import Layers, LayersContext, RowsBy, check_slots, layer_pool, layers_context
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import counts_before
from kvgen.lowering.page_runs import MaxLayers
from kvgen.plan.params import Array, PagePool, Param
from kvgen.schema.base import as_written
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

WARPS: Final = 8


# Ids of a request that a warp copies: enough for the trips to overlap, few enough to share a long request out.
COLUMNS: Final = 512


def specified(op: Op) -> str:
    """An operation's docstring with the fields that its spec gives in place of those that a spec may give ("Choices")."""
    parts = inspect.cleandoc(type(op).__doc__ or "").split("\n\n")
    at = next((i for i, part in enumerate(parts) if part.startswith("Choices")), len(parts))
    fields = [f"{n}={as_written(getattr(op, n))}" for n in type(op).model_fields if n in op.model_fields_set - {"name"}]
    given = f"As specified: {', '.join(fields)}; other fields" if fields else "All fields"
    return "\n\n".join([*parts[:at], f"{given} are at their defaults.", *parts[at + 2 :]])


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


class CopiedRowsOp(Op):
    """What operations that copy whole tokens agree on: how a call names its rows, and of which layers they are.

    `BY_SLOTS` says of a class what becomes of rows with slots.
    """

    BY_SLOTS: ClassVar[str]
    rows: RowsBy = "ragged"
    """How rows name their tokens: "ragged", request by request, by `row_offsets[B + 1]` and `starts[B]`; "slots", one by one,
    by `slots[T]` = page * page_size + offset, without a page table.
    """
    layers: Layers = "one"
    """"one": a call copies one layer. "all": it takes the whole cache and copies every layer in one launch; the arrays have the
    layers in front, `[layers, T, ...]`; layers and rows may lie any distance apart, so K and V may be views of one buffer,
    `[2, layers, T, kv_heads, head_dim]` or `[layers, 2, T, ...]`.
    """
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call with `layers="all"` may bring. The kernel's arguments have room for so many."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`, `starts` and `slots`. None: the cache's `lengths_dtype`; i64 for slots."""
    raw: bool = False
    """True: codes and scales are copied as they are stored. False: gather dequantizes values, scatter quantizes them."""

    @property
    def description(self) -> str:
        """What the operation does, with these options."""
        more = [self.BY_SLOTS] if self.rows == "slots" else []
        if self.layers == "all":
            more.append(
                "Here a call takes the whole cache and copies every layer: arrays have the layers in front, `[layers, T, ...]`.\n"
                "Layers and rows may lie any distance apart, so K and V may be views of one buffer."
            )
        return "\n\n".join([inspect.cleandoc(type(self).__doc__ or ""), *more])

    def check(self, kernels: KernelSet) -> None:
        if self.rows == "slots":
            check_slots(self.name, kernels.kv)
            if self.index_dtype == "u32":
                raise ValueError(
                    "index_dtype: got 'u32' with rows='slots', where -1 skips a row; use 'i32' or 'i64', or None"
                )
        if self.layers == "all" and kernels.kv.ragged:
            raise ValueError(
                f"layers: got 'all' for {self.name} with a Ragged cache, whose layers are copied one by one; use 'one'"
            )
        self._pool(kernels.kv)

    def _index(self, cache: Cache) -> DType:
        return dtype(self.index_dtype or ("i64" if self.rows == "slots" else cache.lengths_dtype))

    def _pool(self, cache: Cache, *, writes: bool = False) -> tuple[PagePool, ...]:
        """Where every layer's memory begins, if a launch has all of them."""
        return (layer_pool(lower(cache), self.max_layers, writes=writes),) if self.layers == "all" else ()

    def _layers(self, cache: Cache, arrays: Sequence[Param]) -> LayersContext | None:
        """The same for the template."""
        return next((layers_context(lower(cache), pool, arrays) for pool in self._pool(cache)), None)

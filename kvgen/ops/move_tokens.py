"""move_tokens: copy tokens onto other slots of the pool, in every layer (drafts that were accepted)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvgen.expr.nodes import const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.copied_rows import LayersContext, layer_pool, layers_context
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows_rules import check_one_place
from kvgen.lowering.page_runs import MaxLayers, PairIndex
from kvgen.lowering.row_runs import RunContext, raw_runs
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 256
PAIRS: Final = 32  # whose slots are looked up at once


@dataclass(frozen=True)
class MoveTokensContext:
    """Everything ops/move_tokens.cu.j2 reads: `runs` of what a token stores, of all `layers`; a block has `pairs` at once."""

    entry: str
    params: tuple[str, ...]
    runs: tuple[RunContext, ...]
    layers: LayersContext
    threads: int
    pairs: int


class MoveTokens(Op):
    """Copy tokens onto other slots, in every layer: the token in slot `src[i]` to slot `dst[i]`.

    A slot is page * page_size + offset. All that a token stores moves, as it is stored: values or codes, and its scales. Use it
    for trees of drafts (EAGLE-3): accepted tokens, which lie anywhere behind a request's last one, become its next tokens.

    Pairs `row_offsets[b]` to `row_offsets[b + 1]` are those of request b, and requests share no slot that is written. A
    request's pairs may overlap in one direction: a slot that is written by pair i is read by no later pair. Lists in the order of
    the new positions are so, as an accepted token never moves back to the place of a later one: every token then arrives as it
    was before the call. A pair with -1 in either list, or of a slot with itself, is skipped. A slot outside the pool, or offsets
    that decrease or pass T, are reported, and the pair, or the request's pairs, skipped. Source: SGLang, move_kv_cache.
    """

    kind: ClassVar[str] = "move_tokens"
    at_rates: ClassVar[bool] = True
    slots_dtype: PairIndex = "i64"
    """Element type of `src[T]` and `dst[T]`, signed: -1 skips a pair."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""
    max_layers: MaxLayers = 128
    """Most layers of the cache that a call may bring. The kernel's arguments have room for so many layer pointers."""

    def check(self, kernels: KernelSet) -> None:
        check_one_place(kernels, self.kind)
        layer_pool(lower(kernels.kv), self.max_layers, writes=True)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        lowered = lower(kernels.kv)
        pool = layer_pool(lowered, self.max_layers, writes=True)
        index = dtype(self.index_dtype or kernels.kv.lengths_dtype)

        def slots(name: str, doc: str) -> Array:
            kind = dtype(self.slots_dtype).name
            return Array(name, kind, ("T",), untrusted=True, doc=doc, field=f"ops.{self.name}.slots_dtype")

        doc = "first pair of each request"
        params: tuple[Param, ...] = (
            slots("src", "slot of each token, or -1 to skip it"),
            slots("dst", "slot that it is copied to, or -1"),
            Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="index_dtype"),
            Size("num_rows", "u32", "T"),
            pool,
            ERRORS,
        )
        context = MoveTokensContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            runs=raw_runs(lowered, ""),
            layers=layers_context(lowered, pool, ()),
            threads=THREADS,
            pairs=PAIRS,
        )
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/move_tokens.cu.j2",
            context,
            params,
            (var("B"), const(1), var("all_layers")),
            THREADS,
            writes_pool=True,
            all_layers=True,
            reads_tables=False,
        )
        return (plan,)

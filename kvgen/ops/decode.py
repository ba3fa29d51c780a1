"""decode: attention of a few query rows per request over its cached tokens."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention import decode_mma, decode_simt
from kvgen.lowering.attention.choose import Choice, choose, fitting, kernel_plans
from kvgen.lowering.attention.decode_problem import DecodeProblem
from kvgen.lowering.attention.listed_pages import LIST_SIZES, check_listed, page_lists
from kvgen.lowering.attention.masks_scores import attention_context, check_arguments, check_rate
from kvgen.lowering.attention.problem import AttentionCall, Candidate
from kvgen.lowering.attention.split_kv import (
    OUT_SCALE,
    Q_SCALE,
    SIZES,
    WORKSPACE,
    Split,
    check_cross,
    most_seen,
    new_in_length,
    row_offsets,
)
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.model_facts import Attention, check_attention, softmax_scale
from kvgen.lowering.partners import check_window
from kvgen.ops.base import specified
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.mask import TREE_ROWS, Mask
from kvgen.schema.score import Score
from kvgen.schema.tables import IndexName

MOST_ROWS: Final = 128
OutName = Literal["f16", "bf16", "f32", "e4m3"]
CANDIDATES: Final[tuple[Candidate[DecodeProblem], ...]] = (decode_mma, decode_simt)


class Decode(Op):
    """Attend with the newest query rows of every request to all of its tokens, those of this step included.

    q is `[T, q_heads, head_dim]` and `out` `[T, q_heads, v_dim]`: the softmax of `scale` * (q . k) times V, computed in f32
    and rounded to `out_dtype`. A request has `rows` query rows at most. Without `row_offsets` request b has the rows [b *
    rows, (b + 1) * rows); with it those of [row_offsets[b], row_offsets[b + 1]). The last row of a request stands at its
    last token, the one before it at the token before.

    Choices, with the default first:

    - `rows`: 1. Give 2 to 8 for drafts of speculative decoding, up to 128 for a prefix that a batch shares. The tokens of a
      request are read once for all of its rows and the query heads of a kv head; beyond 96 to 128 of these columns (fewer
      where V has more than 128 dims), once for each such number.
    - `mask` says which tokens a row sees (causal), `score` what happens to scale * (q . k) before the softmax (nothing).
    - `scale`: the set's model's, or 1 / sqrt(head_dim).
    - `q_dtype` and `out_dtype`: the cache's dtype. "e4m3" is codes, to be multiplied with `q_scale` or `out_scale` (optional, f32
      `[1]`, positive): a result is divided by `out_scale`, and saturates.
    - `sinks`: none. With "out", every query head has one more key, of score `sinks[head]` (f32 `[q_heads]`) and without a
      value, in the softmax's denominator; with "lse" it counts in `lse` as well.
    - `split` divides the work. "none": a block has a request and a kv head; best where the batch alone fills the GPU.
      "balanced": for small batches and long contexts. `decode.plan` divides all tokens evenly among the blocks that the GPU
      holds at once, on the device, once a step for all layers; the launcher takes the workspace, and the last block of a
      request merges its parts in token order. "invariant": as "balanced", but requests are always cut into `chunk` tokens,
      so that a request's bits do not depend on the others in the batch. "none" has that property too.

    `lse` is an optional output f32 `[T, q_heads]`: the logarithm, to `lse_base`, of the softmax's denominator. Rows of no
    request and rows that see no token give 0, and `lse_empty` in lse. A request with an invalid page, length or row offset
    gives NaN.
    """

    kind: ClassVar[str] = "decode"
    by_arch: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    rows: int = 1
    """Most query rows of a request, 1 to 128."""
    scale: float | None = None
    """Factor of q . k. None: the set's `model` says; without one head_dim ** -0.5."""
    q_dtype: Literal["e4m3"] | None = None
    """Element type of q: "e4m3", whose codes stand for themselves times `q_scale`, an optional f32 of the call, as append's
    q_out="e4m3" makes them. None: the cache's `dtype`.
    """
    out_dtype: OutName | None = None
    """Element type of `out`: "f32", "f16", "bf16" or "e4m3": codes of the result divided by `out_scale`, an optional f32 of the
    call, saturated. None: the cache's `dtype`.
    """
    mask: Mask = Mask()
    """Which tokens a row sees. Default: causal."""
    pages: Literal["all", "per_head"] = "all"
    """Which pages of a request are read: "all", or "per_head", those that the call lists, for block-sparse attention.

    `page_lists[T, kv_heads, P]`, i32, any distances from row to row and from head to head: what the query heads of a kv head
    attend to, as far as the row's mask shows it. Entries are numbers in the request's page table, 0 that of its first tokens,
    in any order. -1 is skipped, and a page that stands twice counts twice. `page_counts[T, kv_heads]`, i32, optional: entries of
    each list that count (None: all P). A number that is no page of the request's tokens (position), a count below 0 or above P
    (length) and an invalid page id give NaN in the query heads of that kv head. One query row a request, split="none". Sources:
    `topk_idx` and the block table of vLLM's sparse attention of MiniMax-M3 (MSA), whose blocks are pages of 128 tokens.
    """
    cross: bool = False
    """True: q's rows are no tokens of the cache, whose `lengths` are all that a request has: cross attention, a prefix that
    requests share. Masks have no positions then: Mask(causal=False). False: a request's last rows are its last tokens.
    """
    score: Score | None = None
    """Function of scores before the softmax. None: scores stay as they are."""
    sinks: Literal["out", "lse"] | None = None
    """"out" and "lse": the call brings `sinks`, f32 `[q_heads]`, a logit of each head in the softmax's denominator;
    "lse" counts it in `lse` too. None: no sinks.
    """
    lse_base: Literal["e", "2"] = "e"
    """Base of the logarithm in `lse`: "e" or "2"."""
    lse_empty: Literal["-inf", "inf"] = "-inf"
    """Value of `lse` for a row that sees no token."""
    split: Split = "none"
    """How requests are divided among blocks: "none", a block a request and kv head; "balanced", equal shares, planned
    once a step; "invariant", pieces of `chunk` tokens, so that a request's bits do not depend on its batch.
    """
    chunk: int = Field(default=512, ge=64, le=2**20)
    """Tokens of a piece with split="invariant"."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets` and `valid_tokens`. None: the cache's `lengths_dtype`."""

    @field_validator("rows")
    @classmethod
    def _few_rows(cls, value: int) -> int:
        if not 1 <= value <= MOST_ROWS:
            raise ValueError(
                f"rows: got {value}; it must be at least 1 and at most {MOST_ROWS}: 1 to 8 query rows a request for decoding and "
                "drafts, more over a prefix that a batch shares; ops.Extend() takes any number"
            )
        return value

    @field_validator("scale")
    @classmethod
    def _usable_scale(cls, value: float | None) -> float | None:
        if value is not None and not 1e-30 <= value <= 1e30:
            raise ValueError(f"scale: got {value!r}; a softmax scale lies in [1e-30, 1e30]; None takes the model's")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Decode:
        if self.mask.tree == "packed" and self.rows > TREE_ROWS:
            raise ValueError(
                f"rows: got {self.rows} beside a packed tree, whose words have a bit for each of {TREE_ROWS} rows; use fewer "
                "rows, or tree='mask'"
            )
        if self.cross:
            check_cross(self.mask)
        if self._lists and (self.rows > 1 or self.split != "none"):
            name, value = ("rows", self.rows) if self.rows > 1 else ("split", self.split)
            raise ValueError(
                f"{name}: got {value!r} beside pages='per_head'; lists are those of one query row a request, and a block has the "
                "whole of one; use rows=1 and split='none'"
            )
        if self.chunk % 64:
            raise ValueError(f"chunk: got {self.chunk}; chunks are whole tiles: a multiple of 64 tokens")
        if "chunk" in self.model_fields_set and self.split != "invariant":
            raise ValueError(
                f"chunk: got {self.chunk} beside split={self.split!r}; chunks have a fixed size with split='invariant' only"
            )
        return self

    @property
    def description(self) -> str:
        """The launcher's docstring: the operation, with the fields that its spec gives."""
        return specified(self)

    def kernel_names(self) -> tuple[str, ...]:
        return (self.name,) if self.split == "none" else (self.name, f"{self.name}_plan")

    def check(self, kernels: KernelSet) -> None:
        if kernels.kv.stores == "k":
            raise ValueError(
                "ops: decode needs V, but the cache has stores='k'; use ops.MlaDecode() for latent rows, ops.Gather(), or a "
                "cache that stores both"
            )
        check_rate(self.name, kernels, self.mask, self.score, cross=self.cross)
        if self._lists:
            check_listed(kernels.kv)
        mask = None if self.cross else self.mask
        check_attention(Attention(self, self.scale, self.sinks, mask, self.score), kernels)
        check_window(self, "mask.window", self.mask.window, kernels)
        check_window(self, "mask.chunk", self.mask.chunk, kernels)
        if self.score is not None:
            check_arguments(self.name, self._params(kernels, dtype("u32"), dtype("f32")), kernels)

    @property
    def _elementwise(self) -> bool:
        """The kernel looks at scores one by one."""
        return self.score is not None or self.mask.tree is not None

    @property
    def _lists(self) -> bool:
        """Each kv head has pages of its own."""
        return self.pages == "per_head"

    def choices(self, kernels: KernelSet) -> dict[str, Choice]:
        """The kernel of each of the set's architectures, and why earlier candidates do not take it."""
        return choose(CANDIDATES, self.problem(kernels), kernels.arch)

    def candidates(self, kernels: KernelSet, arch: str) -> dict[str, KernelPlan]:
        """Every kernel that fits on an architecture, for it alone, by its name; the chosen one first."""
        problem = self.problem(kernels)
        found = fitting(CANDIDATES, problem, arch)
        return {choice.name: kernel_plans(problem, {arch: choice})[0] for choice in found}

    def softmax_scale(self, kernels: KernelSet) -> float:
        """Factor of q . k: `scale`, else the model's, else head_dim ** -0.5."""
        return softmax_scale(self.name, self.scale, kernels)

    def problem(self, kernels: KernelSet) -> DecodeProblem:
        """The call as kernels see it."""
        cache = kernels.kv
        index = dtype(self.index_dtype or cache.lengths_dtype)
        attend = attention_context(self.mask, self.score, kernels, index)
        out = dtype(self.out_dtype or cache.dtype)
        call = AttentionCall(
            entry=entry_name(kernels, self.name),
            params=(),
            attend=attend,
            elem=dtype(self.q_dtype or cache.dtype).c,
            out_elem=out.c,
            kv_heads=cache.kv_heads,
            group=kernels.group,
            rows=self.rows,
            v_size=cache.v_dim,
            planned=self.split != "none",
            sinks=self.sinks is not None,
            new_in_length=new_in_length(kernels, self.cross),
            lse_inf=self.lse_empty == "inf",
            lse_sinks=self.sinks == "lse",
            lse_base_two=self.lse_base == "2",
            q_scaled=self.q_dtype is not None,
            out_scaled=out.name == "e4m3",
            lists=self._lists,
        )
        return DecodeProblem(
            name=self.name,
            kernels=kernels,
            call=call,
            params=self._params(kernels, index, out),
            scale=self.softmax_scale(kernels),
            elementwise=self._elementwise,
            split=self.split,
            chunk=self.chunk if self.split == "invariant" else 0,
            max_seen=most_seen(kernels, self.rows, self.mask),
            index=index.name,
            cross=self.cross,
        )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        problem = self.problem(kernels)
        return kernel_plans(problem, choose(CANDIDATES, problem, kernels.arch))

    def _params(self, kernels: KernelSet, index: DType, out: DType) -> tuple[Param, ...]:
        """The parameters of a call, in the order of the kernel's signature."""
        cache = kernels.kv
        elem = dtype(self.q_dtype or cache.dtype)
        attend = attention_context(self.mask, self.score, kernels, index)
        v_dim = "v_head_dim" if cache.v_head_dim else "head_dim"
        planned = self.split != "none"
        # The planner has applied them.
        asked = tuple(p for p in attend.params if not (planned and p.name == "valid_tokens"))
        arrays = tuple(p for p in asked if isinstance(p, Array))
        numbers = tuple(p for p in asked if not isinstance(p, Array))
        sinks = Array("sinks", "f32", (kernels.q_heads,), doc="score of each query head's sink", fields=("q_heads",))
        return (
            Array(
                "q",
                elem.name,
                ("T", kernels.q_heads, cache.head_dim),
                strided=True,
                doc="query rows",
                field="q_dtype" if self.q_dtype else "dtype",
                fields=(None, "q_heads", "head_dim"),
            ),
            Array(
                "out",
                out.name,
                ("T", kernels.q_heads, cache.v_dim),
                access="out",
                strided=True,
                doc="attention output",
                field="out_dtype" if self.out_dtype else "dtype",
                fields=(None, "q_heads", v_dim),
            ),
            *arrays,
            *(page_lists(cache.kv_heads) if self._lists else ()),
            *((sinks,) if self.sinks else ()),
            *((Q_SCALE,) if self.q_dtype else ()),
            *((OUT_SCALE,) if out.name == "e4m3" else ()),
            *((WORKSPACE,) if planned else (row_offsets(index.name),)),
            Array(
                "lse",
                "f32",
                ("T", kernels.q_heads),
                access="out",
                optional=True,
                doc=f"logarithm to base {self.lse_base} of the softmax's denominator",
                fields=(None, "q_heads"),
            ),
            Size("q_stride", "i64", "q.stride"),
            Size("out_stride", "i64", "out.stride"),
            Size("num_rows", "u32", "T"),
            *(LIST_SIZES if self._lists else ()),
            *numbers,
            *(SIZES if planned else ()),
            ERRORS,
        )

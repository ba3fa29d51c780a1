"""mla_decode: attention of a step's query rows over latent rows, in the absorbed form."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.expr.score_c import float_literal
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention import (
    mla_mma,
    mla_mma_few_heads,
    mla_sm90,
    mla_sm90_few_heads,
    mla_sm90_rows,
)
from kvgen.lowering.attention.choose import Choice, choose, fitting, kernel_plans
from kvgen.lowering.attention.masks_scores import LOG2E, attention_context
from kvgen.lowering.attention.mla_lists import list_contexts, list_lengths, list_params, list_sizes
from kvgen.lowering.attention.mla_problem import MlaProblem
from kvgen.lowering.attention.problem import AttentionCall, Candidate
from kvgen.lowering.attention.split_kv import SIZES, WORKSPACE, Split, most_seen, new_in_length, row_offsets
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.model_facts import Attention, check_attention, softmax_scale
from kvgen.ops.base import specified
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.keys import Keys, class_of_keys
from kvgen.schema.mask import Mask
from kvgen.schema.tables import IndexName

CANDIDATES: Final[tuple[Candidate[MlaProblem], ...]] = (
    mla_sm90_few_heads,
    mla_sm90,
    mla_sm90_rows,
    mla_mma_few_heads,
    mla_mma,
)


class MlaDecode(Op):
    """Attend with absorbed queries to a cache of latent rows (MLA), this step's rows included.

    q is `[T, q_heads, latent_dim + rope_dim]`. V is the first `latent_dim` dims of each row, so `out` is `[T, q_heads,
    latent_dim]`, still latent: the model's up-projection of every head follows. Sums are f32, rounded once to `out_dtype`
    (None: the cache's dtype). `lse` is an optional output f32 `[T, q_heads]`, as in decode.

    Request b has q's rows from b * rows on, or with `row_offsets[B + 1]` its own, at most `rows` (1). Of n tokens, row i of
    r stands at token n - r + i and sees the tokens up to there.

    Choices:

    - `scale` multiplies scores. None: from the set's model. It follows from the model's heads before absorption, not from
      the width of a cached row: DeepSeek V3's is (128 + 64) ** -0.5, times YaRN's factor.
    - `sparse`: False. True: each row of q has a list of its own, `indices` i32 `[T, K]`, of physical rows (page id *
      page_size + offset), which may be other requests' rows. -1 is skipped, and `topk_lengths` i32 `[T]` say how many
      entries of a list count (optional with split="none"; None: all). Nothing is causal then. An index outside the pool, or
      a topk_length that is negative or above K, makes the row NaN.
    - `sources`: (). With `sparse=True` other caches, each with a list a row of q of its own, under the same softmax: Keys(name=
      "compressed", cache=...) brings `compressed_cache`, `compressed_indices` and `compressed_topk_lengths`. Their records may
      be other ones; values are those of gather, in the cache's dtype, before they are multiplied.
    - `sinks`: as in decode.
    - `split`: as in decode; with "balanced" and "invariant" a workspace is planned once a step. With `sparse=True` "balanced"
      divides the listed rows among blocks: `topk_lengths` of every list are then required, in `plan` and in the call, and lists
      of other lengths than were planned make their row NaN. "invariant" is refused there: with "none" a row is one block's.

    Rows of no request and rows that see nothing give 0, and `lse_empty` in lse; a request with invalid pages or lengths
    gives NaN.
    """

    kind: ClassVar[str] = "mla_decode"
    by_arch: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    rows: int = Field(default=1, ge=1, le=8)
    """Most query rows of a request."""
    scale: float | None = None
    """Factor of q . k, from the model's heads before absorption. None: the set's `model` says."""
    sparse: bool = False
    """True: every row of q attends to the rows of `indices[T, K]`, i32, instead of its request's."""
    sources: tuple[Keys, ...] = Field(default=(), strict=False)
    """Caches besides the set's own that lists name rows of, with sparse=True. (): none."""
    sinks: Literal["out", "lse"] | None = None
    """"out" and "lse": the call brings `sinks`, f32 `[q_heads]`, a logit of each head in the softmax's denominator;
    "lse" counts it in `lse` too. None: no sinks.
    """
    out_dtype: Literal["f32", "f16", "bf16"] | None = None
    """Element type of `out`. None: the cache's `dtype`."""
    lse_base: Literal["e", "2"] = "e"
    """Base of the logarithm in `lse`: "e" or "2"."""
    lse_empty: Literal["-inf", "inf"] = "-inf"
    """Value of `lse` for a row that sees no token."""
    split: Split = "none"
    """How requests, or the lists of rows, are divided among blocks: "none", "balanced" or "invariant", as in Decode."""
    chunk: int = Field(default=512, ge=64, le=2**20)
    """Tokens of a piece with split="invariant"."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    @field_validator("scale")
    @classmethod
    def _usable_scale(cls, value: float | None) -> float | None:
        if value is not None and not 1e-30 <= value <= 1e30:
            raise ValueError(f"scale: got {value!r}; a softmax scale lies in [1e-30, 1e30]; None takes the model's")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> MlaDecode:
        if self.sparse and self.rows != 1:
            raise ValueError(
                f"rows: got {self.rows} with sparse=True, where every row of q has a list of its own; leave rows out"
            )
        if self.sparse and self.split == "invariant":
            raise ValueError(
                "split: got 'invariant' with sparse=True; where a row is one block's, its bits follow from its lists alone; use "
                "split='none', or 'balanced'"
            )
        self._check_sources()
        if self.chunk % 64:
            raise ValueError(f"chunk: got {self.chunk}; chunks are whole tiles: a multiple of 64 tokens")
        if "chunk" in self.model_fields_set and self.split != "invariant":
            raise ValueError(
                f"chunk: got {self.chunk} beside split={self.split!r}; chunks have a fixed size with split='invariant' only"
            )
        return self

    def _check_sources(self) -> None:
        """Lists alone name rows of several caches, whose arguments have names of their own."""
        names = [keys.name for keys in self.sources]
        if names and not self.sparse:
            raise ValueError(
                f"sources: got {', '.join(names)} with sparse=False, where a request's table says which rows are read; give "
                "sparse=True, or leave sources out"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"sources: got {twice!r} twice; arguments are called after them; give each a name of its own"
            )

    def check(self, kernels: KernelSet) -> None:
        """The cache is one of latent rows that tensor cores can take."""
        cache = kernels.kv
        if not cache.latent_part:
            raise ValueError(
                f"ops: mla_decode reads latent rows, but the cache is {type(cache).__name__}; use ops.Decode(), or a Latent cache"
            )
        if self.scale is None and (kernels.model is None or kernels.model.mla is None):
            raise ValueError(
                "ops: mla_decode has no scale, and the set no model with mla to take it from; a latent row's width says "
                "nothing about it; give scale, for DeepSeek V3 (128 + 64) ** -0.5"
            )
        check_attention(Attention(self, self.scale, self.sinks, None if self.sparse else Mask()), kernels)
        if self.rows > 1 and cache.entry_tokens > 1:
            raise ValueError(
                f"rows: got {self.rows} with rate={cache.entry_tokens}; rows of a request see entries that end at each other's "
                "tokens, which the kernel does not tell apart; use one row a request, or lists with sparse=True"
            )
        if self.sparse and cache.storage.own_table:
            raise ValueError(
                "ops: mla_decode with sparse=True finds rows by one index, but scales have a page table of their own "
                "(own_table); use own_table=False"
            )
        if isinstance(self.problem(kernels).row, str):
            mla_mma.check_row(cache, "ops: mla_decode")
        for keys in self.sources:
            self._check_keys(keys, cache)
        self.plan(kernels)

    def _check_keys(self, keys: Keys, cache: Cache) -> None:
        """Rows of another cache are as long as the set's, of which V is the same part, and q's type is theirs."""
        at, other = f"sources: {keys.name}", keys.cache
        if not other.latent_part:
            raise ValueError(f"{at}: got a {type(other).__name__} cache; rows are latent; give a Latent cache")
        mla_mma.check_row(other, at)
        for name, mine, its in (
            ("dtype", cache.dtype, other.dtype),
            ("head_dim", cache.head_dim, other.head_dim),
            ("latent_dim", cache.latent_part, other.latent_part),
        ):
            if mine != its:
                raise ValueError(
                    f"{at}: got {name}={its!r} beside a cache with {name}={mine!r}; one q is multiplied with all rows, and one "
                    f"out sums them; give {name}={mine!r}"
                )

    def other_caches(self) -> dict[str, Cache]:
        return {self._class_of(keys): keys.cache for keys in self.sources}

    def about_other(self, class_name: str) -> str:
        return f"A cache whose rows the lists of {self.name} name: its pages, of any tables or none."

    def other_space(self, class_name: str) -> str:
        return next(self._space_of(keys) for keys in self.sources if self._class_of(keys) == class_name)

    def _class_of(self, keys: Keys) -> str:
        return class_of_keys(self.name, keys.name)

    @staticmethod
    def _space_of(keys: Keys) -> str:
        return f"{keys.name}_keys"

    def _caches(self, kernels: KernelSet) -> tuple[Cache, ...]:
        return (kernels.kv, *(keys.cache for keys in self.sources))

    def choices(self, kernels: KernelSet) -> dict[str, Choice]:
        """The kernel of each of the set's architectures, and why earlier candidates do not take it."""
        return choose(CANDIDATES, self.problem(kernels), kernels.arch)

    def candidates(self, kernels: KernelSet, arch: str) -> dict[str, KernelPlan]:
        """Every kernel that fits on an architecture, for it alone, by its name; the chosen one first."""
        problem = self.problem(kernels)
        found = fitting(CANDIDATES, problem, arch)
        return {choice.name: kernel_plans(problem, {arch: choice})[0] for choice in found}

    def softmax_scale(self, kernels: KernelSet) -> float:
        """Factor of q . k: `scale`, else the model's."""
        return softmax_scale(self.name, self.scale, kernels)

    @property
    def description(self) -> str:
        """The launcher's docstring: the operation, with the fields that its spec gives."""
        return specified(self)

    def kernel_names(self) -> tuple[str, ...]:
        return (self.name,) if self.split == "none" else (self.name, f"{self.name}_plan")

    def problem(self, kernels: KernelSet) -> MlaProblem:
        """The call as kernels see it."""
        cache = kernels.kv
        index = dtype(self.index_dtype or cache.lengths_dtype)
        names, spaces, _ = self._lists()
        call = AttentionCall(
            entry=entry_name(kernels, self.name),
            params=(),
            attend=attention_context(Mask(), None, kernels, index),
            elem=dtype(cache.dtype).c,
            out_elem=dtype(self.out_dtype or cache.dtype).c,
            kv_heads=1,
            group=kernels.q_heads,
            rows=self.rows,
            v_size=cache.latent_part,
            planned=self.split != "none",
            sinks=self.sinks is not None,
            new_in_length=new_in_length(kernels),
            lse_inf=self.lse_empty == "inf",
            lse_sinks=self.sinks == "lse",
            lse_base_two=self.lse_base == "2",
        )
        return MlaProblem(
            name=self.name,
            kernels=kernels,
            call=call,
            params=self._params(kernels, index),
            qk_scale=float_literal(self.softmax_scale(kernels) * LOG2E),
            caches=(cache, *(keys.cache for keys in self.sources)),
            lists=list_contexts(self.name, names, spaces) if self.sparse else (),
            lengths=list_lengths(names) if self.sparse else (),
            split=self.split,
            chunk=self.chunk if self.split == "invariant" else 0,
            max_seen=0 if self.sparse else most_seen(kernels, self.rows, Mask()),
            index=index.name,
        )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        problem = self.problem(kernels)
        return kernel_plans(problem, choose(CANDIDATES, problem, kernels.arch))

    def _lists(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The set's own list and the others: names ("": its own), namespaces and classes of their caches."""
        found = (("", "", ""), *((k.name, self._space_of(k), self._class_of(k)) for k in self.sources))
        names, spaces, classes = zip(*found, strict=True)
        return names, spaces, classes

    def _params(self, kernels: KernelSet, index: DType) -> tuple[Param, ...]:
        """The parameters of a call, in the order of the kernel's signature."""
        cache = kernels.kv
        elem, out = dtype(cache.dtype), dtype(self.out_dtype or cache.dtype)
        heads = kernels.q_heads
        planned = self.split != "none"
        sinks = Array("sinks", "f32", (heads,), doc="score of each query head's sink", fields=("q_heads",))
        listed: tuple[Param, ...] = (WORKSPACE,) if planned else (row_offsets(index.name),)
        sizes = SIZES if planned else ()
        if self.sparse:
            listed = (*((WORKSPACE,) if planned else ()), *list_params(*self._lists(), planned=planned))
            sizes = (*sizes, *list_sizes(self._lists()[0]))
        return (
            Array(
                "q",
                elem.name,
                ("T", heads, cache.head_dim),
                strided=True,
                doc="query rows in the absorbed form",
                field="dtype",
                fields=(None, "q_heads", "head_dim"),
            ),
            Array(
                "out",
                out.name,
                ("T", heads, cache.latent_part),
                access="out",
                strided=True,
                doc="attention output, still latent",
                field="out_dtype" if self.out_dtype else "dtype",
                fields=(None, "q_heads", "latent_dim"),
            ),
            *listed,
            *((sinks,) if self.sinks else ()),
            Array(
                "lse",
                "f32",
                ("T", heads),
                access="out",
                optional=True,
                doc=f"logarithm to base {self.lse_base} of the softmax's denominator",
                fields=(None, "q_heads"),
            ),
            Size("q_stride", "i64", "q.stride"),
            Size("out_stride", "i64", "out.stride"),
            Size("num_rows", "u32", "T"),
            *sizes,
            ERRORS,
        )

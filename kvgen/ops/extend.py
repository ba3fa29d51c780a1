"""extend: attention of any number of new rows per request over everything cached, those rows included."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention import extend_mma, extend_simt, extend_sm90, row_rule
from kvgen.lowering.attention.choose import Choice, choose, fitting, kernel_plans
from kvgen.lowering.attention.extend_problem import ExtendProblem
from kvgen.lowering.attention.masks_scores import attention_context, check_arguments
from kvgen.lowering.attention.problem import AttentionCall, Candidate
from kvgen.lowering.attention.split_kv import (
    OUT_SCALE,
    Q_SCALE,
    SIZES,
    WORKSPACE,
    check_cross,
    new_in_length,
)
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.model_facts import Attention, check_attention, softmax_scale
from kvgen.lowering.partners import check_window
from kvgen.ops.base import specified
from kvgen.ops.decode import Decode
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.mask import Mask
from kvgen.schema.score import Score
from kvgen.schema.tables import IndexName

OutName = Literal["f16", "bf16", "f32", "e4m3"]
CANDIDATES: Final[tuple[Candidate[ExtendProblem], ...]] = (extend_sm90, extend_mma, extend_simt)

# What an extend and a decode over the same tokens may have of their own.
_OWN: Final = frozenset(("name", "rows", "split", "chunk", "index_dtype"))


class Extend(Op):
    """Attend with the new query rows of every request to all of its tokens, those of this step included.

    For prompts, chunks of prompts, prompts over a cached prefix, verification windows, and batches that mix these with
    decoding rows. q is `[T, q_heads, head_dim]` and `out` `[T, q_heads, v_dim]`: the softmax of `scale` * (q . k) times V,
    computed in f32 and rounded to `out_dtype`. Keys and values have been appended before. `extend.plan` divides the work on
    the device, once a step for all layers, into the workspace that the launcher takes: with `row_offsets` request b has the
    rows [row_offsets[b], row_offsets[b + 1]), any number of them; without, every request has T // B, as a padded batch
    has. The last row of a request stands at its last token, the one before it at the token before.

    Choices, with the default first:

    - `mask` says which tokens a row sees (causal), `score` what happens to scale * (q . k) before the softmax (nothing).
    - `scale`: 1 / sqrt(head_dim).
    - `q_dtype` and `out_dtype`: the cache's dtype. "e4m3" is codes, to be multiplied with `q_scale` or `out_scale` (optional, f32
      `[1]`, positive): a result is divided by `out_scale`, and saturates.
    - `sinks`: none. With "out", every query head has one more key, of score `sinks[head]` (f32 `[q_heads]`) and without a
      value, in the softmax's denominator; with "lse" it counts in `lse` as well.
    - `split`: "balanced" cuts the keys of a request where its rows alone do not fill the GPU. "invariant": sums begin anew at
      every multiple of `chunk` tokens and are added up in order, whoever computes them, so that a row's bits depend on its
      request's tokens alone: not on the batch, nor on how many rows come with it.

    `lse` is an optional output f32 `[T, q_heads]`: the logarithm, to `lse_base`, of the softmax's denominator. Rows of no
    request and rows that see no token give 0, and `lse_empty` in lse. A row gives NaN if a page that it or a row near it reads
    is invalid, or its request's length or row offsets are.
    """

    kind: ClassVar[str] = "extend"
    by_arch: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
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
    """Which tokens a row sees. Default: causal. With tree="packed" a request has 32 rows at most."""
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
    split: Literal["balanced", "invariant"] = "balanced"
    """Where a request's keys are cut: "balanced", where the GPU would not be full; "invariant", at multiples of `chunk` tokens,
    so that a row's bits do not depend on its batch.
    """
    chunk: int = Field(default=2048, ge=64, le=2**20)
    """Tokens that are summed together with split="invariant"."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets` and `valid_tokens`. None: the cache's `lengths_dtype`."""

    @field_validator("scale")
    @classmethod
    def _usable_scale(cls, value: float | None) -> float | None:
        if value is not None and not 1e-30 <= value <= 1e30:
            raise ValueError(f"scale: got {value!r}; a softmax scale lies in [1e-30, 1e30]; None takes the model's")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Extend:
        if self.cross:
            check_cross(self.mask)
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
        return (self.name, f"{self.name}_plan")

    def check(self, kernels: KernelSet) -> None:
        if kernels.kv.stores == "k":
            raise ValueError(
                "ops: extend needs V, but the cache has stores='k'; use ops.MlaDecode() for latent rows, ops.Gather(), or a "
                "cache that stores both"
            )
        mask = None if self.cross else self.mask
        check_attention(Attention(self, self.scale, self.sinks, mask, self.score), kernels)
        check_window(self, "mask.window", self.mask.window, kernels)
        check_window(self, "mask.chunk", self.mask.chunk, kernels)
        if self.score is not None:
            check_arguments(self.name, self._params(kernels, dtype("u32"), dtype("f32")), kernels)

    def choices(self, kernels: KernelSet) -> dict[str, Choice]:
        """The kernel of each of the set's architectures, and why earlier candidates do not take it."""
        return choose(CANDIDATES, self.problem(kernels), kernels.arch)

    def candidates(self, kernels: KernelSet, arch: str) -> dict[str, KernelPlan]:
        """Every kernel that fits on an architecture, for it alone, by its name; the chosen one first."""
        problem = self.problem(kernels)
        found = fitting(CANDIDATES, problem, arch)
        return {choice.name: kernel_plans(problem, {arch: choice})[0] for choice in found}

    def decode_of(self, kernels: KernelSet) -> Decode | None:
        """The set's decode that sees, weighs and stores as this operation does; None where it has none."""
        alike = Decode.model_fields.keys() & type(self).model_fields.keys() - _OWN
        ours = (
            op for op in kernels.ops if type(op) is Decode and all(getattr(op, n) == getattr(self, n) for n in alike)
        )
        return next(ours, None)

    def decode_rows(self, kernels: KernelSet, most: int | None = None) -> int:
        """Rows of a request up to which the set's decode costs no more (`row_rule`), as many as it has rows, or of decodes for
        `most` rows; 0 without a decode, and where bits of rows may not depend on how many come. On CUDA cores it is all of
        them.
        """
        decode = self.decode_of(kernels)
        if decode is None or self._chunk:
            return 0
        arch = row_rule.arch_of(kernels)
        fit = choose(CANDIDATES, self.problem(kernels), (arch,))[arch].fit
        if fit.division.lanes:
            return most or decode.rows
        return row_rule.decode_rows(kernels, most or decode.rows, arch, fit, elementwise=self.elementwise)

    @property
    def elementwise(self) -> bool:
        """A decode of the same attention looks at scores one by one."""
        return self.score is not None or self.mask.tree is not None

    @property
    def _chunk(self) -> int:
        return self.chunk if self.split == "invariant" else 0

    def softmax_scale(self, kernels: KernelSet) -> float:
        """Factor of q . k: `scale`, else the model's, else head_dim ** -0.5."""
        return softmax_scale(self.name, self.scale, kernels)

    def problem(self, kernels: KernelSet) -> ExtendProblem:
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
            rows=0,
            v_size=cache.v_dim,
            planned=True,
            sinks=self.sinks is not None,
            new_in_length=new_in_length(kernels, self.cross),
            lse_inf=self.lse_empty == "inf",
            lse_sinks=self.sinks == "lse",
            lse_base_two=self.lse_base == "2",
            q_scaled=self.q_dtype is not None,
            out_scaled=out.name == "e4m3",
        )
        mask = self.mask
        return ExtendProblem(
            name=self.name,
            kernels=kernels,
            call=call,
            params=self._params(kernels, index, out),
            scale=self.softmax_scale(kernels),
            chunk=self._chunk,
            index=index.name,
            cross=self.cross,
            scored=self.score is not None,
            masked=bool(mask.window or mask.ahead or mask.chunk or mask.block or mask.tree),
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
        # The planner has applied valid_tokens.
        arrays = tuple(p for p in attend.params if isinstance(p, Array) and p.name != "valid_tokens")
        numbers = tuple(p for p in attend.params if not isinstance(p, Array))
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
            *((sinks,) if self.sinks else ()),
            *((Q_SCALE,) if self.q_dtype else ()),
            *((OUT_SCALE,) if out.name == "e4m3" else ()),
            WORKSPACE,
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
            *numbers,
            *SIZES,
            ERRORS,
        )

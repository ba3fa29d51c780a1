"""indexer_query: q of an indexer as indexer_scores takes it: RoPE, Hadamard transform, codes, scales folded into weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows_rules import check_angles, resolve_rope
from kvgen.lowering.partners import check_partners
from kvgen.lowering.rope_norm import HeadContext, RopeContext, decimal, lanes_of, rope_context, width_of
from kvgen.ops.append import Append
from kvgen.ops.pool_tokens import PoolTokens
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.model import Rope
from kvgen.schema.tables import IndexName

THREADS: Final = 256
ROWS: Final = 2  # of a block


@dataclass(frozen=True)
class IndexerQueryContext:
    """Everything ops/indexer_query.cu.j2 reads.

    A block has `rows` rows and `heads` heads of each, of the struct `head`. Scales are powers of two if
    `power`; `packed`: codes are e2m1, with four scales a head. `amax_min` and `factor`, of all weights, are decimal texts.
    """

    entry: str
    params: tuple[str, ...]
    head: HeadContext
    threads: int
    rows: int
    heads: int
    power: bool
    packed: bool
    amax_min: str
    factor: str
    hadamard: bool
    rope: tuple[RopeContext, ...]


class IndexerQuery(Op):
    """An indexer's query rows, made ready for `IndexerScores` over codes: one launch from the projections' results to codes.

    q is `[T, q_heads, head_dim]` in the cache's dtype, `weights` f32 or that dtype `[T, q_heads]`. In f32, rounded once: RoPE
    at `positions[T]`, then with `hadamard` the Hadamard transform of each head, then codes and a scale a head:

    - scale = 2^ceil(log2(max(amax, amax_min) / 448)) with `recipe="pow2"`, else max(amax, amax_min) / 448; `q_out` e4m3
      `[T, q_heads, head_dim]` is x / scale, saturating;
    - `weights_out` f32 `[T, q_heads]` is weights * scale * `factor`.

    Over keys of e2m1 (MXFP4) a scale, a power of two, is of 32 dims: 2^ceil(log2(max(amax, amax_min) / 6)). `q_out` is u8
    `[T, q_heads, head_dim / 2]`, the even dim in the low nibble, `q_scales` i32 `[T, q_heads]` exponents + 127 of four blocks,
    the first the lowest byte, and weights_out weights * `factor`.

    Keys are append's: with the same RoPE and `hadamard`. A position without an angle (negative, at or past 2^24 or the rows of
    `cos_sin`) is reported, and its row is NaN: codes 0x7f, weights NaN. Nothing is padding. The cache is not looked at.

    Source: DeepSeek V3.2 and V4, inference/model.py, Indexer; vLLM, fused_indexer_q_rope_quant (without `hadamard`).
    """

    kind: ClassVar[str] = "indexer_query"
    at_rates: ClassVar[bool] = True
    rope: Rope | Literal["model", "local"] | None = None
    """RoPE of q: a Rope, "model" or "local" for the set's model's. None: none."""
    angles: Literal["computed", "pairs", "halves"] = "computed"
    """"computed": cosines and sines from positions. "pairs" and "halves": the call brings `cos_sin[P, dims]`, as for Append."""
    angles_dtype: Literal["f32", "same"] = "f32"
    """Element type of `cos_sin`: "f32", or "same" as the cache's `dtype`."""
    hadamard: bool = False
    """True: each head is transformed behind RoPE, as the keys are (ops.Append(hadamard="qk"))."""
    recipe: Literal["pow2", "amax"] = "pow2"
    """"pow2": scales are powers of two, rounded up. "amax": the largest magnitude becomes 448."""
    amax_min: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """The least that counts as a head's (or block's) largest magnitude. None: 1e-4; 6 * 2^-126 over keys of e2m1."""
    factor: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of all weights. None: head_dim ** -0.5 * q_heads ** -0.5."""
    weights_dtype: Literal["f32", "same"] = "f32"
    """Element type of `weights`: "f32", or "same" as the cache's `dtype`."""
    index_dtype: IndexName | None = None
    """Element type of `positions`. None: i64."""

    @property
    def description(self) -> str:
        """The launcher's docstring: the operation, with the choices that its spec makes."""
        done = [*(["RoPE"] if self.rope is not None else []), *(["the Hadamard transform"] if self.hadamard else [])]
        first = f"{' and '.join(done)}, then " if done else ""
        return (
            f"Make an indexer's q ready for its scores: {first}e4m3 codes, a scale a head times the head's weight.\n\n"
            "A row whose position has no angle is NaN."
        )

    def check(self, kernels: KernelSet) -> None:
        cache, quant = kernels.kv, kernels.kv.quants["k"]
        if cache.kv_heads != 1 or quant is None or quant.codes.name not in ("e4m3", "e2m1"):
            found = f"{cache.kv_heads} heads" if cache.kv_heads != 1 else quant.codes.name if quant else cache.dtype
            raise ValueError(
                f"ops: got indexer_query with keys of {found}; it makes codes for one head of e4m3 or e2m1 keys; "
                "use presets.vllm_indexer(), and append's q_out for keys that are not quantized"
            )
        dim = cache.head_dim
        if quant.codes.packed and dim != 128:
            raise ValueError(
                f"head_dim: got {dim} for indexer_query over keys of e2m1; the four scales of 128 dims are a word; use "
                "head_dim=128"
            )
        if quant.codes.packed and self.recipe != "pow2":
            raise ValueError(
                f"recipe: got {self.recipe!r} over keys of e2m1, whose scales are powers of two, four a word; use 'pow2'"
            )
        if dim & (dim - 1) or not 16 <= dim <= 512:
            raise ValueError(
                f"head_dim: got {dim} for indexer_query; lanes share a head by bits of its dims; give a power of two from 16 "
                "to 512"
            )
        rope = resolve_rope(self.rope, kernels)
        keys = [op for op in kernels.ops if isinstance(op, Append | PoolTokens)]
        rule = "scores are products of q with keys that were changed alike"
        transformed = [(op, "hadamard", op.hadamard is not None) for op in keys]
        check_partners(self, "hadamard", self.hadamard, transformed, rule)
        check_partners(self, "rope", rope, [(op, "rope", resolve_rope(op.rope, kernels)) for op in keys], rule)
        if rope is not None:
            check_angles(rope, self.angles, self.angles_dtype, local=self.rope == "local")
            rotary_dim = rope.dim or dim
            if rope.proportional or rotary_dim > dim or rotary_dim & (rotary_dim - 1):
                raise ValueError(
                    f"rope.dim: got {rotary_dim}{', proportional' if rope.proportional else ''} for heads of {dim} of "
                    f"indexer_query; lanes share a head by bits of its dims; give a power of two up to {dim}, not proportional"
                )
            return
        for field, default in (("angles", "computed"), ("angles_dtype", "f32"), ("index_dtype", None)):
            if getattr(self, field) != default:
                raise ValueError(
                    f"{field}: got {getattr(self, field)!r} without rope, to which it belongs; give one, or leave it out"
                )

    def weight_factor(self, kernels: KernelSet) -> float:
        """Factor of all weights."""
        return self.factor if self.factor is not None else (kernels.kv.head_dim * kernels.q_heads) ** -0.5

    def least(self, kernels: KernelSet) -> float:
        """The least that counts as a largest magnitude."""
        if self.amax_min is not None:
            return self.amax_min
        return 6 * 2.0**-126 if _packed(kernels) else 1e-4

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        rope = resolve_rope(self.rope, kernels)
        head = self._head(kernels, rope)
        heads = next(n for n in range(THREADS // (ROWS * head.lanes) or 1, 0, -1) if kernels.q_heads % n == 0)
        angles: tuple[RopeContext, ...] = ()
        if rope is not None:
            angles = (
                rope_context(
                    rope,
                    head.rotary_dim,
                    head_dim=head.dim,
                    local=self.rope == "local",
                    table=self.angles != "computed",
                    form=self.angles,
                    given=True,
                    sections=(),
                    rate=1,
                    order="runs",
                    head=head,
                ),
            )
        params = self._params(kernels, head)
        context = IndexerQueryContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            head=head,
            threads=ROWS * heads * head.lanes,
            rows=ROWS,
            heads=heads,
            power=self.recipe == "pow2",
            packed=_packed(kernels),
            amax_min=decimal(self.least(kernels)),
            factor=decimal(self.weight_factor(kernels)),
            hadamard=self.hadamard,
            rope=angles,
        )
        grid = (ceil_div(var("T"), ROWS), const(kernels.q_heads // heads), const(1))
        template = "ops/indexer_query.cu.j2"
        return (
            KernelPlan(self.name, context.entry, template, context, params, grid, context.threads, reads_tables=False),
        )

    def _head(self, kernels: KernelSet, rope: Rope | None) -> HeadContext:
        dim = kernels.kv.head_dim
        rotary_dim = 0 if rope is None else rope.dim or dim
        width = width_of(kernels.kv.dtype, dim // 2, *((rotary_dim // 2,) if rotary_dim else ()))
        return HeadContext(
            name="QueryHead",
            roles="q",
            dim=dim,
            rotary_dim=rotary_dim,
            rotary_begin=dim - rotary_dim if rope is not None and rope.part == "last" else 0,
            neox=rope is not None and rope.style == "neox",
            width=width,
            lanes=lanes_of(dim, width),
            hadamard=decimal(dim**-0.5) if self.hadamard else "",
            bits=True,
        )

    def _params(self, kernels: KernelSet, head: HeadContext) -> tuple[Param, ...]:
        kind, heads = dtype(kernels.kv.dtype), kernels.q_heads
        rows, fields = ("T", heads, head.dim), (None, "q_heads", "head_dim")
        own, packed = kind.name if self.weights_dtype == "same" else "f32", _packed(kernels)
        codes = ("u8", ("T", heads, head.dim // 2), head.width // 2) if packed else ("e4m3", rows, head.width)
        found: list[Array] = [
            Array(
                "q",
                kind.name,
                rows,
                align=head.width * kind.bytes,
                strided=True,
                doc="query rows of the indexer",
                field="dtype",
                fields=fields,
            ),
            Array(
                "weights",
                own,
                ("T", heads),
                strided=True,
                doc="of each head",
                field="weights_dtype",
                fields=(None, "q_heads"),
            ),
            Array("q_out", codes[0], codes[1], access="out", align=codes[2], strided=True, doc="codes", fields=fields),
            Array(
                "weights_out",
                "f32",
                ("T", heads),
                access="out",
                strided=True,
                doc="weights times scales",
                fields=(None, "q_heads"),
                in_place=("weights",) if own == "f32" else (),
            ),
        ]
        if packed:
            found.append(
                Array(
                    "q_scales",
                    "i32",
                    ("T", heads),
                    access="out",
                    strided=True,
                    doc="scales of q_out, four exponents + 127 a word",
                    fields=(None, "q_heads"),
                )
            )
        sizes = [Size(f"{a.name}_stride", "i64", f"{a.name}.stride") for a in found]
        if head.rotary_dim:
            index = dtype(self.index_dtype or "i64")
            doc = "position of each row"
            found.append(Array("positions", index.name, ("T",), untrusted=True, doc=doc, field="index_dtype"))
        if self.angles != "computed":
            table = dtype(kind.name if self.angles_dtype == "same" else "f32")
            doc, shape = "cosines and sines of each position", ("P", head.rotary_dim)
            found.append(
                Array(
                    "cos_sin", table.name, shape, strided=True, doc=doc, field="angles_dtype", fields=(None, "rope.dim")
                )
            )
            sizes += [Size("cos_sin_stride", "i64", "cos_sin.stride"), Size("cos_sin_rows", "u32", "P")]
        return (*found, *sizes, Size("num_rows", "u32", "T"), ERRORS)


def _packed(kernels: KernelSet) -> bool:
    """Keys are e2m1."""
    quant = kernels.kv.quants["k"]
    return quant is not None and quant.codes.packed

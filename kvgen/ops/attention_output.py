"""attention_output: what a model does to attention's output before its projection: transforms undone, groups quantized."""

from __future__ import annotations

import math
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
from kvgen.ops.merge_states import values_dim
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.model import Rope
from kvgen.schema.tables import IndexName

THREADS: Final = 256
ROWS: Final = 8  # of a block: their scales are a sector
_WORD: Final = 4  # e8m0 scales


@dataclass(frozen=True)
class AttentionOutputContext:
    """Everything ops/attention_output.cu.j2 reads.

    A block has `rows` tokens and `heads` heads of the struct `head`, `group_heads` are a group of it.
    `blocks` scales a head, of `block` dims each, 0: not quantized; `words` of them are stored together, as e8m0, or 1, as f32.
    `power`: they are powers of two. `amax_min` is a decimal text.
    """

    entry: str
    params: tuple[str, ...]
    head: HeadContext
    threads: int
    rows: int
    heads: int
    group_heads: int
    block: int
    blocks: int
    words: int
    power: bool
    amax_min: str
    hadamard: bool
    rope: tuple[RopeContext, ...]


class AttentionOutput(Op):
    """Attention's output, before its projection: the Hadamard transform and the RoPE of V undone, groups of dims quantized.

    o is `[T, q_heads, dim]` in the cache's dtype, as decode, extend and mla_decode leave it. Each where it is asked for, in f32,
    rounded once: `hadamard`, the transform of each head, its own inverse; `rope`, undone by the row's position (where K
    and V are one latent row, V has RoPE's part; DeepSeek V4); `block`, codes and scales.

    - Without `block` out is `[T, q_heads, dim]` in the cache's dtype, and may be o's memory.
    - With `block` out is e4m3 `[groups, T, q_heads / groups * dim]`, the operand of a grouped product, and a scale covers
      `block` dims. `out_scales` is f32 `[groups, N, T]` with `scale_dtype="f32"`, N = q_heads / groups * dim / block; with "e8m0"
      i32 `[groups, N / 4, T]`, four bytes e + 127 a word, the first the lowest. The first two axes of both may be
      strided: DeepGEMM's scales have T padded to a multiple of 4.
    - scale = 2^ceil(log2(max(amax, amax_min) / 448)) with `recipe="pow2"`, else max(amax, amax_min) / 448; code =
      e4m3(x / scale), saturating. A NaN in a block makes its scale NaN.

    `positions[T]` come with `rope`. A position without an angle (negative, at or past 2^24 or the rows of `cos_sin`) is reported,
    and its row is NaN: codes 0x7f, scales NaN. Nothing is padding. The cache is not looked at. Source: vLLM,
    fused_inv_rope_fp8_quant.
    """

    kind: ClassVar[str] = "attention_output"
    ragged: ClassVar[bool] = True
    dim: Annotated[int, Field(ge=16, le=512)] | None = None
    """Elements of a head, a power of two. None: those of attention's output (v_head_dim, or latent_dim)."""
    hadamard: bool = False
    """True: the Hadamard transform of each head is undone (ops.Append(hadamard="qkv"))."""
    rope: Rope | Literal["model", "local"] | None = None
    """RoPE that is undone: a Rope, "model" or "local" for the set's model's. None: none."""
    angles: Literal["computed", "pairs", "halves"] = "computed"
    """"computed": cosines and sines from positions. "pairs" and "halves": the call brings `cos_sin[P, dims]`, as for Append."""
    angles_dtype: Literal["f32", "same"] = "f32"
    """Element type of `cos_sin`: "f32", or "same" as the cache's `dtype`."""
    block: Literal[16, 32, 64, 128, 256, 512] | None = None
    """Dims a scale: 128 (DeepSeek V3, V4), 32 (MX). None: out is not quantized."""
    scale_dtype: Literal["f32", "e8m0"] = "f32"
    """"f32"; "e8m0", four a 32-bit word (Blackwell's products)."""
    recipe: Literal["pow2", "amax"] = "pow2"
    """"pow2": scales are powers of two, rounded up. "amax": the largest magnitude becomes 448."""
    amax_min: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-10
    """The least that counts as a block's largest magnitude."""
    groups: Annotated[int, Field(ge=1)] = 1
    """Groups of neighbouring heads, each the operand of a product of its own (o_groups of DeepSeek V4)."""
    index_dtype: IndexName | None = None
    """Element type of `positions`. None: i64."""

    @property
    def description(self) -> str:
        """The steps of this one, of all that it could have."""
        undone = [*(["Hadamard transform"] if self.hadamard else []), *(["RoPE"] if self.rope is not None else [])]
        done = f"Undo the {' and the '.join(undone)} of attention's output" if undone else "Take attention's output"
        if self.block is None:
            return f"{done}.\n\nA row whose position has no angle is NaN."
        return (
            f"{done}, and quantize blocks of {self.block} dims to e4m3.\n\nout_scales is `[groups, N, T]`: rows lie side by "
            "side. A row whose position has no angle is NaN."
        )

    def _dim(self, kernels: KernelSet) -> tuple[int, str]:
        return (self.dim, f"ops.{self.name}.dim") if self.dim is not None else values_dim(kernels.kv)

    def check(self, kernels: KernelSet) -> None:
        dim, _ = self._dim(kernels)
        if not (self.hadamard or self.rope is not None or self.block is not None):
            raise ValueError(
                "ops: got AttentionOutput with nothing to do; give hadamard=True, rope or block, or leave the operation out"
            )
        if dim & (dim - 1) or not 16 <= dim <= 512:
            raise ValueError(
                f"dim: got heads of {dim}; lanes share a head by bits of its dims; give a power of two from 16 to 512"
            )
        self._check_blocks(kernels, dim)
        rope = resolve_rope(self.rope, kernels)
        stores = [op for op in kernels.ops if isinstance(op, Append)]
        transformed = [(op, "hadamard", op.hadamard == "qkv") for op in stores]
        check_partners(self, "hadamard", self.hadamard, transformed, "the transform of V that append made is undone")
        if rope is not None:
            ropes = [(op, "rope", resolve_rope(op.rope, kernels)) for op in stores]
            check_partners(self, "rope", rope, ropes, "the RoPE of V that append made is undone")
        if rope is not None:
            check_angles(rope, self.angles, self.angles_dtype, local=self.rope == "local")
            self._check_rope(rope, kernels, dim)
        self._check_words(kernels, dim, rope)
        if rope is not None:
            return
        for field, default in (("angles", "computed"), ("angles_dtype", "f32"), ("index_dtype", None)):
            if getattr(self, field) != default:
                raise ValueError(
                    f"{field}: got {getattr(self, field)!r} without rope, to which it belongs; give one, or leave it out"
                )

    def _check_blocks(self, kernels: KernelSet, dim: int) -> None:
        if self.block is None:
            for field, default in (("scale_dtype", "f32"), ("recipe", "pow2"), ("amax_min", 1e-10), ("groups", 1)):
                if getattr(self, field) != default:
                    raise ValueError(
                        f"{field}: got {getattr(self, field)!r} without block, to which it belongs; give one, or leave it out"
                    )
            return
        if self.block > dim:
            raise ValueError(f"block: got {self.block} with heads of {dim}; a block is of one head; give at most {dim}")
        if kernels.q_heads % self.groups:
            raise ValueError(
                f"groups: got {self.groups} of {kernels.q_heads} query heads; groups have as many heads each; give a divisor"
            )
        if self.scale_dtype == "e8m0" and self.recipe != "pow2":
            raise ValueError("recipe: got 'amax' with scale_dtype='e8m0', whose scales are powers of two; use 'pow2'")

    def _check_rope(self, rope: Rope, kernels: KernelSet, dim: int) -> None:
        rotary_dim = self._rotary_dim(rope, kernels, dim)
        if rope.proportional:
            raise ValueError(
                "rope.proportional: got True; the pairs of a part rotate back here; use a Rope with dim, or leave it out"
            )
        if rotary_dim > dim or rotary_dim & (rotary_dim - 1):
            raise ValueError(
                f"rope.dim: got {rotary_dim} for heads of {dim}; lanes share a head by bits of its dims; give a power "
                f"of two up to {dim}"
            )

    def _rotary_dim(self, rope: Rope, kernels: KernelSet, dim: int) -> int:
        return rope.dim or kernels.kv.rope_part or dim

    def _check_words(self, kernels: KernelSet, dim: int, rope: Rope | None) -> None:
        if self.scale_dtype != "e8m0" or self.block is None:
            return
        heads = self._heads(kernels, self._head(kernels, dim, rope))
        blocks = heads * (dim // self.block)
        if blocks % _WORD:
            raise ValueError(
                f"scale_dtype: got 'e8m0' with {blocks} blocks of {self.block} dims in the {heads} heads that a block of threads "
                "has; four scales make a word; give a smaller block, or use 'f32'"
            )

    def _heads(self, kernels: KernelSet, head: HeadContext) -> int:
        """Heads of a block of threads, all of one group."""
        return math.gcd(max(1, THREADS // (ROWS * head.lanes)), kernels.q_heads // self.groups)

    def _head(self, kernels: KernelSet, dim: int, rope: Rope | None) -> HeadContext:
        rotary_dim = 0 if rope is None else self._rotary_dim(rope, kernels, dim)
        sizes = (dim // 2, *((rotary_dim // 2,) if rotary_dim else ()), *((self.block,) if self.block else ()))
        width = width_of(kernels.kv.dtype, *sizes)
        last = rope is not None and (rope.part == "last" or bool(kernels.kv.rope_part))
        return HeadContext(
            name="OutHead",
            roles="the output",
            dim=dim,
            rotary_dim=rotary_dim,
            rotary_begin=dim - rotary_dim if last and rotary_dim else 0,
            neox=rope is not None and rope.style == "neox",
            width=width,
            lanes=lanes_of(dim, width),
            hadamard=decimal(dim**-0.5) if self.hadamard else "",
            bits=True,
        )

    def _params(self, kernels: KernelSet, head: HeadContext) -> tuple[Param, ...]:
        kind, rows = dtype(kernels.kv.dtype), ("T", kernels.q_heads, head.dim)
        _, named = self._dim(kernels)
        fields = (None, "q_heads", named)
        align = head.width * kind.bytes
        found: list[Param] = [
            Array(
                "o", kind.name, rows, align=align, strided=True, doc="attention's output", field="dtype", fields=fields
            )
        ]
        sizes = [Size("o_stride", "i64", "o.stride")]
        if self.block is None:
            doc = "the same, transforms undone"
            found.append(
                Array(
                    "out",
                    kind.name,
                    rows,
                    access="out",
                    align=align,
                    strided=True,
                    doc=doc,
                    field="dtype",
                    fields=fields,
                    in_place=("o",),
                )
            )
            sizes.append(Size("out_stride", "i64", "out.stride"))
        else:
            found += self._quantized(kernels, head)
            for name in ("out", "out_scales"):
                sizes += [Size(f"{name}_stride", "i64", f"{name}.stride")]
                sizes += [Size(f"{name}_row_stride", "i64", f"{name}.row_stride")]
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

    def _quantized(self, kernels: KernelSet, head: HeadContext) -> list[Array]:
        """Codes and scales of the output."""
        assert self.block is not None
        dims = kernels.q_heads // self.groups * head.dim
        own = f"ops.{self.name}"
        codes = Array(
            "out",
            "e4m3",
            (self.groups, "T", dims),
            access="out",
            align=head.width,
            strided=2,
            doc="codes",
            fields=(f"{own}.groups", None, "q_heads"),
        )
        packed = self.scale_dtype == "e8m0"
        scales = Array(
            "out_scales",
            "i32" if packed else "f32",
            (self.groups, dims // self.block // (_WORD if packed else 1), "T"),
            access="out",
            strided=2,
            doc="scales, four a word" if packed else "out_scales",
            field=f"{own}.scale_dtype",
            fields=(f"{own}.groups", f"{own}.block", None),
        )
        return [codes, scales]

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        dim, _ = self._dim(kernels)
        rope = resolve_rope(self.rope, kernels)
        head = self._head(kernels, dim, rope)
        heads = self._heads(kernels, head)
        angles: tuple[RopeContext, ...] = ()
        if rope is not None:
            angles = (
                rope_context(
                    rope,
                    head.rotary_dim,
                    head_dim=dim,
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
        context = AttentionOutputContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            head=head,
            threads=ROWS * heads * head.lanes,
            rows=ROWS,
            heads=heads,
            group_heads=kernels.q_heads // self.groups,
            block=self.block or 0,
            blocks=dim // self.block if self.block else 0,
            words=_WORD if self.scale_dtype == "e8m0" else 1,
            power=self.recipe == "pow2",
            amax_min=decimal(self.amax_min),
            hadamard=self.hadamard,
            rope=angles,
        )
        grid = (ceil_div(var("T"), ROWS), const(kernels.q_heads // heads), const(1))
        template = "ops/attention_output.cu.j2"
        return (
            KernelPlan(self.name, context.entry, template, context, params, grid, context.threads, reads_tables=False),
        )

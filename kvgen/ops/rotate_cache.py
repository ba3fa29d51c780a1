"""rotate_cache: RoPE of the step's rows of K where they are stored, and of q."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.new_rows_rules import check_new_rows, refuse_residual, resolve_rope
from kvgen.lowering.row_kernel import row_kernel
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.model import Rope
from kvgen.schema.tables import IndexName


class RotateCache(Op):
    """Apply RoPE to the step's rows of K in the cache, in place, and to q.

    q `[T, q_heads, q_dim]` becomes `q_out`. The options mean what they mean in append: `rows` ("ragged" or "padded"),
    positions, angles and their tables, sections. With `q_out="none"` there is no q, and `num_rows` says how many rows there
    are, padding included. Rows are read dequantized, rotated in f32 and stored as append stores them. In latent rows the RoPE
    part rotates. Source: Modular MAX, fused_qk_rope.ragged.paged and fused_qk_rope.padded.paged.
    """

    kind: ClassVar[str] = "rotate_cache"
    rope: Rope | Literal["model", "local"] = "model"
    """Rotation: a Rope, "model" or "local" for the set's model's."""
    rows: Literal["ragged", "padded"] = "ragged"
    """How rows find their request: "ragged", by `row_offsets[B + 1]`; "padded", `[B, S, ...]` with `valid_lengths[B]`.
    """
    angles: Literal["computed", "pairs", "halves"] = "computed"
    """"computed": cosines and sines from positions. "pairs" and "halves": the call brings `cos_sin[P, dims]`, pair by
    pair (Modular MAX) or all cosines first (vLLM).
    """
    angles_dtype: Literal["f32", "same"] = "f32"
    """Element type of `cos_sin`: "f32", or "same" as the cache's `dtype`."""
    positions: Literal["lengths", "given"] = "lengths"
    """"lengths": a row's position is its place in its request. "given": the call brings `positions[T]`."""
    sections: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False, max_length=4)] = ()
    """Pairs of each section of M-RoPE; `positions` is then `[len(sections), T]`. (): one position a row."""
    sections_order: Literal["runs", "interleaved"] = "runs"
    """Which row of `positions` rotates a pair: as in append, in "runs" or "interleaved" (Qwen3-VL)."""
    q_out: Literal["same", "e4m3", "none"] = "same"
    """Output of q: "same", `q_out` in the cache's dtype; "e4m3", codes of q / `q_scale`; "none", q is not taken.
    """
    q_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Elements of a query head. None: `head_dim`."""
    index_dtype: IndexName | None = Field(default=None)
    """Element type of `row_offsets`, `valid_lengths` and `positions`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        refuse_residual("rotate_cache", kernels)
        if self.rows == "padded" and self.q_out == "none":
            raise ValueError(
                "rows: got 'padded' with q_out='none'; the padded length is q's; take q along, or use 'ragged'"
            )
        check_new_rows(self.new_rows(kernels), kernels)
        self.plan(kernels)

    def new_rows(self, kernels: KernelSet) -> NewRows:
        """The rows, with the model's RoPE looked up."""
        return NewRows(
            name=self.name,
            rows=self.rows,
            index_dtype=self.index_dtype,
            stored=("k",),
            rope=resolve_rope(self.rope, kernels),
            local=self.rope == "local",
            angles=self.angles,
            angles_dtype=self.angles_dtype,
            positions=self.positions,
            sections=self.sections,
            sections_order=self.sections_order,
            takes_q=self.q_out != "none",
            q_out=self.q_out,
            q_dim=self.q_dim,
        )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        title = "turns the step's rows of K where they are stored" + (", and q" if self.q_out != "none" else "")
        return (row_kernel(self.new_rows(kernels), kernels, "ops/rotate_cache.cu.j2", title),)

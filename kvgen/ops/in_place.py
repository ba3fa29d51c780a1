"""norm_cache and rotate_cache: what a model does to the new rows of K or V, on rows that are already stored."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvgen.ops.append import Append
from kvgen.ops.append_plan import plan_rows
from kvgen.ops.append_rules import check_norm
from kvgen.plan import KernelPlan
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.model import Rope
from kvgen.spec.norm import RmsNorm
from kvgen.spec.table import IndexName


class NormCache(Op):
    """RMS norm of the step's rows of K or V, in place.

    `row_offsets[B + 1]` says how many rows of a request are new, as append takes them, and `num_rows` how many there are in
    all, padding included; `k_weight` (or `v_weight`) are the norm's. Rows are read dequantized, normalised in f32, and
    stored as append stores them: all blocks of a quantized row get new scales, also those that a norm's `dim` leaves
    alone. In latent rows the latent part is normalised.
    Source: Modular MAX, rms_norm_kv_cache.ragged.paged and rms_norm_value_cache.ragged.paged.
    """

    kind: ClassVar[str] = "norm_cache"
    role: Literal["k", "v"] = "k"
    norm: RmsNorm = RmsNorm()
    index_dtype: IndexName | None = Field(default=None)

    def check(self, kernels: KernelSet) -> None:
        if self.role not in kernels.cache.roles:
            raise ValueError("role: got 'v' for a cache that stores K only; use 'k'")
        _refuse_residual("norm_cache", kernels)
        check_norm(kernels, "norm", self.norm, role=self.role)
        self.plan(kernels)

    def _append(self) -> Append:
        norm = self.norm if self.role == "k" else None
        return Append(name=self.name, k_norm=norm, q_out="none", index_dtype=self.index_dtype)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        title = f"normalises the step's rows of {self.role.upper()} where they are stored"
        v_norm = self.norm if self.role == "v" else None
        return (plan_rows(self._append(), kernels, title, v_norm=v_norm, stored=(self.role,)),)


class RotateCache(Op):
    """RoPE of the step's rows of K, in place, and of q `[T, q_heads, q_dim]`, which becomes `q_out`.

    The options are append's: positions, tables of angles, sections; "ragged" rows and "padded" ones. Without q
    (`q_out="none"`) `num_rows` says how many rows there are, padding included. Rows are read dequantized, turned in f32, and
    stored as append stores them. In latent rows the RoPE part turns.
    Source: Modular MAX, fused_qk_rope.ragged.paged and fused_qk_rope.padded.paged.
    """

    kind: ClassVar[str] = "rotate_cache"
    rope: Rope | Literal["model", "local"] = "model"
    rows: Literal["ragged", "padded"] = "ragged"
    angles: Literal["computed", "pairs", "halves"] = "computed"
    angles_dtype: Literal["f32", "same"] = "f32"
    positions: Literal["lengths", "given"] = "lengths"
    sections: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False, max_length=4)] = ()
    q_out: Literal["same", "e4m3", "none"] = "same"
    q_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    index_dtype: IndexName | None = Field(default=None)

    def check(self, kernels: KernelSet) -> None:
        _refuse_residual("rotate_cache", kernels)
        if self.rows == "padded" and self.q_out == "none":
            raise ValueError(
                "rows: got 'padded' with q_out='none'; the padded length is q's; take q along, or use 'ragged'"
            )
        self._append().check(kernels)
        self.plan(kernels)

    def _append(self) -> Append:
        return Append(**{name: getattr(self, name) for name in type(self).model_fields})

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        title = "turns the step's rows of K where they are stored" + (", and q" if self._append().takes_q else "")
        return (plan_rows(self._append(), kernels, title, stored=("k",)),)


def _refuse_residual(name: str, kernels: KernelSet) -> None:
    residual = kernels.cache.storage.residual
    if residual:
        raise ValueError(
            f"ops: got {name} with residual={residual}, whose sealed tokens share scales and cannot change alone; change rows "
            "before seal and append"
        )

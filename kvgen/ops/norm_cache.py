"""norm_cache: RMS norm of the step's rows of K or V where they are stored."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.new_rows_rules import check_norm, refuse_residual
from kvgen.lowering.row_kernel import row_kernel
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.norm import LayerNorm, RmsNorm
from kvgen.schema.tables import IndexName


class NormCache(Op):
    """Normalise the step's rows of K or V in the cache, in place (RMS norm).

    `row_offsets[B + 1]` says how many rows of a request are new, as append takes them, and `num_rows` how many rows there
    are in all, padding included. `k_weight` (`role="v"`: `v_weight`) are the norm's weights. Rows are read dequantized,
    normalised in f32 and stored as append stores them: every block of a quantized row gets a new scale, those outside a
    norm's `dim` as well. In latent rows the latent part is normalised. Source: Modular MAX, rms_norm_kv_cache.ragged.paged,
    rms_norm_value_cache.ragged.paged.
    """

    kind: ClassVar[str] = "norm_cache"
    role: Literal["k", "v"] = "k"
    """Which rows are normalised: "k" or "v"."""
    norm: RmsNorm | LayerNorm = RmsNorm()
    """The norm: an RmsNorm, or a LayerNorm in its place. Default: RmsNorm(), over each head."""
    index_dtype: IndexName | None = Field(default=None)
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    @property
    def description(self) -> str:
        """The docstring, with the norm that this operation has."""
        found = super().description
        return found.replace("RMS norm", "LayerNorm", 1) if isinstance(self.norm, LayerNorm) else found

    def check(self, kernels: KernelSet) -> None:
        if self.role not in kernels.kv.roles:
            raise ValueError("role: got 'v' for a cache that stores K only; use 'k'")
        refuse_residual("norm_cache", kernels)
        check_norm(kernels, "norm", self.norm, role=self.role, stored=True)
        self.plan(kernels)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        k_norm, v_norm = (self.norm if self.role == role else None for role in ("k", "v"))
        new = NewRows(name=self.name, index_dtype=self.index_dtype, stored=(self.role,), k_norm=k_norm, v_norm=v_norm)
        title = f"normalises the step's rows of {self.role.upper()} where they are stored"
        return (row_kernel(new, kernels, "ops/norm_cache.cu.j2", title),)

"""Kernels that a fused append replaces: one for each thing that is done to the rows, and one that stores them.

No such kernels run here. Of each the sectors are counted that it must move at least: its operands, read and written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.cases.contents import Call
from kvgen.cases.step import Step
from kvgen.cases.touched_bytes import SECTOR
from kvgen.layout.dtypes import dtype
from kvgen.ops import Append


@dataclass(frozen=True)
class Pass:
    """One kernel of the sequence, and the fewest sectors of what it reads and writes."""

    title: str
    sectors: int


def separate_passes(op: Append, call: Call, least: Mapping[str, int]) -> tuple[Pass, ...]:
    """The sequence of kernels in place of an append, whose own fewest sectors are `least`: bias, norm, RoPE, each over q, k and
    v where it changes them and in place; q to e4m3; quantize, from rows to packed codes and scales; store. Empty for what is
    one kernel anyway.
    """
    scene = call.scene
    step = Step(op, scene.kernels)
    cache, size = scene.kv, dtype(scene.kv.dtype).bytes
    tokens = sum(scene.workload.new)
    shapes = step.shapes() if op.takes_q else {r: s for r, s in step.shapes().items() if r != "q"}

    def rows(dims: Mapping[str, int]) -> int:
        """Sectors of so many elements of each head."""
        return sum(-(-tokens * shapes[role][0] * dim * size // SECTOR) for role, dim in dims.items())

    def given(*names: str) -> int:
        return sum(least.get(name, 0) for name in names)

    whole = {role: dim for role, (_, dim) in shapes.items()}
    kept = {role: dim for role, dim in whole.items() if role != "q"}
    cached = sum(n for name, n in least.items() if scene.group(name, call.launcher) in ("kv", "scales"))
    tables = sum(n for name, n in least.items() if scene.group(name, call.launcher) == "tables") - given("positions")
    found = []
    if op.bias:
        found.append(Pass("bias", 2 * rows(whole) + given("bias", "q_bias", "k_bias", "v_bias")))
    every = {"q": op.q_norm, "k": op.k_norm, "v": op.v_norm}
    norms = {role: norm for role, norm in every.items() if norm is not None and role in shapes}
    if norms:
        dims = {role: norm.dim or (step.latent if role == "k" else 0) or whole[role] for role, norm in norms.items()}
        weights = [f"{role}_{name}" for role in norms for name in ("weight", "norm_bias")]
        found.append(Pass("norm", 2 * rows(dims) + given(*weights)))
    if step.rope is not None:
        rotated = {role: step.rotary_dim for role in shapes if role != "v"}
        found.append(Pass("RoPE", 2 * rows(rotated) + given("cos_sin", "positions")))
    if op.position_scale is not None:
        found.append(
            Pass("factor of q", 2 * rows({"q": whole["q"]}) + (given("positions") if step.rope is None else 0))
        )
    if op.hadamard is not None:
        found.append(
            Pass("Hadamard", 2 * rows({role: whole[role] for role in op.hadamard if role in whole and role in shapes}))
        )
    if op.takes_q and op.q_out == "e4m3":
        found.append(Pass("q to e4m3", rows({"q": whole["q"]}) + given("q_out", "q_scale")))
    stored = rows(kept)
    if any(quant is not None for quant in cache.quants.values()):
        found.append(Pass("quantize", stored + cached))
        stored = cached
    if op.inputs != "q":
        found.append(Pass("store", stored + cached + tables))
    return tuple(found) if len(found) > 1 else ()

"""What new rows ask of the cache, and their options of each other: refused here in the words of the operations' fields."""

from __future__ import annotations

from typing import Literal

from kvgen.lowering.new_rows import NewRows
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.model import LongRopeScaling, Rope
from kvgen.spec.norm import RmsNorm


def check_new_rows(new: NewRows, kernels: KernelSet) -> None:
    """Raise ValueError where the options contradict the cache or each other."""
    _check_rows(new, kernels)
    _check_blocks(kernels)
    _check_inputs(new, kernels)
    _check_q(new)
    for field, norm in (("q_norm", new.q_norm), ("k_norm", new.k_norm)):
        if norm is not None:
            check_norm(kernels, field, norm, q_dim=new.q_dim)
    if new.rope is not None:
        _check_rope(new, new.rope, kernels)
    else:
        _check_no_rope(new)


def _check_rows(new: NewRows, kernels: KernelSet) -> None:
    storage = kernels.kv.storage
    if new.rows == "slots" and kernels.kv.page_table.separate_kv:
        raise ValueError("rows: got 'slots' with table=PerKV(), where K and V lie in different pages; use 'ragged'")
    if new.rows == "slots" and kernels.kv.ragged:
        raise ValueError("rows: got 'slots' with a Ragged cache, whose tokens are found by request; use 'ragged'")
    if new.rows == "slots" and (storage.own_table or storage.residual):
        which = "own_table=True, whose scales lie in other pages" if storage.own_table else "residual, a tail a request"
        raise ValueError(f"rows: got 'slots' with {which}; a slot names one place; use 'ragged'")


def _check_blocks(kernels: KernelSet) -> None:
    for segment in kernels.kv.storage.segments:
        quant, scales = segment.quant, segment.scales
        if quant is None or scales is None or not quant.computed or quant.residual:
            continue
        if segment.region.dtype.packed and scales.block[2] == 1:
            raise ValueError(
                f"quant: got block.dim=1 with {segment.region.dtype.name} codes, two a byte, whose scales append "
                "computes; a byte's codes are written together, so give block.dim an even number"
            )


def _check_inputs(new: NewRows, kernels: KernelSet) -> None:
    cache = kernels.kv
    if new.inputs == "qkv" and cache.stores == "k":
        raise ValueError(
            "inputs: got 'qkv' for a cache that stores K only; rows of a fused projection have q, k and v; use 'separate'"
        )
    if new.inputs == "parts" and not cache.rope_part:
        raise ValueError(
            "inputs: got 'parts' for a cache without latent rows; only those have a latent and a RoPE part; use 'separate'"
        )
    if new.bias and cache.rope_part:
        raise ValueError("bias: got True for latent rows, whose projections have none; leave it out")
    changed = "rope" if new.rope is not None else "k_norm" if new.k_norm is not None else "bias" if new.bias else ""
    if changed and cache.storage.residual:
        raise ValueError(
            f"{changed}: got one for a cache with residual={cache.storage.residual}, whose seal takes K as it is stored; "
            "change K before seal and append, or use a cache without residual"
        )


def _check_q(new: NewRows) -> None:
    if new.takes_q:
        return
    for field, given in (("q_out", new.q_out == "e4m3"), ("q_dim", new.q_dim is not None), ("q_norm", new.q_norm)):
        if given:
            why = "q_out='none'" if new.q_out == "none" else "nothing that changes q"
            raise ValueError(
                f"{field}: got {getattr(new, field)!r} with {why}; append takes q where it is biased, normalised, turned, or "
                "part of inputs='qkv'; give one of them, or leave it out"
            )


def check_norm(kernels: KernelSet, field: str, norm: RmsNorm, *, q_dim: int | None = None, role: str = "k") -> None:
    """Raise ValueError where a norm does not fit the rows of a role."""
    cache = kernels.kv
    dim = cache.v_dim if role == "v" else cache.head_dim - cache.rope_part
    if cache.rope_part and field == "q_norm":
        raise ValueError(
            "q_norm: got a norm with latent rows, whose queries are normalised before their projection; leave it out"
        )
    if cache.rope_part and norm.over == "row":
        raise ValueError(
            f"{field}: got over='row' with latent rows, whose norm is over the latent part of the one head; use 'head'"
        )
    if field == "q_norm":
        dim = q_dim or dim
    if norm.dim is not None and norm.dim > dim:
        raise ValueError(
            f"{field}: got dim={norm.dim} for heads of {dim}; a norm covers at most the whole head; give at most "
            f"{dim}, or None for all"
        )


def _check_no_rope(new: NewRows) -> None:
    for field, default in (("angles", "computed"), ("angles_dtype", "f32"), ("positions", "lengths"), ("sections", ())):
        if getattr(new, field) != default:
            raise ValueError(
                f"{field}: got {getattr(new, field)!r} without rope, to which it belongs; give rope=Rope(...), or leave it out"
            )


def resolve_rope(given: Rope | Literal["model", "local"] | None, kernels: KernelSet) -> Rope | None:
    """The RoPE of an operation's `rope`, the model's own looked up; raises ValueError where the model has none."""
    if not isinstance(given, str):
        return given
    if kernels.model is None or kernels.model.rope is None:
        raise ValueError(
            f"rope: got {given!r} in a set whose model has no rope; give model=Model(rope=Rope(...)), or a Rope here"
        )
    return kernels.model.rope


def _check_rope(new: NewRows, rope: Rope, kernels: KernelSet) -> None:
    dims = _check_dims(new, rope, kernels)
    scaled = isinstance(rope.scaling, LongRopeScaling) and not (new.local and rope.local_theta is not None)
    if new.angles == "computed" and scaled:
        raise ValueError(
            "rope: got LongRopeScaling with angles='computed'; which of its factors hold depends on the longest sequence, "
            "which no spec knows; bring a table with angles='halves' or 'pairs'"
        )
    if new.angles == "computed" and new.angles_dtype != "f32":
        raise ValueError("angles_dtype: got 'same' with angles='computed', which needs no table; leave it out")
    if new.rows == "slots" and new.positions == "lengths":
        raise ValueError(
            "positions: got 'lengths' with rows='slots', which do not say whose rows they are; use positions='given'"
        )
    if new.sections and new.positions != "given":
        raise ValueError("sections: got them with positions='lengths'; sections have positions each; use 'given'")
    if new.sections and sum(new.sections) != dims // 2:
        raise ValueError(
            f"sections: got {new.sections}, {sum(new.sections)} pairs in all; RoPE turns {dims // 2} pairs of a head; give "
            f"sections whose sum is {dims // 2}"
        )


def _check_dims(new: NewRows, rope: Rope, kernels: KernelSet) -> int:
    cache = kernels.kv
    if cache.latent_part and not cache.rope_part:
        raise ValueError("rope: got one for latent rows with rope_dim=0, which have no part that turns; leave it out")
    if cache.rope_part and rope.part == "first":
        raise ValueError(
            "rope.part: got 'first' with latent rows, whose rotated part is the last; use 'last', or leave it out"
        )
    whole = cache.rope_part or cache.head_dim
    dims = rope.dim or whole
    if cache.rope_part and dims != cache.rope_part:
        raise ValueError(
            f"rope.dim: got {dims} with latent rows whose RoPE part has {cache.rope_part}; all of it turns; give that, or None"
        )
    q_dim = new.q_dim or whole
    if new.takes_q and not cache.rope_part and q_dim != cache.head_dim:
        raise ValueError(
            f"q_dim: got {q_dim} with head_dim={cache.head_dim}; heads of q and k are alike but in latent caches; leave it out"
        )
    if dims > whole or (new.takes_q and dims > q_dim):
        raise ValueError(
            f"rope.dim: got {dims} for heads of {min(whole, q_dim)}; at most the whole head turns; give at most "
            f"{min(whole, q_dim)}, or None for all"
        )
    if dims % 2:
        raise ValueError(f"rope: got heads of {dims}; elements turn in pairs; give rope.dim, an even number")
    return dims


def refuse_residual(name: str, kernels: KernelSet) -> None:
    """Raise ValueError where stored rows share scales with others, so that none can be changed alone."""
    residual = kernels.kv.storage.residual
    if residual:
        raise ValueError(
            f"ops: got {name} with residual={residual}, whose sealed tokens share scales and cannot change alone; change rows "
            "before seal and append"
        )


def check_one_place(kernels: KernelSet, kind: str) -> None:
    """Raise ValueError where one number cannot say where a token is."""
    storage = kernels.kv.storage
    if kernels.kv.page_table.separate_kv:
        raise ValueError(f"ops: got {kind} with table=PerKV(), where K and V lie in different pages; use another table")
    if storage.own_table or storage.residual:
        which = "own_table=True, whose scales lie in other pages" if storage.own_table else "residual, a tail a request"
        raise ValueError(f"ops: got {kind} with {which}; a slot names one place; use a cache without")

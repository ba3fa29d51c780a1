"""Rules of new rows for the cache, and of their options for each other: refused here in the words of the operations' fields."""

from __future__ import annotations

from typing import Literal

from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.segments import check_whole_bytes
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.model import LongRopeScaling, Rope
from kvgen.schema.norm import Norm


def check_new_rows(new: NewRows, kernels: KernelSet) -> None:
    """Raise ValueError where the options contradict the cache or each other."""
    _check_rows(new, kernels)
    _check_rate(new, kernels)
    _check_blocks(kernels)
    _check_inputs(new, kernels)
    _check_q(new)
    if new.takes_q and new.q_out_heads is not None and new.q_out_heads < kernels.q_heads:
        raise ValueError(
            f"q_out_heads: got {new.q_out_heads} for {kernels.q_heads} query heads; q_out has all of them, and zeros behind; "
            f"give {kernels.q_heads} or more, or leave it out"
        )
    for role, norm in (("q", new.q_norm), ("k", new.k_norm), ("v", new.v_norm)):
        if norm is not None:
            check_norm(kernels, f"{role}_norm", norm, q_dim=new.q_dim, role=role, in_parts=new.inputs == "parts")
    _check_norm_order(new, kernels)
    if new.position_scale is not None:
        _check_position_scale(new, kernels)
    if new.hadamard:
        _check_hadamard(new, kernels)
    if new.rope is not None:
        _check_rope(new, new.rope, kernels)
    else:
        _check_no_rope(new)
    if new.takes_positions and new.rows == "slots" and new.positions == "lengths":
        raise ValueError(
            "positions: got 'lengths' with rows='slots', which do not say whose rows they are; use positions='given'"
        )


def _check_rows(new: NewRows, kernels: KernelSet) -> None:
    storage = kernels.kv.storage
    if new.rows == "slots" and kernels.kv.page_table.separate_kv:
        raise ValueError("rows: got 'slots' with table=PerKV(), where K and V lie in different pages; use 'ragged'")
    if new.rows == "slots" and kernels.kv.ragged:
        raise ValueError("rows: got 'slots' with a Ragged cache, whose tokens are found by request; use 'ragged'")
    if new.rows == "slots" and (storage.own_table or storage.residual):
        which = "own_table=True, whose scales lie in other pages" if storage.own_table else "residual, a tail a request"
        raise ValueError(f"rows: got 'slots' with {which}; a slot names one place; use 'ragged'")


def _check_rate(new: NewRows, kernels: KernelSet) -> None:
    """Rows of which one in `rate` is stored, as its entry."""
    rate = kernels.kv.entry_tokens
    if rate == 1 or new.q_alone:
        return
    if new.takes_q:
        raise ValueError(
            f"q_out: got {new.q_out!r} with rate={rate}; one row of {rate} is stored, at its first token's position, and q of "
            "every row rotates at its own; use q_out='none', and append with inputs='q' for q"
        )
    if new.sections:
        raise ValueError(
            f"sections: got {new.sections} with rate={rate}; an entry of {rate} tokens rotates by one position, its first "
            "token's; leave sections out"
        )


def _check_blocks(kernels: KernelSet) -> None:
    for segment in kernels.kv.storage.segments:
        quant, scales = segment.quant, segment.scales
        if quant is None or scales is None or not quant.computed or quant.residual:
            continue
        check_whole_bytes("append", segment)


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
    if new.q_alone:
        _check_q_alone(new)
        return
    changed = "rope" if new.rope is not None else "k_norm" if new.k_norm is not None else "bias" if new.bias else ""
    if changed and cache.storage.residual:
        raise ValueError(
            f"{changed}: got one for a cache with residual={cache.storage.residual}, whose seal takes K as it is stored; "
            "change K before seal and append, or use a cache without residual"
        )


def _check_q_alone(new: NewRows) -> None:
    """q alone: nothing is stored, so that nothing may ask for K, V or their places."""
    if new.rows == "slots":
        raise ValueError(
            "rows: got 'slots' with inputs='q'; slots name where rows are stored, and q is not stored; use 'ragged' or 'padded'"
        )
    for field in ("k_norm", "v_norm"):
        if getattr(new, field) is not None:
            raise ValueError(
                f"{field}: got one with inputs='q'; K and V are no inputs then; leave it out, or use inputs='separate'"
            )
    if not new.takes_q:
        why = "q_out='none'" if new.q_out == "none" else "nothing that changes q"
        raise ValueError(
            f"inputs: got 'q' with {why}; append would do nothing; give rope, q_norm, bias or position_scale, and an output for q"
        )


def _check_q(new: NewRows) -> None:
    if new.takes_q:
        return
    given = {
        "q_out": new.q_out == "e4m3",
        "q_dim": new.q_dim is not None,
        "q_out_heads": new.q_out_heads is not None,
        "q_norm": new.q_norm is not None,
        "position_scale": new.position_scale is not None,
    }
    for field in (name for name, is_given in given.items() if is_given):
        why = "q_out='none'" if new.q_out == "none" else "nothing that changes q"
        raise ValueError(
            f"{field}: got {getattr(new, field)!r} with {why}; append takes q where it is biased, normalised, rotated, or "
            "part of inputs='qkv'; give one of them, or leave it out"
        )


def check_norm(
    kernels: KernelSet,
    field: str,
    norm: Norm,
    *,
    q_dim: int | None = None,
    role: str = "k",
    in_parts: bool = False,
    stored: bool = False,
) -> None:
    """Raise ValueError where a norm does not fit the rows of a role; `in_parts`: a latent row's parts are two arrays, `stored`:
    they are read where they are stored."""
    cache = kernels.kv
    if field == "v_norm" and "v" not in cache.roles:
        raise ValueError("v_norm: got one for a cache that stores K only; it has no V rows; leave it out")
    dim = cache.v_dim if role == "v" else cache.head_dim - cache.rope_part
    if cache.rope_part and field == "q_norm" and q_dim is None:
        raise ValueError(
            "q_norm: got a norm with latent rows and q_dim=None; q is then its RoPE part alone, and a norm is over whole heads; "
            f"bring them with q_dim={cache.head_dim}, or leave it out"
        )
    if cache.rope_part and norm.whole_row and field != "q_norm" and (in_parts or stored):
        why = "inputs='parts'" if in_parts else "rows that are stored in parts"
        raise ValueError(
            f"{field}: got over='row' with {why}; its sum is over the latent and the RoPE part of a row of the caller's; "
            "use ops.Append with inputs='separate', or over='head', the norm of the latent part"
        )
    if stored and norm.given:
        raise ValueError(
            f"{field}: got mean_square='given' for rows that are read where they are stored; a call brings mean squares of new "
            "rows alone; use ops.Append, or mean_square='computed'"
        )
    if field == "q_norm":
        dim = q_dim or dim
    if norm.dim is not None and norm.dim > dim:
        raise ValueError(
            f"{field}: got dim={norm.dim} for heads of {dim}; a norm covers at most the whole head; give at most "
            f"{dim}, or None for all"
        )


def _check_norm_order(new: NewRows, kernels: KernelSet) -> None:
    if new.norm_order == "before":
        return
    if new.rope is None or (new.q_norm is None and new.k_norm is None):
        missing = "rope" if new.rope is None else "q_norm and k_norm"
        raise ValueError(
            f"norm_order: got 'after' without {missing}; it says which of RoPE and the norms of q and k is first; give both, or "
            "leave it out"
        )
    if kernels.kv.rope_part:
        raise ValueError(
            "norm_order: got 'after' with latent rows, whose latent part is normalised and whose RoPE part rotates; leave it out"
        )
    for role, norm in (("q", new.q_norm), ("k", new.k_norm)):
        if norm is not None and norm.whole_row:
            raise ValueError(
                f"norm_order: got 'after' with {role}_norm over the whole row; its sum is taken before heads rotate; use "
                "over='head', or norm_order='before'"
            )


def _check_position_scale(new: NewRows, kernels: KernelSet) -> None:
    cache = kernels.kv
    if new.sections:
        raise ValueError(
            f"position_scale: got one with sections={new.sections}, several positions a row; no model has both; leave one out"
        )
    if cache.rope_part and new.q_dim is None:
        raise ValueError(
            "position_scale: got one with latent rows and q_dim=None; q is then its RoPE part alone, and the factor is the "
            f"whole query's; bring the absorbed query with q_dim={cache.head_dim}, or scale q before append"
        )
    if cache.storage.residual and not new.q_alone:
        raise ValueError(
            f"position_scale: got one for a cache with residual={cache.storage.residual}, whose slots keep a tail in place of a "
            "position; use inputs='q' in an operation of its own, or scale q before append"
        )


def _check_hadamard(new: NewRows, kernels: KernelSet) -> None:
    """A transform is of whole heads: what a lane has are runs of dims whose places differ in single bits."""
    cache, asked = kernels.kv, new.hadamard
    if cache.rope_part:
        raise ValueError(
            f"hadamard: got {asked!r} with latent rows, whose latent part and RoPE part are apart; the transform is of "
            "whole heads; leave it out"
        )
    if cache.storage.residual and not new.q_alone:
        raise ValueError(
            f"hadamard: got {asked!r} for a cache with residual={cache.storage.residual}, whose seal takes K as it is "
            "stored; change K before seal and append, or use a cache without residual"
        )
    if "v" in asked and ("v" not in cache.roles or new.q_alone):
        why = "inputs='q'" if new.q_alone else "a cache that stores K only"
        raise ValueError(f"hadamard: got {asked!r} with {why}; there are no V rows; use 'qk'")
    dims = {"q": new.q_dim or cache.head_dim, "k": cache.head_dim, "v": cache.v_dim}
    for role in asked:
        if dims[role] & (dims[role] - 1) or not 16 <= dims[role] <= 512:
            raise ValueError(
                f"hadamard: got {asked!r} with heads of {dims[role]} in {role}; the transform is of a power of two of dims, "
                "from 16 to 512; leave it out"
            )
    if new.rope is not None and (dim := _hadamard_misfit(new.rope, cache.head_dim)):
        raise ValueError(
            f"hadamard: got {asked!r} with rope.dim={dim}; lanes share a head by bits of its dims, so RoPE rotates "
            "a power of two of them; leave it out"
        )


def _hadamard_misfit(rope: Rope, head_dim: int) -> int:
    """The dims that RoPE rotates where a Hadamard transform cannot follow; 0: it can."""
    if rope.proportional and rope.style == "neox":
        return 0
    dims = rope.dim or head_dim
    return dims if dims & (dims - 1) else 0


def _check_no_rope(new: NewRows) -> None:
    defaults = {
        "angles": "computed",
        "angles_dtype": "f32",
        "positions": "lengths",
        "sections": (),
        "sections_order": "runs",
    }
    if new.position_scale is not None:
        del defaults["positions"]
    for field, default in defaults.items():
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
    check_angles(rope, new.angles, new.angles_dtype, local=new.local)
    if new.sections and new.positions != "given":
        raise ValueError("sections: got them with positions='lengths'; sections have positions each; use 'given'")
    if new.sections and sum(new.sections) != dims // 2:
        raise ValueError(
            f"sections: got {new.sections}, {sum(new.sections)} pairs in all; RoPE rotates {dims // 2} pairs of a head; give "
            f"sections whose sum is {dims // 2}"
        )
    if new.sections_order == "interleaved":
        _check_interleaved(new.sections)


def check_angles(rope: Rope, angles: str, angles_dtype: str, *, local: bool) -> None:
    """Raise ValueError where a rope's angles cannot be computed, or need no table."""
    scaled = isinstance(rope.scaling, LongRopeScaling) and not (local and rope.local_theta is not None)
    if angles == "computed" and scaled:
        raise ValueError(
            "rope: got LongRopeScaling with angles='computed'; which of its factors hold depends on the longest sequence, "
            "which no spec knows; bring a table with angles='halves' or 'pairs'"
        )
    if angles == "computed" and angles_dtype != "f32":
        raise ValueError("angles_dtype: got 'same' with angles='computed', which needs no table; leave it out")


def _check_interleaved(sections: tuple[int, ...]) -> None:
    if len(sections) != 3:
        raise ValueError(
            f"sections_order: got 'interleaved' with sections={sections}; pairs go round three sections, time, height and width; "
            "give three, as (24, 20, 20), or use 'runs'"
        )
    pairs = sum(sections)
    for at, name in ((1, "height"), (2, "width")):
        last = 3 * (sections[at] - 1) + at
        if last >= pairs:
            raise ValueError(
                f"sections: got {sections} with sections_order='interleaved'; the last of {sections[at]} pairs of {name} would "
                f"be pair {last}, and RoPE rotates {pairs}; give at most {(pairs - at + 2) // 3} there"
            )


def _check_dims(new: NewRows, rope: Rope, kernels: KernelSet) -> int:
    cache = kernels.kv
    if cache.latent_part and not cache.rope_part:
        raise ValueError("rope: got one for latent rows with rope_dim=0, which have no part that rotates; leave it out")
    if cache.rope_part and rope.part == "first":
        raise ValueError(
            "rope.part: got 'first' with latent rows, whose rotated part is the last; use 'last', or leave it out"
        )
    if cache.rope_part and rope.proportional:
        raise ValueError(
            "rope.proportional: got True with latent rows, whose RoPE part rotates as a whole; leave it out"
        )
    whole = cache.rope_part or cache.head_dim
    dims = rope.dim or whole
    if rope.proportional and whole % 2:
        raise ValueError(
            f"rope.proportional: got True for heads of {whole}; the pairs are of the whole head, so its size is even"
        )
    if cache.rope_part and dims != cache.rope_part:
        raise ValueError(
            f"rope.dim: got {dims} with latent rows whose RoPE part has {cache.rope_part}; all of it rotates; give that, or None"
        )
    q_dim = new.q_dim or whole
    if new.takes_q and not cache.rope_part and q_dim != cache.head_dim:
        raise ValueError(
            f"q_dim: got {q_dim} with head_dim={cache.head_dim}; heads of q and k are alike but in latent caches; leave it out"
        )
    if dims > whole or (new.takes_q and dims > q_dim):
        raise ValueError(
            f"rope.dim: got {dims} for heads of {min(whole, q_dim)}; at most the whole head rotates; give at most "
            f"{min(whole, q_dim)}, or None for all"
        )
    if dims % 2:
        raise ValueError(f"rope: got heads of {dims}; elements rotate in pairs; give rope.dim, an even number")
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

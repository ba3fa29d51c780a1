"""Tensor parallelism: what one of several GPUs that share a model's heads has of a kernel set, and when they can share them.

All shards of a set are alike, so a size has one spec. Query heads are divided. KV heads are divided too, or, where there are
fewer than GPUs, each GPU has a copy of one; latent rows, which have one head, are on every GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgen.errors import SpecError
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.model import Kind, Model
from kvgen.schema.norm import LayerNorm, RmsNorm
from kvgen.schema.score import Score


def shares(q_heads: int, kv_heads: int, tp: int) -> bool:
    """Whether `tp` GPUs can have the same number of query heads each, and whole KV heads."""
    return tp >= 1 and q_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def shard_heads(q_heads: int, kv_heads: int, tp: int) -> tuple[int, int]:
    """Query heads and KV heads of one of `tp` GPUs that can share them."""
    return q_heads // tp, max(1, kv_heads // tp)


def heads_rule(heads: Sequence[tuple[int, int]]) -> str:
    """What a message says where not all of these (query heads, KV heads) can be shared: the rule, and the sizes that can be."""
    most = min(q_heads for q_heads, _ in heads)
    valid = [tp for tp in range(2, most + 1) if all(shares(q_heads, kv_heads, tp) for q_heads, kv_heads in heads)]
    return (
        "every GPU has the same number of query heads and whole KV heads; valid: "
        f"{', '.join(map(str, valid)) or 'none'}"
    )


def shard_name(name: str, tp: int) -> str:
    """The name of a set's shard: llama3_8b_tp2; of one GPU, and of a set without a name, the set's own."""
    return f"{name}_tp{tp}" if name and tp != 1 else name


def shard(kernels: KernelSet, tp: int) -> KernelSet:
    """The set of one of `tp` GPUs, called `<name>_tp<tp>`; the set itself for one.

    Raises SpecError, which names the sizes that are valid, where the heads cannot be shared so; and for sets whose operations
    need all heads of a token or their numbers, for states, and where what is left is no valid spec.
    """
    if type(tp) is not int:
        raise SpecError(f"tp: got {tp!r}; it is how many GPUs share the heads: a whole number from 1 on")
    if tp == 1:
        return kernels
    said = f"tp: got {tp} for {kernels.name or 'the set'}"
    if kernels.cache.states:
        raise SpecError(
            f"{said}, whose cache has states; kvgen does not know what of their bytes a GPU has; write the spec of a shard, "
            "with its `State(bytes=...)`"
        )
    own = kernels.q_heads, kernels.kv.kv_heads
    kinds = [(k.q_heads, k.kv_heads) for k in kernels.model.kinds] if kernels.model is not None else []
    heads = [own, *((q, kv) for q, kv in kinds if q is not None and kv is not None)]
    unshared = next((each for each in heads if not shares(*each, tp)), None)
    if unshared is not None:
        raise SpecError(f"{said}, of {unshared[0]} query heads and {unshared[1]} KV heads; {heads_rule(heads)}")
    for op in kernels.ops:
        _check_op(said, op, one_head=kernels.kv.kv_heads == 1)
    q_heads, kv_heads = shard_heads(*own, tp)
    try:
        changed: dict[str, Any] = {
            "name": shard_name(kernels.name, tp),
            "q_heads": q_heads,
            "cache": kernels.kv.model_copy(update={"kv_heads": kv_heads} if kv_heads != own[1] else {}),
            "ops": [_shard_op(op, tp) for op in kernels.ops],
            "model": _shard_model(kernels.model, tp)
            if kernels.model is not None and kernels.model.kinds
            else kernels.model,
        }
        return KernelSet(
            **{name: changed.get(name, getattr(kernels, name)) for name in kernels.model_fields_set | {"ops"}}
        )
    except ValueError as error:
        raise SpecError(f"{said}, whose shard would be no valid set: {error}") from None


def _check_op(said: str, op: Op, *, one_head: bool) -> None:
    """Raise SpecError for an operation that a GPU with a part of the heads cannot do as the spec says it; `one_head`: every GPU
    has all of a row of K and V."""
    for field in type(op).model_fields:
        value = getattr(op, field)
        whole = one_head and field != "q_norm"
        if isinstance(value, RmsNorm | LayerNorm) and value.whole_row and not value.given and not whole:
            raise SpecError(
                f"{said}; {field} of {op.name} is over all heads of a token, which no GPU has; give the norm of ops.Append "
                "mean_square='given', and the call the mean over all GPUs' heads, or leave the norm to the engine"
            )
        if isinstance(value, Score) and value.numbered is not None:
            raise SpecError(
                f"{said}; the score function of {op.name} computes with at.{value.numbered}, the number of a head on its GPU, "
                f"not in the model; read what depends on the head from a tensor with the axis {value.numbered}s"
            )
    columns = op.columns_of_all_heads
    if columns is not None:
        raise SpecError(
            f"{said}; {op.name} has columns={columns}, of which kvgen does not know how many a GPU has; leave columns out where "
            "they are q_heads * head_dim, or write the spec of a shard"
        )


def _shard_op(op: Op, tp: int) -> Op:
    """The operation, with the shard of every other cache that it reads."""
    others = list(op.other_caches().values())
    caches = {f: v for f in type(op).model_fields if any((v := getattr(op, f)) is other for other in others)}
    heads = {f: max(1, cache.kv_heads // tp) for f, cache in caches.items()}
    changed = {f: c.model_copy(update={"kv_heads": heads[f]}) for f, c in caches.items() if heads[f] != c.kv_heads}
    return op.model_copy(update=changed)


def _shard_model(model: Model, tp: int) -> Model:
    """The model's facts, with the heads that each kind of layers has on one GPU."""
    return model.model_copy(update={"kinds": tuple(_shard_kind(kind, tp) for kind in model.kinds)})


def _shard_kind(kind: Kind, tp: int) -> Kind:
    if kind.q_heads is None or kind.kv_heads is None:
        return kind
    q_heads, kv_heads = shard_heads(kind.q_heads, kind.kv_heads, tp)
    return kind.model_copy(update={"q_heads": q_heads, "kv_heads": kv_heads})

"""A set's cache beside facts of its model that speak of the same dims."""

from __future__ import annotations

from kvgen.schema.cache import Cache
from kvgen.schema.model import Indexer, Model


def check_cache(model: Model, cache: Cache, q_heads: int, *, scores: bool) -> None:
    """Raise ValueError where the cache has rows that no layers of the model have. `scores`: they are an indexer's keys."""
    if scores:
        _check_indexer(model, cache, q_heads)
    elif cache.latent_part and model.mla is not None:
        latent = cache.head_dim - cache.rope_part
        for field, mine, name, its in (
            ("latent_dim", latent, "kv_lora_rank", model.mla.kv_lora_rank),
            ("rope_dim", cache.rope_part, "qk_rope_head_dim", model.mla.qk_rope_head_dim),
        ):
            if mine != its:
                raise ValueError(
                    f"cache.{field}: got {mine}, and the set's model has mla.{name}={its}; a row is as long as the model's; give "
                    "both the same"
                )
    _check_rate(model, cache.entry_tokens)


def _indexers(model: Model) -> list[Indexer]:
    own = [kind.indexer or (kind.compressed.indexer if kind.compressed is not None else None) for kind in model.kinds]
    return [one for one in (model.indexer, *own) if one is not None]


def _check_indexer(model: Model, cache: Cache, q_heads: int) -> None:
    """Keys and heads of an indexer are those of some layer's."""
    found = {(one.heads, one.dim) for one in _indexers(model)}
    if found and (q_heads, cache.head_dim) not in found:
        has = " or ".join(f"{heads} heads of {dim}" for heads, dim in sorted(found))
        raise ValueError(
            f"q_heads: got {q_heads} over keys of {cache.head_dim} with indexer scores, and the set's model has "
            f"indexers of {has}; give both the same"
        )


def _check_rate(model: Model, rate: int) -> None:
    rates = {kind.compressed.rate for kind in model.kinds if kind.compressed is not None}
    if rate > 1 and rates and rate not in rates:
        has = ", ".join(map(str, sorted(rates)))
        raise ValueError(
            f"cache.rate: got {rate}, and the set's model has layers whose entries stand for {has} tokens; give one of them"
        )

"""How an engine serves a checkpoint: its share of the heads under tensor parallelism, and its own layout of the cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from kvgen.errors import ConfigError
from kvgen.json_file import shown
from kvgen.models.kv_dtype import Stored
from kvgen.models.layers import Checkpoint, LayerFacts, Norm
from kvgen.schema import presets
from kvgen.schema.presets.quants import KVCacheDType, per_tensor
from kvgen.schema.shard import heads_rule, shard_heads, shares


@dataclass(frozen=True)
class Serving:
    """`tp` GPUs share the heads; `page_size` tokens a page (None: kvgen's or the preset's own); `preset`: whose layout."""

    tp: int = 1
    page_size: int | None = None
    preset: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """What was given, as options of `kvgen init`."""
        found = (f"--tp {self.tp}" if self.tp != 1 else "", f"--page-size {self.page_size}" if self.page_size else "")
        return (*filter(None, found), *([f"--preset {self.preset}"] if self.preset else []))


def shard(facts: Checkpoint, tp: int) -> Checkpoint:
    """What one of `tp` GPUs has of a model: its heads, and a KV head of its own where there are fewer than GPUs."""
    if tp == 1:
        return facts
    unshared = next((kind for kind in facts.cached if not shares(kind.q_heads, kind.kv_heads, tp)), None)
    if unshared is not None:
        of_kind = "" if unshared is facts.cached[0] else f" of {unshared.kind} layers"
        rule = heads_rule([(kind.q_heads, kind.kv_heads) for kind in facts.cached])
        raise ConfigError(
            f"--tp: got {tp} for {unshared.q_heads} query heads and {unshared.kv_heads} KV heads{of_kind}; {rule}"
        )
    kinds = tuple(_shard(kind, tp) if kind.cache else kind for kind in facts.kinds)
    own = next(kind for kind in kinds if kind.cache)
    model = facts.model
    if model.kinds:
        heads = {kind.kind: {"q_heads": kind.q_heads, "kv_heads": kind.kv_heads} for kind in kinds if kind.cache}
        model = model.model_copy(
            update={"kinds": tuple(kind.model_copy(update=heads.get(kind.name, {})) for kind in model.kinds)}
        )
    notes = (*facts.notes, _ROW_NORM) if any(_is_given(kind) for kind in kinds) else facts.notes
    return replace(facts, q_heads=own.q_heads, kv_heads=own.kv_heads, kinds=kinds, model=model, notes=notes)


_ROW_NORM: Final = (
    "The norms of q and k are over the heads of all GPUs: append takes q_mean_square and k_mean_square, each token's mean of "
    "squares over them. A GPU computes the mean over its own heads; the sum of these means over the GPUs, divided by their "
    "number, is what append takes."
)


def _is_given(kind: LayerFacts) -> bool:
    return any(norm is not None and norm.mean_square == "given" for norm in (kind.q_norm, kind.k_norm))


def _shard(kind: LayerFacts, tp: int) -> LayerFacts:
    q_heads, kv_heads = shard_heads(kind.q_heads, kind.kv_heads, tp)
    q_norm, k_norm = (_of_all_heads(norm) for norm in (kind.q_norm, kind.k_norm))
    return replace(kind, q_heads=q_heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm)


def _of_all_heads(norm: Norm | None) -> Norm | None:
    """The norm as a GPU with some of the heads has it: the mean square of a row is given."""
    return replace(norm, mean_square="given") if norm is not None and norm.over == "row" else norm


def preset_fields(facts: Checkpoint, stored: Stored, serving: Serving) -> dict[str, Any]:
    """What a spec gives the preset for this checkpoint; ConfigError where the preset is for another kind of cache."""
    name = serving.preset
    if name not in presets.__all__:
        try:
            getattr(presets, str(name))
        except AttributeError as error:
            raise ConfigError(f"--preset: got {shown(name)}; {str(error).partition('; ')[2]}") from None
    taken = inspect.signature(getattr(presets, str(name))).parameters
    mla = facts.model.mla
    if ("kv_heads" not in taken) if mla is None else ("latent_dim" not in taken):
        kind = "K and V" if mla is None else "latent rows"
        fitting = [n for n in presets.__all__ if _fits(n, latent=mla is not None)]
        raise ConfigError(
            f"--preset: got {name!r}, which is for another kind of cache; {facts.model.architecture} caches {kind}; valid: "
            f"{', '.join(fitting)}"
        )
    if serving.page_size is not None and "page_size" not in taken:
        raise ConfigError(
            f"--page-size: got {serving.page_size} with --preset {name}, whose pages have one size; leave it out"
        )
    found: dict[str, Any] = {"dtype": stored.dtype}
    if mla is None:
        found |= {"kv_heads": facts.kv_heads, "head_dim": facts.head_dim}
    else:
        found |= {"latent_dim": mla.kv_lora_rank, "rope_dim": mla.qk_rope_head_dim}
    if "total_layers" in taken and taken["total_layers"].default is inspect.Parameter.empty:
        found["total_layers"] = facts.model.layers
    if serving.page_size is not None:
        found["page_size"] = serving.page_size
    if stored.quant is not None:
        found["kv_cache_dtype"] = _kv_cache_dtype(stored, str(name), "kv_cache_dtype" in taken)
    return found


def _fits(name: str, *, latent: bool) -> bool:
    taken = inspect.signature(getattr(presets, name)).parameters
    return ("latent_dim" if latent else "kv_heads") in taken


def _kv_cache_dtype(stored: Stored, name: str, has_words: bool) -> str:
    """The preset's word for how KV is stored."""
    words: Sequence[KVCacheDType] = get_args(KVCacheDType) if has_words else ()
    for word in words:
        if per_tensor(word) == stored.quant:
            return word
    also = ", fp8-static or int8-static" if words else ""
    source = f"the checkpoint's {stored.source} says otherwise" if stored.source else "--kv-dtype says otherwise"
    raise ConfigError(
        f"--preset: got {name!r}, which says itself how KV is stored, and {source}; give --kv-dtype {stored.dtype}{also}, or "
        "a preset of such a cache (`kvgen list --presets`)"
    )

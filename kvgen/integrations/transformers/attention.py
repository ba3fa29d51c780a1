"""The attention and mask functions called "kvgen"."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from kvgen.errors import ArgumentError
from kvgen.integrations.transformers import versions
from kvgen.integrations.transformers.cache import KvgenLayer
from kvgen.integrations.transformers.masks import check_mask
from kvgen.integrations.transformers.paged import kernels_of, paged_cache_of, update_by_attention
from kvgen.integrations.transformers.sets import Attention

NAME: Final = "kvgen"


def register() -> None:
    """Make attn_implementation="kvgen" known, to continuous batching too; again does nothing new.

    Raises ImportError for a transformers that `versions.KNOWN` does not have.
    """
    versions.check()
    AttentionInterface.register(NAME, kvgen_attention)
    AttentionMaskInterface.register(NAME, kvgen_mask)
    theirs = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if not hasattr(theirs, "__wrapped__"):
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _keeping_kvgen(theirs)
    if versions.MODULES_UPDATE and not hasattr(PagedAttentionCache.update, "kvgen"):
        PagedAttentionCache.update = update_by_attention(PagedAttentionCache.update, NAME)


def _keeping_kvgen(theirs: Callable[..., None]) -> Callable[..., None]:
    """The check of attn_implementation by continuous batching, whose list of names is fixed: with "kvgen" in it."""

    @functools.wraps(theirs)
    def switch_to_cb_friendly_attn(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            theirs(manager, model, *args, **kwargs)

    return switch_to_cb_friendly_attn


def kvgen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The 2-D mask of padding as it was given; kernels know the rest. Raises ArgumentError for a mask that they do not know."""
    check_mask(mask_function)
    return attention_mask


# torch.compile leaves it out: it would trace launchers, call by call, for nothing.
@torch.compiler.disable(recursive=True)  # type: ignore[untyped-decorator]
def kvgen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query `[B, Hq, S, D]` over everything that the layer of `key` has cached, these rows included: `[B, S, Hq, Dv]`.

    In continuous batching the rows of all requests are one `[1, H, T, D]`, and belong to a PagedAttentionCache: `cache`, or
    the one that has marked `key`.
    """
    paged = cache if isinstance(cache, PagedAttentionCache) else paged_cache_of(key)
    if paged is not None:
        _check(module, query, attention_mask, dropout, kwargs)
        kernels = kernels_of(paged, module, query)
        number: Any = module.layer_idx
        _hold(kernels.attention(number), query, key, scaling, softcap, sliding_window, s_aux)
        return kernels.attend(paged, number, (query, key, value), s_aux, kwargs), None
    layer = getattr(key, "_kvgen", None) or _projected(module)
    if not isinstance(layer, KvgenLayer) or layer.attention is None:
        raise ArgumentError(_without_cache(module, kwargs))
    owner = layer.owner
    owner.taken()
    _check(module, query, attention_mask, dropout, kwargs)
    _hold(layer.attention, query, key, scaling, softcap, sliding_window, s_aux)
    return owner.attend(layer, query, key, value, attention_mask, s_aux), None


def _without_cache(module: torch.nn.Module, given: Mapping[str, Any]) -> str:
    """The message for rows that no cache of kvgen holds."""
    name = type(module).__name__
    if "cu_seq_lens_q" in given:
        return (
            f"attn_implementation: got 'kvgen' in continuous batching for rows of {name} that no PagedAttentionCache was updated "
            "with; use generate() with a KvgenCache, or attn_implementation='sdpa'"
        )
    return (
        f"{versions.ARGUMENT}: attn_implementation='kvgen' got rows of {name} that no KvgenCache holds; pass "
        f"{versions.ARGUMENT}=KvgenCache(model.config, max_tokens=...). For guidance_scale and assistant_early_exit generate() "
        "calls the model with another cache: leave them out, or use another attn_implementation. An assistant_model gets "
        "another one than 'kvgen'"
    )


def _check(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    given: Mapping[str, Any],
) -> None:
    """Raise ArgumentError for what kernels do not compute."""
    if given.get("output_attentions"):
        raise ArgumentError(
            "output_attentions: got True; kernels do not write the probabilities out; leave it out, or use "
            "attn_implementation='eager'"
        )
    if not getattr(getattr(module, "config", None), "is_causal", True):
        raise ArgumentError(
            "config.is_causal: got False, tokens that see later ones; kernels of attn_implementation='kvgen' are causal; use "
            "another attn_implementation"
        )
    if not getattr(module, "is_causal", True):
        raise ArgumentError(
            f"attn_implementation: got 'kvgen' for {type(module).__name__}, whose tokens see later ones; use another "
            "attn_implementation"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ArgumentError(
            f"attention_mask: got {attention_mask.dim()} dimensions; padding is `[batch, tokens]`; masks of your own need "
            "another attn_implementation"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise ArgumentError(
            "attn_implementation: got 'kvgen' with gradients; its kernels have none; call it under torch.no_grad()"
        )
    if dropout:
        raise ArgumentError(f"dropout: got {dropout}; kernels leave nothing out; call model.eval()")


def _projected(module: torch.nn.Module) -> KvgenLayer | None:
    """The layer that was updated last, where the module projects what its cache holds up before attention."""
    layer = KvgenLayer.last()
    number = getattr(module, "layer_idx", None)
    if layer is None or layer.attention is None or not layer.attention.latent or number != layer.index:
        return None
    return layer


def _hold(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """What the model asks for is what its config was read as."""
    heads, read_heads = (query.shape[1], key.shape[1]), (attention.q_heads, attention.kv_heads)
    if heads != read_heads:
        raise ArgumentError(
            f"heads: got {heads[0]} of q and {heads[1]} of k from the model, where its config was read as {read_heads[0]} and "
            f"{read_heads[1]}; a model in shards needs KvgenCache(..., tp=...), the GPUs that share its heads"
        )
    asked = {
        "scaling": (attention.scale if scale is None else scale, attention.scale),
        "softcap": (softcap or 0.0, attention.softcap or 0.0),
        "sliding_window": (window or attention.window or 0, attention.window or 0),
        "sinks": (sinks is not None, attention.sinks),
    }
    for name, (got, read) in asked.items():
        if not math.isclose(got, read, rel_tol=1e-5):
            raise ArgumentError(
                f"{name}: got {got} from the model, where its config was read as {read}; use another attn_implementation, and "
                "report it with the config"
            )

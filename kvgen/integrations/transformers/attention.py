"""The attention and mask functions called "kvgen"."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from transformers import AttentionInterface
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.masking_utils import AttentionMaskInterface

from kvgen.errors import ArgumentError
from kvgen.integrations.transformers.cache import KvgenLayer
from kvgen.integrations.transformers.paged import kernels_of
from kvgen.integrations.transformers.sets import Attention

NAME: Final = "kvgen"


def register() -> None:
    """Make attn_implementation="kvgen" known, to continuous batching too; again does nothing new.

    Raises ImportError for a transformers that is not 5.
    """
    if transformers.__version__.split(".")[0] != "5":
        raise ImportError(
            f"kvgen.integrations.transformers works with transformers 5 (5.23 is tested); got {transformers.__version__}; pip "
            "install 'transformers>=5,<6'"
        )
    AttentionInterface.register(NAME, kvgen_attention)
    AttentionMaskInterface.register(NAME, kvgen_mask)
    theirs = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if not hasattr(theirs, "__wrapped__"):
        ContinuousBatchingManager.switch_to_cb_friendly_attn = _keeping_kvgen(theirs)


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
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The 2-D mask of padding as it was given; kernels know the rest. Raises ArgumentError for masks that show later tokens."""
    if getattr(mask_function, "__qualname__", "").startswith("or_masks"):
        raise ArgumentError(
            "attn_implementation: got 'kvgen' for tokens that see later ones (images, prefixes); its masks are causal, with "
            "windows and chunks; use another attn_implementation"
        )
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

    `cache`: the PagedAttentionCache of continuous batching, whose rows of all requests are one `[1, H, T, D]`.
    """
    if isinstance(cache, PagedAttentionCache):
        _check(module, query, attention_mask, dropout)
        kernels = kernels_of(cache, module, query)
        number: Any = module.layer_idx
        _hold(kernels.attention(number), query, key, scaling, softcap, sliding_window, s_aux)
        return kernels.attend(cache, number, (query, key, value), s_aux, kwargs), None
    layer = getattr(key, "_kvgen", None) or _projected(module)
    if not isinstance(layer, KvgenLayer) or layer.attention is None:
        raise ArgumentError(
            f"past_key_values: attn_implementation='kvgen' got rows of {type(module).__name__} that no KvgenCache holds; pass "
            "past_key_values=KvgenCache(model.config, max_tokens=...)"
        )
    owner = layer.owner
    owner.taken()
    _check(module, query, attention_mask, dropout)
    _hold(layer.attention, query, key, scaling, softcap, sliding_window, s_aux)
    return owner.attend(layer, query, key, value, attention_mask, s_aux), None


def _check(module: torch.nn.Module, query: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float) -> None:
    """Raise ArgumentError for what kernels do not compute."""
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

"""The attention and mask functions called "kvgen"."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvgen.errors import ArgumentError
from kvgen.integrations.transformers.cache import KvgenLayer
from kvgen.integrations.transformers.sets import Attention

NAME: Final = "kvgen"


def register() -> None:
    """Make attn_implementation="kvgen" known; again does nothing new. Raises ImportError for a transformers that is not 5."""
    if transformers.__version__.split(".")[0] != "5":
        raise ImportError(
            f"kvgen.integrations.transformers works with transformers 5 (5.23 is tested); got {transformers.__version__}; pip "
            "install 'transformers>=5,<6'"
        )
    AttentionInterface.register(NAME, kvgen_attention)
    AttentionMaskInterface.register(NAME, kvgen_mask)


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query `[B, Hq, S, D]` over everything that the layer of `key` has cached, these rows included: `[B, S, Hq, Dv]`."""
    layer = getattr(key, "_kvgen", None) or _projected(module)
    if not isinstance(layer, KvgenLayer) or layer.attention is None:
        raise ArgumentError(
            f"past_key_values: attn_implementation='kvgen' got rows of {type(module).__name__} that no KvgenCache holds; pass "
            "past_key_values=KvgenCache(model.config, max_tokens=...)"
        )
    owner = layer.owner
    owner.taken()
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
    _hold(layer.attention, query.shape[1], scaling, softcap, sliding_window, s_aux)
    return owner.attend(layer, query, key, value, attention_mask, s_aux), None


def _projected(module: torch.nn.Module) -> KvgenLayer | None:
    """The layer that was updated last, where the module projects what its cache holds up before attention."""
    layer = KvgenLayer.last()
    number = getattr(module, "layer_idx", None)
    if layer is None or layer.attention is None or not layer.attention.latent or number != layer.index:
        return None
    return layer


def _hold(
    attention: Attention,
    heads: int,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """What the model asks for is what its config was read as."""
    asked = {
        "heads": (heads, attention.q_heads),
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

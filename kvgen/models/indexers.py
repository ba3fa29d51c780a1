"""Indexers that pick the tokens of latent rows (DeepSeek V3.2, GLM-5, A.X-K2, HY-V4): which layers have one, its RoPE and norm.

Field names and rules are those of transformers 5.23. Its code of GLM rotates pairs (2i, 2i + 1) whatever indexer_rope_interleave
says; the field is read as vLLM reads it.
"""

from __future__ import annotations

from typing import Final

from kvgen.models.family import Index
from kvgen.models.fields import Fields
from kvgen.models.outside import HEAD_DIM, HEADS, LAYERS, POSITIONS
from kvgen.schema.model import Indexer, Rope
from kvgen.schema.norm import LayerNorm

_WORDS: Final = {"full": "full", "shared": "shared"}
_LETTERS: Final = {"F": "full", "S": "shared", **_WORDS}


def indexers(index: Index, text: Fields, count: int) -> list[Indexer]:
    """The indexer of each layer; one with `source` takes the picks of the last layer before it that has its own."""
    own = Indexer(
        heads=text.integer("index_n_heads", default=index.heads, high=HEADS),
        dim=text.integer("index_head_dim", default=128, high=HEAD_DIM),
        topk=text.integer("index_topk", default=2048, high=POSITIONS),
    )
    field, full = _full(index, text, count)
    if not full[0]:
        text.fail(
            field, "layer 0 would take picks of a layer before it; valid: what gives layer 0 an indexer of its own"
        )
    found: list[Indexer] = []
    last = 0
    for layer in range(count):
        last = layer if full[layer] else last
        found.append(own if full[layer] else own.model_copy(update={"source": last}))
    return found


def index_rope(index: Index, text: Fields, rope: Rope) -> Rope:
    """RoPE of the indexer's q and keys: the angles of the latent row's, on a part of each head."""
    rotary_dim, dim = rope.dim or 0, text.integer("index_head_dim", default=128, high=HEAD_DIM)
    if rotary_dim > dim:
        text.fail(
            "index_head_dim",
            f"RoPE rotates {rotary_dim} elements of each head, qk_rope_head_dim; valid: from {rotary_dim}",
        )
    pairs = text.flag("indexer_rope_interleave", default=index.interleaved)
    return rope.model_copy(update={"style": "interleaved" if pairs else "neox", "part": index.part})


def index_norm(index: Index, eps: float) -> LayerNorm:
    """The layer norm of the indexer's keys; `eps` is the config's."""
    return LayerNorm(eps=index.eps or eps, bias=True, weight_dtype="f32" if index.f32 else "same")


def _full(index: Index, text: Fields, count: int) -> tuple[str, list[bool]]:
    """(the field that says it, whether each layer has an indexer)."""
    if index.shared and text.has("indexer_types"):
        return "indexer_types", _listed(text, "indexer_types", text.items("indexer_types", length=count), _WORDS)
    if index.schedule and text.has("index_topk_pattern"):
        value = text.values["index_topk_pattern"]
        if not isinstance(value, str | list) or len(value) != count:
            text.fail("index_topk_pattern", f"it must be a string or a list; valid: {count} of F and S, a layer each")
        return "index_topk_pattern", _listed(text, "index_topk_pattern", list(value), _LETTERS)
    every, first = index.every, 2
    if index.schedule:
        every = max(1, text.integer("index_topk_freq", default=every, low=0, high=LAYERS))
        first = text.integer("index_skip_topk_offset", default=first, low=0, high=LAYERS)
    return "index_skip_topk_offset", [max(layer - first + 1, 0) % every == 0 for layer in range(count)]


def _listed(text: Fields, key: str, values: list[object], words: dict[str, str]) -> list[bool]:
    listed = Fields({str(i): value for i, value in enumerate(values)}, text.name(key))
    found = []
    for i in range(len(values)):
        if not listed.has(str(i)):
            listed.fail(str(i), f"it says whether layer {i} has an indexer; valid: {', '.join(words)}")
        found.append(listed.choice(str(i), words, default="full") == "full")
    return found

"""Layers with a window of rows and compressed entries (DeepSeek V4, V4.1): their config.json -> its facts, layer by layer.

V4's field names are those of DeepSeek's published files (`compress_ratios`, one number a layer, MTP's behind them) and of
transformers 5.23 (`layer_types`, `compress_rates`); V4.1's those of its published file. Where a field is absent, V4's value is
transformers' default; V4.1 has no class there yet, and its fields are required.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvgen.models.family import Family, FamilyRope
from kvgen.models.fields import Fields
from kvgen.models.layers import CacheDtype, Checkpoint, LayerFacts, Norm
from kvgen.models.model_facts import model_of
from kvgen.models.outside import HEAD_DIM, HEADS, LAYERS, POSITIONS
from kvgen.models.rope import layer_ropes
from kvgen.schema.model import Compressed, Indexer, Rope, YarnScaling

_KINDS: Final = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_ROPE: Final = FamilyRope(style="interleaved", thetas=())
_LENGTH: Final = 1_048_576


@dataclass(frozen=True)
class _Sizes:
    """Sizes that all layers share; `plain` is the RoPE of layers without entries, `compressed` of those with them."""

    heads: int
    dim: int
    window: int
    eps: float
    plain: Rope
    compressed: Rope


def read_compressed(family: Family, text: Fields, architecture: str, dtype: CacheDtype) -> Checkpoint:
    """The facts of a text model with compressed entries; ConfigError names the field that is wrong or missing."""
    sizes = _sizes(text, architecture)
    count = text.integer("num_hidden_layers", high=LAYERS)
    layers = _shared_layers(text, architecture, count) if family.compressed == "shared" else _own_layers(text, count)
    own, names = family.compressed == "own", _names(layers)
    found = [_facts(i, names[i], entries, sizes, q_norm=own) for i, entries in enumerate(layers)]
    kinds = [fact for i, fact in enumerate(found) if fact.kind not in {one.kind for one in found[:i]}]
    pattern = [next(i for i, kind in enumerate(kinds) if kind.kind == fact.kind) for fact in found]
    return Checkpoint(
        q_heads=sizes.heads,
        kv_heads=1,
        head_dim=sizes.dim,
        dtype=dtype,
        stores="k",
        model=model_of(architecture, kinds, pattern, rsqrt=None),
        kinds=tuple(kinds),
        pattern=tuple(pattern),
        notes=family.notes,
    )


def _sizes(text: Fields, architecture: str) -> _Sizes:
    text.require(architecture, "num_attention_heads", "num_hidden_layers")
    dim = text.integer("head_dim", default=512, high=HEAD_DIM)
    if text.integer("num_key_value_heads", default=1, high=HEADS) != 1:
        text.fail("num_key_value_heads", "the row that a token keeps is key and value of all heads; valid: 1")
    share = text.optional_number("partial_rotary_factor", low=0.0, high=1.0)
    rotary_dim = text.integer("qk_rope_head_dim", default=64 if share is None else int(share * dim), low=2, high=dim)
    if rotary_dim % 2:
        text.fail("qk_rope_head_dim", "RoPE rotates pairs of elements; valid: an even number")
    return _Sizes(
        heads=text.integer("num_attention_heads", high=HEADS),
        dim=dim,
        window=text.integer("sliding_window", default=128, high=POSITIONS),
        eps=text.number("rms_norm_eps", default=1e-6, low=1e-30, high=1.0),
        plain=_rope(text, rotary_dim, "main", text.number("rope_theta", default=10_000.0, low=1.001, high=1e12)),
        compressed=_rope(
            text, rotary_dim, "compress", text.number("compress_rope_theta", default=160_000.0, low=1.001, high=1e12)
        ),
    )


def _rope(text: Fields, rotary_dim: int, label: str, theta: float) -> Rope:
    """RoPE of a row's last `rotary_dim` elements: "main" without scaling, "compress" with the config's.

    YaRN multiplies cos and sin by nothing here: DeepSeek's code has no such factor.
    """
    given, key = text.object("rope_parameters"), "rope_parameters"
    if given is not None and any(given.has(name) for name in ("main", "compress")):
        inner = given.object(label)
        found: Mapping[str, Any] = inner.values if inner is not None else {}
    else:
        key = "rope_scaling" if text.has("rope_scaling") else key
        flat = text.object(key)
        found = flat.values if flat is not None and label == "compress" else {}
        found = {name: value for name, value in found.items() if name != "rope_theta"}
    found = {name: value for name, value in found.items() if name != "partial_rotary_factor"}
    if found.get("attn_factor") is not None:
        Fields(found, key).fail("attn_factor", "DeepSeek's code multiplies cos and sin by nothing; valid: null")
    length = {"max_position_embeddings": text.integer("max_position_embeddings", default=_LENGTH, high=POSITIONS)}
    row = replace(_ROPE, theta=theta)
    made = layer_ropes(
        Fields({key: found, **length}, text.where), row, {"full": rotary_dim}, "qk_rope_head_dim", _LENGTH
    )
    assert made["full"] is not None
    rope = made["full"].rope.model_copy(update={"dim": rotary_dim, "part": "last"})
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.attention_factor is None:
        scaling = rope.scaling.model_copy(update={"attention_factor": 1.0, "mscale": None, "mscale_all_dim": None})
        rope = rope.model_copy(update={"scaling": scaling})
    return rope


def _own_layers(text: Fields, count: int) -> list[Compressed | None]:
    """V4: each layer has entries of its own, or none. An indexer picks among those of 4 tokens."""
    rates = _rates(text, count)
    index = Indexer(
        heads=text.integer("index_n_heads", default=64, high=HEADS),
        dim=text.integer("index_head_dim", default=128, high=HEAD_DIM),
        topk=text.integer("index_topk", default=512, high=POSITIONS),
    )
    sparse = Compressed(rate=4, overlap=True, indexer=index)
    return [
        None if rate <= 1 else sparse.model_copy(update={"rate": rate}) if rate == 4 else Compressed(rate=rate)
        for rate in rates
    ]


def _rates(text: Fields, count: int) -> list[int]:
    """Tokens an entry of each layer, 0 where it has none. Numbers behind the last layer's are those of MTP layers."""
    if text.has("layer_types") or not text.has("compress_ratios"):
        rates = _KINDS | _renamed(text)
        if not text.has("layer_types"):  # transformers' default: two heavy layers, then sparse ones at odd places
            return [
                rates["compressed_sparse_attention" if i >= 2 and (i - 2) % 2 else "heavily_compressed_attention"]
                for i in range(count)
            ]
        words = {str(i): word for i, word in enumerate(text.items("layer_types", length=count))}
        listed = Fields(words, text.name("layer_types"))
        choices = {name: name for name in _KINDS}
        return [
            rates[listed.choice(str(i), choices, default="")]
            if listed.has(str(i))
            else listed.fail(str(i), f"valid: {', '.join(_KINDS)}")
            for i in range(count)
        ]
    return _listed(text, count, (0, 1, 4, 128))


def _renamed(text: Fields) -> dict[str, int]:
    """`compress_rates` by kind of layers."""
    given = text.object("compress_rates")
    names = [name for name in _KINDS if given is not None and given.has(name)]
    found = {name: given.integer(name, high=POSITIONS) for name in names} if given is not None else {}
    if given is not None and found.get("compressed_sparse_attention", 4) != 4:
        given.fail("compressed_sparse_attention", "these entries are pooled from two windows of 4 tokens; valid: 4")
    return found


def _listed(text: Fields, count: int, valid: Sequence[int]) -> list[int]:
    value = text.values["compress_ratios"]
    if not isinstance(value, list) or not count <= len(value) <= LAYERS:
        text.fail(
            "compress_ratios", f"it must be a list; valid: {count} entries, one a layer, then those of MTP layers"
        )
    for i, rate in enumerate(value):
        if isinstance(rate, bool) or not isinstance(rate, int) or rate not in valid:
            Fields({str(i): rate}, text.name("compress_ratios")).fail(
                str(i), f"tokens an entry; valid: {', '.join(map(str, valid))}"
            )
    return list(value[:count])


def _shared_layers(text: Fields, architecture: str, count: int) -> list[Compressed | None]:
    """V4.1: a layer reads the entries of the last one of `kv_source_layer_ids` up to itself, by the picks of the last one of
    `index_source_layer_ids`; behind `candidate_source_layer_id`, picks are among that layer's candidate blocks."""
    text.require(architecture, "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "index_topk")
    rates = _listed(text, count, (0, 1, 2))
    sources, pickers = (_numbers(text, name, count) for name in ("kv_source_layer_ids", "index_source_layer_ids"))
    index = Indexer(
        heads=text.integer("index_n_heads", high=HEADS),
        dim=text.integer("index_head_dim", default=128, high=HEAD_DIM),
        topk=text.integer("index_topk", high=POSITIONS),
    )
    candidates = text.optional_integer("candidate_source_layer_id", low=0, high=count - 1)
    found: list[Compressed | None] = []
    for i, rate in enumerate(rates):
        if not rate:
            found.append(None)
            continue
        source, picker = (
            _last(text, "kv_source_layer_ids", sources, i),
            _last(text, "index_source_layer_ids", pickers, i),
        )
        if rates[source] != rate:
            text.fail(
                "compress_ratios",
                f"layer {i} reads the entries of layer {source}, of {rates[source]} tokens; valid: equal numbers",
            )
        indexer = index.model_copy(update={"source": None if picker == i else picker})
        if candidates is not None and i > candidates and picker > candidates:
            indexer = indexer.model_copy(update=_candidates(text, candidates))
        found.append(Compressed(rate=rate, source=None if source == i else source, indexer=indexer))
    return found


def _candidates(text: Fields, source: int) -> dict[str, int]:
    return {
        "candidate_source": source,
        "candidate_blocks": text.integer("candidate_topk_blocks", high=POSITIONS),
        "candidate_block": text.integer("candidate_block_size", high=POSITIONS),
    }


def _numbers(text: Fields, key: str, count: int) -> list[int]:
    value = text.values[key]
    if not isinstance(value, list) or not 1 <= len(value) <= count:
        text.fail(key, f"it must be a list of layers; valid: 1 to {count} entries")
    listed = Fields({str(i): number for i, number in enumerate(value)}, text.name(key))
    return [listed.integer(str(i), low=0, high=count - 1) for i in range(len(value))]


def _last(text: Fields, key: str, layers: Sequence[int], layer: int) -> int:
    before = [one for one in layers if one <= layer]
    if not before:
        text.fail(
            key, f"layer {layer} reads what such a layer up to itself has made; valid: one of 0 to {layer} among them"
        )
    return max(before)


def _facts(index: int, kind: str, entries: Compressed | None, sizes: _Sizes, *, q_norm: bool) -> LayerFacts:
    return LayerFacts(
        index=index,
        kind=kind,
        q_heads=sizes.heads,
        kv_heads=1,
        head_dim_k=sizes.dim,
        head_dim_v=sizes.dim,
        scale=float(sizes.dim**-0.5),
        window=sizes.window,
        sinks=True,
        rope=sizes.plain if entries is None else sizes.compressed,
        q_norm=Norm(sizes.dim, sizes.eps, weight=False) if q_norm else None,
        k_norm=Norm(sizes.dim, sizes.eps, multiply="before"),
        compressed=entries,
    )


def _names(layers: Sequence[Compressed | None]) -> list[str]:
    """The kind of each layer. One whose name layers of another kind have already carries its first layer's number: "c2_8"."""
    known: dict[str, Compressed | None] = {}
    found = []
    for i, entries in enumerate(layers):
        same = next((name for name, one in known.items() if one == entries), None)
        name = same or (f"{_name(entries)}_{i}" if _name(entries) in known else _name(entries))
        known[name] = entries
        found.append(name)
    return found


def _name(entries: Compressed | None) -> str:
    """ "swa" for a window alone, "c4" for entries of 4 tokens; "c2_of_8" reads layer 8's; "c1_of_20_by_24" by layer 24's picks,
    "c1_of_20_by_own" by its own."""
    if entries is None:
        return "swa"
    name = f"c{entries.rate}"
    if entries.source is None:
        return name
    picker = entries.indexer.source if entries.indexer is not None else entries.source
    by = "" if picker == entries.source else "_by_own" if picker is None else f"_by_{picker}"
    return f"{name}_of_{entries.source}{by}"

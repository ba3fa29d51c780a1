"""config.json -> facts: a reader for each family of architectures.

A field that a family's published configs leave out takes the value transformers gives it (the default of its config
class), written at the reader; any other missing field is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from kvgen.models.fields import POSITIONS, Fields
from kvgen.models.layers import LayerFacts, Norm
from kvgen.models.rope import gemma3_rope, rope_facts
from kvgen.spec.model import LayerKind, Mla, Model, Rope
from kvgen.spec.norm import RmsNorm

HEADS = 4096
HEAD_DIM = 1024
LAYERS = 1024
RANK = 2**20

CacheDtype = Literal["bf16", "f16", "f32"]
# An engine keeps the cache in the checkpoint's type unless told otherwise; the newest published configs omit it.
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_LAYER_KINDS = {"sliding_attention": "local", "full_attention": "full"}


@dataclass(frozen=True)
class Checkpoint:
    """What a config.json says about a model's cache and attention.

    For latent attention `kv_heads` is 1, `head_dim` the cached row's elements and `stores` "k". `norm` is that of q and k
    before RoPE, of a latent row's latent part.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: CacheDtype
    stores: Literal["kv", "k"]
    model: Model
    norm: RmsNorm | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def layers(self) -> list[LayerFacts]:
        """The model's layers, first to last."""
        return [self._layer(i) for i in range(self.model.layers or 0)]

    def _layer(self, index: int) -> LayerFacts:
        model = self.model
        window = model.layer_window(index)
        local = window is not None and model.window_pattern is not None
        rope = model.rope
        if rope is not None and rope.local_theta is not None:
            plain = Rope(style=rope.style, theta=rope.local_theta, dim=rope.dim, part=rope.part)
            rope = plain if local else rope.model_copy(update={"local_theta": None})
        norm = None
        if self.norm is not None:
            norm = Norm(
                dim=model.mla.kv_lora_rank
                if model.mla is not None
                else self.norm.weights(self.kv_heads, self.head_dim),
                eps=self.norm.eps,
                over=self.norm.over,
                offset=self.norm.weight_offset,
                multiply=self.norm.multiply,
            )
        return LayerFacts(
            index=index,
            kind="full" if window is None else "local",
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim_k=self.head_dim,
            head_dim_v=self.head_dim if model.mla is None else model.mla.kv_lora_rank,
            scale=model.softmax_scale(self.head_dim),
            window=window,
            softcap=model.logit_softcap,
            sinks=model.sinks,
            alibi=model.alibi,
            rope=rope,
            q_norm=norm if model.mla is None else None,
            k_norm=norm,
            mla=model.mla,
        )


Reader = Callable[[Fields, str], Checkpoint]


def llama(fields: Fields, architecture: str) -> Checkpoint:
    """Llama 1 to 3.3: every layer full, RoPE base 10000 where the config has none (Llama 2)."""
    head_dim = _head_dim(fields, architecture)
    return _checkpoint(fields, architecture, head_dim, rope=rope_facts(fields, head_dim, theta=10_000.0))


def mistral(fields: Fields, architecture: str) -> Checkpoint:
    """Mistral: `sliding_window` on every layer; null means none, an absent field 4096."""
    head_dim = _head_dim(fields, architecture)
    absent = 4096 if "sliding_window" not in fields.values else None
    window = fields.optional_integer("sliding_window", high=POSITIONS) or absent
    return _checkpoint(
        fields, architecture, head_dim, rope=rope_facts(fields, head_dim, theta=10_000.0), windows=(window, None)
    )


def qwen2(fields: Fields, architecture: str) -> Checkpoint:
    """Qwen 2 and 2.5: `sliding_window` holds only with `use_sliding_window`, from layer `max_window_layers` (28) on."""
    head_dim = _head_dim(fields, architecture)
    rope = rope_facts(fields, head_dim, theta=10_000.0)
    return _checkpoint(fields, architecture, head_dim, rope=rope, windows=_qwen_windows(fields))


def qwen3(fields: Fields, architecture: str) -> Checkpoint:
    """Qwen 3: as Qwen 2, head dim 128 unless given, RMS norm over each head of Q and K."""
    head_dim = _head_dim(fields, architecture, default=128)
    rope = rope_facts(fields, head_dim, theta=10_000.0)
    return _checkpoint(fields, architecture, head_dim, rope=rope, windows=_qwen_windows(fields), qk_norm="head")


def qwen3_moe(fields: Fields, architecture: str) -> Checkpoint:
    """Qwen 3 mixture of experts: as Qwen 3, but a used window holds on every layer."""
    head_dim = _head_dim(fields, architecture)
    used = fields.flag("use_sliding_window", default=False)
    window = fields.integer("sliding_window", high=POSITIONS) if used else None
    rope = rope_facts(fields, head_dim, theta=10_000.0)
    return _checkpoint(fields, architecture, head_dim, rope=rope, windows=(window, None), qk_norm="head")


def gemma3(fields: Fields, architecture: str) -> Checkpoint:
    """Gemma 3: the text model, nested in the multimodal ones; local layers with a RoPE base of their own.

    google/gemma-3-4b-it states neither heads nor head dim: 8 query and 4 KV heads of 256, window 4096, every sixth
    layer full, bases 1e6 and 1e4 and query_pre_attn_scalar 256 are the config class's defaults.
    """
    text = fields.object("text_config") or fields
    text.require(architecture, "num_hidden_layers")
    head_dim = text.integer("head_dim", default=256, high=HEAD_DIM)
    layers = text.integer("num_hidden_layers", high=LAYERS)
    key = "sliding_window_pattern" if text.has("sliding_window_pattern") else "_sliding_window_pattern"
    every = text.integer(key, default=6, high=LAYERS)
    kinds: list[LayerKind] = ["local" if (i + 1) % every else "full" for i in range(layers)]
    window, pattern = _windows(text, text.integer("sliding_window", default=4096, high=POSITIONS), kinds)
    model = Model(
        architecture=architecture,
        layers=layers,
        rope=gemma3_rope(text, head_dim, has_local=pattern is not None),
        window=window,
        window_pattern=pattern,
        qk_norm="head",
        logit_softcap=text.optional_number("attn_logit_softcapping", low=1e-3, high=1e6),
        query_pre_attn_scalar=text.number("query_pre_attn_scalar", default=256.0, low=1e-3, high=1e6),
    )
    q_heads = text.integer("num_attention_heads", default=8, high=HEADS)
    kv_heads = text.integer("num_key_value_heads", default=4, high=HEADS)
    _check_group(text, q_heads, kv_heads, "num_key_value_heads")
    norm = RmsNorm(eps=_eps(text), weight_offset=1.0, multiply="before")
    return Checkpoint(q_heads, kv_heads, head_dim, _dtype(text, fields), "kv", model, norm)


def gemma2(fields: Fields, architecture: str) -> Checkpoint:
    """Gemma 2: every other layer local, the first one too; scores capped at 50 unless the config says otherwise (null: not)."""
    head_dim = _head_dim(fields, architecture, default=256)
    layers = fields.integer("num_hidden_layers", high=LAYERS)
    kinds: list[LayerKind] = ["full" if i % 2 else "local" for i in range(layers)]
    windows = _windows(fields, fields.integer("sliding_window", default=4096, high=POSITIONS), kinds)
    found = _checkpoint(
        fields, architecture, head_dim, rope=rope_facts(fields, head_dim, theta=10_000.0), windows=windows
    )
    absent = 50.0 if "attn_logit_softcapping" not in fields.values else None
    facts = {
        "logit_softcap": fields.optional_number("attn_logit_softcapping", low=1e-3, high=1e6) or absent,
        "query_pre_attn_scalar": fields.number("query_pre_attn_scalar", default=256.0, low=1e-3, high=1e6),
    }
    return replace(found, model=found.model.model_copy(update=facts))


def phi3(fields: Fields, architecture: str) -> Checkpoint:
    """Phi-3 and Phi-4-mini: fused QKV (the cache is a usual one), partial RoPE, LongRoPE in the 128k models."""
    head_dim = _head_dim(fields, architecture)
    window = fields.optional_integer("sliding_window", high=POSITIONS)
    rope = rope_facts(fields, head_dim, theta=10_000.0)
    return _checkpoint(fields, architecture, head_dim, rope=rope, windows=(window, None))


def falcon(fields: Fields, architecture: str) -> Checkpoint:
    """Falcon: one KV head with `multi_query` (though its 7B says num_kv_heads 71); groups in the newer decoder."""
    fields.require(architecture, "hidden_size", "num_attention_heads", "num_hidden_layers")
    q_heads = fields.integer("num_attention_heads", high=HEADS)
    head_dim = _divided_head_dim(fields, q_heads)
    kv_heads = q_heads
    if fields.flag("new_decoder_architecture", default=False) or not fields.flag("multi_query", default=True):
        kv_heads = fields.integer("num_kv_heads", default=q_heads, high=HEADS)
    else:
        kv_heads = 1
    _check_group(fields, q_heads, kv_heads, "num_kv_heads")
    alibi = fields.flag("alibi", default=False)
    model = Model(
        architecture=architecture,
        layers=fields.integer("num_hidden_layers", high=LAYERS),
        rope=None if alibi else rope_facts(fields, head_dim, theta=10_000.0),
        alibi=alibi,
    )
    return Checkpoint(q_heads, kv_heads, head_dim, _dtype(fields), "kv", model)


def bloom(fields: Fields, architecture: str) -> Checkpoint:
    """BLOOM: ALiBi, a KV head a query head; two spellings of each field, of which older configs mix some."""
    keys = [
        next((k for k in both if fields.has(k)), both[0])
        for both in (("n_head", "num_attention_heads"), ("hidden_size", "n_embed"), ("n_layer", "num_hidden_layers"))
    ]
    return _with_alibi(fields, architecture, keys)


def mpt(fields: Fields, architecture: str) -> Checkpoint:
    """MPT: ALiBi, unless attn_config says otherwise; the scale may be given. Clipping of q, k and v happens before append."""
    attention = fields.object("attn_config") or Fields({}, "attn_config")
    if attention.flag("qk_ln", default=False):
        attention.fail("qk_ln", "append has RMS norms of q and k, no layer norms; valid: false")
    found = _with_alibi(fields, architecture, ["n_heads", "d_model", "n_layers"])
    kinds = {"multihead_attention": "heads", "multiquery_attention": "one", "grouped_query_attention": "groups"}
    kind = attention.choice("attn_type", kinds, default="heads")
    kv_heads = 1 if kind == "one" else found.q_heads
    if kind == "groups":
        kv_heads = attention.integer("kv_n_heads", high=HEADS)
    _check_group(attention, found.q_heads, kv_heads, "kv_n_heads")
    scale = attention.optional_number("softmax_scale", low=1e-3, high=1e3)
    facts = {
        "alibi": attention.flag("alibi", default=True),
        "query_pre_attn_scalar": scale**-2 if scale is not None else None,
    }
    return replace(found, kv_heads=kv_heads, model=found.model.model_copy(update=facts))


def gpt_oss(fields: Fields, architecture: str) -> Checkpoint:
    """gpt-oss: a sink per query head; layers alternate, the first one local, unless `layer_types` says otherwise."""
    head_dim = _head_dim(fields, architecture, default=64)
    layers = fields.integer("num_hidden_layers", high=LAYERS)
    kinds: list[LayerKind] = ["full" if i % 2 else "local" for i in range(layers)]
    windows = _windows(fields, fields.integer("sliding_window", default=128, high=POSITIONS), kinds)
    rope = rope_facts(fields, head_dim, theta=150_000.0)
    return _checkpoint(fields, architecture, head_dim, rope=rope, windows=windows, sinks=True)


def deepseek(fields: Fields, architecture: str) -> Checkpoint:
    """DeepSeek-V2 and V3, Kimi-K2: latent rows of kv_lora_rank + qk_rope_head_dim, shared by all heads; pairs interleaved."""
    fields.require(
        architecture,
        *("num_attention_heads", "num_hidden_layers", "kv_lora_rank"),
        *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    )
    mla = Mla(
        kv_lora_rank=fields.integer("kv_lora_rank", high=RANK),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", high=HEAD_DIM),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", high=HEAD_DIM),
        v_head_dim=fields.integer("v_head_dim", high=HEAD_DIM),
        q_lora_rank=fields.optional_integer("q_lora_rank", high=RANK),
    )
    if mla.row_dim > HEAD_DIM:
        fields.fail(
            "kv_lora_rank",
            f"with qk_rope_head_dim {mla.qk_rope_head_dim} a row has {mla.row_dim} elements; valid: up to {HEAD_DIM}",
        )
    style: Literal["neox", "interleaved"] = "interleaved" if fields.flag("rope_interleave", default=True) else "neox"
    rope = rope_facts(fields, mla.qk_rope_head_dim, theta=10_000.0, style=style, key="qk_rope_head_dim")
    model = Model(
        architecture=architecture,
        layers=fields.integer("num_hidden_layers", high=LAYERS),
        rope=rope.model_copy(update={"dim": mla.qk_rope_head_dim}),
        mla=mla,
    )
    # HF builds the norm of the latent part with its own default, whatever rms_norm_eps says.
    q_heads = fields.integer("num_attention_heads", high=HEADS)
    return Checkpoint(q_heads, 1, mla.row_dim, _dtype(fields), "k", model, RmsNorm())


READERS: dict[str, Reader] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Phi3ForCausalLM": phi3,
    "FalconForCausalLM": falcon,
    "BloomForCausalLM": bloom,
    "MPTForCausalLM": mpt,
    "MptForCausalLM": mpt,
    "GptOssForCausalLM": gpt_oss,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
}

# Only for configs without `architectures`; a named class that has no reader is never read as its model_type's.
MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MPTForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}


def _checkpoint(
    fields: Fields,
    architecture: str,
    head_dim: int,
    *,
    rope: Rope,
    windows: tuple[int | None, tuple[LayerKind, ...] | None] = (None, None),
    qk_norm: Literal["head"] | None = None,
    sinks: bool = False,
) -> Checkpoint:
    """The shape most families share: absent num_key_value_heads means one KV head per query head."""
    q_heads = fields.integer("num_attention_heads", high=HEADS)
    kv_heads = fields.integer("num_key_value_heads", default=q_heads, high=HEADS)
    _check_group(fields, q_heads, kv_heads, "num_key_value_heads")
    model = Model(
        architecture=architecture,
        layers=fields.integer("num_hidden_layers", high=LAYERS),
        rope=rope,
        window=windows[0],
        window_pattern=windows[1],
        sinks=sinks,
        qk_norm=qk_norm,
    )
    norm = RmsNorm(over=qk_norm, eps=_eps(fields)) if qk_norm is not None else None
    return Checkpoint(q_heads, kv_heads, head_dim, _dtype(fields), "kv", model, norm)


def _with_alibi(fields: Fields, architecture: str, keys: Sequence[str]) -> Checkpoint:
    """A model with ALiBi and no RoPE, whose `keys` have heads, the hidden size and layers."""
    fields.require(architecture, *keys)
    heads, hidden, layers = keys
    q_heads = fields.integer(heads, high=HEADS)
    model = Model(architecture=architecture, layers=fields.integer(layers, high=LAYERS), alibi=True)
    return Checkpoint(q_heads, q_heads, _divided_head_dim(fields, q_heads, hidden), _dtype(fields), "kv", model)


def _eps(fields: Fields) -> float:
    return fields.number("rms_norm_eps", default=1e-6, low=1e-30, high=1.0)


def _dtype(*places: Fields) -> CacheDtype:
    """`dtype` (transformers 5) or `torch_dtype`, in the first place that has one; bf16 where none has."""
    for place in places:
        for key in ("dtype", "torch_dtype"):
            if place.has(key):
                return cast(CacheDtype, place.choice(key, _DTYPES, default="bf16"))
    return "bf16"


def _head_dim(fields: Fields, architecture: str, default: int | None = None) -> int:
    """`head_dim`, else `default`, else hidden_size / num_attention_heads; checks that the shape's fields are there."""
    own = () if fields.has("head_dim") or default is not None else ("hidden_size",)
    fields.require(architecture, "num_attention_heads", "num_hidden_layers", *own)
    if not own:
        return fields.integer("head_dim", default=default, high=HEAD_DIM)
    return _divided_head_dim(fields, fields.integer("num_attention_heads", high=HEADS))


def _divided_head_dim(fields: Fields, q_heads: int, key: str = "hidden_size") -> int:
    hidden = fields.integer(key, high=HEADS * HEAD_DIM)
    if hidden % q_heads or hidden // q_heads > HEAD_DIM:
        fields.fail(
            key,
            f"it is divided among {q_heads} heads; valid: a multiple of {q_heads} that gives each up to {HEAD_DIM}",
        )
    return hidden // q_heads


def _check_group(fields: Fields, q_heads: int, kv_heads: int, key: str) -> None:
    if q_heads % kv_heads:
        fields.fail(key, f"{q_heads} query heads share KV heads evenly; valid: divisors of {q_heads}")


def _windows(
    fields: Fields, window: int, kinds: Sequence[LayerKind]
) -> tuple[int | None, tuple[LayerKind, ...] | None]:
    """Window and repeating unit for one kind a layer; `layer_types`, where given, overrides `kinds`."""
    if fields.has("layer_types"):
        entries = fields.items("layer_types", length=len(kinds))
        named = Fields({str(i): entry for i, entry in enumerate(entries)}, fields.name("layer_types"))
        kinds = [cast(LayerKind, named.choice(str(i), _LAYER_KINDS, default="full")) for i in range(len(kinds))]
    if len(set(kinds)) == 1:
        return (window if kinds[0] == "local" else None), None
    count = len(kinds)
    unit = next(n for n in range(2, count + 1) if all(kinds[i] == kinds[i % n] for i in range(n, count)))
    return window, tuple(kinds[:unit])


def _qwen_windows(fields: Fields) -> tuple[int | None, tuple[LayerKind, ...] | None]:
    layers = fields.integer("num_hidden_layers", high=LAYERS)
    if not fields.flag("use_sliding_window", default=False):
        return None, None
    first = fields.integer("max_window_layers", default=28, low=0, high=LAYERS)
    kinds: list[LayerKind] = ["full" if i < first else "local" for i in range(layers)]
    return _windows(fields, fields.integer("sliding_window", default=4096, high=POSITIONS), kinds)

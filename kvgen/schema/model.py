"""Facts of a checkpoint: positions, windows, norms and latent ranks, as its config.json states them.

A cache and its operations do not need all of them; they are recorded once, beside the cache, so that later operations
(RoPE in `append`, windows and sinks in `decode`) read facts instead of asking for them again. "HF" below is Hugging
Face transformers, whose modelling code defines what the fields of a config.json mean.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvgen.schema.base import Spec
from kvgen.schema.layer_sources import check_sources

Positions = Annotated[int, Field(ge=1, le=2**31 - 1)]
Base = Annotated[float, Field(gt=1.0, le=1e12, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]
Dim = Annotated[int, Field(ge=1, le=2**20)]
# Lists are as good as tuples in a spec; strict mode alone would refuse them.
Factors = Annotated[tuple[Factor, ...], Field(strict=False, min_length=1, max_length=512)]
LayerKind = Literal["local", "full"]


class LinearScaling(Spec):
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: Factor
    """Divisor of every frequency."""


class Llama3Scaling(Spec):
    """Llama 3.1: long wavelengths stretched, short ones kept, the band between blended (HF `rope_type: llama3`).

    With wavelength w = 2 pi / f and n = original_max_positions: f stays where w < n / high_freq_factor; becomes
    f / factor where w > n / low_freq_factor; between, with s = (n / w - low) / (high - low), it is
    (1 - s) * f / factor + s * f. Equal factors (Llama 4 Scout) leave no band.
    """

    factor: Factor
    """Divisor of the frequencies with long wavelengths."""
    low_freq_factor: Factor
    """Wavelengths above original_max_positions / low_freq_factor are divided by `factor`."""
    high_freq_factor: Factor
    """Wavelengths below original_max_positions / high_freq_factor keep their frequency."""
    original_max_positions: Positions
    """Positions that the checkpoint was trained with before scaling."""

    @model_validator(mode="after")
    def _ordered(self) -> Llama3Scaling:
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: got {self.high_freq_factor} with low_freq_factor {self.low_freq_factor}; the band "
                "between them is blended, so high must not be below low; Llama 3.1 has 1.0 and 4.0, Llama 4 Scout 1.0 twice"
            )
        return self


class YarnScaling(Spec):
    """YaRN (arXiv 2309.00071; HF `rope_type: yarn`).

    With d rotated elements and n = original_max_positions, the pair that rotates r times over n positions has index
    i(r) = d * ln(n / (2 pi r)) / (2 ln theta). Pairs below i(beta_fast) keep f, pairs above i(beta_slow) get
    f / factor, a linear ramp joins them; `truncate` rounds the two ends outward to whole pairs. cos and sin are
    multiplied by `cos_sin_factor`.
    """

    factor: Annotated[Factor, Field(ge=1.0)]
    """Divisor of the frequencies that are interpolated."""
    original_max_positions: Positions
    """Positions that the checkpoint was trained with before scaling."""
    beta_fast: Factor = 32.0
    """Turns over the original positions from which a pair keeps its frequency."""
    beta_slow: Factor = 1.0
    """Turns over the original positions up to which a pair's frequency is divided by `factor`."""
    mscale: Factor | None = None
    """Numerator's m of the factor of cos and sin. None: see `attention_factor`."""
    mscale_all_dim: Factor | None = None
    """Denominator's m of the factor of cos and sin, and the factor of DeepSeek's softmax scale. None: neither."""
    attention_factor: Factor | None = None
    """Factor of cos and sin. None: m(mscale) / m(mscale_all_dim) where both are given, else m(1), with m(x) = 0.1 * x *
    ln(factor) + 1.
    """
    truncate: bool = True
    """True: the two ends of the ramp are rounded outward to whole pairs."""

    @model_validator(mode="after")
    def _ordered(self) -> YarnScaling:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast: got {self.beta_fast} with beta_slow {self.beta_slow}; fast pairs rotate more often than "
                "slow ones, so beta_fast >= beta_slow; YaRN's own are 32.0 and 1.0"
            )
        return self

    def magnitude(self, mscale: float) -> float:
        """YaRN's m(mscale) = 0.1 * mscale * ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def cos_sin_factor(self) -> float:
        """Factor of cos and sin: `attention_factor`, else m(mscale) / m(mscale_all_dim), else m(1)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)


class LongRopeScaling(Spec):
    """LongRoPE (arXiv 2402.13753; Phi-3's 128k models, HF `rope_type: longrope`, formerly `su`).

    Pair i's frequency is divided by `short_factor[i]` while a sequence fits in `original_max_positions`, and by
    `long_factor[i]` beyond. cos and sin are multiplied by `cos_sin_factor` in both cases.
    """

    short_factor: Factors
    """Divisor of each pair's frequency while a sequence fits in `original_max_positions`; one number a rotated pair."""
    long_factor: Factors
    """Divisor of each pair's frequency beyond; one number a rotated pair."""
    original_max_positions: Annotated[Positions, Field(ge=2)]
    """Positions up to which `short_factor` holds."""
    max_positions: Positions
    """Most positions of the model; it sets the factor of cos and sin."""
    attention_factor: Factor | None = None
    """Factor of cos and sin. None: sqrt(1 + ln s / ln original_max_positions), s = max_positions /
    original_max_positions, at least 1.
    """

    @model_validator(mode="after")
    def _same_length(self) -> LongRopeScaling:
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"long_factor: got {len(self.long_factor)} numbers beside {len(self.short_factor)} short ones; both "
                "have one for each rotated pair"
            )
        return self

    @property
    def cos_sin_factor(self) -> float:
        """`attention_factor`, else sqrt(1 + ln s / ln original_max_positions), s = max over original, at least 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = max(1.0, self.max_positions / self.original_max_positions)
        return math.sqrt(1.0 + math.log(stretch) / math.log(self.original_max_positions))


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


class Rope(Spec):
    """Rotary positions (arXiv 2104.09864): pair i of d rotated elements rotates by position * theta ** (-2 i / d).

    `style` says which two elements make pair i: "neox" i and i + d / 2 (HF `rotate_half`), "interleaved" 2 i and
    2 i + 1 (GPT-J, DeepSeek). `dim` is d, None for the whole head. Where it is less, `part` says which elements rotate: the
    head's "first" `dim` (Phi-3, GPT-NeoX; also None) or its "last" (MAX's interleaved form); in a latent row (`Mla`)
    always the last. `scaling` bends the frequencies. `local_theta`, where given, is the base on local layers, which are
    then not scaled (Gemma 3).

    `proportional` pairs the whole head's elements and gives pair i the whole head's frequency, theta ** (-2 i / head_dim), and
    rotates the first dim / 2 of those pairs alone (Gemma 4's full layers, HF `rope_type: proportional`: head_dim 512 and
    partial_rotary_factor 0.25 are dim=128, so that elements 0 to 63 rotate with 256 to 319).
    """

    style: Literal["neox", "interleaved"]
    """Which two of d rotated elements make pair i: "neox", i and i + d / 2; "interleaved", 2 i and 2 i + 1."""
    theta: Base
    """Base of the frequencies: pair i of d elements rotates by position * theta ** (-2 i / d)."""
    dim: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Elements of a head that are rotated. None: the whole head, in latent rows the RoPE part."""
    scaling: Scaling | None = None
    """How frequencies are scaled for long sequences. None: not at all."""
    local_theta: Base | None = None
    """Base on local layers, which are then not scaled (Gemma 3). None: `theta` on all layers."""
    part: Literal["first", "last"] | None = None
    """Which elements of a head are rotated where `dim` is less than the head: its "first" or its "last". None: the
    first, in latent rows the last.
    """
    proportional: bool = False
    """True: the first `dim` / 2 pairs of the whole head rotate, with the whole head's frequencies (Gemma 4). False: a part of
    `dim` elements has pairs and frequencies of its own.
    """

    @model_validator(mode="after")
    def _whole_head_pairs(self) -> Rope:
        if not self.proportional:
            return self
        if self.dim is None:
            raise ValueError(
                "dim: got None with proportional=True; it says how many elements rotate, two a pair; Gemma 4 has a quarter of "
                "the head: dim=128 of 512. Where all rotate, leave proportional out"
            )
        if self.part is not None:
            raise ValueError(
                f"part: got {self.part!r} with proportional=True; the first pairs of the whole head rotate; leave part out"
            )
        if self.local_theta is not None:
            raise ValueError(
                f"local_theta: got {self.local_theta} with proportional=True; local layers then have a Rope of their own; give "
                "their operation rope=Rope(...), and leave local_theta out"
            )
        if self.scaling is not None and not isinstance(self.scaling, LinearScaling):
            raise ValueError(
                f"scaling: got {type(self.scaling).__name__} with proportional=True; frequencies of part of the head's pairs "
                "are divided by one factor or not scaled; use LinearScaling, or None"
            )
        return self

    @model_validator(mode="after")
    def _pairs(self) -> Rope:
        if self.dim is None:
            if self.part is not None:
                raise ValueError(
                    f"part: got {self.part!r} without dim; the whole head rotates and has no part; give dim, or leave part out"
                )
            return self
        if self.dim % 2:
            raise ValueError(
                f"dim: got {self.dim}; elements rotate in pairs, so it is even; None rotates the whole head"
            )
        if isinstance(self.scaling, LongRopeScaling) and 2 * len(self.scaling.short_factor) != self.dim:
            raise ValueError(
                f"scaling: got {len(self.scaling.short_factor)} factors for {self.dim} rotated elements; there is "
                f"one for each pair, {self.dim // 2}"
            )
        return self


class Mla(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    One row a token serves all heads: `kv_lora_rank` latent elements, then `qk_rope_head_dim` rotated ones. Per head,
    keys have qk_nope_head_dim + qk_rope_head_dim elements and values `v_head_dim`, made from the latent part by the
    checkpoint's up-projections. `q_lora_rank` is None where queries are projected directly (DeepSeek-V2-Lite).
    """

    kv_lora_rank: Dim
    """Elements of a row's latent part."""
    qk_rope_head_dim: Dim
    """Elements of a row's rotated part, shared by all heads."""
    qk_nope_head_dim: Dim
    """Elements of a head's query and key without position, before absorption."""
    v_head_dim: Dim
    """Elements of a head's value after the up projection."""
    q_lora_rank: Dim | None = None
    """Elements of the latent query. None: queries are projected directly (DeepSeek-V2-Lite)."""

    @property
    def row_dim(self) -> int:
        """Elements of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_dim(self) -> int:
        """Elements of a head's query and key before the latent form is absorbed."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Indexer(Spec):
    """Which of a layer's tokens (DeepSeek V3.2, GLM-5) or entries (V4) a query reads: those of the best scores, the sum over
    `heads` of w relu(q . k).

    `source` is a layer, counted from 0, whose picks these layers take (GLM-5.2, V4.1). Behind `candidate_source`, only entries
    of the `candidate_blocks` best blocks of `candidate_block` entries are scored, which that layer chose.
    """

    heads: Annotated[int, Field(ge=1, le=65536)]
    """Heads of the indexer's q."""
    dim: Annotated[int, Field(ge=1, le=1024)]
    """Elements of a head of the indexer's q, and of its one key a token or entry."""
    topk: Positions
    """Tokens or entries that a query reads at most."""
    source: Annotated[int, Field(ge=0, le=1023)] | None = None
    """Layer whose picks these layers take. None: they have an indexer of their own."""
    candidate_source: Annotated[int, Field(ge=0, le=1023)] | None = None
    """Layer whose candidate blocks alone are scored. None: all entries are."""
    candidate_blocks: Positions | None = None
    """Blocks of entries that are candidates at most. None: all entries are."""
    candidate_block: Positions | None = None
    """Entries of such a block. None: all entries are candidates."""

    @model_validator(mode="after")
    def _whole(self) -> Indexer:
        given = [self.candidate_source, self.candidate_blocks, self.candidate_block]
        if any(one is None for one in given) and any(one is not None for one in given):
            raise ValueError(
                f"candidate_source: got {self.candidate_source} with candidate_blocks {self.candidate_blocks} and "
                f"candidate_block {self.candidate_block}; they say one thing together; give all three, or none"
            )
        return self


class Compressed(Spec):
    """Entries that a layer's queries read beside its window's rows, under one softmax (DeepSeek V4): one for `rate` tokens.

    Entry j is pooled from tokens j * rate to (j + 1) * rate - 1, with `overlap` from those of entry j - 1 too; the query at
    position p reads it where (j + 1) * rate <= p + 1. Layers with `source` read the entries of that layer, counted from 0, and
    make none; the window's rows are always their own (V4.1).
    """

    rate: Positions
    """Tokens that an entry stands for."""
    overlap: bool = False
    """True: an entry is pooled from its own tokens and those of the one before it."""
    source: Annotated[int, Field(ge=0, le=1023)] | None = None
    """Layer whose entries these layers read. None: their own."""
    indexer: Indexer | None = None
    """Which entries a query reads. None: every one that it sees."""


class Kind(Spec):
    """A kind of layers, in a model whose layers differ in more than a window and a RoPE base.

    `cache=False`: layers that keep a state instead of keys and values (Mamba, linear attention, convolutions), or nothing
    (a mixture of experts alone); they have no other fields. `kv_source` is the layer, counted from 0, whose keys and values
    these layers read; they store none (Gemma 3n and 4). The other fields mean what they mean in `Model`.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    """Name of the kind, as `KernelSet.layers` has it: "full", "local", "linear"."""
    cache: bool = True
    """False: these layers keep no keys and values."""
    q_heads: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Query heads of a layer. None: not stated."""
    kv_heads: Annotated[int, Field(ge=1, le=65536)] | None = None
    """KV heads of a layer. None: not stated."""
    head_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Elements of a head of q and k, of a latent row all of them. None: not stated."""
    v_head_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Elements of a head of v. None: `head_dim`."""
    window: Positions | None = None
    """Tokens that a query sees, its own included. None: all."""
    chunk: Positions | None = None
    """Tokens of a chunk: a query sees those of its position's chunk (Llama 4). None: no chunks."""
    rope: Rope | None = None
    """Rotary positions of these layers. None: they have none."""
    qk_norm: Literal["head", "row"] | None = None
    """Norm of Q and K: over each "head", or over the whole "row" of heads. None: no norm."""
    scale: Factor | None = None
    """Factor of q . k. None: head_dim ** -0.5, for latent rows what `Model.mla` says."""
    logit_softcap: Factor | None = None
    """Cap of the scores before masking. None: no cap."""
    sinks: bool = False
    """True: each query head has a learned logit in the softmax's denominator."""
    kv_source: Annotated[int, Field(ge=0, le=1023)] | None = None
    """Layer whose keys and values these layers read. None: their own."""
    compressed: Compressed | None = None
    """Entries of several tokens that queries read beside the window's rows. None: there are none."""
    indexer: Indexer | None = None
    """Which tokens a query reads (DeepSeek V3.2, GLM-5). None: every one that it sees."""

    @model_validator(mode="after")
    def _stateless(self) -> Kind:
        given = sorted(self.model_fields_set - {"name", "cache"})
        if not self.cache and given:
            raise ValueError(
                f"{given[0]}: got it with cache=False; such layers keep no keys and values, and no more is said of them; leave "
                "it out"
            )
        return self


class Model(Spec):
    """A checkpoint's demands on attention.

    - `architecture`, `layers`: HF's class name and the number of decoder layers.
    - `rope`, or `alibi` (Falcon's older models), or neither.
    - `window`: a query at position p sees keys p - window + 1 ... p, its own included (HF masks k > p - window).
      `window_pattern` names the repeating unit of layers, "local" (windowed) or "full": layer i is
      window_pattern[i % len]. None: every layer is local. A window may exceed any sequence; it then does nothing.
    - `sinks`: a learned logit per query head joins the softmax's denominator and has no value row (gpt-oss).
    - `qk_norm`: RMS norm of Q and K before RoPE, over each "head" (Qwen 3, Gemma 3) or over the whole "row" of heads.
    - `logit_softcap`: scores become cap * tanh(score / cap) before masking.
    - `query_pre_attn_scalar`: scores are scaled by its -1/2 power, instead of the head dim's (Gemma).
    - `mla`: latent ranks.
    - `indexer`: which tokens a query reads, of a model whose layers each have an indexer (DeepSeek V3.2).
    - `kinds`, with `pattern` as the repeating unit of their names: layers that differ in more than a window and a RoPE base
      (heads, head dim, RoPE or none, chunks, whose cache they read, or no cache at all). They say then what `rope`,
      `window`, `sinks`, `qk_norm`, `logit_softcap`, `scale` and `indexer` say of a model whose layers are alike.
    """

    architecture: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")] | None = None
    """Class name in config.json, as "LlamaForCausalLM". None: not stated."""
    layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Decoder layers. None: not stated."""
    rope: Rope | None = None
    """Rotary positions of the model: what rope="model" means in an operation. None: it has none."""
    alibi: bool = False
    """True: positions are ALiBi's slopes."""
    window: Positions | None = None
    """Tokens that a query on a local layer sees, its own included. None: all."""
    window_pattern: Annotated[tuple[LayerKind, ...], Field(strict=False, min_length=2, max_length=1024)] | None = None
    """Repeating unit of layers, "local" (windowed) or "full": layer i is window_pattern[i % len]. None: every layer is
    local where `window` is given.
    """
    sinks: bool = False
    """True: each query head has a learned logit in the softmax's denominator (gpt-oss)."""
    qk_norm: Literal["head", "row"] | None = None
    """RMS norm of Q and K before RoPE: over each "head", or over the whole "row" of heads. None: no norm."""
    logit_softcap: Factor | None = None
    """Cap of the scores before masking: cap * tanh(score / cap). None: no cap."""
    query_pre_attn_scalar: Factor | None = None
    """Scores are scaled by its -1/2 power (Gemma). None: by head_dim ** -0.5."""
    mla: Mla | None = None
    """Ranks of multi-head latent attention. None: the model has none."""
    scale: Factor | None = None
    """Factor of q . k. None: `query_pre_attn_scalar`, the head dim or `mla` say it."""
    indexer: Indexer | None = None
    """Which tokens a query reads, on every layer by an indexer of its own. None: all that it sees, or as `kinds` say."""
    kinds: Annotated[tuple[Kind, ...], Field(strict=False, max_length=64)] = ()
    """Kinds of layers. (): layers differ at most as `window_pattern` and `rope.local_theta` say."""
    pattern: Annotated[tuple[str, ...], Field(strict=False, max_length=1024)] = ()
    """Names of `kinds`, the repeating unit of layers: layer i is pattern[i % len]. (): the one kind there is."""

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        self._check_kinds()
        if self.rope is not None and self.alibi:
            raise ValueError("alibi: got True beside a rope; a checkpoint encodes positions one way; drop one of them")
        if self.window_pattern is not None:
            self._check_pattern(self.window_pattern)
        if self.rope is not None and self.rope.local_theta is not None and self.window_pattern is None:
            raise ValueError(
                f"rope.local_theta: got {self.rope.local_theta} without window_pattern; it is the base on local "
                "layers, where other layers are full; give a pattern, or put the base in theta"
            )
        if self.mla is not None and self.rope is not None and self.rope.dim not in (None, self.mla.qk_rope_head_dim):
            raise ValueError(
                f"rope.dim: got {self.rope.dim} with mla.qk_rope_head_dim {self.mla.qk_rope_head_dim}; a latent row's "
                "rotated part is exactly that long; give the same number, or None"
            )
        picker = self.indexer.source if self.indexer is not None else None
        if picker is not None:
            raise ValueError(
                f"indexer.source: got {picker} in a model whose layers are alike; each then has an indexer of its own; leave it "
                "out, or give kinds of layers"
            )
        if self.mla is not None and self.rope is not None and self.rope.part == "first":
            raise ValueError(
                "rope.part: got 'first' with mla; a latent row's rotated part is its last; use 'last', or leave it out"
            )
        return self

    def _check_kinds(self) -> None:
        names = [kind.name for kind in self.kinds]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"kinds: got {twice!r} twice; a pattern names kinds, so each has a name of its own")
        unknown = next((name for name in self.pattern if name not in names), None)
        if unknown is not None:
            raise ValueError(
                f"pattern: got {unknown!r}, which is no kind; valid: {', '.join(names) or 'none without kinds'}"
            )
        if len(names) > 1 and not self.pattern:
            raise ValueError(
                "pattern: got none with several kinds; it says which layer is of which kind; name them in order"
            )
        if self.layers is not None and len(self.pattern) > self.layers:
            raise ValueError(
                f"pattern: got {len(self.pattern)} entries for {self.layers} layers; the repeating unit is at most as long as "
                f"the model, {self.layers}"
            )
        said = (
            "rope",
            "window",
            "window_pattern",
            "sinks",
            "qk_norm",
            "logit_softcap",
            "query_pre_attn_scalar",
            "scale",
            "indexer",
        )
        both = next((name for name in said if self.kinds and getattr(self, name)), None)
        if both is not None:
            raise ValueError(f"{both}: got it beside kinds, which say it for their layers; leave it out")
        if self.kinds:
            by_name, unit = {kind.name: kind for kind in self.kinds}, self.pattern or (names[0],)
            check_sources([by_name[unit[i % len(unit)]] for i in range(self.layers or len(unit))])

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The kinds of layers: those of `kinds`, else "full" and "local" as the windows say."""
        if self.kinds:
            return tuple(kind.name for kind in self.kinds)
        if self.window_pattern is not None:
            return ("full", "local")
        return ("full",) if self.window is None else ("local",)

    def layer_name(self, layer: int) -> str:
        """The name of one layer's kind, counted from 0."""
        kind = self.layer_kind(layer)
        return kind.name if kind is not None else "full" if self.layer_window(layer) is None else "local"

    def layer_kind(self, layer: int) -> Kind | None:
        """The kind of one layer, counted from 0; None in a model without kinds."""
        if not self.kinds:
            return None
        name = self.pattern[layer % len(self.pattern)] if self.pattern else self.kinds[0].name
        return next(kind for kind in self.kinds if kind.name == name)

    def _check_pattern(self, pattern: tuple[LayerKind, ...]) -> None:
        if self.window is None:
            raise ValueError(
                "window_pattern: got a pattern without window; local layers need one; give window, or drop the pattern"
            )
        if len(set(pattern)) < 2:
            raise ValueError(
                f"window_pattern: got only {pattern[0]!r} layers; a pattern mixes 'local' and 'full'; use None where "
                "every layer is local, window=None where none is"
            )
        if self.layers is not None and len(pattern) > self.layers:
            raise ValueError(
                f"window_pattern: got {len(pattern)} entries for {self.layers} layers; the repeating unit is at most "
                f"as long as the model, {self.layers}"
            )

    def layer_window(self, layer: int) -> int | None:
        """The window of one layer, counted from 0; None where it sees everything before it."""
        kind = self.layer_kind(layer)
        if kind is not None:
            return kind.window
        pattern = self.window_pattern
        if pattern is None or pattern[layer % len(pattern)] == "local":
            return self.window
        return None

    def softmax_scale(self, head_dim: int) -> float:
        """Factor of scores in a model whose heads have `head_dim` elements.

        Latent attention scales by its own head dim, qk_dim ** -0.5, times YaRN's m(mscale_all_dim) squared where given
        (DeepSeek's modelling code); cached rows being wider changes nothing.
        """
        if self.scale is not None:
            return self.scale
        if self.mla is None:
            return float((self.query_pre_attn_scalar or head_dim) ** -0.5)
        scale = float(self.mla.qk_dim**-0.5)
        scaling = self.rope.scaling if self.rope else None
        if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None:
            scale *= scaling.magnitude(scaling.mscale_all_dim) ** 2
        return scale

"""A row of the table of families: what a family's modelling code does that its config.json does not say.

Facts about Hugging Face transformers 5.23: field names where they differ, the config class's defaults for fields that a
file leaves out, RoPE, norms of q, k and v, which layers are of which kind, and the factor of scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

SLIDING: Final[Mapping[str, str]] = {"sliding_attention": "local", "full_attention": "full"}
# What hybrids call layers without keys and values, in transformers 5 and before.
STATES: Final[Mapping[str, str]] = {
    "linear_attention": "linear",
    "mamba": "mamba",
    "conv": "conv",
    "recurrent": "recurrent",
    "moe": "moe",
    "mlp": "mlp",
}
HYBRID: Final[Mapping[str, str]] = {**SLIDING, "attention": "full", "hybrid": "full", **STATES}
CACHELESS: Final = frozenset(STATES.values())


@dataclass(frozen=True)
class FamilyRope:
    """RoPE of a family.

    `theta`: base where the config has none, `thetas` the fields that may have it. `share`: the part of a head that RoPE rotates
    where the config has no partial_rotary_factor (`shares`); None: under default RoPE the family's modelling code rotates the
    whole head, whatever the config says. `dims`: a field with the number of rotated elements. `default`: rope_parameters
    of a config without any. `kinds`: the family has a RoPE for each kind of layers; (base, field with the base). `scales`:
    kinds that a flat `rope_scaling` scales. `nested_only`: bases and shares stand in rope_parameters alone.
    `sections`: pairs of t, h and w where a config has no mrope_section; () is one position a token.
    `layout`: sections lie in "runs" (Qwen2-VL), alternate in a "cycle" t h w t h w (Qwen3-VL), or h w h w, then t (ERNIE).
    `original_first`: the model's own original_max_position_embeddings wins, and is this where absent (Phi-3).
    `when`: a field and the word by which the model has RoPE at all; a flag's word is "true". `zero_on_special`: layers that
    the pattern calls special have none where layer_rope_theta is absent. `alpha`: type "dynamic" with `alpha` is a base
    times alpha ** (d / (d - 2)) (Hunyuan). `mscales`: factors of cos and sin in short_mscale and long_mscale (Phi-3.5-MoE).
    `unscaled_field`: a list of the layers that scaling is for (Molmo 2). `plain_share`: the part under default RoPE where the
    parameters have none (MiMo). `flat` False: parameters that are not by kind of layers are not read (Gemma 3). `beside`
    False: nor is a rope_scaling beside parameters by kind (Step 3.5).
    """

    style: Literal["neox", "interleaved"] = "neox"
    theta: float = 10_000.0
    thetas: tuple[str, ...] = ("rope_theta",)
    share: float | None = None
    shares: tuple[str, ...] = ("partial_rotary_factor",)
    dims: str = ""
    default: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    scales: tuple[str, ...] = ("full",)
    sections: tuple[int, ...] = ()
    layout: Literal["runs", "cycle", "hw_t"] = "runs"
    original_first: int | None = None
    when: tuple[str, str] | None = None
    zero_on_special: bool = False
    alpha: bool = False
    mscales: bool = False
    unscaled_field: str = ""
    plain_share: float | None = None
    flat: bool = True
    beside: bool = True


@dataclass(frozen=True)
class Norms:
    """Norms of q and k, and with `v` of v (an RMS norm of each head without weights). See kvgen.models.layers.Norm.

    `when`: a boolean field that turns them on, absent: `default`. `eps` None: the config's. `roped`: on layers with RoPE
    alone. `over_when`: a field whose word chooses what the mean runs over. `bias`, `per_head`: of a layer norm.
    """

    kind: Literal["rms", "layer"] = "rms"
    over: Literal["head", "row"] = "head"
    weight: bool = True
    offset: float = 0.0
    order: Literal["before", "after"] = "before"
    multiply: Literal["after", "before"] = "after"
    when: str = ""
    default: bool = True
    eps: float | None = None
    roped: bool = False
    v: bool = False
    bias: bool = False
    per_head: bool = False
    over_when: tuple[str, Mapping[str, Literal["head", "row"]]] | None = None


@dataclass(frozen=True)
class Pattern:
    """Which layer is of which kind: `common`, or `special` at place `at` of each unit of `every` layers (-1: its last).

    `every_field`: a field with `every`; `at_field` one with `at`. `from_end`: counted from the last layer. `first`,
    `last`: so many layers at the start, and the last one, are special besides. `also`: a place of the unit that is special too.
    `from_layer`: from this layer on (field max_window_layers) layers are `special`, before it `common`; `until_layer`: the
    special ones of the units lie before it. `lead`: kinds of the first layers, before the units begin.
    `by_flags`: kinds of layers with and without RoPE (field no_rope_layers).
    `types` names fields with a word for each layer, `words` what the words mean; `lists` fields with the special layers'
    numbers, from `base`; `letters` a field with a letter for each layer; `units` a field with the kinds of a repeating unit,
    `expanded` one with units and how often each stands. `whole`: the layers of a config that names none.
    """

    common: str = "full"
    special: str = "full"
    every: int | None = None
    every_field: str = ""
    at: int = -1
    at_field: str = ""
    from_end: bool = False
    first: int = 0
    first_field: str = ""
    last: bool = False
    also: int | None = None
    from_layer: int | None = None
    until_layer: int | None = None
    lead: tuple[str, ...] = ()
    by_flags: tuple[str, str] | None = None
    types: tuple[str, ...] = ("layer_types",)
    words: Mapping[str, str] = field(default_factory=lambda: SLIDING)
    lists: str = ""
    base: int = 0
    letters: tuple[str, Mapping[str, str]] | None = None
    units: str = ""
    expanded: str = ""
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    """Factor of q . k: 1 / sqrt(head dim), unless one of these says otherwise.

    `given`: a field with the factor; `rsqrt`: a field whose -1/2 power it is; `default`: that field's value where the config
    has none; None: the head dim's. `fixed`: a constant. `halved`: by the -1/2 power of half the head dim (Zamba).
    """

    given: str = ""
    rsqrt: str = ""
    default: float | None = None
    fixed: float | None = None
    halved: bool = False


@dataclass(frozen=True)
class KvHeads:
    """KV heads: `field`, `default` where absent (None: as many as query heads), null: as many.

    `one_if`: a boolean field (absent: true) by which there is one, unless the boolean field `unless` is true.
    `words`: a field whose word says "one", "heads" (as many as query heads) or "field". `times`: a factor for local layers.
    """

    field: str = "num_key_value_heads"
    default: int | None = None
    one_if: str = ""
    unless: str = ""
    words: tuple[str, Mapping[str, str]] | None = None
    local_times: int = 1
    always_all: bool = False


@dataclass(frozen=True)
class Index:
    """An indexer that chooses the tokens that a query sees, of `heads` where index_n_heads is absent.

    `interleaved`: the pairs of its RoPE where indexer_rope_interleave is absent; the head's `part` of qk_rope_head_dim elements
    rotates. `eps` of the layer norm of its keys, None: the config's; `f32`: that norm's weights stay f32. `shared`: field
    indexer_types says which layers take the picks of one before them. Where it is absent, layers 0, 1 and each `every`-th behind
    1 have an indexer; with `schedule`, fields index_topk_pattern, or index_topk_freq and index_skip_topk_offset, say it.
    """

    heads: int
    interleaved: bool = False
    part: Literal["first", "last"] = "first"
    eps: float | None = 1e-6
    f32: bool = False
    shared: bool = False
    every: int = 1
    schedule: bool = False


@dataclass(frozen=True)
class Rows:
    """Latent rows: the config class's defaults of the ranks, None where every published config has them.

    `interleaved`: the pairs of RoPE; None: field rope_interleave, absent: true, null: false. `eps` of the latent part's norm,
    None: the config's. `index`: an indexer chooses tokens (DeepSeek sparse attention). `factor`: the latent part is multiplied
    by sqrt(hidden_size / kv_lora_rank) after its norm (LongCat).
    """

    defaults: Mapping[str, int | None] = field(default_factory=dict)
    interleaved: bool | None = None
    eps: float | None = 1e-6
    index: Index | None = None
    factor: bool = False
    rope: bool = True


@dataclass(frozen=True)
class Refusal:
    """A field whose value asks for what kvgen does not have: `when` "true" (truthy), "set" (not null) or a word."""

    field: str
    rule: str
    when: str = "true"


@dataclass(frozen=True)
class Family:
    """One row. `types` are model_types, `classes` class names of `architectures`, with blanks between.

    `names`: fields whose names differ, canonical -> as the config spells it (one or more; a dot reaches into an object).
    `head_dim`: the config class's default; None: hidden_size / num_attention_heads. `divided`: that always, whatever a
    head_dim field says. `rotary`: layers with RoPE: "always"; "windowed" those with a window; "sliding" local layers;
    "local" these, or all where the config has no window; "flags" as no_rope_layers says, "thetas" layer_rope_theta.
    `alibi`: true, or the field that says so; `alibi_note`: what a spec with it says besides. `sinks`: kinds of layers with
    them. `q_scale`: q scaled by position as in "llama4", "ministral", "beam". `q_factor`: a field with a factor of q, and
    its default (Muse).
    `global_heads`: full layers have head dim and KV heads of their own (Gemma 4);
    `head_lists`: a field with the query heads of each layer; `local_heads`: fields with those of local layers. `shared`:
    the last num_kv_shared_layers read an earlier layer's cache. `last_full`: the last layer is full whatever layer_types
    says. `layers_times`: caches a counted layer (LongCat: 2). `cycles`: a field with the layers of a stack, and two with how
    often the stacks run, with their defaults (HRM): a cache for each run. `heads_of`: query heads are KV heads times this
    field, with its default. `window_over`: the window is the field divided by this. `hidden_times`: heads are cut from so many
    hidden sizes (Zamba). `window_before`: a field with the tokens before the query's own that it sees, which wins over the
    window's (MiMo). `compressed`: layers keep a window of rows and entries of several tokens, each its "own" (DeepSeek V4), or
    "shared" with the layers behind it (V4.1); `kvgen.models.compressed` reads them. `notes` stand in the spec's docstring.
    """

    types: str
    classes: str = ""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kv: KvHeads = KvHeads()
    head_dim: int | None = None
    divided: bool = False
    heads: int | None = None
    v_head_dim: tuple[str, int] | None = None
    positions: int = 2048
    eps: float = 1e-6
    rope: FamilyRope | None = FamilyRope()
    norms: Norms | None = None
    pattern: Pattern = Pattern(types=())  # without windows, whatever layer_types says
    window: int | None = None
    window_when: str = ""
    chunk: int | None = None
    rotary: Literal["always", "windowed", "local", "sliding", "flags", "thetas"] = "always"
    scale: Scale = Scale()
    softcap: tuple[str, float | None] | None = None
    sinks: tuple[str, ...] = ()
    alibi: str | bool = False
    alibi_note: str = ""
    q_scale: str = ""
    q_factor: tuple[str, float] | None = None
    rows: Rows | None = None
    global_heads: bool = False
    head_lists: str = ""
    local_heads: tuple[str, ...] = ()
    shared: bool = False
    last_full: bool = False
    layers_times: int = 1
    cycles: tuple[str, tuple[str, int], tuple[str, int]] | None = None
    heads_of: tuple[str, int] | None = None
    window_over: int = 1
    window_before: str = ""
    hidden_times: int = 1
    compressed: Literal["own", "shared"] | None = None
    notes: tuple[str, ...] = ()
    refuses: tuple[Refusal, ...] = ()

    def but(self, types: str, classes: str = "", **changes: Any) -> Family:
        """A row that differs in some columns."""
        return replace(self, types=types, classes=classes, **changes)

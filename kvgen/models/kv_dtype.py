"""How KV is stored: what `--kv-dtype` means, and what a quantized checkpoint's files say of it.

Read are the forms of `quantization_config` that compressed-tensors, ModelOpt and Quark write, in config.json or its text
model's object, and ModelOpt's hf_quant_config.json beside it. Quantized weights alone say nothing of the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvgen.errors import ConfigError, SpecError
from kvgen.json_file import shown
from kvgen.models.fields import Fields
from kvgen.models.layers import CacheDtype, Checkpoint, LayerFacts
from kvgen.models.outside import QuarkTensor, Scheme, checked
from kvgen.models.published import QUANTIZATION
from kvgen.schema.cache import Latent, Paged
from kvgen.schema.model import Mla
from kvgen.schema.quant import Block, Quant

AUTO: Final = "auto"
_TYPES: Final[dict[str, CacheDtype]] = {"bf16": "bf16", "f16": "f16", "f32": "f32"}
_TENSOR: Final = Block(token=None, head=None)
_QUANTS: Final = {
    "fp8": Quant(dtype="e4m3"),
    "fp8-static": Quant(dtype="e4m3", scale_dtype="f32", block=_TENSOR, scale="given"),
    "fp8-scaled": Quant(dtype="e4m3", scale_dtype="f32"),
    "int8": Quant(dtype="i8", scale_dtype="f32"),
    "int8-static": Quant(dtype="i8", scale_dtype="f32", block=_TENSOR, scale="given"),
    "int4": Quant(dtype="i4", scale_dtype="f16", block=Block(dim=32), zero=True),
    "nvfp4": Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global"),
    "fp8_ds_mla": Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), place="row"),
}
# Engines cast whole latent rows; scales per block are the latent part's, whose RoPE part keeps the checkpoint's type.
_WHOLE_ROWS: Final = ("fp8", "fp8-static", "int8-static")
_LATENT_ONLY: Final = "fp8_ds_mla"
KV_DTYPES: Final = (AUTO, *_TYPES, *_QUANTS)
_ALGORITHMS: Final = {"FP8": "fp8-static", "INT8": "int8-static", "NVFP4": "nvfp4"}


@dataclass(frozen=True)
class Stored:
    """The cache's `dtype`, its quantization (None: stored in `dtype`), whether a latent row is quantized whole, and
    which field of the checkpoint's files says so ("": none does)."""

    dtype: CacheDtype
    quant: Quant | None = None
    quant_rope: bool = False
    source: str = ""


def stored_by_kind(
    places: Sequence[Fields], facts: Checkpoint, kv_dtype: str, beside: Mapping[str, Any] | None = None
) -> dict[str, Stored]:
    """How `--kv-dtype` stores the KV of each kind of layers: one word for all, or "full=fp8,local=bf16" and so on.

    `places` are the config and its text model's object; `beside` is the hf_quant_config.json beside it. ConfigError where they
    contradict each other or a cache, or say what kvgen does not know.
    """
    said = _Said(places, facts, beside)
    if "=" not in kv_dtype:
        return _for_each(facts, {kind.kind: kv_dtype for kind in facts.cached}, said)
    given: dict[str, str] = {}
    names = [kind.kind for kind in facts.cached]
    for part in kv_dtype.split(","):
        kind, _, word = (piece.strip() for piece in part.partition("="))
        if kind not in names or kind in given:
            twice = " twice" if kind in given else ""
            raise ConfigError(
                f"--kv-dtype: got {shown(kind)}{twice} in {shown(kv_dtype)}; {facts.model.architecture}'s layers with a cache "
                f"are {', '.join(names)}; name each once, as in {names[0]}=fp8"
            )
        given[kind] = word
    return _for_each(facts, {name: given.get(name, AUTO) for name in names}, said)


def _for_each(facts: Checkpoint, asked: Mapping[str, str], said: _Said) -> dict[str, Stored]:
    found = {}
    for kind in facts.cached:
        own = replace(facts, q_heads=kind.q_heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim_k)
        found[kind.kind] = _stored(said, kind, own, asked[kind.kind])
    return found


def _stored(said: _Said, kind: LayerFacts, facts: Checkpoint, kv_dtype: str) -> Stored:
    """How `--kv-dtype` stores the KV of a kind of layers; "auto" asks the checkpoint. ConfigError where that is not possible."""
    name, quant, source = kv_dtype, _QUANTS.get(kv_dtype), ""
    if name == AUTO:
        name, quant, source = said.of(kind)
    elif name not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype: got {shown(name)}; it must be one of {', '.join(KV_DTYPES)}")
    if name == _LATENT_ONLY and not facts.model.mla:
        usual = ", ".join(n for n in KV_DTYPES if n != _LATENT_ONLY)
        raise ConfigError(
            f"--kv-dtype: got {name!r}, which is for latent rows; {facts.model.architecture} caches K and V; valid: {usual}"
        )
    if quant is None:
        return Stored(_TYPES.get(name, facts.dtype))
    found = Stored(facts.dtype, quant, facts.model.mla is not None and name in _WHOLE_ROWS, source)
    _check(facts, found, source or f"--kv-dtype: got {name!r}")
    return found


def _check(facts: Checkpoint, found: Stored, blamed: str) -> None:
    """Raise ConfigError unless there is such a cache."""
    try:
        if facts.model.mla is not None:
            latent(facts.model.mla, found, page_size=16)
        else:
            Paged(dtype=found.dtype, kv_heads=facts.kv_heads, head_dim=facts.head_dim, page_size=16, quant=found.quant)
    except SpecError as error:
        wrong = str(error).replace("\n", "; ")
        raise ConfigError(f"{blamed}; {wrong}; --kv-dtype {found.dtype} stores it as it is") from None


def latent(mla: Mla, found: Stored, *, page_size: int) -> Latent:
    """The cache of a model's latent rows."""
    return Latent(
        dtype=found.dtype,
        latent_dim=mla.kv_lora_rank,
        rope_dim=mla.qk_rope_head_dim,
        page_size=page_size,
        quant=found.quant,
        quant_rope=found.quant_rope,
    )


# The checkpoint's own word --------------------------------------------------------------------------------------------

_CHOOSE: Final = "say with --kv-dtype how kvgen shall store KV"
_Word = tuple[str, Quant | None, str]  # (word of --kv-dtype, quantization, field that says so)
_NOTHING: Final[_Word] = (AUTO, None, "")
# Fields of a quantization that are about KV, but for those whose value kvgen reads; another one is refused.
_OF_KV: Final = re.compile(r"kv_?cache", re.IGNORECASE)
_KNOWN: Final = frozenset(
    (
        *("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quantized_layers", "kv_cache_schema_version"),
        *("kv_cache_quant_config", "kv_cache_post_rope", "kv_cache_group"),
    )
)
_LAYER: Final = re.compile(r"(?:\A|\.)layers\.(\d{1,4})(?:\.|\Z)")
_ALGORITHM_KEYS: Final = ("quant_algo", "kv_cache_quant_algo")
_OTHER_MODELS: Final = re.compile(r"(?:\A|\.)(?:vision|visual|audio)")


@dataclass(frozen=True)
class _Said:
    """KV precision as the files of a checkpoint state it: the config and its text model's object (`places`), and
    hf_quant_config.json (`beside`)."""

    places: Sequence[Fields]
    facts: Checkpoint
    beside: Mapping[str, Any] | None

    def of(self, kind: LayerFacts) -> _Word:
        """KV precision of a kind of layers: "auto" and None where the files say nothing. ConfigError where they differ."""
        layers = self._layers(kind)
        own = next((word for config in self._objects() if (word := _word(config, layers)) != _NOTHING), _NOTHING)
        try:
            other = _word(Fields(self.beside), layers) if self.beside is not None else _NOTHING
        except ConfigError as error:
            raise ConfigError(f"{QUANTIZATION}: {error}") from None
        if other == _NOTHING:
            return own
        name, quant, field = other
        if own != _NOTHING and own[:2] != (name, quant):
            raise ConfigError(
                f"{QUANTIZATION}: {field} says {name} of KV, and {own[2]} of config.json says {own[0]}; {_CHOOSE}"
            )
        return own if own != _NOTHING else (name, quant, f"{field} of {QUANTIZATION}")

    def _layers(self, kind: LayerFacts) -> tuple[int, ...]:
        """The layers that store what layers of this kind read."""
        if kind.kv_source is not None:
            return (kind.kv_source,)
        return tuple(i for i, at in enumerate(self.facts.pattern) if self.facts.kinds[at].kind == kind.kind)

    def _objects(self) -> Iterator[Fields]:
        for place in self.places:
            for key in ("quantization_config", "compression_config"):
                found = place.object(key)
                if found is not None:
                    yield found


def _word(config: Fields, layers: Sequence[int]) -> _Word:
    """KV precision of these layers as an object states it: "auto" and None where it says nothing.

    Read are compressed-tensors' kv_cache_scheme, ModelOpt's kv_cache_quant_algo and kv_cache_quantized_layers (also inside
    `quantization`, as its hf_quant_config.json has them) and Quark's descriptions of the outputs of k_proj and v_proj.
    Quantized weights alone say nothing of KV.
    """
    inner = config.object("quantization") if config.values.get("quant_method") in (None, "modelopt") else None
    places = [place for place in (config, inner) if place is not None]
    for place in places:
        for key, value in place.values.items():
            if isinstance(key, str) and _OF_KV.search(key) and key not in _KNOWN and value:
                place.fail(key, f"kvgen does not know this field of a quantized KV cache; {_CHOOSE}")
    for place in places:
        listed = _listed(place)
        if listed:
            return _by_layer(place, listed, layers)
    said = [word for place in places for word in _of_all_layers(place) if word != _NOTHING]
    other = next((word for word in said if word[:2] != said[0][:2]), None)
    if other is not None:
        raise ConfigError(f"{other[2]}: it says {other[0]} of KV, and {said[0][2]} says {said[0][0]}; {_CHOOSE}")
    return said[0] if said else _quark(config)


def _of_all_layers(place: Fields) -> Iterator[_Word]:
    """KV precision by kv_cache_scheme, an object or an algorithm's name, and by kv_cache_quant_algo."""
    if isinstance(place.values.get("kv_cache_scheme"), str):
        yield _algorithm(place, "kv_cache_scheme")
    elif (scheme := place.object("kv_cache_scheme")) is not None:
        yield (*_scheme(scheme), place.name("kv_cache_scheme"))
    if place.has("kv_cache_quant_algo"):
        yield _algorithm(place, "kv_cache_quant_algo")


def _algorithm(place: Fields, key: str) -> _Word:
    """ModelOpt's name of an algorithm."""
    algorithm = place.values[key]
    if algorithm in ("", "none", "None"):
        return _NOTHING
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        place.fail(key, f"kvgen knows {', '.join(_ALGORITHMS)}; {_CHOOSE}")
    return _ALGORITHMS[algorithm], _QUANTS[_ALGORITHMS[algorithm]], place.name(key)


_LISTED: Final = "kv_cache_quantized_layers"


def _listed(place: Fields) -> dict[int, _Word]:
    """ModelOpt's kv_cache_quantized_layers: the number of a layer -> its attention's algorithm; {} where it names none."""
    listed = place.object(_LISTED)
    found: dict[int, _Word] = {}
    for name in listed.values if listed is not None else ():
        assert listed is not None
        if not isinstance(name, str) or _OTHER_MODELS.search(name):
            continue
        number = _LAYER.search(name)
        if number is None:
            place.fail(_LISTED, f"{shown(name)} names no layer, as in 'model.layers.0.self_attn'; {_CHOOSE}")
        layer = listed.object(name)
        key = next((one for one in _ALGORITHM_KEYS if layer is not None and layer.has(one)), None)
        found[int(number[1])] = _algorithm(layer, key) if layer is not None and key is not None else _NOTHING
    return found


def _by_layer(place: Fields, listed: Mapping[int, _Word], layers: Sequence[int]) -> _Word:
    """KV precision stated for these layers, of which those that are not listed are not quantized. Layers of one kind share a
    cache: ConfigError where they are stored in several ways."""
    found = [listed.get(layer, _NOTHING)[:2] for layer in layers]
    other = next((i for i, word in enumerate(found) if word != found[0]), None)
    if other is not None:
        named = {word: algorithm for algorithm, word in _ALGORITHMS.items()} | {AUTO: "none"}
        said = " and ".join(f"{named[found[i][0]]} in layer {layers[i]}" for i in (0, other))
        place.fail(
            _LISTED,
            f"kv_cache_quant_algo is {said}; layers of one kind share a cache, which stores KV in one way; {_CHOOSE}",
        )
    return (*found[0], place.name(_LISTED)) if found and found[0] != _NOTHING[:2] else _NOTHING


def _scheme(scheme: Fields) -> tuple[str, Quant]:
    """compressed-tensors' QuantizationArgs: 8 bits, symmetric, a static scale a tensor or head, or a dynamic one."""
    found = checked(Scheme, scheme.values, scheme.name)
    kind = "fp8" if found.type == "float" else "int8"
    if found.num_bits != 8:
        scheme.fail("num_bits", f"KV of 8 bits is what kvgen reads from a config; {_CHOOSE}")
    if not found.symmetric:
        scheme.fail("symmetric", f"given scales have no zero points; {_CHOOSE}")
    if found.dynamic:
        name = "fp8-scaled" if kind == "fp8" else "int8"  # a scale per token and head is what a write can compute
        return name, _QUANTS[name]
    name = f"{kind}-static"
    if found.strategy == "tensor":
        return name, _QUANTS[name]
    return name, _QUANTS[name].model_copy(update={"block": Block(token=None)})


_QUARK_OUTPUTS: Final = re.compile(r"(?:[*.\w]*[.*])?[kv]_proj\Z")
_QUARK_TYPES: Final = {"fp8_e4m3": "fp8-static", "int8": "int8-static"}
_QUARK_PLAIN: Final = ("bfloat16", "float16", "float32")


def _quark(config: Fields) -> _Word:
    """Quark: `kv_cache_quant_config` or `layer_quant_config` with output_tensors of the projections whose rows are cached.

    `export.kv_cache_group` names these projections; where nothing describes their outputs, nothing is quantized.
    """
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        groups = config.object(key)
        for name in groups.values if groups is not None else ():
            if groups is None or not isinstance(name, str) or not _QUARK_OUTPUTS.match(name) or not groups.has(name):
                continue
            group = groups.object(name)
            outputs = group.object("output_tensors") if group is not None else None
            if outputs is not None:
                return _quark_tensor(outputs)
    export = config.object("export")
    if export is not None and export.has("kv_cache_group") and export.values["kv_cache_group"] != []:
        whole = config.object("global_quant_config")
        outputs = whole.object("output_tensors") if whole is not None else None
        if outputs is not None:
            return _quark_tensor(outputs)
        export.fail("kv_cache_group", f"nothing says how these projections' outputs are quantized; {_CHOOSE}")
    return _NOTHING


def _quark_tensor(outputs: Fields) -> _Word:
    found = checked(QuarkTensor, outputs.values, outputs.name)
    if found.dtype in _QUARK_PLAIN:
        return _NOTHING
    if found.dtype not in _QUARK_TYPES:
        outputs.fail("dtype", f"kvgen reads KV of {', '.join(_QUARK_TYPES)} from a config; {_CHOOSE}")
    if found.qscheme not in (None, "per_tensor"):
        outputs.fail("qscheme", f"a scale per tensor is what kvgen reads from a config; {_CHOOSE}")
    if found.symmetric is False:
        outputs.fail("symmetric", f"given scales have no zero points; {_CHOOSE}")
    name = _QUARK_TYPES[found.dtype]
    if found.is_dynamic:
        name = "fp8-scaled" if name == "fp8-static" else "int8"
    return name, _QUANTS[name], outputs.where


# Words ----------------------------------------------------------------------------------------------------------------


def words(found: Stored) -> str:
    """How KV is stored, for a reader: "e4m3 codes with an f32 scale per token and head"."""
    quant = found.quant
    if quant is None:
        return found.dtype
    if quant.scale_dtype is None:
        return f"{quant.dtype} codes without scales"
    scale = f"{quant.scale_dtype} scale{' and zero point' if quant.zero else ''}"
    article = "an" if quant.scale_dtype[0] in "ef" else "a"
    if quant.scale == "given":
        whose = "layer and head" if quant.block.head else "layer"
        return f"{quant.dtype} codes with a given {scale} per {whose}, K's and V's"
    per = f"token, head and {quant.block.dim} dims" if quant.block.dim else "token and head"
    extra = ", in the row" if quant.place == "row" else ""
    extra += ", times a given f32 scale" if quant.recipe == "global" else ""
    return f"{quant.dtype} codes with {article} {scale} per {per}{extra}"

"""A Hugging Face config.json -> the text of a spec (`kvgen init`).

The file is untrusted: it is read as JSON and nothing else, every value is checked against a range, and every mistake
is a `ConfigError` that names the field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, NoReturn

from kvgen.architectures import DEFAULT_ARCHS
from kvgen.errors import ConfigError, SpecError
from kvgen.json_file import shown
from kvgen.models.compressed_text import compressed_source
from kvgen.models.families import BY_CLASS, BY_TYPE
from kvgen.models.family import Family
from kvgen.models.fields import Fields
from kvgen.models.kv_dtype import AUTO, KV_DTYPES, stored_by_kind
from kvgen.models.layers import Checkpoint, LayerFacts
from kvgen.models.missing import MISSING, MISSING_CLASSES
from kvgen.models.published import parse, read, read_quantization
from kvgen.models.reader import read_family
from kvgen.models.serving import Serving, shard
from kvgen.models.text import DEFAULT, spec_source
from kvgen.models.wrappers import HOLDERS, PLACES, TEXT_OF_CLASS, TEXT_OF_TYPE

__all__ = [
    "AUTO",
    "EXAMPLE",
    "KV_DTYPES",
    "Checkpoint",
    "LayerFacts",
    "Serving",
    "default_name",
    "example",
    "facts",
    "parse",
    "read",
    "read_quantization",
    "spec_text",
]

EXAMPLE = "llama_3_1_8b.json"

# What a reader of an unknown architecture would need at least; `head_dim` may come from `hidden_size`.
_GENERIC = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_WELL_KNOWN = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"),
    *("llama", "mistral", "qwen3", "gemma3_text", "deepseek_v3"),
)
_ALSO_USED = ("rope_theta", "sliding_window", "kv_lora_rank")


def example() -> dict[str, Any]:
    """Llama-3.1-8B's config.json, which ships with kvgen."""
    return parse(files(__package__).joinpath(EXAMPLE).read_bytes(), source=EXAMPLE)


def facts(config: Mapping[str, Any]) -> Checkpoint:
    """What a config says about the cache and attention; `ConfigError` names the field that is wrong or missing."""
    fields = Fields(config)
    family, text, architecture = _family(fields)
    for place in (fields, text):
        if place.values.get("is_causal") is False:
            place.fail(
                "is_causal", "tokens see later ones, and kvgen's append and decode are causal; valid: true, null"
            )
    try:
        found = read_family(family, text, fields, architecture)
    except SpecError as error:
        raise ConfigError(str(error).replace("\n", "; ")) from None
    own = _own_name(fields, text, architecture) if fields.values.get("architectures") else None
    if own is None:
        return found
    note = f"{architecture} is a name of its makers': its attention is read as that of model_type {own}."
    return replace(found, notes=(note, *found.notes))


def spec_text(
    config: Mapping[str, Any],
    *,
    source: str,
    arch: Sequence[str] = DEFAULT_ARCHS,
    kv_dtype: str = AUTO,
    serving: Serving = DEFAULT,
    architecture: str | None = None,
    name: str | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> str:
    """The Python text of a spec for a config.

    `source` names the config in the docstring, as `--from` did. The cache is paged: 16-token pages of K and V, or
    64-token pages of latent rows for DeepSeek and Kimi; layers whose heads differ get a set each, named `name` and their
    kind. `kv_dtype` is one of KV_DTYPES: how KV is stored, or one for each kind of layers, such as "full=fp8,local=bf16";
    "auto" is what the config's quantization says, else the checkpoint's type. `serving` is how an engine serves it;
    `architecture` the class whose config this is, where the config names one that has no reader and the same fields.
    `quantization` is the hf_quant_config.json beside the config: it says how KV is stored where the config does not.
    """
    if architecture is not None:
        if architecture not in BY_CLASS:
            near = difflib.get_close_matches(architecture, BY_CLASS, n=3)
            known = [name for name in _WELL_KNOWN if name in BY_CLASS]
            more = f"; valid: {', '.join(known)} and {len(BY_CLASS) - len(known)} more"
            found_near = f"; did you mean {', '.join(near)}?" if near else more
            raise ConfigError(f"--as: got {shown(architecture)}; no reader for it{found_near}")
        config = {**config, "architectures": [architecture]}
    found = shard(facts(config), serving.tp)
    compressed = any(kind.compressed is not None for kind in found.cached)
    if compressed and kv_dtype != AUTO:
        raise ConfigError(
            f"--kv-dtype: got {shown(kv_dtype)}; how {found.model.architecture}'s rows are stored is the engine's record; say it "
            "with --preset"
        )
    whole = Fields(config)
    how = {} if compressed else stored_by_kind((whole, _text(whole)), found, kv_dtype, quantization)
    options = [f"--kv-dtype {kv_dtype}"] if kv_dtype != AUTO else []
    options += [*serving.options, *([f"--as {architecture}"] if architecture else [])]
    options += [f"--arch {','.join(arch)}"] if tuple(arch) != DEFAULT_ARCHS else []
    said: dict[str, Any] = {"source": source, "options": options, "arch": arch, "name": name or _name(found)}
    try:
        text = compressed_source(found, serving, **said) if compressed else spec_source(found, how, serving, **said)
    except SpecError as error:
        raise ConfigError(str(error).replace("\n", "; ")) from None
    if serving != DEFAULT or tuple(arch) != DEFAULT_ARCHS or found.model.kinds or _new(found):
        _check(text)
    return text


def _new(found: Checkpoint) -> bool:
    """Whether operations get more from a config than what every combination of fields is known to allow."""
    return any(
        kind.mrope or kind.head_dim_v != kind.head_dim_k or kind.q_norm or kind.v_norm or kind.q_scale
        for kind in found.cached
    )


def _check(text: str) -> None:
    """Raise ConfigError where a spec, put together from options that are right one by one, is none."""
    try:
        exec(compile(text, "<spec>", "exec"), {"__name__": "spec"})
    except SpecError as error:
        raise ConfigError(str(error).replace("\n", "; ")) from None


def default_name(config: Mapping[str, Any]) -> str:
    """A set name from family and shape, query heads x KV heads x head dim, such as `llama_32x8x128`."""
    return _name(facts(config))


def _name(found: Checkpoint) -> str:
    family = re.sub(r"For(CausalLM|ConditionalGeneration)\Z", "", found.model.architecture or "model")
    family = re.sub(r"\A[^a-z]+", "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", family).lower()) or "model"
    shape = f"_{found.q_heads}x{found.kv_heads}x{found.head_dim}"
    return f"{family[: 40 - len(shape)]}{shape}"


def _family(fields: Fields) -> tuple[Family, Fields, str]:
    """The row for a config, the object with the text model's fields, and the class name that a spec states."""
    listed = fields.values.get("architectures")
    if listed is not None and not isinstance(listed, list):
        fields.fail("architectures", "it must be a list of one class name, such as ['LlamaForCausalLM']")
    named = listed[0] if listed else None
    model_type = fields.values.get("model_type")
    text = _text(fields)
    if named is None:
        if not isinstance(model_type, str):
            _unknown(fields, "model_type", model_type, BY_TYPE)
        return _of_type(fields, text, model_type)
    if not isinstance(named, str):
        _unknown(fields, "architectures[0]", named, BY_CLASS)
    if text is fields and named in BY_CLASS:
        rows = BY_CLASS[named]
        return next((row for row in rows if model_type in row.types.split()), rows[0]), text, named
    inner = _inner_type(text) if text is not fields else None
    inner = inner or TEXT_OF_CLASS.get(named) or (TEXT_OF_TYPE.get(model_type) if isinstance(model_type, str) else None)
    if inner is None and named in BY_CLASS:
        return BY_CLASS[named][0], text, named
    inner = inner or _own_name(fields, text, named)
    if inner is None or inner not in BY_TYPE:
        _unreadable(inner, "architectures[0]", named)
        _unreadable(MISSING_CLASSES.get(named), "architectures[0]", named)
        _unreadable(model_type, "architectures[0]", named)
        _unknown(fields, "architectures[0]", named, BY_CLASS)
    return (
        BY_TYPE[inner],
        text,
        named if re.fullmatch(r"[A-Za-z0-9_]{1,64}", named) else _class_of(BY_TYPE[inner], inner),
    )


def _own_name(fields: Fields, text: Fields, named: str) -> str | None:
    """The model_type that a class without a row is of, by its name; None where the name says something else.

    Such names are those of other heads (`Qwen2ForRewardModel`, `MistralModel`), of a model's own code
    (`PhiMoEForCausalLM` of phimoe) and of drafts that are layers of it (`LlamaForCausalLMEagle3`).
    """
    model_type = fields.values.get("model_type")
    known = text is fields and isinstance(model_type, str) and model_type in BY_TYPE
    if not known or named in BY_CLASS or named in TEXT_OF_CLASS or not re.fullmatch(r"[A-Za-z0-9_]{1,64}", named):
        return None
    assert isinstance(model_type, str)
    stem = _stem(re.sub(r"\AEagle3?|Eagle3?\Z", "", named))
    return model_type if stem in {_plain(model_type), *map(_stem, BY_TYPE[model_type].classes.split())} else None


def _stem(named: str) -> str:
    """A class name without what stands on top of the model, in lower case: `Qwen2ForRewardModel` is qwen2."""
    return _plain(re.sub(r"(?:For[A-Z]\w*|Model)\Z", "", named))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _of_type(fields: Fields, text: Fields, model_type: str) -> tuple[Family, Fields, str]:
    """The row for a config without `architectures`."""
    inner = (_inner_type(text) if text is not fields else None) or TEXT_OF_TYPE.get(model_type) or model_type
    if inner not in BY_TYPE:
        _unreadable(inner, "model_type", model_type)
        _unknown(fields, "model_type", model_type, BY_TYPE)
    if inner != model_type:
        return BY_TYPE[inner], text, _holder(model_type) or _class_of(BY_TYPE[inner], inner)
    return BY_TYPE[inner], text, _class_of(BY_TYPE[inner], inner)


def _holder(model_type: str) -> str | None:
    """The class of a multimodal model_type."""
    return next(
        (name for pairs in HOLDERS.values() for kind, _, name in map(_pair, pairs.split()) if kind == model_type), None
    )


def _pair(text: str) -> tuple[str, str, str]:
    return text.partition(":")


def _class_of(family: Family, model_type: str) -> str:
    """The name of a family's class, or of its model_type where it has none of its own."""
    return family.classes.split()[0] if family.classes else re.sub(r"[^A-Za-z0-9_]", "_", model_type)


def _text(fields: Fields) -> Fields:
    """The text model's own object of a multimodal config; the config itself where there is none."""
    for path in PLACES:
        place: Fields | None = fields
        for key in path:
            place = place.object(key) if place is not None and place.has(key) else None
        if place is not None:
            return place
    return fields


def _inner_type(text: Fields) -> str | None:
    """The text model's type, by its own model_type or its class."""
    listed, model_type = text.values.get("architectures"), text.values.get("model_type")
    if isinstance(model_type, str) and (model_type in BY_TYPE or model_type in MISSING):
        return model_type
    if isinstance(listed, list) and listed and isinstance(listed[0], str) and listed[0] in BY_CLASS:
        return BY_CLASS[listed[0]][0].types.split()[0]
    return None


def _unreadable(model_type: object, key: str, shown_value: str) -> None:
    """Raise for a type of which it is known why kvgen does not read it."""
    if isinstance(model_type, str) and model_type in MISSING:
        said = f" ({model_type})" if model_type != shown_value else ""
        raise ConfigError(f"{key}: got {shown(shown_value)}{said}; kvgen does not read it: {MISSING[model_type]}")


def _unknown(fields: Fields, key: str, value: object, known: Mapping[str, object]) -> NoReturn:
    """Raise for an architecture without a reader, telling what a hand-written spec can take from the file."""
    text = Fields(fields.values["text_config"]) if isinstance(fields.values.get("text_config"), Mapping) else fields
    found = [f"{name} = {shown(text.values[name])}" for name in (*_GENERIC, *_ALSO_USED) if text.has(name)]
    missing = [name for name in _GENERIC if not text.has(name)]
    if not {"head_dim", "hidden_size"} <= set(missing):
        missing = [name for name in missing if name not in ("head_dim", "hidden_size")]
    lacking = ", ".join(missing).replace("head_dim, ", "head_dim or ")
    near = difflib.get_close_matches(value, known, n=3) if isinstance(value, str) else []
    some = [*dict.fromkeys((*near, *[name for name in _WELL_KNOWN if name in known]))]
    model_type = fields.values.get("model_type")
    row = BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    of_type = f"{row.classes.split()[0]}`, of its model_type," if row is not None and row.classes else "CLASS`"
    raise ConfigError(
        f"{key}: got {shown(value)}; no reader for it; valid: {', '.join(some)} and {len(known) - len(some)} more. `--as "
        f"{of_type} reads it as another class's, where its attention is the same. Fields found: {', '.join(found) or 'none'}; "
        f"missing: {lacking or 'none'}. A spec written by hand needs query heads, KV heads and head dim"
    )

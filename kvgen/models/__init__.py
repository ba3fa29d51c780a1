"""A Hugging Face config.json -> the text of a spec (`kvgen init`).

The file is untrusted: it is read as JSON and nothing else, every value is checked against a range, and every mistake
is a `ConfigError` that names the field.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from kvgen.errors import ConfigError, SpecError, ToolError
from kvgen.json_file import parse_object, read_object, shown
from kvgen.models.families import MODEL_TYPES, READERS, Checkpoint
from kvgen.models.fields import Fields
from kvgen.models.kv_dtype import AUTO, KV_DTYPES, stored
from kvgen.models.serving import Serving, shard
from kvgen.models.text import DEFAULT, spec_source

__all__ = ["AUTO", "EXAMPLE", "KV_DTYPES", "Serving", "default_name", "example", "facts", "parse", "read", "spec_text"]

SIZE_LIMIT = 2**20
EXAMPLE = "llama_3_1_8b.json"
DEFAULT_ARCH = ("sm_80", "sm_90a")

# What a reader of an unknown architecture would need at least; `head_dim` may come from `hidden_size`.
_GENERIC = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_ALSO_USED = ("rope_theta", "sliding_window", "kv_lora_rank")


def read(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file of at most 1 MiB; `ConfigError` for anything else."""
    try:
        return read_object(path, limit=SIZE_LIMIT)
    except ToolError as error:
        raise ConfigError(f"{error}; give the path of a model's config.json") from None


def parse(data: bytes, *, source: str) -> dict[str, Any]:
    """The JSON object in `data`; `source` names it in messages."""
    try:
        return parse_object(data, source)
    except ToolError as error:
        raise ConfigError(str(error)) from None


def example() -> dict[str, Any]:
    """Llama-3.1-8B's config.json, which ships with kvgen."""
    return parse(files(__package__).joinpath(EXAMPLE).read_bytes(), source=EXAMPLE)


def facts(config: Mapping[str, Any]) -> Checkpoint:
    """What a config says about the cache and attention; `ConfigError` names the field that is wrong or missing."""
    fields = Fields(config)
    architecture = _architecture(fields)
    try:
        return READERS[architecture](fields, architecture)
    except SpecError as error:
        raise ConfigError(str(error).replace("\n", "; ")) from None


def spec_text(
    config: Mapping[str, Any],
    *,
    source: str,
    arch: Sequence[str] = DEFAULT_ARCH,
    kv_dtype: str = AUTO,
    serving: Serving = DEFAULT,
    architecture: str | None = None,
) -> str:
    """The Python text of a spec for a config.

    `source` names the config in the docstring, as `--from` did. The cache is paged: 16-token pages of K and V, or
    64-token pages of latent rows for DeepSeek and Kimi. `kv_dtype` is one of KV_DTYPES: how KV is stored; "auto" is what
    the config's quantization says, else the checkpoint's type. `serving` is how an engine serves it; `architecture` the
    class whose config this is, where the config names one that has no reader and the same fields.
    """
    if architecture is not None:
        if architecture not in READERS:
            near = difflib.get_close_matches(architecture, READERS, n=3)
            found_near = f"; did you mean {', '.join(near)}?" if near else f"; valid: {', '.join(READERS)}"
            raise ConfigError(f"--as: got {shown(architecture)}; no reader for it{found_near}")
        config = {**config, "architectures": [architecture]}
    found = shard(facts(config), serving.tp)
    how = stored(Fields(config), found, kv_dtype)
    options = [f"--kv-dtype {kv_dtype}"] if kv_dtype != AUTO else []
    options += [*serving.options, *([f"--as {architecture}"] if architecture else [])]
    options += [f"--arch {','.join(arch)}"] if tuple(arch) != DEFAULT_ARCH else []
    text = spec_source(found, how, serving, source=source, options=options, arch=arch)
    if serving != DEFAULT or tuple(arch) != DEFAULT_ARCH:
        _check(text)
    return text


def _check(text: str) -> None:
    """Raise ConfigError where a spec, put together from options that are right one by one, is none."""
    try:
        exec(compile(text, "<spec>", "exec"), {"__name__": "spec"})
    except SpecError as error:
        raise ConfigError(str(error).replace("\n", "; ")) from None


def default_name(config: Mapping[str, Any]) -> str:
    """A set name from family and shape, query heads x KV heads x head dim, such as `llama_32x8x128`."""
    found = facts(config)
    family = re.sub(r"For(CausalLM|ConditionalGeneration)\Z", "", found.model.architecture or "model")
    family = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", family).lower()
    return f"{family}_{found.q_heads}x{found.kv_heads}x{found.head_dim}"


def _architecture(fields: Fields) -> str:
    """`architectures[0]`, or what `model_type` implies where there is none."""
    listed = fields.values.get("architectures")
    if listed is None or listed == []:
        model_type = fields.values.get("model_type")
        if isinstance(model_type, str) and model_type in MODEL_TYPES:
            return MODEL_TYPES[model_type]
        _unknown(fields, "model_type", model_type, MODEL_TYPES)
    if not isinstance(listed, list):
        fields.fail("architectures", "it must be a list of one class name, such as ['LlamaForCausalLM']")
    if isinstance(listed[0], str) and listed[0] in READERS:
        return listed[0]
    _unknown(fields, "architectures[0]", listed[0], READERS)


def _unknown(fields: Fields, key: str, value: object, known: Mapping[str, object]) -> NoReturn:
    """Raise for an architecture without a reader, telling what a hand-written spec can take from the file."""
    text = Fields(fields.values["text_config"]) if isinstance(fields.values.get("text_config"), Mapping) else fields
    found = [f"{name} = {shown(text.values[name])}" for name in (*_GENERIC, *_ALSO_USED) if text.has(name)]
    missing = [name for name in _GENERIC if not text.has(name)]
    if not {"head_dim", "hidden_size"} <= set(missing):
        missing = [name for name in missing if name not in ("head_dim", "hidden_size")]
    lacking = ", ".join(missing).replace("head_dim, ", "head_dim or ")
    raise ConfigError(
        f"{key}: got {shown(value)}; no reader for it; valid: {', '.join(known)}. Fields found: "
        f"{', '.join(found) or 'none'}; missing: {lacking or 'none'}. A spec written by hand needs query heads, KV "
        "heads and head dim"
    )

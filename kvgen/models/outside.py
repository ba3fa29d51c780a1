"""The JSON objects of a config.json as pydantic models: names, types and ranges, with kvgen's words for what is wrong.

A model lists the fields that kvgen reads of one object; others pass unread. null counts as absent, as it does in
transformers. The first field that is wrong raises `ConfigError`: its name, its value, the rule and what is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvgen.errors import ConfigError
from kvgen.json_file import shown

HEADS: Final = 4096
HEAD_DIM: Final = 1024
LAYERS: Final = 1024
RANK: Final = 2**20
POSITIONS: Final = 2**31 - 1

Heads = Annotated[int, Field(ge=1, le=HEADS)]
Dim = Annotated[int, Field(ge=1, le=HEAD_DIM)]
Rank = Annotated[int, Field(ge=1, le=RANK)]
Positions = Annotated[int, Field(ge=1, le=POSITIONS)]
Count = Annotated[int, Field(ge=1, le=LAYERS)]
Theta = Annotated[float, Field(ge=1.0 + 1e-6, le=1e12)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

Names = Callable[[str], str]
M = TypeVar("M", bound="Outside")


class Outside(BaseModel):
    """One JSON object of a config.json."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True)


class Shape(Outside):
    """Heads, layers and their sizes. `hidden_size` counts only where no field has the head dim."""

    num_attention_heads: Heads
    num_hidden_layers: Count
    num_key_value_heads: Heads | None = None
    head_dim: Dim | None = None
    hidden_size: Annotated[int, Field(ge=1, le=HEADS * HEAD_DIM)] | None = None
    max_position_embeddings: Positions | None = None


class Latents(Outside):
    """Ranks of multi-head latent attention."""

    kv_lora_rank: Rank
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=HEAD_DIM)]
    qk_nope_head_dim: Dim
    v_head_dim: Dim
    q_lora_rank: Rank | None = None
    rope_interleave: bool | None = None


class RopeJson(Outside):
    """`rope_parameters` (transformers 5), `rope_scaling` (transformers 4), or one kind of layers of them.

    `type` is the older name of `rope_type`, "su" that of "longrope". "mrope" is no scaling: its sections say how positions of
    three axes are dealt to pairs.
    """

    rope_type: (
        Literal["default", "linear", "llama3", "yarn", "longrope", "su", "mrope", "proportional", "dynamic"] | None
    ) = None
    type: (
        Literal["default", "linear", "llama3", "yarn", "longrope", "su", "mrope", "proportional", "dynamic"] | None
    ) = None
    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: Annotated[float, Field(ge=1.0, le=1e6)] | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    beta_slow: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    mscale: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    attention_factor: Factor | None = None
    attn_factor: Factor | None = None
    truncate: bool | None = None
    short_factor: Annotated[list[Factor], Field(max_length=HEAD_DIM)] | None = None
    long_factor: Annotated[list[Factor], Field(max_length=HEAD_DIM)] | None = None
    short_mscale: Factor | None = None
    long_mscale: Factor | None = None
    alpha: Factor | None = None
    mrope_interleaved: bool | None = None
    mrope_section: Annotated[list[Annotated[int, Field(ge=0, le=HEAD_DIM)]], Field(max_length=4)] | None = None
    llama_4_scaling_beta: Annotated[float, Field(ge=0.0, le=1e3)] | None = None


class Scheme(Outside):
    """compressed-tensors' QuantizationArgs for KV: `quantization_config.kv_cache_scheme`."""

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: Literal["float", "int"] = "int"
    symmetric: bool = True
    dynamic: bool = False
    strategy: Literal["tensor", "attn_head"] = "tensor"


class QuarkTensor(Outside):
    """Quark's description of one tensor: `dtype`, `qscheme`, `is_dynamic`."""

    dtype: Literal["fp8_e4m3", "fp8_e5m2", "int8", "uint8", "int4", "uint4", "bfloat16", "float16", "float32"]
    qscheme: Literal["per_tensor", "per_channel", "per_group"] | None = None
    is_dynamic: bool | None = None
    symmetric: bool | None = None


def checked(model: type[M], values: Mapping[str, object], named: Names) -> M:
    """`values` as `model`; ConfigError for the first field that is wrong, called what `named` calls it."""
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        _refuse(model, [str(part) for part in first["loc"]], given, named)


def _refuse(model: type[Outside], place: list[str], given: Mapping[str, object], named: Names) -> NoReturn:
    value: Any = given
    rule = _schema(model)["properties"][place[0]]
    steps = 0
    for part in place:
        if isinstance(value, Mapping) and part in value:
            value, steps = value[part], steps + 1
        elif isinstance(value, list) and part.isdigit():
            value, steps = value[int(part)], steps + 1
            rule = _plain(rule).get("items", {})
    name = ".".join([named(place[0]), *place[1:steps]])
    raise ConfigError(f"{name}: got {shown(value if steps else None)}; {_rule(_plain(rule))}")


@cache
def _schema(model: type[Outside]) -> dict[str, Any]:
    return model.model_json_schema()


def _plain(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rule without the alternative of null."""
    found: Mapping[str, Any] = next((one for one in rule.get("anyOf", ()) if one.get("type") != "null"), rule)
    return found


def _rule(rule: Mapping[str, Any]) -> str:
    if "enum" in rule or "const" in rule:
        return f"it is none that kvgen knows; valid: {', '.join(rule.get('enum') or [rule['const']])}"
    kind = rule.get("type")
    if kind == "integer":
        return f"it must be an integer; valid: {rule['minimum']} to {rule['maximum']}"
    if kind == "number":
        return f"it must be a number; valid: {rule['minimum']:g} to {rule['maximum']:g}"
    if kind == "boolean":
        return "it must be a boolean; valid: true, false"
    if kind == "array":
        most = f"; valid: at most {rule['maxItems']} entries" if "maxItems" in rule else ""
        return f"it must be a list{most}"
    if kind == "string":
        return f"it must be a string; valid: at most {rule['maxLength']} characters"
    return "it must be a JSON object, such as {...}"

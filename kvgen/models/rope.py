"""RoPE as a config.json states it, in the spellings of transformers 4 (`rope_scaling`) and 5 (`rope_parameters`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgen.errors import ConfigError
from kvgen.models.family import FamilyRope
from kvgen.models.fields import Fields
from kvgen.models.outside import RopeJson, Share, Theta, checked
from kvgen.models.unread import ORIGINAL, unread
from kvgen.schema.model import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, Scaling, YarnScaling

_LATENT = "qk_rope_head_dim"
KINDS = {"full": "full_attention", "local": "sliding_attention"}
_KNOWN = ("default", "linear", "llama3", "yarn", "longrope", "su")


@dataclass(frozen=True)
class LayerRope:
    """RoPE of a kind of layers.

    `rope.dim` elements of a head rotate; with `proportional`, their frequencies are those of the whole head's first pairs, and
    pair i is elements i and i + d / 2 of the whole head (Gemma 4). `sections`: pairs of each of several positions a token.
    `factor`: what mscale_all_dim makes of a latent model's scale where no YarnScaling says it. `beta`, `original`: q is
    scaled by position (Ministral 3). `ignored`: a partial_rotary_factor that the family's modelling code does not use.
    `unread`: names of fields that nothing was made of; `attn_factor`: the name of one that transformers does not read.
    """

    rope: Rope
    proportional: bool = False
    sections: tuple[int, ...] = ()
    factor: float = 1.0
    beta: float | None = None
    original: int | None = None
    ignored: float | None = None
    unread: tuple[str, ...] = ()
    attn_factor: str | None = None


def layer_ropes(
    fields: Fields, row: FamilyRope, head_dims: Mapping[str, int], key: str, positions: int
) -> dict[str, LayerRope | None]:
    """The RoPE of each kind in `head_dims`, None where it has none.

    `key` names the field that the head dim came from; `positions` is max_position_embeddings where the config has none.
    """
    given, place = _given(fields, row)
    nested = [name for name in KINDS.values() if name in given]
    beside = _beside(fields, given, place, nested)
    if row.kinds:
        of_kinds = {
            kind: _of_kind(fields, row, kind, given, place, bool(nested), dim, key, positions)
            for kind, dim in head_dims.items()
        }
        return {kind: _with_unread(layer_rope, beside) for kind, layer_rope in of_kinds.items()}
    if nested:
        same = [given[name] for name in nested if given[name] is not None]
        if any(one != same[0] for one in same):
            raise ConfigError(
                f"{place}: got an object for each kind of layers; this family's layers rotate alike; valid: one object, such as "
                '{"rope_type": "default", "rope_theta": 10000.0}'
            )
        given, place = same[0] if same else {}, f"{place}.{nested[0]}"
    found: dict[str, LayerRope | None] = {}
    for kind, dim in head_dims.items():
        found[kind] = _with_unread(_layer_rope(fields, row, given, place, dim, key, positions, row.theta), beside)
    return found


def _beside(fields: Fields, given: Mapping[str, Any], place: str, nested: Sequence[str]) -> tuple[str, ...]:
    """Names of fields beside those that are read: a whole object where the other one holds, what lies beside kinds."""
    found = []
    new = fields.values.get("rope_parameters")
    if place == fields.name("rope_scaling") and isinstance(new, Mapping) and new and new != given:
        found.append(fields.name("rope_parameters"))
    if nested:
        found += [
            f"{place}.{name}" for name, value in given.items() if name not in KINDS.values() and value is not None
        ]
    return tuple(found)


def _with_unread(layer_rope: LayerRope | None, names: tuple[str, ...]) -> LayerRope | None:
    return replace(layer_rope, unread=(*names, *layer_rope.unread)) if layer_rope is not None and names else layer_rope


def unscaled(layer_rope: LayerRope) -> LayerRope:
    """A RoPE without its scaling."""
    return replace(layer_rope, rope=layer_rope.rope.model_copy(update={"scaling": None}))


def _given(fields: Fields, row: FamilyRope) -> tuple[Mapping[str, Any], str]:
    """The parameters and their field's name: rope_scaling where it is not empty, else rope_parameters, else the family's."""
    old, new = fields.object("rope_scaling"), fields.object("rope_parameters")
    if old is not None and old.values and not row.kinds:
        return old.values, old.where
    if new is not None and (new.values or not row.default):
        merged = dict(new.values)
        if row.kinds and old is not None and old.values:
            return _with_scaling(merged, old.values, row), new.where
        return merged, new.where
    if row.kinds and old is not None and old.values:
        return _with_scaling(dict(row.default), old.values, row), old.where
    return row.default, fields.name("rope_parameters")


def _with_scaling(given: dict[str, Any], scaling: Mapping[str, Any], row: FamilyRope) -> dict[str, Any]:
    """Parameters by kind, in which a flat rope_scaling scales the kinds that the family says."""
    if any(name in scaling for name in KINDS.values()):
        return {**given, **scaling}
    if not row.flat and not any(name in given for name in KINDS.values()):
        given = {}
    elif not row.beside:
        return given
    if given and not any(name in given for name in KINDS.values()):
        given = {name: dict(given) for name in KINDS.values()}
    for kind in row.scales:
        inner = given.get(KINDS[kind])
        # Parameters that a config leaves out have a rope_type, which wins over the older name `type` in the scaling.
        given[KINDS[kind]] = {**(inner if isinstance(inner, Mapping) else {"rope_type": "default"}), **scaling}
    return given


def _of_kind(
    fields: Fields,
    row: FamilyRope,
    kind: str,
    given: Mapping[str, Any],
    place: str,
    nested: bool,
    dim: int,
    key: str,
    positions: int,
) -> LayerRope | None:
    theta, name = row.kinds.get(kind, row.kinds["full"])
    word = KINDS.get(kind, "full_attention")
    inner: Any = given
    if nested or row.default:
        inner = given.get(word, None if nested else given)
        if inner is None and (not theta or (word in given and word in row.default and row.default[word] is None)):
            return None
        if inner is None and not name and word not in given and theta == 0.0:
            return None
    elif not theta:
        return None
    if not nested and not row.flat and place != fields.name("rope_scaling"):
        inner = None
    inner = Fields(inner if inner is not None else {}, f"{place}.{word}" if nested else place)
    own = replace(row, thetas=(name,) if name else ())
    return _layer_rope(fields, own, inner.values, inner.where, dim, key, positions, theta)


def _layer_rope(
    fields: Fields,
    row: FamilyRope,
    given: Mapping[str, Any],
    place: str,
    head_dim: int,
    key: str,
    positions: int,
    theta: float,
) -> LayerRope:
    inside = Fields(given, place)
    json = checked(RopeJson, given, inside.name)
    kind = json.rope_type or json.type or "default"
    if kind == "su" or (kind == "yarn" and row.original_first is not None):
        kind = "longrope"
    plain = kind in ("default", "mrope") or (kind == "dynamic" and row.alpha)
    base = json.rope_theta or _top(fields, row.thetas, Theta) or theta
    share, shared_by = _share(fields, row, json, inside)
    if plain and row.plain_share is not None and json.partial_rotary_factor is None:
        share, shared_by = row.plain_share, None
    ignored = None
    if plain and row.share is None and share != 1.0:
        share, ignored = 1.0, share
    rotated = _rotated(fields, row, given, head_dim, share)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        if shared_by is not None:
            shared_by[0].fail(
                shared_by[1],
                f"it rotates {rotated} of {head_dim} elements, not whole pairs; valid: such as 1.0, all of them",
            )
        raise ConfigError(f"{fields.name(key)}: got {head_dim}; RoPE rotates pairs of elements; valid: an even number")
    if kind == "proportional":
        rotated = 2 * int(share * head_dim // 2)
    if kind == "dynamic":
        base = _dynamic(row, json, inside, base, rotated)
    scaling = None if plain else _scaling(fields, row, json, inside, kind, rotated, positions)
    part = None if rotated == head_dim else rotated
    whole = kind == "proportional" and part is not None
    rope = Rope(style=row.style, theta=base, dim=part, scaling=scaling, proportional=whole)
    sections = tuple(json.mrope_section or ()) or row.sections
    extra = 1.0
    if not plain and json.mscale_all_dim and not isinstance(scaling, YarnScaling):
        extra = (0.1 * json.mscale_all_dim * math.log(json.factor or 1.0) + 1.0) ** 2
    original = json.original_max_position_embeddings
    if kind in ("yarn", "llama3", "longrope"):
        original = _original(fields, row, json, positions)
    return LayerRope(
        rope,
        proportional=kind == "proportional",
        sections=sections,
        factor=extra,
        beta=json.llama_4_scaling_beta,
        original=original if original is not None else _length(fields, positions),
        ignored=ignored,
        unread=tuple(
            inside.name(name)
            for name in unread(fields, row, json, given, kind, share=rotated / head_dim, latent=key == _LATENT)
        ),
        attn_factor=inside.name("attn_factor") if kind == "yarn" and json.attn_factor is not None else None,
    )


def _top(fields: Fields, names: tuple[str, ...], kind: Any) -> float | None:
    """A number beside the parameters, in the first of these fields that has one."""
    low, high = (1.0 + 1e-6, 1e12) if kind is Theta else (0.0, 1.0)
    for name in names:
        place, last = fields.inner(name)
        if place is not None and place.has(last):
            value = place.values[last]
            if isinstance(value, list) and value:  # one a layer (Step 3.5)
                place, last = Fields({last: value[0]}, place.where), last
            return place.number(last, low=low, high=high)
    return None


def _share(fields: Fields, row: FamilyRope, json: RopeJson, inside: Fields) -> tuple[float, tuple[Fields, str] | None]:
    """The part of a head that rotates, and where that is said."""
    if json.partial_rotary_factor is not None:
        return json.partial_rotary_factor, (inside, "partial_rotary_factor")
    for name in row.shares:
        if fields.has(name):
            found = _top(fields, (name,), Share)
            assert found is not None
            return found, (fields, name)
    return row.share if row.share is not None else 1.0, None


def _rotated(fields: Fields, row: FamilyRope, given: Mapping[str, Any], head_dim: int, share: float) -> int:
    """Elements of a head that rotate."""
    if row.dims and fields.has(row.dims):
        return fields.integer(row.dims, low=2, high=head_dim)
    if row.dims in row.default and given is row.default:
        if row.dims in fields.values:
            fields.fail(row.dims, "it says how many elements of a head rotate; valid: an even number")
        return min(int(given[row.dims]), head_dim)
    return int(head_dim * share)


def _dynamic(row: FamilyRope, json: RopeJson, inside: Fields, base: float, rotated: int) -> float:
    if row.alpha and json.alpha and rotated > 2:
        return float(min(base * json.alpha ** (rotated / (rotated - 2)), 1e12))
    if row.alpha and json.alpha is None and json.factor in (None, 1.0):
        return base
    key = "rope_type" if json.rope_type else "type"
    inside.fail(
        key,
        "its frequencies depend on the longest sequence of a batch, and engines differ from transformers in how; kvgen reads "
        f"none of them; valid: {', '.join(_KNOWN)}",
    )


def _length(fields: Fields, positions: int) -> int:
    return fields.integer("max_position_embeddings", default=positions, high=2**31 - 1)


def _original(fields: Fields, row: FamilyRope, json: RopeJson, positions: int, low: int = 1) -> int:
    """The trained length: the field beside parameters that all layers share, which wins; else the scaling's own; else the
    model's whole length.

    transformers reads its configs' RoPE again as it builds a model, and there the field beside the parameters wins; so it
    does in vLLM. Phi-3's class has a default for it.
    """
    key = ORIGINAL
    if row.original_first is not None:
        return fields.integer(key, default=row.original_first, low=low, high=2**31 - 1)
    if not row.kinds and fields.has(key):
        return fields.integer(key, low=low, high=2**31 - 1)
    if json.original_max_position_embeddings is not None:
        if json.original_max_position_embeddings < low:
            raise ConfigError(
                f"{key}: got {json.original_max_position_embeddings}; it must be an integer; valid: {low} to {2**31 - 1}"
            )
        return json.original_max_position_embeddings
    return fields.integer("max_position_embeddings", default=positions, low=low, high=2**31 - 1)


def _scaling(
    fields: Fields, row: FamilyRope, json: RopeJson, inside: Fields, kind: str, rotated: int, positions: int
) -> Scaling | None:
    if kind == "longrope":
        return _long_rope(fields, row, json, inside, rotated, positions)
    if kind in ("proportional", "dynamic"):
        return LinearScaling(factor=json.factor) if kind == "proportional" and json.factor not in (None, 1.0) else None
    if kind == "yarn":
        return _yarn(fields, row, json, inside, positions)
    factor = inside.number("factor", low=1.0, high=1e6)
    if kind == "linear":
        return LinearScaling(factor=factor)
    low = inside.number("low_freq_factor", low=1e-6, high=1e6)
    high = inside.number("high_freq_factor", low=1e-6, high=1e6)
    if high < low:
        inside.fail("high_freq_factor", f"it must not be below low_freq_factor; valid: from {low:g}")
    return Llama3Scaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original(fields, row, json, positions),
    )


def _yarn(fields: Fields, row: FamilyRope, json: RopeJson, inside: Fields, positions: int) -> YarnScaling:
    original = _original(fields, row, json, positions)
    factor = json.factor
    if factor is None:
        if not fields.has("max_position_embeddings") or "factor" not in inside.values:
            inside.number("factor", low=1.0, high=1e6)
        factor = max(1.0, _length(fields, positions) / original)
    fast, slow = json.beta_fast or 32.0, json.beta_slow or 1.0
    if fast < slow:
        inside.fail("beta_fast", f"it must not be below beta_slow; valid: from {slow:g}")
    for key, value in (("beta_fast", fast), ("beta_slow", slow)):
        if value < 1e-6:
            inside.fail(key, "it must be a number; valid: 1e-06 to 1e+06")
    # 0 is how DeepSeek's code spells "none"; transformers takes a null truncate for false, and reads none of a RoPE by kind.
    scaling = YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=json.mscale or None,
        mscale_all_dim=json.mscale_all_dim or None,
        attention_factor=json.attention_factor,
        truncate=bool(json.truncate) if "truncate" in inside.values and not row.kinds else True,
    )
    if json.attn_factor is None:
        return scaling
    if json.attention_factor is not None:
        inside.fail(
            "attn_factor", "attention_factor beside it says what cos and sin are multiplied by; valid: one of them"
        )
    return scaling.model_copy(update={"attention_factor": scaling.cos_sin_factor * json.attn_factor})


def _long_rope(
    fields: Fields, row: FamilyRope, json: RopeJson, inside: Fields, rotated: int, positions: int
) -> LongRopeScaling:
    short = inside.numbers("short_factor", length=rotated // 2, low=1e-6, high=1e6)
    long = inside.numbers("long_factor", length=rotated // 2, low=1e-6, high=1e6)
    original = _original(fields, row, json, positions, low=2)
    factor = json.attention_factor
    if factor is None and json.factor is not None:
        factor = math.sqrt(1.0 + math.log(json.factor) / math.log(original)) if json.factor > 1.0 else 1.0
    if row.mscales and json.short_mscale is not None:
        if json.long_mscale != json.short_mscale:
            inside.fail(
                "long_mscale", f"short sequences have another; one table holds for both; valid: {json.short_mscale:g}"
            )
        factor = json.short_mscale
    return LongRopeScaling(
        short_factor=short,
        long_factor=long,
        original_max_positions=original,
        max_positions=_length(fields, positions),
        attention_factor=factor,
    )

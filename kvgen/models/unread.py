"""Which fields of a RoPE's parameters nothing is made of: a spec's docstring names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvgen.models.family import FamilyRope
from kvgen.models.fields import Fields
from kvgen.models.outside import RopeJson

ORIGINAL: Final = "original_max_position_embeddings"
# Type -> the fields that it reads beside those of every type.
_READ: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "mrope": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}),
    "yarn": frozenset({"factor", "beta_fast", "beta_slow", "attention_factor", "attn_factor", "truncate", ORIGINAL}),
    "longrope": frozenset({"factor", "short_factor", "long_factor", "attention_factor", ORIGINAL}),
    "proportional": frozenset({"factor"}),
    "dynamic": frozenset({"alpha"}),
}


def unread(
    fields: Fields, row: FamilyRope, json: RopeJson, given: Mapping[str, Any], kind: str, *, share: float, latent: bool
) -> list[str]:
    """The fields of `given`, which `json` has as numbers, that nothing is made of under a type; none of a family's defaults.

    `fields` is the text model's object; `share` is the part of a head that rotates; `latent`: of latent rows, whose scale of
    scores has mscale_all_dim. Values of null are absent.
    """
    if given is row.default:
        return []
    read = {"rope_type", "rope_theta", *_READ[kind]}
    if (
        json.type in (None, json.rope_type)
        or json.rope_type is None
        or {json.type, json.rope_type} == {"su", "longrope"}
    ):
        read.add("type")
    if not fields.has(row.dims) or json.partial_rotary_factor == share:
        read.add("partial_rotary_factor")  # where a family's code rotates whole heads, LayerRope.ignored says it
    if row.sections:
        read.add("mrope_section")
        read |= {"mrope_interleaved"} if json.mrope_interleaved is (row.layout == "cycle") else set()
    if kind == "longrope" and row.mscales:
        read |= {"short_mscale", "long_mscale"}
    if kind == "dynamic" and json.alpha is None:
        read.add("factor")
    if kind == "yarn" and json.mscale and json.mscale_all_dim and json.attention_factor is None:
        read |= {"mscale", "mscale_all_dim"}
    elif latent and kind not in ("default", "mrope"):
        read |= {"mscale_all_dim", "factor"}
    beside = fields.values.get(ORIGINAL) if row.original_first is not None or not row.kinds else None
    wins = beside if beside is not None else row.original_first
    if wins is not None and wins != json.original_max_position_embeddings:
        read.discard(ORIGINAL)
    return [name for name, value in given.items() if isinstance(name, str) and value is not None and name not in read]

"""Facts -> the Python text of a spec, laid out as `ruff format` would with lines of 120.

Nothing of a config is pasted: a value reaches the text as the literal of a validated int, float, bool or string of
letters, digits and underscores, and nothing else can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.errors import ConfigError, SpecError
from kvgen.models.layers import Checkpoint
from kvgen.models.kv_dtype import Stored, latent, words
from kvgen.models.serving import Serving, preset_fields
from kvgen.ops.mla_decode import MlaDecode
from kvgen.spec.base import Spec
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.mask import Mask
from kvgen.spec.model import LongRopeScaling, Mla
from kvgen.spec.score import Score

LINE = 120
INDENT = "    "
SOURCE_LENGTH = 80
PAGE = 16
LATENT_PAGE = 64
DEFAULT = Serving()


@dataclass(frozen=True)
class Atom:
    """Text that is never broken."""

    text: str


@dataclass(frozen=True)
class Group:
    """`opening item, item, ... closing`; an item may carry a keyword. One line where it fits, else an item a line."""

    opening: str
    items: Sequence[tuple[str, Atom | Group]]
    closing: str

    @property
    def flat(self) -> str:
        """The one-line form; a tuple of one keeps its comma."""
        inner = ", ".join(word + (item.text if isinstance(item, Atom) else item.flat) for word, item in self.items)
        return f"{self.opening}{inner}{',' if self.opening == '(' and len(self.items) == 1 else ''}{self.closing}"


def spec_source(
    facts: Checkpoint,
    stored: Stored,
    serving: Serving = DEFAULT,
    *,
    source: str,
    options: Sequence[str] = (),
    arch: Sequence[str],
) -> str:
    """The spec file's text; `source` says where the facts come from and is reduced to harmless characters.

    `options` are those of `kvgen init` that were given.
    """
    model = facts.model
    page = serving.page_size or (LATENT_PAGE if model.mla else PAGE)
    operations = [*_appends(facts), Atom("ops.Gather()"), *_decodes(facts, stored, arch)]
    used = spec_names(model)
    used |= {"RmsNorm"} if facts.norm is not None else set()
    score = _score(facts)
    used |= {"Mask"} if model.window is not None else set()
    used |= {"Score"} if score is not None else set()
    if serving.preset is not None:
        kind, given = f"presets.{serving.preset}", preset_fields(facts, stored, serving)
        cache = [(f"{name}=", literal(value)) for name, value in given.items()]
    else:
        kind = "Latent" if model.mla else "Paged"
        cache = _cache(facts, stored, page)
        used |= {kind} | (spec_names(stored.quant) if stored.quant is not None else set())
    body = Group(
        "KernelSet(",
        [
            ("q_heads=", literal(facts.q_heads)),
            ("cache=", Group(f"{kind}(", cache, ")")),
            ("ops=", Group("[", [("", operation) for operation in operations], "]")),
            ("arch=", Group("[", [("", literal(name)) for name in arch], "]")),
            ("model=", call(model)),
        ],
        ")",
    )
    imports = ", ".join([*sorted({"KernelSet", *used}), "ops", *(["presets"] if serving.preset else [])])
    command = " ".join([f"kvgen init --from {_harmless(source)}", *options])
    return (
        f'"""{_headline(facts, stored, serving, page)}\n\n{_how(facts, stored)}Written by `{command}`.\n"""'
        f"\n\nfrom kvgen import {imports}\n\nkernels = {_broken(body, 0)}\n"
    )


def _cache(facts: Checkpoint, stored: Stored, page: int) -> list[tuple[str, Atom | Group]]:
    """The fields of a cache in kvgen's own layout."""
    mla = facts.model.mla
    found: list[tuple[str, Atom | Group]] = [("dtype=", literal(stored.dtype))]
    if mla is not None:
        found += [("latent_dim=", literal(mla.kv_lora_rank)), ("rope_dim=", literal(mla.qk_rope_head_dim))]
    else:
        found += [("kv_heads=", literal(facts.kv_heads)), ("head_dim=", literal(facts.head_dim))]
    found.append(("page_size=", literal(page)))
    if stored.quant is not None:
        found.append(("quant=", literal(stored.quant)))
    if stored.quant_rope:
        found.append(("quant_rope=", literal(True)))
    return found


def _appends(facts: Checkpoint) -> list[Atom | Group]:
    """append with the model's norms and RoPE; a second one for local layers whose RoPE differs."""
    model = facts.model
    norms = ("k_norm",) if model.mla else ("q_norm", "k_norm")
    normal = [(f"{name}=", literal(facts.norm)) for name in norms if facts.norm is not None]
    # Which of LongRoPE's factors hold, nobody knows before the longest sequence.
    table = (
        [("angles=", literal("halves"))] if isinstance(getattr(model.rope, "scaling", None), LongRopeScaling) else []
    )
    found: list[Atom | Group] = []
    for name in ("model", "local") if model.rope is not None and model.rope.local_theta else ("model",):
        own = [("name=", literal("append_local"))] if name == "local" else []
        rope = [("rope=", literal(name)), *(table if name == "model" else [])] if model.rope is not None else []
        found.append(Group("ops.Append(", [*own, *rope, *normal], ")"))
    return found


def _decodes(facts: Checkpoint, stored: Stored, arch: Sequence[str]) -> list[Atom | Group]:
    """decode with the model's scale, window, score and sinks; a second one for local layers that have full ones beside them.

    An engine plans once per step for all layers of a kind. Latent rows that mla_decode cannot read get none.
    """
    model = facts.model
    if model.mla is not None:
        return [Atom('ops.MlaDecode(split="balanced")')] if _decodes_latent(facts, model.mla, stored, arch) else []
    same: list[tuple[str, Atom | Group]] = []
    if model.query_pre_attn_scalar not in (None, facts.head_dim):
        same.append(("scale=", literal(model.softmax_scale(facts.head_dim))))
    score = _score(facts)
    rest = [("score=", literal(score))] if score is not None else []
    if model.sinks:
        rest.append(("sinks=", literal("lse")))  # out and lse then are one state, which merging takes as it is
    rest.append(("split=", literal("balanced")))
    local = [("mask=", literal(Mask(window=model.window)))] if model.window is not None else []
    if model.window_pattern is None:
        return [Group("ops.Decode(", [*same, *local, *rest], ")")]
    name = ("name=", literal("decode_local"))
    return [Group("ops.Decode(", [*same, *rest], ")"), Group("ops.Decode(", [name, *same, *local, *rest], ")")]


def _decodes_latent(facts: Checkpoint, mla: Mla, stored: Stored, arch: Sequence[str]) -> bool:
    """Whether mla_decode can read the model's rows as they are stored."""
    fields: dict[str, Any] = {"q_heads": facts.q_heads, "arch": tuple(arch), "model": facts.model}
    try:
        decode = MlaDecode(split="balanced")
        decode.plan(KernelSet(name="found", cache=latent(mla, stored, page_size=LATENT_PAGE), ops=(decode,), **fields))
    except (ValueError, SpecError):
        return False
    return True


def _score(facts: Checkpoint) -> Score | None:
    """What the model does to scores besides scaling them."""
    fields: dict[str, Any] = {"alibi": True} if facts.model.alibi else {}
    if facts.model.logit_softcap is not None:
        fields["softcap"] = facts.model.logit_softcap
    return Score(**fields) if fields else None


def _headline(facts: Checkpoint, stored: Stored, serving: Serving, page: int) -> str:
    model = facts.model
    start = f"{model.architecture}: {stored.dtype}"
    place = f"in the layout of presets.{serving.preset}" if serving.preset else f"in {page}-token pages"
    share = f" on one of {serving.tp} GPUs" if serving.tp > 1 else ""
    if model.mla:
        return f"{start} latent rows of {facts.head_dim} {place}, {facts.q_heads} query heads{share}."
    heads = f"{facts.q_heads} query heads over {facts.kv_heads} KV heads of {facts.head_dim}"
    return f"{start} cache {place}, {heads}{share}."


def _how(facts: Checkpoint, stored: Stored) -> str:
    """What is stored, and who says so; "" for a cache of the checkpoint's own type."""
    if stored.quant is None:
        return ""
    said = f",\nas the checkpoint's {stored.source} says" if stored.source else ""
    rest = f"; the RoPE part stays {stored.dtype}" if facts.model.mla and not stored.quant_rope else ""
    return f"Stored are {words(stored)}{rest}{said}.\n"


def _harmless(source: str) -> str:
    """A path or name for the docstring: letters, digits and ._-/@+ stay; the end is kept, for it names the file."""
    text = re.sub(r"[^A-Za-z0-9._/@+-]", "_", source)
    return text if len(text) <= SOURCE_LENGTH else "..." + text[3 - SOURCE_LENGTH :]


def _given(spec: Spec) -> list[str]:
    """The fields that a constructor call must give: those that were given and are not at their default."""
    fields = type(spec).model_fields
    given = (n for n in fields if n in spec.model_fields_set)
    return [n for n in given if fields[n].is_required() or getattr(spec, n) != fields[n].default]


def spec_names(spec: Spec) -> set[str]:
    """The class names that `call(spec)` uses."""
    values = [getattr(spec, name) for name in _given(spec)]
    return {type(spec).__name__}.union(*(spec_names(value) for value in values if isinstance(value, Spec)))


def call(spec: Spec) -> Group:
    """A constructor call with every field that is not at its default."""
    items = [(f"{name}=", literal(getattr(spec, name))) for name in _given(spec)]
    return Group(f"{type(spec).__name__}(", items, ")")


def literal(value: object) -> Atom | Group:
    """The Python literal of a validated value."""
    if isinstance(value, Spec):
        return call(value)
    if isinstance(value, tuple):
        return Group("(", [("", literal(item)) for item in value], ")")
    if value is None or isinstance(value, bool):
        return Atom(repr(value))
    if isinstance(value, int):
        return Atom(f"{value:_}" if abs(value) >= 10_000 else str(value))
    if isinstance(value, float) and math.isfinite(value):
        return Atom(f"{int(value):_}.0" if value.is_integer() and 10_000 <= abs(value) < 1e15 else repr(value))
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_]+", value):
        return Atom(f'"{value}"')
    raise ConfigError(f"spec: got a {type(value).__name__}; it has no place in a spec; valid: numbers, names, booleans")


def _broken(group: Group, depth: int) -> str:
    """The group with an item a line, each on one line where that fits."""
    pad = INDENT * (depth + 1)
    lines = []
    for word, item in group.items:
        flat = item.text if isinstance(item, Atom) else item.flat
        if isinstance(item, Group) and len(pad) + len(word) + len(flat) + 1 > LINE:
            flat = _broken(item, depth + 1)
        lines.append(f"{pad}{word}{flat},\n")
    return f"{group.opening}\n{''.join(lines)}{INDENT * depth}{group.closing}"

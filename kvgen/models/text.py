"""Facts -> the Python text of a spec: a set for each shape of heads, for prompts over latent rows, for an indexer's keys."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgen.errors import ConfigError, SpecError
from kvgen.models.features import lacking
from kvgen.models.indexer_text import index_set
from kvgen.models.kv_dtype import Stored, latent, words
from kvgen.models.layers import Checkpoint, LayerFacts
from kvgen.models.reader import norm_of
from kvgen.models.serving import Serving, preset_fields
from kvgen.models.source import INDENT, LINE, Atom, Group, broken, call, harmless, literal, spec_names
from kvgen.ops.extend import Extend
from kvgen.ops.mla_decode import MlaDecode
from kvgen.schema import presets
from kvgen.schema.cache import Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask
from kvgen.schema.model import LongRopeScaling, Model
from kvgen.schema.position_scale import PositionScale
from kvgen.schema.ragged import Ragged
from kvgen.schema.score import Score

PAGE = 16
LATENT_PAGE = 64
DEFAULT = Serving()


@dataclass(frozen=True)
class _Set:
    """Layers that one kernel set serves: their kinds, how their KV is stored, and the facts as of these layers alone."""

    suffix: str
    kinds: tuple[LayerFacts, ...]
    facts: Checkpoint
    stored: Stored


def spec_source(
    facts: Checkpoint,
    stored: Mapping[str, Stored],
    serving: Serving = DEFAULT,
    *,
    source: str,
    options: Sequence[str] = (),
    arch: Sequence[str],
    name: str = "model",
) -> str:
    """The spec file's text; `source` says where the facts come from and is reduced to harmless characters.

    `stored` has a kind's name -> how its KV is stored. Layers whose heads or precision differ get a set each, called `name`
    and their kind; a single set takes the file's name. `options` are those of `kvgen init` that were given. ConfigError
    where a layer asks for what no operation does yet.
    """
    absent = lacking(facts.kinds)
    if absent is not None:
        feature, layer = absent
        whose = (
            f"{facts.model.architecture}'s {layer.kind} layers ask"
            if len(facts.kinds) > 1
            else f"{facts.model.architecture} asks"
        )
        raise ConfigError(
            f"layers: {whose} for {feature.what}, which no operation has yet ({feature.lacking}); its config can be read "
            "(kvgen.models.facts), but no spec is written for it"
        )
    sets = _sets(facts, stored)
    used: set[str] = set()
    several = len(sets) > 1
    page = serving.page_size or LATENT_PAGE
    keys = index_set(facts, sets[0].stored.dtype, page, serving, arch, f"{name[:34]}_keys")
    shared = several or (keys is not None and bool(facts.model.kinds))
    bodies = [_body(facts, one, serving, arch, used, shared=shared) for one in sets]
    if several:
        bodies = [
            _called(f"{name[: 39 - len(one.suffix)]}_{one.suffix}", body)
            for one, body in zip(sets, bodies, strict=True)
        ]
    prompts = _prompts(sets[0], arch, used, name)
    beside = prompts or (keys.group if keys is not None else None)
    used |= keys.names if keys is not None else set()
    presets = ["presets"] if serving.preset else []
    imports = ", ".join([*sorted({"KernelSet", *used}), "ops", *presets])
    line = f"from kvgen import {imports}"
    if len(line) > LINE:
        names = [*sorted({"KernelSet", *used}), "ops", *presets]
        line = "from kvgen import (\n" + "".join(f"{INDENT}{one},\n" for one in names) + ")"
    command = " ".join([f"kvgen init --from {harmless(source)}", *options])
    said = (keys.said if keys is not None else _also(prompts, name)) + "".join(
        f"{note}\n" for note in _wrapped(facts.notes)
    )
    head = (
        f'"""{_headline(facts, sets, serving)}\n\n{_how(facts, sets)}{said}Written by `{command}`.\n"""\n\n{line}\n\n'
    )
    if beside is not None:
        bodies = [_called(name, bodies[0]), beside]
    if len(bodies) == 1:
        return f"{head}{_model(facts) if shared else ''}kernels = {broken(bodies[0], 0)}\n"
    listed = Group("[", [("", body) for body in bodies], "]")
    return f"{head}{_model(facts) if shared else ''}kernels = {broken(listed, 0)}\n"


def _model(facts: Checkpoint) -> str:
    """The model by name, where several sets have it."""
    return f"{broken(Group('model = Model(', call(facts.model).items, ')'), 0)}\n\n"


def _called(name: str, body: Group) -> Group:
    return Group(body.opening, [("name=", literal(name)), *body.items], body.closing)


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(note, LINE)]


def _sets(facts: Checkpoint, stored: Mapping[str, Stored]) -> list[_Set]:
    """Sets, those with a full layer first: one for each shape of heads and way of storing."""
    groups: dict[object, list[LayerFacts]] = {}
    for kind in sorted(facts.cached, key=lambda kind: (kind.window is not None or kind.chunk is not None, kind.index)):
        how = stored[kind.kind]
        shape = (kind.q_heads, kind.kv_heads, kind.head_dim_k, kind.head_dim_v, how)
        groups.setdefault(shape, []).append(kind)
    found = []
    for kinds in groups.values():
        first = kinds[0]
        own = replace(facts, q_heads=first.q_heads, kv_heads=first.kv_heads, head_dim=first.head_dim_k)
        found.append(_Set(first.kind, tuple(kinds), own, stored[first.kind]))
    return found


def _body(
    facts: Checkpoint, one: _Set, serving: Serving, arch: Sequence[str], used: set[str], *, shared: bool
) -> Group:
    """One KernelSet without a name; adds the names that it uses to `used`. `shared`: the file names the model."""
    model = facts.model
    appends, append_of = _appends(model, one)
    decodes, decode_of = _decodes(model, one, arch)
    extends, extend_of = _extends(model, one, serving, arch)
    picks = {kind.kind for kind in one.kinds if kind.index_rope is not None and decode_of.get(kind.kind)}
    remap: list[Atom | Group] = [Atom('ops.RemapIndices(counts=True, unseen="drop")')] if picks else []
    operations = [*appends, Atom("ops.Gather()"), *remap, *extends, *decodes]
    used |= spec_names(model)
    for kind in one.kinds:
        used |= {type(norm_of(norm)).__name__ for norm in (kind.q_norm, kind.k_norm, kind.v_norm) if norm is not None}
        used |= {"PositionScale"} if kind.q_scale is not None else set()
    used |= (
        {"Mask"}
        if any(kind.window is not None or kind.chunk is not None for kind in one.kinds) and not model.mla
        else set()
    )
    used |= {"Score"} if any(_score(kind) is not None for kind in one.kinds) else set()
    if serving.preset is not None:
        form, given = f"presets.{serving.preset}", preset_fields(one.facts, one.stored, serving)
        cache = [(f"{field}=", literal(value)) for field, value in given.items()]
    else:
        form = "Latent" if model.mla else "Paged"
        cache = _cache(one, serving.page_size or (LATENT_PAGE if model.mla else PAGE))
        used |= {"Layout"} if form == "Paged" and one.kinds[0].head_dim_v != one.kinds[0].head_dim_k else set()
        used |= {form} | (spec_names(one.stored.quant) if one.stored.quant is not None else set())
    items: list[tuple[str, Atom | Group]] = [
        ("q_heads=", literal(one.facts.q_heads)),
        ("cache=", Group(f"{form}(", cache, ")")),
        ("ops=", Group("[", [("", operation) for operation in operations], "]")),
        ("arch=", Group("[", [("", literal(arch_name)) for arch_name in arch], "]")),
        ("model=", Atom("model") if shared else call(model)),
    ]
    if shared or model.kinds:
        attends = {k.kind: (*extend_of.get(k.kind, ()), *decode_of.get(k.kind, ())) for k in one.kinds}
        lists = {kind: ("remap_indices",) if kind in picks else () for kind in attends}
        uses = [(f'"{kind}": ', literal((*append_of[kind], *lists[kind], *attends[kind]))) for kind in attends]
        items.append(("layers=", Group("{", uses, "}")))
    return Group("KernelSet(", items, ")")


def _cache(one: _Set, page: int) -> list[tuple[str, Atom | Group]]:
    """The fields of a cache in kvgen's own layout."""
    first, stored = one.kinds[0], one.stored
    found: list[tuple[str, Atom | Group]] = [("dtype=", literal(stored.dtype))]
    if first.mla is not None:
        found += [("latent_dim=", literal(first.mla.kv_lora_rank)), ("rope_dim=", literal(first.mla.qk_rope_head_dim))]
    else:
        found += [("kv_heads=", literal(first.kv_heads)), ("head_dim=", literal(first.head_dim_k))]
        found += [("v_head_dim=", literal(first.head_dim_v))] if first.head_dim_v != first.head_dim_k else []
    found.append(("page_size=", literal(page)))
    if first.mla is None and first.head_dim_v != first.head_dim_k:  # K and V of two widths have a tensor each
        axes = Atom('"page layer token head dim"')
        found.append(("layout=", Group("Layout(", [("k=", axes), ("v=", axes)], ")")))
    if stored.quant is not None:
        found.append(("quant=", literal(stored.quant)))
    if stored.quant_rope:
        found.append(("quant_rope=", literal(True)))
    return found


def _named(operation: str, fields: list[tuple[str, Atom | Group]], kind: LayerFacts, known: dict[str, str]) -> str:
    """The name of the operation with these fields: that of an equal one, the operation's own, or one with its kind's."""
    flat = Group("(", fields, ")").flat
    return known.setdefault(flat, operation if not known else f"{operation}_{kind.kind}")


def _appends(model: Model, one: _Set) -> tuple[list[Atom | Group], dict[str, tuple[str, ...]]]:
    """append with the norms and RoPE of each kind of layers; (operations, kind -> its operation's name).

    Layers that read another layer's keys and values append q alone, or nothing where they leave q as it is.
    """
    found: dict[str, list[tuple[str, Atom | Group]]] = {}
    known: dict[str, str] = {}
    uses: dict[str, tuple[str, ...]] = {}
    for kind in one.kinds:
        fields = _append(model, kind)
        if kind.kv_source is not None:
            if not fields:
                uses[kind.kind] = ()
                continue
            fields = [("inputs=", literal("q")), *fields]
        name = _named("append", fields, kind, known)
        uses[kind.kind] = (name,)
        found.setdefault(name, fields)
    return [_operation("append", name, fields) for name, fields in found.items()], uses


def _append(model: Model, kind: LayerFacts) -> list[tuple[str, Atom | Group]]:
    fields: list[tuple[str, Atom | Group]] = []
    norms = [(f"{role}_norm", getattr(kind, f"{role}_norm")) for role in "qkv"]
    if kind.rope is not None:
        local = model.rope is not None and model.rope.local_theta is not None and kind.window is not None
        fields.append(("rope=", literal(kind.rope if model.kinds else "local" if local else "model")))
        # Which of LongRoPE's factors hold, nobody knows before the longest sequence.
        if isinstance(kind.rope.scaling, LongRopeScaling):
            fields.append(("angles=", literal("halves")))
        if kind.mrope:
            fields += [("positions=", literal("given")), ("sections=", literal(kind.mrope))]
            fields += [("sections_order=", literal("interleaved"))] if kind.interleaved else []
        if any(norm is not None and norm.order == "after" for field, norm in norms if field != "v_norm"):
            fields.append(("norm_order=", literal("after")))
    fields += [(f"{field}=", literal(norm_of(norm))) for field, norm in norms if norm is not None]
    if kind.q_scale is not None:
        scale = PositionScale(scale=kind.q_scale.coefficient, period=kind.q_scale.positions, offset=kind.q_scale.shift)
        fields.append(("position_scale=", literal(scale)))
        if kind.mla is not None:  # the factor is the whole query's: it is brought absorbed
            fields.append(("q_dim=", literal(kind.head_dim_k)))
    return fields


def _operation(kind: str, name: str, fields: list[tuple[str, Atom | Group]]) -> Group:
    called = {"append": "Append", "extend": "Extend", "decode": "Decode", "mla_decode": "MlaDecode"}[kind]
    return Group(f"ops.{called}(", [*([("name=", literal(name))] if name != kind else []), *fields], ")")


def _decodes(model: Model, one: _Set, arch: Sequence[str]) -> tuple[list[Atom | Group], dict[str, tuple[str, ...]]]:
    """decode with the scale, mask, score and sinks of each kind; (operations, kind -> their names).

    An engine plans once per step for all layers of a kind. Latent rows that mla_decode cannot read get none.
    """
    found: dict[str, list[tuple[str, Atom | Group]]] = {}
    known: dict[str, str] = {}
    uses: dict[str, tuple[str, ...]] = {}
    operation = "decode" if one.kinds[0].mla is None else "mla_decode"
    readable = _decodes_latent(one, arch)
    for kind in one.kinds:
        if kind.mla is not None:
            if kind.kind not in readable:
                continue
            fields: list[tuple[str, Atom | Group]] = [("scale=", literal(kind.scale))] if model.kinds else []
            fields.append(("sparse=", literal(True)) if kind.indexer else ("split=", literal("balanced")))
            fields += [("sinks=", literal("lse"))] if kind.sinks else []
        else:
            fields = [*_attention(model, kind), ("split=", literal("balanced"))]
        name = _named(operation, fields, kind, known)
        uses[kind.kind] = (name,)
        found.setdefault(name, fields)
    return [_operation(operation, name, fields) for name, fields in found.items()], uses


def _extends(
    model: Model, one: _Set, serving: Serving, arch: Sequence[str]
) -> tuple[list[Atom | Group], dict[str, tuple[str, ...]]]:
    """extend as decode, for prompts; none over latent rows, nor where its kernel cannot read the cache."""
    found: dict[str, list[tuple[str, Atom | Group]]] = {}
    known: dict[str, str] = {}
    uses: dict[str, tuple[str, ...]] = {}
    for kind in one.kinds if model.mla is None and _extends_cache(one, serving, arch) else ():
        fields = _attention(model, kind)
        name = _named("extend", fields, kind, known)
        uses[kind.kind] = (name,)
        found.setdefault(name, fields)
    return [_operation("extend", name, fields) for name, fields in found.items()], uses


def _prompts(one: _Set, arch: Sequence[str], used: set[str], name: str) -> Group | None:
    """The set for prompts over latent rows, whose keys and values are projected up: heads without a cache, a prompt's own rows,
    and a chunk of those before it at a time. None over rows that are no latent ones, or are picked from lists."""
    kind = one.kinds[0]
    if kind.mla is None or kind.indexer or kind.q_factor != 1.0:
        return None
    mla, heads = kind.mla, one.facts.q_heads
    sizes: dict[str, Any] = {
        "dtype": one.stored.dtype,
        "kv_heads": heads,
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }
    fields: dict[str, Any] = {"q_heads": heads, "arch": tuple(arch)}
    try:
        KernelSet(name="found", cache=Ragged(**sizes), ops=(Extend(),), **fields)
    except (ValueError, SpecError):
        return None
    scale = ("scale=", literal(kind.scale))
    before = [scale, ("mask=", literal(Mask(causal=False))), ("cross=", literal(True))]
    operations: list[Atom | Group] = [_operation("extend", "extend", [scale])]
    operations += [_operation("extend", "extend_prefix", before), Atom("ops.MergeStates()")]
    used |= {"Mask", "Ragged"}
    cache: list[tuple[str, Atom | Group]] = [(f"{field}=", literal(value)) for field, value in sizes.items()]
    items: list[tuple[str, Atom | Group]] = [
        ("name=", literal(f"{name[:32]}_prompts")),
        ("q_heads=", literal(heads)),
        ("cache=", Group("Ragged(", cache, ")")),
        ("ops=", Group("[", [("", operation) for operation in operations], "]")),
        ("arch=", Group("[", [("", literal(arch_name)) for arch_name in arch], "]")),
    ]
    return Group("KernelSet(", items, ")")


def _also(prompts: Group | None, name: str) -> str:
    """A line of the docstring about the set for prompts."""
    if prompts is None:
        return ""
    return f"`{name[:32]}_prompts` has the heads of prompts, projected up: docs/extend.md of kvgen.\n"


def _extends_cache(one: _Set, serving: Serving, arch: Sequence[str]) -> bool:
    """True: extend can read the model's rows as they are stored."""
    first, stored = one.kinds[0], one.stored
    fields: dict[str, Any]
    if serving.preset is not None:
        given = preset_fields(one.facts, stored, serving)  # which knows the presets there are
        cache = getattr(presets, serving.preset)(**given)
    else:
        v_differs = first.head_dim_v != first.head_dim_k
        axes = "page layer token head dim"
        fields = {"v_head_dim": first.head_dim_v, "layout": Layout(k=axes, v=axes)} if v_differs else {}
        fields |= {"quant": stored.quant} if stored.quant is not None else {}
        sizes: dict[str, Any] = {"kv_heads": first.kv_heads, "head_dim": first.head_dim_k}
        cache = Paged(dtype=stored.dtype, page_size=serving.page_size or PAGE, **sizes, **fields)
    fields = {"q_heads": one.facts.q_heads, "arch": tuple(arch)}
    try:
        KernelSet(name="found", cache=cache, ops=(Extend(),), **fields)
    except (ValueError, SpecError):
        return False
    return True


def _attention(model: Model, kind: LayerFacts) -> list[tuple[str, Atom | Group]]:
    fields: list[tuple[str, Atom | Group]] = []
    usual, scale = float(kind.head_dim_k**-0.5), kind.scale * kind.q_factor
    if model.query_pre_attn_scalar not in (None, kind.head_dim_k) or abs(scale - usual) > 1e-9 * usual:
        fields.append(("scale=", literal(scale)))
    if kind.window is not None or kind.chunk is not None:
        fields.append(("mask=", literal(Mask(window=kind.window) if kind.chunk is None else Mask(chunk=kind.chunk))))
    score = _score(kind)
    fields += [("score=", literal(score))] if score is not None else []
    if kind.sinks:
        fields.append(("sinks=", literal("lse")))  # out and lse then are one state, which merging takes as it is
    return fields


def _decodes_latent(one: _Set, arch: Sequence[str]) -> frozenset[str]:
    """The kinds of layers whose latent rows mla_decode can read as they are stored."""
    forms: dict[tuple[float, bool, bool], list[LayerFacts]] = {}
    for kind in one.kinds:
        if kind.mla is not None:
            forms.setdefault((kind.scale, kind.sinks, kind.indexer is not None), []).append(kind)
    found: list[str] = []
    for (scale, sinks, picked), kinds in forms.items():
        asked: dict[str, Any] = {"sparse": True} if picked else {"split": "balanced"}
        fields: dict[str, Any] = {"q_heads": one.facts.q_heads, "arch": tuple(arch), "model": one.facts.model}
        mla = kinds[0].mla
        assert mla is not None
        try:  # a set plans its operations when it is made
            decode = MlaDecode(scale=scale, sinks="lse" if sinks else None, **asked)
            KernelSet(name="found", cache=latent(mla, one.stored, page_size=LATENT_PAGE), ops=(decode,), **fields)
        except (ValueError, SpecError):
            continue
        found += [kind.kind for kind in kinds]
    return frozenset(found)


def _score(kind: LayerFacts) -> Score | None:
    """Changes of scores besides their scale."""
    fields: dict[str, Any] = {"alibi": True} if kind.alibi else {}
    if kind.softcap is not None:
        fields["softcap"] = kind.softcap
    return Score(**fields) if fields else None


def _headline(facts: Checkpoint, sets: Sequence[_Set], serving: Serving) -> str:
    model, first = facts.model, sets[0]
    page = serving.page_size or (LATENT_PAGE if model.mla else PAGE)
    start = f"{model.architecture}: {first.stored.dtype}"
    place = f"in the layout of presets.{serving.preset}" if serving.preset else f"in {page}-token pages"
    share = f" on one of {serving.tp} GPUs" if serving.tp > 1 else ""
    if model.mla:
        return f"{start} latent rows of {first.facts.head_dim} {place}, {first.facts.q_heads} query heads{share}."
    if len(sets) == 1:
        return f"{start} cache {place}, {_heads(first)}{share}."
    lines = "\n".join(f"- `{one.suffix}`: {_heads(one)}" for one in sets)
    return f"{start} caches {place}{share}, one for each shape of heads:\n\n{lines}"


def _heads(one: _Set) -> str:
    first = one.kinds[0]
    values = f", V of {first.head_dim_v}" if first.head_dim_v != first.head_dim_k else ""
    return f"{first.q_heads} query heads over {first.kv_heads} KV heads of {first.head_dim_k}{values}"


def _how(facts: Checkpoint, sets: Sequence[_Set]) -> str:
    """The stored type, and who asked for it; "" for a cache of the checkpoint's own type."""
    lines = []
    for one in sets:
        stored = one.stored
        if stored.quant is None:
            continue
        said = f",\nas the checkpoint's {stored.source} says" if stored.source else ""
        rest = f"; the RoPE part stays {stored.dtype}" if facts.model.mla and not stored.quant_rope else ""
        where = f"`{one.suffix}` stores" if len({s.stored for s in sets}) > 1 else "Stored are"
        line = f"{where} {words(stored)}{rest}{said}.\n"
        lines += [line] if line not in lines else []
    return "".join(lines)

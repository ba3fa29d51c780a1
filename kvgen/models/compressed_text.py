"""Facts of layers with a window and compressed entries -> the Python text of a spec: a set for each cache that they keep.

The window's set has the attention of every kind of layers, which reads that kind's entries as a second list; each kind of
entries has a set that pools them, and the indexer's keys have one that scores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from kvgen.errors import ConfigError
from kvgen.models.layers import Checkpoint, LayerFacts
from kvgen.models.reader import norm_of, rms_norm
from kvgen.models.serving import Serving
from kvgen.models.source import Atom, Group, broken, call, harmless, literal, spec_names
from kvgen.schema.model import Rope

# Presets of rows that are key and value at once, and of the indexer's keys beside them.
PRESETS: Final = {
    "flashinfer_v4_nvfp4": "vllm_indexer",
    "flashmla_v4": "vllm_indexer",
    "flashmla_v41": "vllm_indexer",
    "flashmla_v41_fp4": "vllm_indexer_fp4",
    "sglang_v4": "sglang_indexer",
    "sglang_v4_fp4": "sglang_indexer",
    "vllm_v4": "vllm_indexer",
    "vllm_v41": "vllm_indexer",
    "vllm_v41_fp4": "vllm_indexer_fp4",
}
# Records that entries alone have, and the window's beside them.
WINDOWS: Final = {"flashmla_v41_fp4": "flashmla_v41", "vllm_v41_fp4": "vllm_v41"}
# Tokens that an engine's block has; pages of entries are such blocks.
BLOCK: Final = 256
_Fields = list[tuple[str, Atom | Group]]


def compressed_source(
    facts: Checkpoint, serving: Serving, *, source: str, options: Sequence[str], arch: Sequence[str], name: str
) -> str:
    """The spec file's text, as kvgen.models.text.spec_source writes it for other models."""
    preset = serving.preset or ("flashmla_v4" if facts.cached[0].q_norm is not None else "flashmla_v41")
    if preset not in PRESETS:
        raise ConfigError(
            f"--preset: got {preset!r}, which is for another kind of cache; {facts.model.architecture} caches rows that are key "
            f"and value at once; valid: {', '.join(sorted(PRESETS))}"
        )
    if serving.page_size is not None and BLOCK % serving.page_size:
        raise ConfigError(
            f"--page-size: got {serving.page_size}; the window's pages lie in blocks of {BLOCK} tokens; valid: its divisors"
        )
    sets = [_window(facts, preset, serving, arch, name)]
    sets += [_entries(facts, kind, preset, arch, name) for kind in _own(facts)]
    sets += [_keys(facts, kind, preset, arch, name) for kind in _own(facts) if kind.compressed.indexer is not None]
    used = {"KernelSet", "Keys", "RmsNorm"} | spec_names(facts.model)
    names = [*sorted(used), "ops", "presets"]
    line = "from kvgen import " + ", ".join(names)
    if len(line) > 120:
        line = "from kvgen import (\n" + "".join(f"    {one},\n" for one in names) + ")"
    command = " ".join([f"kvgen init --from {harmless(source)}", *options])
    ropes = _ropes(facts)
    shared = "".join(f"{word} = {broken(call(rope), 0)}\n" for word, rope in ropes.items()) + "\n"
    called = {call(rope).flat: word for word, rope in ropes.items()}
    model = _by_name(Group("model = Model(", call(facts.model).items, ")"), called)
    head = f'"""{_headline(facts, preset, serving)}\n\nWritten by `{command}`.\n"""\n\n{line}\n\n'
    listed = Group("[", [("", one) for one in sets], "]")
    return f"{head}{shared}{broken(model, 0)}\n\nkernels = {broken(_by_name(listed, called), 0)}\n"


def _ropes(facts: Checkpoint) -> dict[str, Rope]:
    """The ropes of a file by the name that it gives each: that of layers without entries, and that of the others."""
    found: dict[str, Rope] = {}
    for kind in facts.cached:
        assert kind.rope is not None
        found.setdefault("window_rope" if kind.compressed is None else "rope", kind.rope)
    return dict(sorted(found.items(), reverse=True))  # the window's first


def _by_name(group: Group, names: Mapping[str, str]) -> Group:
    """The group with each value whose text is in `names` as the name that the file gives it."""
    items: _Fields = []
    for word, item in group.items:
        known = names.get(item.flat) if isinstance(item, Group) else None
        items.append((word, Atom(known) if known else _by_name(item, names) if isinstance(item, Group) else item))
    return Group(group.opening, items, group.closing)


def _own(facts: Checkpoint) -> list[Any]:
    """A kind of layers for each form of entries that some make."""
    found: dict[int, LayerFacts] = {}
    for kind in facts.cached:
        if kind.compressed is not None and kind.compressed.source is None:
            found.setdefault(kind.compressed.rate, kind)
    return list(found.values())


def _headline(facts: Checkpoint, preset: str, serving: Serving) -> str:
    first = facts.cached[0]
    share = f" on one of {serving.tp} GPUs" if serving.tp > 1 else ""
    lines = [
        f"- `window`: rows of {first.head_dim_k}, key and value of {facts.q_heads} query heads{share}, and all attention"
    ]
    for kind in _own(facts):
        rate = kind.compressed.rate
        lines.append(f"- `c{rate}`: an entry for {'each token' if rate == 1 else f'every {rate} tokens'}")
        if kind.compressed.indexer is not None:
            lines.append(f"- `c{rate}_keys`: the keys of these entries' indexer")
    return f"{facts.model.architecture} in the records of presets.{preset}, a set for each cache:\n\n" + "\n".join(
        lines
    )


def _set(
    facts: Checkpoint,
    suffix: str,
    cache: Group,
    operations: Sequence[Group],
    arch: Sequence[str],
    name: str,
    *,
    layers: Mapping[str, tuple[str, ...]],
    heads: int | None = None,
) -> Group:
    items: _Fields = [
        ("name=", literal(f"{name[: 39 - len(suffix)]}_{suffix}")),
        ("q_heads=", literal(heads or facts.q_heads)),
        ("cache=", cache),
        ("ops=", Group("[", [("", one) for one in operations], "]")),
        ("arch=", Group("[", [("", literal(one)) for one in arch], "]")),
        ("model=", Atom("model")),
    ]
    items += [("layers=", Group("{", [(f'"{kind}": ', literal(used)) for kind, used in layers.items()], "}"))]
    return Group("KernelSet(", items, ")")


def _window(facts: Checkpoint, preset: str, serving: Serving, arch: Sequence[str], name: str) -> Group:
    appends: dict[str, str] = {}
    decodes: dict[str, str] = {}
    uses: dict[str, tuple[str, ...]] = {}
    operations: list[Group] = []
    for kind in facts.cached:
        fields = _append(kind)
        stored = appends.setdefault(Group("(", fields, ")").flat, _named("append", appends, kind))
        read = decodes.setdefault(_read(kind), _named("mla_decode", decodes, kind))
        if stored not in {n for used in uses.values() for n in used}:
            operations.append(_operation("Append", "append", stored, fields))
        if read not in {n for used in uses.values() for n in used}:
            operations.append(_operation("MlaDecode", "mla_decode", read, _decode(kind, preset)))
        uses[kind.kind] = (stored, read)
    operations.sort(key=lambda one: one.opening)
    undone: dict[str, str] = {}
    for kind in facts.cached:
        assert kind.rope is not None
        back = undone.setdefault(call(kind.rope).flat, _named("attention_output", undone, kind))
        if back not in {n for used in uses.values() for n in used}:
            fields = [("rope=", literal(kind.rope)), ("dim=", literal(kind.head_dim_k))]
            operations.append(_operation("AttentionOutput", "attention_output", back, fields))
        uses[kind.kind] = (uses[kind.kind][0], "list_keys", *uses[kind.kind][1:], back)
    window = Group("ops.ListKeys(", [("window=", literal(facts.cached[0].window))], ")")
    cache = Group(f"presets.{WINDOWS.get(preset, preset)}(", _page(preset, serving), ")")
    return _set(facts, "window", cache, [*operations, window, Group("ops.Gather(", [], ")")], arch, name, layers=uses)


def _page(preset: str, serving: Serving) -> _Fields:
    if serving.page_size is None:
        return []
    field = {"vllm": "block_tokens", "sglang": "page_tokens"}.get(preset.partition("_")[0], "page_size")
    return [(f"{field}=", literal(serving.page_size))]


def _named(operation: str, known: dict[str, str], kind: LayerFacts) -> str:
    return operation if not known else f"{operation}_{kind.kind}"


def _operation(called: str, usual: str, name: str, fields: _Fields) -> Group:
    return Group(f"ops.{called}(", [*([("name=", literal(name))] if name != usual else []), *fields], ")")


def _append(kind: LayerFacts) -> _Fields:
    fields: _Fields = [("rope=", literal(kind.rope)), ("q_dim=", literal(kind.head_dim_k))]
    if kind.q_norm is not None:
        fields.append(("q_norm=", literal(norm_of(kind.q_norm))))
    return [*fields, ("k_norm=", _norm(kind, over="row"))]


def _norm(kind: LayerFacts, over: Literal["head", "row"] = "head") -> Group:
    """The norm of a row: of a latent row's two parts together where it is over the "row"."""
    assert kind.k_norm is not None
    return call(rms_norm(replace(kind.k_norm, over=over)))


def _read(kind: LayerFacts) -> str:
    """The entries that attention of a kind reads: they tell kinds apart."""
    return "" if kind.compressed is None else str(kind.compressed.rate)


def _decode(kind: LayerFacts, preset: str) -> _Fields:
    fields: _Fields = [("sparse=", literal(True)), ("scale=", literal(kind.scale)), ("sinks=", literal("out"))]
    if kind.compressed is not None:
        keys = Group("Keys(", [("name=", literal("entries")), ("cache=", _rows(preset, kind.compressed.rate))], ")")
        fields.append(("sources=", Group("(", [("", keys)], ")")))
    return fields


def _rows(preset: str, rate: int) -> Group:
    """The cache of entries of `rate` tokens, a page of an engine's block."""
    fields: _Fields = [("rate=", literal(rate))] if rate > 1 else []
    if preset.startswith(("flashmla", "flashinfer")):
        fields.insert(0, ("page_size=", literal(BLOCK // rate)))
    elif preset.startswith("vllm_v41"):
        fields.insert(0, ("block_tokens=", literal(BLOCK)))
    return Group(f"presets.{preset}(", fields, ")")


def _pool(kind: LayerFacts) -> Group:
    """The operation that makes the entries, or their indexer's keys, of a kind of layers."""
    entries = kind.compressed
    assert entries is not None
    fields: _Fields = [("overlap=", literal(True))] if entries.overlap else []
    fields += [("ape=", literal(True))] if kind.q_norm is not None else []  # V4.1's gate has no positions
    fields += [("norm=", _norm(kind)), ("rope=", literal(kind.rope))]
    return Group("ops.PoolTokens(", fields, ")")


def _entries(facts: Checkpoint, kind: Any, preset: str, arch: Sequence[str], name: str) -> Group:
    pool = _pool(kind)
    latent = kind.q_norm is None and kind.compressed.indexer is not None  # V4.1's index keys are made of the entries
    items = [*pool.items, ("latent_out=", literal(True))] if latent else pool.items
    picked = kind.compressed.indexer is not None
    lists, uses = dict[str, Group](), dict[str, tuple[str, ...]]()
    for other in facts.cached:
        if other.compressed is not None and other.compressed.rate == kind.compressed.rate and _lists(other):
            listed, operation = _listing(other) if picked else ("list_keys", Group("ops.ListKeys(", [], ")"))
            lists[listed] = operation
            uses[other.kind] = ("pool_tokens", listed) if other.compressed.source is None else (listed,)
    operations = [Group(pool.opening, items, pool.closing), *lists.values(), Group("ops.Gather(", [], ")")]
    return _set(
        facts, f"c{kind.compressed.rate}", _rows(preset, kind.compressed.rate), operations, arch, name, layers=uses
    )


def _listing(kind: Any) -> tuple[str, Group]:
    """The operation that makes a list of a kind's picks, and its name: picks count entries, or columns of the lists of blocks."""
    fields: _Fields = [("counts=", literal(True)), ("unseen=", literal("drop"))]
    block = kind.compressed.indexer.candidate_block
    if block is None:
        return "remap_indices", Group("ops.RemapIndices(", fields, ")")
    named: _Fields = [("name=", literal("remap_candidates")), ("candidates=", literal(block)), *fields]
    return "remap_candidates", Group("ops.RemapIndices(", named, ")")


def _lists(kind: LayerFacts) -> bool:
    """These layers make a list of their entries: not where they take another layer's."""
    return _scores(kind) or (kind.compressed is not None and kind.compressed.indexer is None)


def _scores(kind: LayerFacts) -> bool:
    """These layers have an indexer of their own."""
    index = kind.compressed.indexer if kind.compressed is not None else None
    return index is not None and index.source is None


def _keys(facts: Checkpoint, kind: Any, preset: str, arch: Sequence[str], name: str) -> Group:
    index, rate = kind.compressed.indexer, kind.compressed.rate
    fields: _Fields = [("head_dim=", literal(index.dim))] if index.dim != 128 else []
    fields += [("page_size=", literal(BLOCK // rate)), *([("rate=", literal(rate))] if rate > 1 else [])]
    cache = Group(f"presets.{PRESETS[preset]}(", fields, ")")
    write, uses = _pool(kind), "pool_tokens"
    if kind.q_norm is None:
        named: _Fields = [("rope=", literal(kind.rope)), ("q_out=", literal("none")), ("k_norm=", _norm(kind))]
        write, uses = Group("ops.Append(", named, ")"), "append"
    query = Group("ops.IndexerQuery(", [("rope=", literal(kind.rope))], ")")
    scores, used = dict[str, Group](), dict[str, tuple[str, ...]]()
    for other in facts.cached:
        if other.compressed is not None and other.compressed.rate == rate and _scores(other):
            scored, operation = _scoring(facts, other)
            scores[scored] = operation
            used[other.kind] = (*([uses] if other.compressed.source is None else []), "indexer_query", scored)
    operations = [write, query, *scores.values()]
    return _set(facts, f"c{rate}_keys", cache, operations, arch, name, layers=used, heads=index.heads)


def _scoring(facts: Checkpoint, kind: Any) -> tuple[str, Group]:
    """The operation that scores a kind's entries, and its name: all entries, with a maximum a block where later layers score
    the best blocks
    alone; or those of listed blocks."""
    block = kind.compressed.indexer.candidate_block
    if block is not None:
        return "candidate_scores", Group(
            "ops.IndexerScores(", [("name=", literal("candidate_scores")), ("candidates=", literal(block))], ")"
        )
    block = _blocks_of(facts, kind)
    if block is None:
        return "indexer_scores", Group("ops.IndexerScores(", [], ")")
    fields: _Fields = [
        ("name=", literal("block_scores")),
        ("block_max=", literal(block)),
        ("pin_newest=", literal(True)),
    ]
    return "block_scores", Group("ops.IndexerScores(", fields, ")")


def _blocks_of(facts: Checkpoint, kind: LayerFacts) -> int | None:
    """The entries of a block of which layers behind one of this kind score the best; None where none do."""
    for other in facts.cached:
        index = other.compressed.indexer if other.compressed is not None else None
        if index is None or index.candidate_source is None:
            continue
        if facts.kinds[facts.pattern[index.candidate_source]].kind == kind.kind:
            if index.candidate_block not in (2, 4, 8, 16):
                raise ConfigError(
                    f"candidate_block_size: got {index.candidate_block}; ops.IndexerScores has maxima of blocks of 2, 4, 8 or "
                    "16 entries; valid: one of these"
                )
            return index.candidate_block
    return None

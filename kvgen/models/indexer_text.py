"""Facts of layers whose indexers pick tokens -> the set of the indexers' keys, as the Python text of a spec has it.

A key is e4m3 codes with an f32 scale, a power of two, as DeepSeek, vLLM and SGLang keep it. In kvgen's own layout its pages
have as many tokens as those of the latent rows: one page table and one tensor of lengths serve both caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvgen.errors import SpecError
from kvgen.layout.dtypes import FloatName
from kvgen.models.layers import Checkpoint, LayerFacts
from kvgen.models.serving import Serving
from kvgen.models.source import Atom, Group, call, literal, spec_names
from kvgen.ops.append import Append
from kvgen.ops.indexer_query import IndexerQuery
from kvgen.ops.indexer_scores import IndexerScores
from kvgen.schema import presets
from kvgen.schema.cache import Paged
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.quant import Quant

# The preset of the keys beside an engine's latent rows; FlashMLA's and FlashInfer's are rows of engines that keep vLLM's keys.
_PRESETS: Final = {
    "flashinfer": "vllm_indexer",
    "flashmla": "vllm_indexer",
    "sglang": "sglang_indexer",
    "vllm": "vllm_indexer",
}
_QUANT: Final = Quant(dtype="e4m3", scale_dtype="f32", recipe="pow2", amax_min=1e-4)
_USES: Final = ("append", "indexer_query", "indexer_scores")


@dataclass(frozen=True)
class IndexSet:
    """`group` is the set of the indexers' keys, None where no operation takes them; `said` a sentence for the docstring, `names`
    what the set imports."""

    group: Group | None
    said: str
    names: frozenset[str] = frozenset()


def index_set(
    facts: Checkpoint, dtype: FloatName, page: int, serving: Serving, arch: Sequence[str], name: str
) -> IndexSet | None:
    """The set of the keys of a model's indexers, called `name`; None where no layer has one."""
    first = next((kind for kind in facts.cached if kind.indexer is not None and kind.index_rope is not None), None)
    if first is None or first.indexer is None:
        return None
    preset, fields = _cache(first, dtype, page, serving)
    cache = getattr(presets, preset)(**fields) if preset else Paged(quant=_QUANT, **fields)
    operations = (
        Append(rope=first.index_rope, q_out="none", k_norm=first.index_norm),
        IndexerQuery(rope=first.index_rope),
        IndexerScores(),
    )
    sizes: dict[str, Any] = {"q_heads": first.indexer.heads, "arch": tuple(arch)}
    try:
        made = KernelSet(name=name, cache=cache, ops=operations, **sizes)
        for operation in operations:
            operation.plan(made)
    except (ValueError, SpecError):
        size = f"{first.indexer.heads} heads of {first.indexer.dim}"
        said = f"There is no set of the indexer's keys: ops.IndexerQuery and ops.IndexerScores do not take {size}.\n"
        return IndexSet(None, said)
    names = {"LayerNorm"} | spec_names(operations[1]) - {"IndexerQuery"}
    names |= set() if preset else {"Paged"} | spec_names(_QUANT)
    form = Group(f"presets.{preset}(", _literals(fields), ")") if preset else call(cache)
    return IndexSet(
        _group(facts, first.indexer.heads, form, operations, arch, name), _said(facts, name), frozenset(names)
    )


def _cache(kind: LayerFacts, dtype: FloatName, page: int, serving: Serving) -> tuple[str, dict[str, Any]]:
    """(the preset of the keys beside `serving.preset`, or "" for kvgen's own layout, its fields)."""
    assert kind.indexer is not None
    preset = next((keys for engine, keys in _PRESETS.items() if (serving.preset or "").startswith(engine)), "")
    if not preset:
        if serving.preset is not None and serving.page_size is None:
            page = getattr(presets, serving.preset)().page_size
        sizes = {"kv_heads": 1, "head_dim": kind.indexer.dim, "page_size": page, "stores": "k"}
        return "", {"dtype": dtype, **sizes}
    fields: dict[str, Any] = {"dtype": dtype} if dtype != "bf16" else {}
    fields |= {"head_dim": kind.indexer.dim} if kind.indexer.dim != 128 else {}
    fields |= {"page_size": serving.page_size} if serving.page_size is not None else {}
    return preset, fields


def _literals(fields: Mapping[str, Any]) -> list[tuple[str, Atom | Group]]:
    return [(f"{field}=", literal(value)) for field, value in fields.items()]


def _group(
    facts: Checkpoint,
    heads: int,
    cache: Group,
    operations: Sequence[Append | IndexerQuery | IndexerScores],
    arch: Sequence[str],
    name: str,
) -> Group:
    made = [call(one) for one in operations]
    called = [Group(f"ops.{one.opening}", one.items, one.closing) for one in made]
    items: list[tuple[str, Atom | Group]] = [
        ("name=", literal(name)),
        ("q_heads=", literal(heads)),
        ("cache=", cache),
        ("ops=", Group("[", [("", one) for one in called], "]")),
        ("arch=", Group("[", [("", literal(one)) for one in arch], "]")),
    ]
    if facts.model.kinds:
        own = [kind.kind for kind in facts.cached if kind.index_rope is not None]
        uses = [(f'"{kind}": ', literal(_USES)) for kind in own]
        items += [("model=", Atom("model")), ("layers=", Group("{", uses, "}"))]
    return Group("KernelSet(", items, ")")


def _said(facts: Checkpoint, name: str) -> str:
    """What the docstring says of the set."""
    own = sum(facts.kinds[kind].index_rope is not None for kind in facts.pattern)
    if own == len(facts.pattern):
        return f"`{name}` has the keys of each layer's indexer, which picks the tokens that are read.\n"
    others = len(facts.pattern) - own
    return (
        f"`{name}` has the keys of the indexers of {own} layers;\nthe {others} others read the tokens that one of these picked, "
        "as the model's kinds say.\n"
    )

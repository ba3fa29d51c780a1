"""Layers that read what another layer stores or picks: the map of them, held against the model's kinds of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol


class Picking(Protocol):
    """What is read here of an Indexer."""

    @property
    def source(self) -> int | None: ...
    @property
    def candidate_source(self) -> int | None: ...


class Entries(Protocol):
    """What is read here of Compressed."""

    @property
    def rate(self) -> int: ...
    @property
    def source(self) -> int | None: ...
    @property
    def indexer(self) -> Picking | None: ...


class Layers(Protocol):
    """What is read here of a Kind."""

    @property
    def name(self) -> str: ...
    @property
    def cache(self) -> bool: ...
    @property
    def kv_source(self) -> int | None: ...
    @property
    def compressed(self) -> Entries | None: ...
    @property
    def indexer(self) -> Picking | None: ...


# What a source must be, in words, behind the field that names it.
_MUST: Final = {
    "indexer.source": "an earlier layer that picks tokens by an indexer of its own",
    "indexer.candidate_source": "an earlier layer that picks tokens by an indexer of its own",
    "kv_source": "an earlier layer that stores keys and values of its own",
    "compressed.source": "an earlier layer that makes entries of its own, of as many tokens",
    "compressed.indexer.source": "an earlier layer that picks entries by an indexer of its own",
    "compressed.indexer.candidate_source": "an earlier layer that picks entries by an indexer of its own",
}


def check_sources(kinds: Sequence[Layers]) -> None:
    """Raise ValueError where a layer reads what its source does not have, or has from another one; `kinds` has each layer's kind.

    Kernels know nothing of it: a call of a reading layer brings the layer of its source, `cache[source]`, or its lists.
    """
    named = {id(kind): tuple(_named(kind)) for kind in kinds}  # kinds are few, layers many
    for layer, kind in enumerate(kinds):
        for field, source in named[id(kind)]:
            if source >= layer or not _has(field, kind, kinds[source]):
                raise ValueError(
                    f"{field}: got {source} for kind {getattr(kind, 'name', '')!r}, which is layer {layer}; valid: {_MUST[field]}"
                )


def _named(kind: Layers) -> Iterator[tuple[str, int]]:
    """The layers that a kind names."""
    entries = kind.compressed
    found = {
        "kv_source": kind.kv_source,
        "compressed.source": entries.source if entries is not None else None,
    }
    for field in ("indexer", "compressed.indexer"):
        index = _indexer(field, kind)
        found[f"{field}.source"] = index.source if index is not None else None
        found[f"{field}.candidate_source"] = index.candidate_source if index is not None else None
    return ((field, source) for field, source in found.items() if source is not None)


def _has(field: str, kind: Layers, other: Layers) -> bool:
    """Whether a layer has by itself what the field of another names it for."""
    if field == "kv_source":
        return other.cache and other.kv_source is None
    if field == "compressed.source":
        mine, theirs = kind.compressed, other.compressed
        return mine is not None and theirs is not None and theirs.source is None and theirs.rate == mine.rate
    index = _indexer(field.rpartition(".")[0], other)
    return index is not None and index.source is None


def _indexer(field: str, kind: Layers) -> Picking | None:
    """A kind's indexer of tokens ("indexer"), or that of its entries."""
    if field == "indexer":
        return kind.indexer
    return kind.compressed.indexer if kind.compressed is not None else None

"""Which layer's entries and picks a layer reads: DeepSeek V4.1's map out of its config, and maps that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvgen import Kind, Model, models
from kvgen.errors import SpecError
from kvgen.schema.model import Compressed, Indexer

CONFIG = Path(__file__).resolve().parents[1] / "models" / "configs" / "deepseek_v4_1_flash.json"
# As the published model has them: whose entries are read, and whose picks.
ENTRIES, PICKS = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)


def test_the_map_of_v4_1() -> None:
    """Each layer behind the first two reads the largest layer up to itself that makes entries, by the largest that picks."""
    model = models.facts(json.loads(CONFIG.read_text(encoding="utf-8"))).model
    assert model is not None and model.layers == 40
    for layer in range(40):
        kind = model.layer_kind(layer)
        assert kind is not None
        if layer < 2:
            assert kind.compressed is None
            continue
        entries = kind.compressed
        assert entries is not None and entries.indexer is not None
        owner, picker = (max(i for i in those if i <= layer) for those in (ENTRIES, PICKS))
        assert entries.source == (None if owner == layer else owner) and entries.rate == (2 if layer < 20 else 1)
        assert entries.indexer.source == (None if picker == layer else picker)
        assert entries.indexer.candidate_source == (20 if layer >= 24 else None)


INDEX = Indexer(heads=32, dim=128, topk=512)
OWN = Compressed(rate=2, indexer=INDEX)


def _index(**fields: Any) -> Compressed:
    return Compressed(rate=2, source=1, indexer=INDEX.model_copy(update=fields))


@pytest.mark.parametrize(
    ("field", "reads"),
    [
        ("compressed.source: got 3", {"compressed": Compressed(rate=2, source=3)}),  # itself
        ("compressed.source: got 0", {"compressed": Compressed(rate=2, source=0)}),  # no entries there
        ("compressed.source: got 1", {"compressed": Compressed(rate=4, source=1)}),  # of another rate
        ("compressed.source: got 2", {"compressed": Compressed(rate=2, source=2)}),  # another one's
        ("compressed.indexer.source: got 2", {"compressed": _index(source=2)}),  # another one's picks
        ("compressed.indexer.source: got 5", {"compressed": _index(source=5)}),
        (
            "compressed.indexer.candidate_source: got 0",
            {"compressed": _index(candidate_source=0, candidate_blocks=8, candidate_block=8)},
        ),
        (
            "indexer.source: got 1",
            {"indexer": INDEX.model_copy(update={"source": 1})},
        ),  # that layer picks entries, no tokens
        (
            "indexer.candidate_source: got 4",
            {"indexer": INDEX.model_copy(update={"candidate_source": 4, "candidate_blocks": 8, "candidate_block": 8})},
        ),
        ("kv_source: got 2", {"kv_source": 2}),  # another one's
        ("kv_source: got 4", {"kv_source": 4}),
    ],
)
def test_sources_that_have_nothing(field: str, reads: dict[str, Any]) -> None:
    """A source comes before its reader, and has by itself what is read."""
    layers = [
        Kind(name="window", window=128),
        Kind(name="own", compressed=OWN),
        Kind(name="reads", compressed=_index(source=1), kv_source=1),
        Kind(name="wrong", **reads),
    ]
    with pytest.raises(SpecError, match=rf"^{field} for kind 'wrong', which is layer 3; valid: an earlier layer that"):
        Model(layers=4, kinds=layers, pattern=[kind.name for kind in layers])
    assert Model(layers=3, kinds=layers[:3], pattern=[kind.name for kind in layers[:3]]).layers == 3

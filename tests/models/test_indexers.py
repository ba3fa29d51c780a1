"""Indexers that pick tokens of latent rows: which layers have one, its RoPE and norm, and the sets that init writes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from kvgen import KernelSet, Model, Paged, models, presets
from kvgen.errors import ConfigError
from kvgen.models import Serving
from kvgen.ops import Append, IndexerQuery, IndexerScores, MlaDecode, RemapIndices
from kvgen.schema.cache import Latent
from kvgen.schema.model import Indexer, Rope
from kvgen.schema.norm import LayerNorm

from .checkpoints import changed, config, without

V32, GLM, SHARED = "deepseek_v3_2", "glm_5", "glm_5_2"
# Layers of GLM-5.2 with an indexer, as the published list has them: 0, 1, 2, and each fourth from 6 on.
OWN = (0, 1, 2, *range(6, 78, 4))
SMALL: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_hidden_layers": 7,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
}


def sets(found: dict[str, Any], tmp_path: Path, **options: Any) -> dict[str, KernelSet]:
    path = tmp_path / "found.py"
    path.write_text(models.spec_text(found, source="x", name="x", **options), encoding="utf-8")
    kernels = runpy.run_path(str(path))["kernels"]
    return {str(one.name): one for one in (kernels if isinstance(kernels, list) else [kernels])}


def own(found: dict[str, Any]) -> list[int]:
    """The layers that have an indexer; the others take the picks of the last of them before."""
    layers = models.facts(found).layers()
    having = [i for i, layer in enumerate(layers) if layer.indexer is not None and layer.indexer.source is None]
    for i, layer in enumerate(layers):
        assert layer.indexer is not None and (layer.index_rope is None) == (layer.index_norm is None) == (
            i not in having
        )
        assert layer.indexer.source == (None if i in having else max(one for one in having if one < i))
    return having


def test_which_layers_have_an_indexer() -> None:
    """A list, a pattern and a rule of GLM-5.2 say the same; V3.2 and GLM-5 have one in every layer."""
    assert own(config(V32)) == list(range(61)) and own(config(GLM)) == list(range(78))
    assert own(config(SHARED)) == list(OWN)
    ruled = without(SHARED, "indexer_types")
    letters = "".join("F" if i in OWN else "S" for i in range(78))
    assert own(ruled) == own({**ruled, "index_topk_pattern": letters}) == list(OWN)
    words = ["full" if i in OWN else "shared" for i in range(78)]
    assert own({**ruled, "index_topk_pattern": words, "index_topk_freq": 1}) == list(OWN)
    assert own({**ruled, "index_topk_freq": 0}) == list(range(78))
    assert own({**SMALL, "model_type": "hy_v4"}) == [0, 1, 5]  # transformers' default
    assert own({**SMALL, "model_type": "hy_v4", "indexer_types": ["full"] * 7}) == list(range(7))
    assert own({**SMALL, "model_type": "axk2", "indexer_types": ["shared"] * 7}) == list(
        range(7)
    )  # it has no such field


def test_rope_and_norm_of_keys() -> None:
    """V3.2 turns halves of the first 64 elements, beside interleaved latent rows; HY-V4 the last 64, with an f32 norm."""
    found = models.facts(config(V32)).kinds[0]
    assert found.rope is not None and found.rope.style == "interleaved"
    assert found.index_rope == found.rope.model_copy(update={"style": "neox", "part": "first"})
    assert found.indexer == Indexer(heads=64, dim=128, topk=2048)
    assert found.index_norm == LayerNorm(eps=1e-6, bias=True)
    glm = models.facts(config(GLM)).kinds[0]
    assert glm.index_rope == Rope(style="interleaved", theta=1e6, dim=64, part="first")
    assert glm.indexer == Indexer(heads=32, dim=128, topk=2048) and glm.index_norm == found.index_norm
    halves = models.facts(changed(GLM, indexer_rope_interleave=False)).kinds[0]
    assert halves.index_rope is not None and halves.index_rope.style == "neox"
    hy = models.facts({**SMALL, "model_type": "hy_v4"}).kinds[0]
    assert hy.index_rope == Rope(style="neox", theta=1e4, dim=64, part="last")
    assert hy.index_norm == LayerNorm(eps=1e-5, bias=True, weight_dtype="f32")


def test_the_sets_of_layers_that_all_have_an_indexer(tmp_path: Path) -> None:
    found = sets(config(V32), tmp_path)
    rows, keys = found["x"], found["x_keys"]
    assert [type(op) for op in rows.ops if isinstance(op, MlaDecode | RemapIndices)] == [RemapIndices, MlaDecode]
    assert isinstance(keys.cache, Paged) and isinstance(rows.cache, Latent) and keys.q_heads == 64
    assert (keys.cache.lengths, keys.cache.table, keys.cache.page_size) == (rows.cache.lengths, rows.cache.table, 64)
    append, query, scores = keys.ops
    kind = models.facts(config(V32)).kinds[0]
    assert isinstance(append, Append) and (append.rope, append.k_norm) == (kind.index_rope, kind.index_norm)
    assert isinstance(query, IndexerQuery) and query.rope == append.rope and isinstance(scores, IndexerScores)
    assert rows.model is not None and rows.model.indexer == kind.indexer


def test_the_sets_of_layers_that_share_picks(tmp_path: Path) -> None:
    """A layer that takes another's picks has no keys and maps no list."""
    found = sets(config(SHARED), tmp_path)
    rows, keys = found["x"], found["x_keys"]
    assert isinstance(rows.model, Model) and rows.model == keys.model
    names = [rows.model.layer_name(layer) for layer in range(78)]
    assert [i for i, name in enumerate(names) if name in keys.layers] == list(OWN)
    assert keys.layers["indexed"] == ("append", "indexer_query", "indexer_scores")
    assert set(rows.layers) == set(names) and rows.layers["indexed"] == ("append", "remap_indices", "mla_decode")
    assert {rows.layers[name] for name in set(names) - {"indexed"}} == {("append", "mla_decode")}
    assert (names[3], names[77]) == ("indexed_by_2", "indexed_by_74")
    assert "the keys of the indexers of 21 layers;\nthe 57 others read" in models.spec_text(config(SHARED), source="x")


@pytest.mark.parametrize(
    ("preset", "cache"),
    [
        ("vllm_mla", presets.vllm_indexer()),
        ("flashmla_fp8", presets.vllm_indexer()),
        ("sglang_mla", presets.sglang_indexer()),
    ],
)
def test_keys_of_an_engine(preset: str, cache: Paged, tmp_path: Path) -> None:
    found = sets(config(GLM), tmp_path, serving=Serving(preset=preset, tp=8))
    assert found["x_keys"].cache == cache and (found["x"].q_heads, found["x_keys"].q_heads) == (8, 32)
    assert cache.lengths == found["x"].cache.lengths


def test_keys_without_an_engines_form_have_pages_of_the_rows(tmp_path: Path) -> None:
    for serving, page in ((Serving(preset="max_mla"), 128), (Serving(page_size=32), 32)):
        found = sets(config(GLM), tmp_path, serving=serving)
        assert found["x_keys"].cache.page_size == found["x"].cache.page_size == page
    paged = sets(config(GLM), tmp_path, serving=Serving(preset="vllm_mla", page_size=32))
    assert paged["x_keys"].cache == presets.vllm_indexer(page_size=32)


@pytest.mark.parametrize("name", [GLM, SHARED])
def test_keys_that_no_operation_takes_are_said(name: str, tmp_path: Path) -> None:
    text = models.spec_text(changed(name, index_head_dim=64), source="x")
    assert "no set of the indexer's keys: ops.IndexerQuery and ops.IndexerScores do not take 32 heads of 64." in text
    (rows,) = sets(changed(name, index_head_dim=64), tmp_path).values()
    assert any(isinstance(op, RemapIndices) for op in rows.ops)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (changed(SHARED, indexer_types=["full"] * 77), r"indexer_types: got a list of 77; .*valid: 78 entries"),
        (changed(SHARED, indexer_types=["half"] * 78), r"indexer_types\.0: got 'half'; .*valid: full, shared"),
        (changed(SHARED, indexer_types=[None] * 78), r"indexer_types\.0: got null; .*valid: full, shared"),
        (changed(SHARED, indexer_types=["shared"] * 78), r"indexer_types: .*layer 0 would take picks"),
        (
            {**without(SHARED, "indexer_types"), "index_topk_pattern": "FS"},
            r"index_topk_pattern: got 'FS'; .*valid: 78 of F and S",
        ),
        (
            {**without(SHARED, "indexer_types"), "index_topk_pattern": "X" * 78},
            r"index_topk_pattern\.0: got 'X'; .*valid: F, S",
        ),
        (
            {**without(SHARED, "indexer_types"), "index_skip_topk_offset": 0},
            r"index_skip_topk_offset: got 0; layer 0 would take picks",
        ),
        (changed(GLM, index_n_heads=0), r"index_n_heads: got 0; .*valid: 1 to 4096"),
        (changed(GLM, index_head_dim=32), r"index_head_dim: got 32; RoPE rotates 64 elements .*valid: from 64"),
        (changed(GLM, indexer_rope_interleave="yes"), r"indexer_rope_interleave: got 'yes'; .*valid: true, false"),
    ],
)
def test_refused(found: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        models.facts(found)

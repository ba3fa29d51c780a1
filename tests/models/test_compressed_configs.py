"""Configs of models with compressed entries: what is read, what is refused, and the sets that init writes."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvgen import KernelSet, models
from kvgen.errors import ConfigError
from kvgen.models import Serving
from kvgen.models.compressed_text import PRESETS
from kvgen.ops import IndexerScores, MlaDecode, PoolTokens, RemapIndices
from kvgen.schema.model import YarnScaling

from .checkpoints import changed, config, without

FLASH, PRO, SHARED = "deepseek_v4_flash", "deepseek_v4_pro", "deepseek_v4_1_flash"


def sets(found: dict[str, Any], tmp_path: Path, **options: Any) -> dict[str, KernelSet]:
    path = tmp_path / "found.py"
    path.write_text(models.spec_text(found, source="x", name="x", **options), encoding="utf-8")
    return {kernels.name: kernels for kernels in runpy.run_path(str(path))["kernels"]}


def kinds(name: str) -> Counter[str]:
    found = models.facts(config(name))
    return Counter(found.kinds[kind].kind for kind in found.pattern)


def test_the_layers_that_vllm_counts() -> None:
    """vLLM's pull request 51209 counts 21 and 20 of Flash; Pro has no layer with a window alone but MTP's."""
    assert kinds(FLASH) == {"swa": 2, "c4": 21, "c128": 20}
    assert kinds(PRO) == {"c4": 30, "c128": 31}


def test_the_layers_that_share_entries() -> None:
    layers = models.facts(config(SHARED)).layers()
    entries = [layer.compressed for layer in layers]
    own = [i for i, one in enumerate(entries) if one is not None and one.source is None]
    picks = [
        i for i, one in enumerate(entries) if one is not None and one.indexer is not None and one.indexer.source is None
    ]
    assert own == [2, 8, 14, 20] and picks == [2, 8, 14, 20, 24, 28, 32, 36]
    for i, one in enumerate(entries):
        if one is None:
            assert i < 2
            continue
        assert one.indexer is not None
        assert (one.source if one.source is not None else i) == max(n for n in own if n <= i)
        assert (one.indexer.source if one.indexer.source is not None else i) == max(n for n in picks if n <= i)
        assert (one.indexer.candidate_source == 20) == (i >= 24)


def test_layers_that_share_otherwise(tmp_path: Path) -> None:
    """Layers with entries of their own that differ in what picks among them are kinds of their own."""
    found = config(SHARED)
    by_another = {**found, "text_config": {**found["text_config"], "index_source_layer_ids": [2, 20]}}
    layers = models.facts(by_another).layers()
    assert [layers[i].kind for i in (2, 8, 14)] == ["c2", "c2_8", "c2_8"]
    entries = [layers[i].compressed for i in (2, 8, 14)]
    assert [one.indexer.source for one in entries if one is not None and one.indexer is not None] == [None, 2, 2]
    sources = [2, 8, 14, 20, 24]
    among = {**found, "text_config": {**found["text_config"], "kv_source_layer_ids": sources}}
    layers = models.facts(among).layers()
    entries = [layers[i].compressed for i in (20, 24)]
    assert [one.indexer.candidate_source for one in entries if one is not None and one.indexer is not None] == [
        None,
        20,
    ]
    window = sets(among, tmp_path)["x_window"]
    assert window.model is not None and set(window.layers) == {kind.name for kind in window.model.kinds} >= {"c1_24"}


def test_rope_of_both_kinds_and_of_both_spellings() -> None:
    """transformers 5.23 saves the ropes by label; YaRN's factor of cos and sin is 1 in DeepSeek's code."""
    found = models.facts(config(FLASH)).layers()
    window, turned = found[0].rope, found[2].rope
    assert window is not None and (window.theta, window.scaling, window.dim) == (10_000.0, None, 64)
    assert turned is not None and turned.theta == 160_000.0
    assert turned.scaling == YarnScaling(factor=16.0, original_max_positions=65_536, attention_factor=1.0)
    yarn = {**config(FLASH)["rope_scaling"], "rope_theta": 160_000.0, "partial_rotary_factor": 0.125}
    saved = {
        **without(FLASH, "rope_scaling", "compress_ratios", "qk_rope_head_dim"),
        "rope_parameters": {"main": {"rope_type": "default", "rope_theta": 10_000.0}, "compress": yarn},
        "layer_types": ["sliding_attention"] * 2
        + (["compressed_sparse_attention", "heavily_compressed_attention"] * 21)[:41],
    }
    assert models.facts(saved).layers() == found


def test_what_a_config_leaves_out_is_transformers_default() -> None:
    found = models.facts({"model_type": "deepseek_v4", "num_attention_heads": 64, "num_hidden_layers": 5}).layers()
    assert [layer.kind for layer in found] == ["c128", "c128", "c128", "c4", "c128"]
    assert (found[0].head_dim_k, found[0].window) == (512, 128)


def test_blocks_of_candidates_are_chosen_and_scored(tmp_path: Path) -> None:
    """Layer 20 has a maximum of each 8 entries; layers 24, 28, 32 and 36 score the keys of a list, and map its columns."""
    found = sets(config(SHARED), tmp_path)
    keys, entries = found["x_c1_keys"], found["x_c1"]
    assert keys.model is not None
    used = {
        layer: (keys.layers[name], entries.layers[name])
        for layer in range(40)
        if (name := keys.model.layer_name(layer)) in keys.layers
    }
    assert sorted(used) == [20, 24, 28, 32, 36]
    source, *others = used.values()
    assert source == (("append", "indexer_query", "block_scores"), ("pool_tokens", "remap_indices"))
    assert others == [(("indexer_query", "candidate_scores"), ("remap_candidates",))] * 4
    scores = {op.name: op for op in keys.ops if isinstance(op, IndexerScores)}
    assert (scores["block_scores"].block_max, scores["block_scores"].pin_newest) == (8, True)
    remaps = {op.name: op.candidates for op in entries.ops if isinstance(op, RemapIndices)}
    assert scores["candidate_scores"].candidates == 8 and remaps == {"remap_indices": None, "remap_candidates": 8}
    plain = [op.block_max for op in found["x_c2_keys"].ops if isinstance(op, IndexerScores)]
    assert plain == [None]


def test_blocks_that_no_operation_has(tmp_path: Path) -> None:
    found = config(SHARED)
    of_12 = {**found, "text_config": {**found["text_config"], "candidate_block_size": 12}}
    assert models.facts(of_12).layers()
    with pytest.raises(ConfigError, match=r"candidate_block_size: got 12; .*valid: one of these"):
        sets(of_12, tmp_path)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("name", [FLASH, SHARED])
def test_every_preset_has_its_sets(name: str, preset: str, tmp_path: Path) -> None:
    found = sets(config(name), tmp_path, serving=Serving(preset=preset, tp=8))
    window = found.pop("x_window")
    decodes = [op for op in window.ops if isinstance(op, MlaDecode)]
    assert window.q_heads == 8 and all(op.sinks == "out" and op.sparse for op in decodes)
    read = {keys.cache for op in decodes for keys in op.sources}
    for kernels in found.values():
        scored = any(isinstance(op, IndexerScores) for op in kernels.ops)
        assert kernels.name.endswith("_keys") == scored
        assert scored or (any(isinstance(op, PoolTokens) for op in kernels.ops) and kernels.cache in read)
    assert window.model is not None and set(window.layers) == {kind.name for kind in window.model.kinds}


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (changed(FLASH, compress_ratios=[4] * 42), r"compress_ratios: got a list of 42; .*valid: 43 entries"),
        (changed(FLASH, compress_ratios=[3] * 43), r"compress_ratios\.0: got 3; .*valid: 0, 1, 4, 128"),
        (changed(FLASH, num_key_value_heads=8), r"num_key_value_heads: got 8; .*valid: 1"),
        (changed(FLASH, qk_rope_head_dim=63), r"qk_rope_head_dim: got 63; .*an even number"),
        (
            changed(PRO, layer_types=["full_attention"] * 61),
            r"layer_types\.0: got 'full_attention'; .*sliding_attention",
        ),
        (
            changed(FLASH, layer_types=["sliding_attention"] * 43, compress_rates={"compressed_sparse_attention": 8}),
            r"compress_rates\.compressed_sparse_attention: got 8; .*valid: 4",
        ),
    ],
)
def test_refused(found: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        models.facts(found)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("kv_source_layer_ids", [8, 14, 20], r"kv_source_layer_ids: .*layer 2 reads .*valid: one of 0 to 2"),
        ("kv_source_layer_ids", [], r"kv_source_layer_ids: .*valid: 1 to 40 entries"),
        ("kv_source_layer_ids", [2, 8, 14], r"compress_ratios: .*layer 20 reads the entries of layer 14, of 2 tokens"),
        ("index_source_layer_ids", [2, 40], r"index_source_layer_ids\.1: got 40; .*valid: 0 to 39"),
        ("candidate_topk_blocks", None, r"candidate_topk_blocks: got null"),
        ("index_topk", None, r"index_topk: missing from a DeepseekV41ForCausalLM config"),
    ],
)
def test_refused_where_layers_share(field: str, value: Any, what: str) -> None:
    found = config(SHARED)
    with pytest.raises(ConfigError, match=what):
        models.facts({**found, "text_config": {**found["text_config"], field: value}})


def test_options_that_have_no_meaning_are_refused(tmp_path: Path) -> None:
    for options, what in (
        ({"kv_dtype": "fp8"}, r"--kv-dtype: got 'fp8'; .*say it with --preset"),
        ({"serving": Serving(preset="vllm")}, r"--preset: got 'vllm', .*valid: flashinfer_v4_nvfp4"),
        ({"serving": Serving(page_size=48)}, r"--page-size: got 48; .*256 tokens"),
        ({"serving": Serving(tp=3)}, r"--tp: got 3 for 64 query heads"),
    ):
        with pytest.raises(ConfigError, match=what):
            sets(config(FLASH), tmp_path, **options)

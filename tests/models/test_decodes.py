"""config.json -> decode: every layer of a model has one with its window, scale, score and sinks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvgen import models
from kvgen.ops import Decode
from kvgen.schema.kernel_set import Op
from kvgen.schema.loader import load_file
from kvgen.schema.mask import Mask
from kvgen.schema.score import Score

from .checkpoints import WRITTEN, changed, config

# What every layer of a kind decodes with, by hand.
DECODES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama_3_1_8b": ({},),
    "phi_3_mini_4k": ({"mask": Mask(window=2047)},),
    "falcon_7b": ({},),
    "gemma_2_9b_it": (
        {"score": Score(softcap=50.0)},
        {"name": "decode_local", "mask": Mask(window=4096), "score": Score(softcap=50.0)},
    ),
    "gemma_3_4b_it": ({}, {"name": "decode_local", "mask": Mask(window=1024)}),
    "gemma_3_27b_it": (
        {"scale": 168**-0.5},
        {"name": "decode_local", "scale": 168**-0.5, "mask": Mask(window=1024)},
    ),
    "gpt_oss_20b": ({"sinks": "lse"}, {"name": "decode_local", "mask": Mask(window=128), "sinks": "lse"}),
}


def operations(text: str, tmp_path: Path) -> dict[str, Op]:
    """The operations of the set that a spec's text builds, by name."""
    (tmp_path / "made.py").write_text(text, encoding="utf-8")
    return {op.name: op for op in load_file(tmp_path / "made.py", "made.py")[0].kernels.ops}


@pytest.mark.parametrize("name", DECODES)
def test_decode_has_what_the_model_asks(name: str, tmp_path: Path) -> None:
    found = operations(models.spec_text(config(name), source=name), tmp_path)
    wanted = tuple(Decode(split="balanced", **fields) for fields in DECODES[name])
    assert tuple(op for op in found.values() if isinstance(op, Decode)) == wanted


def test_every_layer_has_its_decode() -> None:
    """One decode for each window or chunk of each shape of heads, and no other."""
    for name in WRITTEN:
        text = models.spec_text(config(name), source=name)
        layers = [
            x for x in models.facts(config(name)).layers() if x.mla is None and (x.cache or x.kv_source is not None)
        ]
        if any(x.compressed is not None for x in layers):  # see test_compressed_configs
            continue
        seen = {(x.q_heads, x.kv_heads, x.head_dim_k, x.head_dim_v, x.window, x.chunk) for x in layers}
        assert text.count("ops.Decode(") == len(seen), name
        for field, found in (("window", {x.window for x in layers}), ("chunk", {x.chunk for x in layers})):
            assert {int(w) for w in re.findall(rf"mask=Mask\({field}=([\d_]+)\)", text)} == found - {None}, name


def test_decode_with_alibi(tmp_path: Path) -> None:
    for found in (changed("falcon_7b", alibi=True), config("bloom_560m"), config("mpt_7b")):
        made = operations(models.spec_text(found, source="x"), tmp_path)
        assert made["decode"] == Decode(score=Score(alibi=True), split="balanced")
    assert "alibi_slopes are to be multiplied" in models.spec_text(changed("falcon_7b", alibi=True), source="x")
    assert "alibi_slopes" not in models.spec_text(config("falcon_7b"), source="x")


def test_latent_rows_are_decoded_whatever_they_are_stored_as(tmp_path: Path) -> None:
    for name in ("deepseek_v2_lite", "deepseek_v3", "kimi_k2"):
        for stored in ("auto", "fp8", "fp8_ds_mla", "int8", "nvfp4"):
            found = operations(models.spec_text(config(name), source="x", kv_dtype=stored), tmp_path)
            assert "mla_decode" in found, (name, stored)

"""config.json -> decode: every layer of a model has one with its window, scale, score and sinks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvgen import models
from kvgen.ops import Decode
from kvgen.spec.kernel_set import Op
from kvgen.spec.loader import load_file
from kvgen.spec.mask import Mask
from kvgen.spec.score import Score

from .checkpoints import NAMES, changed, config

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
    for name in NAMES:
        model, text = models.facts(config(name)).model, models.spec_text(config(name), source=name)
        windows = {model.layer_window(i) for i in range(model.layers or 1)} if model.mla is None else set()
        assert text.count("ops.Decode(") == len(windows)
        assert {int(w) for w in re.findall(r"mask=Mask\(window=([\d_]+)\)", text)} == windows - {None}


def test_decode_with_alibi(tmp_path: Path) -> None:
    for found in (changed("falcon_7b", alibi=True), config("bloom_560m"), config("mpt_7b")):
        made = operations(models.spec_text(found, source="x"), tmp_path)
        assert made["decode"] == Decode(score=Score(alibi=True), split="balanced")


def test_latent_rows_are_decoded_where_that_is_possible(tmp_path: Path) -> None:
    for name in ("deepseek_v2_lite", "deepseek_v3", "kimi_k2"):
        for stored, possible in {"auto": True, "fp8": True, "fp8_ds_mla": True, "int8": False, "nvfp4": False}.items():
            found = operations(models.spec_text(config(name), source="x", kv_dtype=stored), tmp_path)
            assert ("mla_decode" in found) == possible, (name, stored)

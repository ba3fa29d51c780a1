"""The rules of kvgen.schema.model: what a checkpoint's facts cannot say."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from kvgen.schema.model import Llama3Scaling, LongRopeScaling, Mla, Model, Rope, YarnScaling

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
LONG = {"original_max_positions": 4096, "max_positions": 131_072}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Llama3Scaling, {**LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor: got 0.5 with low_freq_factor 1.0; "),
        (
            YarnScaling,
            {"factor": 2.0, "original_max_positions": 1, "beta_fast": 0.5},
            "beta_fast: got 0.5 with beta_slow",
        ),
        (LongRopeScaling, {**LONG, "short_factor": (1.0,), "long_factor": (1.0, 2.0)}, "long_factor: got 2 numbers "),
        (Rope, {"style": "neox", "theta": 1e4, "dim": 63}, "dim: got 63; elements rotate in pairs"),
        (
            Rope,
            {
                "style": "neox",
                "theta": 1e4,
                "dim": 64,
                "scaling": LongRopeScaling(short_factor=(1.0,), long_factor=(1.0,), **LONG),
            },
            "scaling: got 1 factors for 64 rotated elements",
        ),
        (Model, {"alibi": True, "rope": Rope(style="neox", theta=1e4)}, "alibi: got True beside a rope"),
        (Model, {"window_pattern": ("local", "full")}, "window_pattern: got a pattern without window"),
        (Model, {"window": 8, "window_pattern": ("local", "local")}, "window_pattern: got only 'local' layers"),
        (
            Model,
            {"window": 8, "layers": 2, "window_pattern": ("local", "full", "full")},
            "window_pattern: got 3 entries for 2 layers",
        ),
        (Model, {"rope": Rope(style="neox", theta=1e4, local_theta=1e4)}, "rope.local_theta: got 10000.0 without"),
        (
            Model,
            {
                "rope": Rope(style="neox", theta=1e4, dim=32),
                "mla": Mla(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
            },
            "rope.dim: got 32 with mla.qk_rope_head_dim 64",
        ),
        (Model, {"architecture": 'x"\n'}, "architecture"),
        (Model, {"architecture": "x\n"}, "architecture"),
        (Model, {"layers": True}, "layers"),
        (Model, {"window": 0}, "window"),
        (Model, {"unknown": 1}, "unknown"),
        (Rope, {"style": "neox", "theta": math.inf}, "theta"),
    ],
)
def test_model_rules(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**fields)


def test_models_are_frozen_and_take_lists() -> None:
    model = Model(window=8, window_pattern=["local", "full"])  # type: ignore[arg-type]
    assert model.window_pattern == ("local", "full")
    with pytest.raises(ValueError, match="frozen"):
        model.window = 9

"""What transformers' modules answered (transformers/make.py, which says what is in a file), with the facts kvgen has of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvgen import models
from kvgen.schema.model import Rope
from kvgen.schema.norm import RmsNorm
from tests.models.checkpoints import changed, config

FILES = Path(__file__).parent / "transformers"
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Golden:
    """One file: `arrays` by their names there, and what `rotate` and `rms_norm` are told."""

    name: str
    arrays: dict[str, Array]
    rope: Rope
    norm: RmsNorm | None = None
    dims: int | None = None
    part: Literal["first", "last"] | None = None
    sections: tuple[int, ...] | None = None
    local: bool = False
    long: bool = False

    def output(self, key: str) -> Array:
        """`rope`, `norm` or `both`, its elements where kvgen has them."""
        found: Array = self.arrays[key]
        return found if key == "norm" else found[..., self.arrays["order"]]

    @property
    def rotary_dim(self) -> int:
        """How many elements of a row are rotated."""
        return 2 * len(self.arrays["inv_freq"])


def load(name: str) -> dict[str, Array]:
    """The arrays of NAME.npz."""
    with np.load(FILES / f"{name}.npz") as found:
        return dict(found)


def rope_of(name: str, **changes: Any) -> Rope:
    """The rope in the model of tests/models/configs/NAME.json."""
    rope = models.facts(changed(name, **changes) if changes else config(name)).model.rope
    assert rope is not None
    return rope


@cache
def golden() -> dict[str, Golden]:
    """Every file of one layer's Q or K, by name."""
    head, gemma = RmsNorm(eps=1e-6), RmsNorm(eps=1e-6, weight_offset=1.0, multiply="before")
    partial = {"hidden_size": 4096, "partial_rotary_factor": 0.75}
    facts: dict[str, dict[str, Any]] = {
        "llama_3_1_8b": {"rope": rope_of("llama_3_1_8b")},
        "qwen3_8b": {"rope": rope_of("qwen3_8b"), "norm": head},
        "gemma_3_4b_it_local": {"rope": rope_of("gemma_3_4b_it"), "norm": gemma, "local": True},
        "gemma_3_4b_it_full": {"rope": rope_of("gemma_3_4b_it"), "norm": gemma},
        "deepseek_v3": {
            "rope": rope_of("deepseek_v3"), "norm": RmsNorm(eps=1e-6, dim=512), "dims": 64, "part": "last"
        },
        "phi_3_mini_4k": {"rope": rope_of("phi_3_mini_4k")},
        "phi_3_5_mini_short": {"rope": rope_of("phi_3_5_mini")},
        "phi_3_5_mini_long": {"rope": rope_of("phi_3_5_mini"), "long": True},
        "phi_3_5_partial_short": {"rope": rope_of("phi_3_5_mini", **partial)},
        "phi_3_5_partial_long": {"rope": rope_of("phi_3_5_mini", **partial), "long": True},
        "qwen2_vl": {"rope": Rope(style="neox", theta=1_000_000.0), "sections": (16, 24, 24)},
    }  # fmt: skip
    return {name: Golden(name, load(name), **given) for name, given in facts.items()}

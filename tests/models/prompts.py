"""A prompt through one layer's attention: rows drawn from a seed, and what transformers' eager attention made of them in f32.

`python -m tests_torch.record_prompts` records them; kvgen's side is `test_prompts.py`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

RECORDED: Final = Path(__file__).parent / "recorded_prompts"
TOKENS: Final = 23  # prime, and no head count or dim of a model; windows are cut to 9
KEPT: Final = (0, 1, 8, 9, 15, 16, 17, 22)  # rows whose output is recorded: around windows and pages
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Prompt:
    """A layer of a config and the shapes of what its attention is given; `output` `[KEPT, heads, V dim]`."""

    name: str
    config: dict[str, Any]
    layer: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    sinks: bool = False
    output: Floats | None = None

    @property
    def heads(self) -> list[int]:
        """Those whose output is recorded."""
        return sorted({0, 1, self.q_heads - 1})

    def draw(self) -> dict[str, Floats]:
        """q, k, v `[tokens, heads, dim]` as attention gets them, numbers of bf16; sinks."""
        seed = int.from_bytes(hashlib.sha256(f"prompt {self.name} {self.layer}".encode()).digest()[:4], "little")
        rng = np.random.default_rng(seed)

        def some(*shape: int) -> Floats:
            return rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

        found = {
            "q": some(TOKENS, self.q_heads, self.k_dim),
            "k": some(TOKENS, self.kv_heads, self.k_dim),
            "v": some(TOKENS, self.kv_heads, self.v_dim),
        }
        return found | ({"sinks": some(self.q_heads)} if self.sinks else {})

    def _digest(self) -> NDArray[np.float64]:
        return np.array([float(np.abs(a).sum(dtype=np.float64)) for _, a in sorted(self.draw().items())])

    def save(self) -> None:
        """Write the prompt and its output; the rows are drawn anew when it is read."""
        assert self.output is not None
        facts = {n: a for n, a in vars(self).items() if n != "output"}
        path = RECORDED / f"{self.name}_{self.layer}.npz"
        np.savez_compressed(path, facts=np.array(json.dumps(facts)), output=self.output, drawn=self._digest())

    @staticmethod
    def read(path: Path) -> Prompt:
        """A recorded prompt; raises where this NumPy draws other rows than the one that recorded."""
        with np.load(path) as found:
            prompt = Prompt(**json.loads(str(found["facts"])), output=found["output"])
            np.testing.assert_allclose(prompt._digest(), found["drawn"], rtol=1e-6, err_msg=f"{path.name}: other rows")
        return prompt

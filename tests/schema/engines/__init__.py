"""Every engine that has a preset, by its name; see `memory`."""

from __future__ import annotations

from collections.abc import Callable

from tests.schema.engines import flashinfer, kvbm, modular, others, vllm
from tests.schema.engines.memory import Engine, Ints, Sizes

ENGINES: dict[str, Callable[[Sizes], Engine]] = {
    name: function
    for module in (flashinfer, kvbm, modular, others, vllm)
    for name, function in vars(module).items()
    if name.startswith(("max_", "vllm", "flash", "tensorrt", "sglang", "lmdeploy", "kivi", "kvbm"))
}

__all__ = ["ENGINES", "Engine", "Ints", "Sizes"]

"""kvgen: specs in Python -> readable, specialised CUDA for KV caches -> launchers.

The names below load on first use (PEP 562), so that generated packages, which import `kvgen.runtime` only, load neither
pydantic nor jinja2. Where these are not installed, names of specs raise ImportError and say which extra has them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen import ops, score
    from kvgen.codegen.in_memory import compile_ahead
    from kvgen.codegen.inline import compile_kernel
    from kvgen.codegen.load import load
    from kvgen.runtime.cpu import machine as cpu_machine
    from kvgen.runtime.error_word import ErrorWord
    from kvgen.runtime.faults import FaultError
    from kvgen.runtime.page_ranges import page_ranges, paired_ranges
    from kvgen.schema import presets
    from kvgen.schema.cache import Continuous, Latent, Paged
    from kvgen.schema.cache_fields import Layout
    from kvgen.schema.interleave import Interleave
    from kvgen.schema.kernel_set import KernelSet
    from kvgen.schema.keys import Keys
    from kvgen.schema.mask import Mask
    from kvgen.schema.model import (
        Compressed,
        Indexer,
        Kind,
        LinearScaling,
        Llama3Scaling,
        LongRopeScaling,
        Mla,
        Model,
        Rope,
        YarnScaling,
    )
    from kvgen.schema.norm import LayerNorm, RmsNorm
    from kvgen.schema.position_scale import PositionScale
    from kvgen.schema.quant import Block, Quant
    from kvgen.schema.ragged import Ragged
    from kvgen.schema.score import Score
    from kvgen.schema.state import State
    from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, PerKV, Ring
    from kvgen.version import __version__ as __version__

_HOME = {
    **dict.fromkeys(("Block", "Quant"), "kvgen.schema.quant"),
    **dict.fromkeys(("Continuous", "Latent", "Paged"), "kvgen.schema.cache"),
    "Layout": "kvgen.schema.cache_fields",
    **dict.fromkeys(("CSR", "Dense", "Indirect", "Mapped", "PerKV", "Ring"), "kvgen.schema.tables"),
    **dict.fromkeys(
        (
            *(
                "Compressed",
                "Indexer",
                "Kind",
                "LinearScaling",
                "Llama3Scaling",
                "LongRopeScaling",
                "Mla",
                "Model",
                "Rope",
            ),
            "YarnScaling",
        ),
        "kvgen.schema.model",
    ),
    "ErrorWord": "kvgen.runtime.error_word",
    "FaultError": "kvgen.runtime.faults",
    "KernelSet": "kvgen.schema.kernel_set",
    "Keys": "kvgen.schema.keys",
    "Mask": "kvgen.schema.mask",
    "Ragged": "kvgen.schema.ragged",
    **dict.fromkeys(("LayerNorm", "RmsNorm"), "kvgen.schema.norm"),
    "Interleave": "kvgen.schema.interleave",
    "PositionScale": "kvgen.schema.position_scale",
    "Score": "kvgen.schema.score",
    "State": "kvgen.schema.state",
    "__version__": "kvgen.version",
    "compile_ahead": "kvgen.codegen.in_memory",
    "compile_kernel": "kvgen.codegen.inline",
    "cpu_machine": "kvgen.runtime.cpu",
    "load": "kvgen.codegen.load",
    **dict.fromkeys(("page_ranges", "paired_ranges"), "kvgen.runtime.page_ranges"),
}

_THERE = {"cpu_machine": "machine"}  # names that are shorter at home

__all__ = [
    "CSR",
    "Block",
    "Compressed",
    "Continuous",
    "Dense",
    "ErrorWord",
    "FaultError",
    "Indexer",
    "Indirect",
    "Interleave",
    "KernelSet",
    "Keys",
    "Kind",
    "Latent",
    "LayerNorm",
    "Layout",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mapped",
    "Mask",
    "Mla",
    "Model",
    "Paged",
    "PerKV",
    "PositionScale",
    "Quant",
    "Ragged",
    "Ring",
    "RmsNorm",
    "Rope",
    "Score",
    "State",
    "YarnScaling",
    "compile_ahead",
    "compile_kernel",
    "cpu_machine",
    "load",
    "ops",
    "page_ranges",
    "paired_ranges",
    "presets",
    "score",
]


def __getattr__(name: str) -> Any:
    try:
        if name in ("ops", "presets", "score"):
            return import_module("kvgen.schema.presets" if name == "presets" else f"kvgen.{name}")
        if name in _HOME:
            return getattr(import_module(_HOME[name]), _THERE.get(name, name))
    except ModuleNotFoundError as error:
        from kvgen.extras import BUILD, missing, needs_build

        if error.name not in BUILD:
            raise
        raise ImportError(needs_build(f"kvgen.{name}", missing(BUILD)), name=error.name) from None
    raise AttributeError(f"module 'kvgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

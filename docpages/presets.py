"""docs/presets.md: every preset with its parameters and its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final

from docpages.blocks import markdown
from kvgen import presets

_HEAD: Final = """# Presets: other engines' caches

A preset is a function of `kvgen.presets` that returns a cache spec: the axes, page table, lengths and quantization of one engine, so
that generated kernels run on that engine's own memory.

    from kvgen import KernelSet, ops, presets

    cache = presets.vllm(dtype="bf16", kv_heads=8, head_dim=128)
    kernels = KernelSet(q_heads=32, cache=cache, ops=[ops.Append(rows="slots"), ops.Decode(split="balanced")])

N is the number of pages (or blocks), L of layers, P of tokens a page, H of KV heads, D is the head dim, B the number of requests, T of
new rows. Strides are in elements of a packed pool, in bytes where a row or a page is one of bytes. Page, K/V and layer strides are read
from the tensors at run time: padded pages, several layers in a page, and K and V as two views of one buffer need no preset of their own.

fp8 and int8 caches with one scale a tensor (`kv_cache_dtype`) take it as a device array f32 `[1, 1]` a layer, `k_scale` and `v_scale`.
Codes are multiplied by it when they are read.

To change a field of a preset, copy it: `presets.vllm(...).model_copy(update={"table": Mapped()})`.

<!-- Written by `python -m docpages` from the docstrings. -->
"""
_ENGINES: Final = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "flashinfer": "FlashInfer",
    "flash": "FlashMLA and FlashAttention",
    "tensorrt_llm": "TensorRT-LLM",
    "modular": "Modular MAX",
    "kvbm": "Dynamo's KV block manager",
    "integer": "lmdeploy and KIVI",
}


def presets_page() -> str:
    """The page."""
    parts = [_HEAD]
    for module, engine in _ENGINES.items():
        parts.append(f"\n## {engine}\n")
        parts += [_section(f) for f in functions() if f.__module__.rpartition(".")[2] == module]
    return "".join(parts)


def functions() -> list[Callable[..., Any]]:
    """The presets, in the order of their names."""
    return [getattr(presets, name) for name in presets.__all__]


def _section(preset: Callable[..., Any]) -> str:
    parameters = inspect.signature(preset).parameters.values()
    shown = ", ".join(_parameter(p) for p in parameters)
    returns = str(preset.__annotations__["return"])
    doc = re.sub(r"\s+(?=Source:\s)", "\n\n", markdown(inspect.cleandoc(preset.__doc__ or "")))
    return f"\n### {preset.__name__}\n\n`{preset.__name__}({shown})` returns `{returns}`.\n\n{doc}\n"


def _parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    value = parameter.default
    return f"{parameter.name}=" + (f'"{value}"' if isinstance(value, str) else repr(value))

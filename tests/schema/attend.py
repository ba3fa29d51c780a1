"""The functions of attention/masks.j2 in a kernel of their own, asked about places on the CPU machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvgen
from kvgen import KernelSet, Mask, Paged, Score, ops
from kvgen.codegen.render import environment
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.masks_scores import AttentionContext, attention_context
from kvgen.plan.params import Array, Param, Scalar, Size
from kvgen.runtime.cpu import machine
from kvgen.schema.arguments import Argument

CACHE: Final = Paged(dtype="bf16", kv_heads=2, head_dim=8, page_size=4)
HEADS: Final = 6
SET: Final = KernelSet(name="asked", q_heads=HEADS, cache=CACHE, ops=(ops.Gather(),))
PLACE: Final = ("b", "row", "q_head", "i", "position", "token", "tokens")


@dataclass(frozen=True)
class Answers:
    """For each place: if it is seen, its score, and the tokens [first, end) that its row may see."""

    visible: NDArray[np.bool_]
    score: NDArray[np.float32]
    first: NDArray[np.int64]
    end: NDArray[np.int64]


def context(mask: Mask, score: Score | None = None) -> AttentionContext:
    return attention_context(mask, score, SET, dtype("i32"))


def text_of(a: AttentionContext) -> str:
    """Everything that the macros write."""
    m: Any = environment().get_template("attention/masks.j2").module
    return "\n".join(str(part) for part in (m.inputs(a), m.mask(a), m.visible(a), m.score(a)))


def _argument(p: Param) -> Argument:
    match p:
        case Size():
            return ops.Size(p.name, p.value, p.dtype)
        case Scalar():
            return ops.Scalar(p.name, p.dtype)
        case Array():
            kind: Any = p.dtype
            return ops.Array(p.name, kind, p.shape, strided=p.strided)
    raise AssertionError(p)


def ask(
    cases: Mapping[str, tuple[Mask, Score | None]],
    places: Mapping[str, Any],
    scores: NDArray[np.float32],
    arguments: Mapping[str, Any],
) -> dict[str, Answers]:
    """Results of each case's functions for the places, fields of struct At each; one kernel for all cases."""
    made = {name: context(*case) for name, case in cases.items()}
    macros: Any = environment().get_template("attention/masks.j2").module
    params = {p.name: p for a in made.values() for p in a.params if p.name != "valid_tokens"}
    text = ['#include "cache.cuh"', '#include "../device/attention/plan/split_kv.cuh"']
    text += [f"namespace of_{name} {{\n{text_of(a)}\n}}" for name, a in made.items()]
    text += [
        'extern "C" __global__ void asked(const __grid_constant__ Cache cache, const uint32_t* places, const float* scores,',
        "    uint32_t* words, float* numbers, uint32_t count,",
        ",\n".join(f"    {p.declaration}" for p in params.values()) + ") {" if params else "    uint32_t nothing) {",
        "  pdl_wait();",
        "  const uint32_t n = blockIdx.x * 128 + threadIdx.x;",
        "  if (n >= count) return;",
        "  const uint32_t* p = places + 7 * n;",
        "  const At at = {p[0], p[1], p[2], p[3], p[4], p[5], p[6]};",
    ]
    for i, (name, a) in enumerate(made.items()):
        at = f"{len(made)} * n + {i}"
        text += [
            f"  const of_{name}::Inputs in{i} = of_{name}::{macros.fill(a)};",
            f"  words[({at}) * 3] = of_{name}::visible(in{i}, at);",
            f"  words[({at}) * 3 + 1] = of_{name}::Mask::first(at.position);",
            f"  words[({at}) * 3 + 2] = of_{name}::Mask::last(at.position, at.tokens);",
            f"  numbers[{at}] = of_{name}::score(in{i}, at, scores[n]);",
        ]
    own = [
        ops.Array("places", "u32", ("N", 7)), ops.Array("scores", "f32", ("N",)),
        ops.Array("out_words", "u32", ("N", len(made), 3), "out"), ops.Array("out_numbers", "f32", ("N", len(made)), "out"),
        ops.Size("count", "N"),
    ]  # fmt: skip
    more = [_argument(p) for p in params.values()] or [ops.Size("nothing", "N")]
    kernel = kvgen.compile_kernel(
        "\n".join((*text, "}\n")), cache=CACHE, grid="ceil_div(N, 128)", params=(*own, *more), arch=("sm_90a",),
    )  # fmt: skip
    pool = np.zeros((1, 2, 1, 4, 2, 8), np.uint16).view("V2").view(dtype("bf16").numpy())
    layer = kernel.Cache(pool, lengths=np.zeros(1, np.int32), page_table=np.zeros((1, 1), np.int32))[0]
    asked = np.stack([np.asarray(places[name], np.uint32) for name in PLACE], axis=1)
    words = np.zeros((len(asked), len(made), 3), np.uint32)
    numbers = np.zeros((len(asked), len(made)), np.float32)
    brought = {p.name: arguments[p.name] for p in params.values() if not isinstance(p, Size)}
    with machine(mode="check"):
        kernel(layer, places=asked, scores=scores, out_words=words, out_numbers=numbers, **brought)
    found = words.astype(np.int64)
    return {
        name: Answers(found[:, i, 0] != 0, numbers[:, i], found[:, i, 1], found[:, i, 2]) for i, name in enumerate(made)
    }

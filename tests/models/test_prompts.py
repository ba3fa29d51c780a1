"""Prompts through a layer of each kind of a few models: init's extend on the CPU machine, against transformers' eager attention.

The extend is that of the set that `kvgen init` writes for the config, with a bf16 cache; of latent attention one over
decompressed K and V, with the model's scale. Whole, behind a prefix, and one row.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from kvgen import KernelSet, Ragged, models, ops
from kvgen.architectures import Arch
from kvgen.cases.closeness import numerics
from kvgen.reference import cache_rows
from kvgen.reference.attention import Arguments, RowPosition, modified, visible
from kvgen.reference.decode import products, weighted
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from tests.models.prompts import KEPT, RECORDED, TOKENS, Floats, Prompt
from tests.support.harness import package

PATHS: Final = sorted(RECORDED.glob("*.npz"))
SOME: Final = ("gpt_oss_20b_0",)  # a window and sinks: what every run compiles a kernel for


@cache
def _sets(config: str, arch: Arch) -> tuple[KernelSet, ...]:
    text = models.spec_text(json.loads(config), source="config.json", arch=(arch,), kv_dtype="bf16")
    there: dict[str, Any] = {"__name__": "spec"}
    exec(compile(text, "<spec>", "exec"), there)
    listed = there["kernels"]
    return tuple(listed) if isinstance(listed, list) else (listed,)


def set_of(prompt: Prompt, arch: Arch = "sm_80") -> KernelSet:
    """The layer's extend over the cache of init's set, alone; of latent attention over K and V that were decompressed."""
    facts = models.facts(prompt.config).layers()[prompt.layer]
    name = f"prompt_{prompt.name}_{prompt.layer}_{arch}"
    if facts.mla is not None:
        rows = Ragged(dtype="bf16", kv_heads=prompt.kv_heads, head_dim=prompt.k_dim, v_head_dim=prompt.v_dim)
        return KernelSet(
            name=name, q_heads=prompt.q_heads, cache=rows, ops=(ops.Extend(scale=facts.scale),), arch=(arch,)
        )
    sets = _sets(json.dumps(prompt.config), arch)
    kernels = next((s for s in sets if facts.kind in s.layers), sets[0])
    extends = {op.name: op for op in kernels.ops if isinstance(op, ops.Extend)}
    uses = kernels.layers.get(facts.kind)
    if uses is None:  # two kinds, as specs have had them from the start
        local = facts.window is not None and "extend_local" in extends
        uses = ["extend_local" if local else "extend"]
    (used,) = (op for n, op in extends.items() if n in uses)
    return KernelSet(
        name=name,
        q_heads=kernels.q_heads,
        cache=kernels.kv,
        ops=(used.model_copy(update={"name": "extend"}),),
        arch=(arch,),
    )


# Rows of each request of the batch, the last ones of the prompt: all of it, a chunk behind a prefix, one row.
ROWS: Final = (TOKENS, 11, 1)


def kvgen_output(prompt: Prompt, kernels: KernelSet) -> list[Floats]:
    """`[rows, query heads, V dim]` of each request."""
    module, drawn = (
        package(kernels),
        {n: a.astype(ml_dtypes.bfloat16) for n, a in prompt.draw().items() if n != "sinks"},
    )
    tables: dict[str, Any]
    if kernels.kv.ragged:
        tokens, pages = 1, TOKENS
        tables = {"kv_offsets": np.arange(len(ROWS) + 1, dtype=np.int32) * TOKENS}
        places = [list(range(TOKENS * b, TOKENS * (b + 1))) for b in range(len(ROWS))]
        pages *= len(ROWS)
    else:
        tokens = kernels.kv.page_tokens or TOKENS
        pages = -(-TOKENS // tokens) + 1
        places = [list(range(1, pages))[::-1]]  # all have the same pages
        before = kernels.kv.lengths == "before"
        lengths = [TOKENS - rows * before for rows in ROWS]
        tables = {"lengths": np.array(lengths, np.int32), "page_table": np.array(places * len(ROWS), np.int32)}
    sizes = {"pages": pages, "layers": 1, "rows": pages, "tokens": tokens}
    pools = {t.name: np.zeros([sizes.get(n, n) for n in t.shape], ml_dtypes.bfloat16) for t in module.Cache.TENSORS}
    for request in places:
        for role, rows in zip("kv", cache_rows(kernels.kv, pools, 0), strict=True):
            for token in range(TOKENS):
                rows.write(request[token // tokens], token % tokens, drawn[role][token])
    offsets = np.cumsum([0, *ROWS]).astype(np.int32)
    q = np.concatenate([drawn["q"][TOKENS - rows :] for rows in ROWS])
    out, errors = np.zeros((len(q), prompt.q_heads, prompt.v_dim), ml_dtypes.bfloat16), np.zeros(1, np.uint64)
    given = {"sinks": prompt.draw()["sinks"]} if prompt.sinks else {}
    with machine(mode="check"):
        arrays = {n: [a] for n, a in pools.items()} if kernels.kv.ragged else pools  # one a layer
        layer = module.Cache(**arrays, **tables)[0]
        workspace = module.extend.workspace(max_rows=len(q))
        module.extend.plan(layer, workspace, row_offsets=offsets, rows=len(q))
        module.extend(layer, q, out, **given, workspace=workspace, errors=errors)
    assert describe(errors) is None
    return np.split(out.astype(np.float32), offsets[1:-1])


def hold(prompt: Prompt, arch: Arch = "sm_80") -> None:
    """Fail where a row of extend differs from transformers' by more than weights and results rounded to bf16 do."""
    assert prompt.output is not None
    for rows, found in zip(ROWS, kvgen_output(prompt, set_of(prompt, arch)), strict=True):
        for row, right in zip(KEPT, prompt.output, strict=True):
            if row >= TOKENS - rows:
                got = found[row - (TOKENS - rows), prompt.heads].astype(np.float64)
                off = np.abs(got - right).max() / np.abs(right).max()
                assert off <= 2.0**-7, f"{prompt.name}, layer {prompt.layer}: row {row} of {rows} off by {off:.3g}"


def test_there_are_recordings_of_every_kind() -> None:
    found = [Prompt.read(path) for path in PATHS]
    assert any(p.sinks for p in found) and any(p.v_dim != p.k_dim for p in found)
    for name in ("gemma_3_4b_it", "gpt_oss_20b"):
        assert len([p for p in found if p.name == name]) == 2, "a local layer and a full one"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_as_transformers_attended(path: Path) -> None:
    prompt = Prompt.read(path)
    assert path.stat().st_size < 100_000
    hold_oracle(prompt)
    if "KVGEN_FAMILY" in os.environ or path.stem in SOME:
        hold(prompt)
    if "KVGEN_FAMILY" in os.environ:
        hold(prompt, "sm_90a")


def hold_oracle(prompt: Prompt) -> None:
    """Fail where the oracle differs from transformers by more than f32 loses."""
    assert prompt.output is not None
    kernels = set_of(prompt)
    op, rows = kernels.ops[0], prompt.draw()
    assert isinstance(op, ops.Extend)
    given = numerics(kernels, op, {n: a for n, a in rows.items() if n == "sinks"})
    at = RowPosition(0, 0, np.arange(TOKENS), TOKENS, TOKENS)
    arguments = Arguments({}, prompt.q_heads, prompt.kv_heads)
    tokens = np.arange(TOKENS)
    seen = visible(op.mask, at, tokens, arguments)
    for row, right in zip(KEPT, prompt.output, strict=True):
        mine = tokens[seen[row]]
        one = RowPosition(0, row, np.array([row]), TOKENS, TOKENS)
        scores = products(rows["q"][row].astype(np.float64), rows["k"][mine].astype(np.float64), given.scale)
        scores = modified(op.score, one, mine, scores[None], arguments)[0]
        out, _ = weighted(scores, rows["v"][mine].astype(np.float64), given.sinks)
        off = np.abs(out[prompt.heads] - right).max() / np.abs(right).max()
        assert off <= 2e-5, f"{prompt.name}, layer {prompt.layer}: row {row} of the oracle off by {off:.3g}"

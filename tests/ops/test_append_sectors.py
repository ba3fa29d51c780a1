"""append of a long prompt moves every sector of rows, codes and scales once, whatever the layout."""

from __future__ import annotations

from typing import Any, Final

import pytest

from kvgen import KernelSet, ops, presets
from kvgen.bench import measure
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from tests.support.append_sets import NEOX, YARN
from tests.support.harness import package

TOKENS: Final = 512
_HEADS: Final[dict[str, Any]] = {"dtype": "bf16", "kv_heads": 4, "head_dim": 128}
CACHES: Final = {
    "max_paged": presets.max_paged(page_size=16, **_HEADS),
    "vllm_hnd": presets.vllm_hnd(page_size=16, **_HEADS),
    "vllm_xpacked": presets.vllm_xpacked(page_size=16, **_HEADS),  # 16 bytes of K, 2 of V lie together
    "max_paged_scaled": presets.max_paged_scaled(page_size=16, **_HEADS),
    "max_nvfp4": presets.max_nvfp4(page_size=128, **_HEADS),
    "vllm_nvfp4": presets.vllm_nvfp4(**_HEADS),  # scales of four tokens side by side
    "max_mla_fp8": presets.max_mla_fp8(page_size=64),
}


# Rows that are normed or turned first are stored by the same accesses: one of every way to store, both of one that packs.
FUSED: Final = ("max_paged", "vllm_xpacked", "vllm_nvfp4", "max_mla_fp8")
PLAIN: Final = ("vllm_hnd", "vllm_xpacked", "max_paged_scaled", "max_nvfp4", "vllm_nvfp4")


@pytest.mark.parametrize(("name", "fused"), [(n, True) for n in FUSED] + [(n, False) for n in PLAIN])
def test_a_prompt(name: str, fused: bool) -> None:
    cache = CACHES[name]
    append = ops.Append(rope=YARN if cache.rope_part else NEOX) if fused else ops.Append()
    kernels = KernelSet(
        name=f"sectors_{name}_{fused}".lower(), q_heads=cache.kv_heads * 8, cache=cache, ops=[append], arch=["sm_90a"]
    )
    scene = Scene(kernels, package(kernels), Workload("prompt", (TOKENS,), (TOKENS,)))
    (done,) = measure(scene, append, "sm_90a")
    counted = {t.name: t.ratio for t in done.traffic if t.group in ("kv", "scales", "input", "output") and t.minimum}
    large = {n: r for n, r in counted.items() if not n.endswith("global_scale[0]") and "global_scale" not in n}
    assert len(large) >= 2 and all(r is not None and r <= 1.02 for r in large.values()), counted

"""extend by warpgroups: each barrier, fence, expected byte, wait and parity of its pipeline, left out once, is found by the CPU machine."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from kvgen import KernelSet, Mask, Paged, ops
from kvgen.codegen.emit import render_device, render_set
from kvgen.errors import DeviceError
from kvgen.spec.loader import LoadedSet
from tests.support import harness
from tests.support.batches import PLAIN
from tests.support.extend_steps import step


def _set(name: str, **fields: Any) -> KernelSet:
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16)
    return KernelSet(name=name, q_heads=4, cache=cache, ops=(ops.Extend(**fields),), arch=("sm_90a",))


# Tiles of which all columns see all tokens have no other look at V before its product.
CAUSAL, FULL = _set("extend_sync"), _set("extend_sync_full", mask=Mask(causal=False))
K_EMPTY: Final = "mbarrier_wait(&shared.k_empty[stage], number / kStages & 1 ^ 1)"
V_EMPTY: Final = "mbarrier_wait(&shared.v_empty[before], (number - 1) / kStages & 1 ^ 1)"
V_FULL: Final = "mbarrier_wait(&shared.v_full[stage], number / kStages & 1);\n      wgmma_fence();\n      begin_pv(sums, weights, values + stage * (2 * kTokens * kValueDims / 16))"
LAST: Final = "      release(&shared.v_empty[stage]);\n"
# Name: what of the kernel becomes what, and the kinds of fault that say so.
WITHOUT: Final = {
    "init fence": ("    fence_mbarrier_init();\n", "", "proxy_fence"),
    "init barrier": ("  __syncthreads();  // mbarriers are there\n", "", "race bad_mbarrier"),
    "registers": ("    release_registers<40>();\n", "", "deadlock"),
    "K empty": (f"{K_EMPTY};", "", "bad_mbarrier in_flight race"),
    "K empty parity": (K_EMPTY, K_EMPTY.replace(" ^ 1", ""), "deadlock"),
    "V empty": (f"{V_EMPTY};", "", "bad_mbarrier in_flight race"),
    "V empty parity": (V_EMPTY, V_EMPTY.replace(" ^ 1", ""), "deadlock"),
    "K expected": ("mbarrier_arrive_expect_tx(&shared.k_full[stage], 2 * kTokens * kKeyDims)", "mbarrier_arrive(&shared.k_full[stage])", "in_flight race"),
    "V expected": ("mbarrier_arrive_expect_tx(&shared.v_full[before], 2 * kTokens * kValueDims)", "mbarrier_arrive(&shared.v_full[before])", "in_flight race"),
    "Q empty": ("        mbarrier_wait(&shared.q_empty, entries & 1 ^ 1);\n", "", "race deadlock in_flight bad_mbarrier"),
    "Q copies": ("        cp_async_wait<0>();\n        fence_async", "        fence_async", "in_flight"),
    "Q fence": ("        fence_async_shared();\n        mbarrier_arrive(&shared.q_full)", "        mbarrier_arrive(&shared.q_full)", "proxy_fence"),
    "Q arrive": ("        mbarrier_arrive(&shared.q_full);\n", "", "deadlock"),
    "Q full": ("      mbarrier_wait(&shared.q_full, entries & 1);\n", "", "race in_flight uninitialised"),
    "Q full parity": ("mbarrier_wait(&shared.q_full, entries & 1)", "mbarrier_wait(&shared.q_full, 0)", "race in_flight proxy_fence"),
    "first K full": ("      mbarrier_wait(&shared.k_full[number % kStages], number / kStages & 1);\n", "", "in_flight race uninitialised"),
    "K full": ("      mbarrier_wait(&shared.k_full[next], (number + 1) / kStages & 1);\n", "", "in_flight race uninitialised"),
    "K full parity": ("mbarrier_wait(&shared.k_full[next], (number + 1) / kStages & 1)", "mbarrier_wait(&shared.k_full[next], 0)", "in_flight race"),
    "V full": ("      mbarrier_wait(&shared.v_full[stage], number / kStages & 1);\n      wgmma_fence();\n      begin_pv(sums, weights, values + stage * (2 * kTokens * kValueDims / 16));  // O", "      wgmma_fence();\n      begin_pv(sums, weights, values + stage * (2 * kTokens * kValueDims / 16));  // O", "in_flight race uninitialised"),
    "last V full": (f"      {V_FULL};\n", f"      {V_FULL.partition(chr(10))[2].lstrip()};\n", "in_flight race uninitialised"),
    "V full before it is read": ("      mbarrier_wait(&shared.v_full[number % kStages], number / kStages & 1);\n", "", "in_flight race uninitialised"),
    "K read": ("      release(&shared.k_empty[next]);\n", "", "deadlock"),
    "first K read": ("      release(&shared.k_empty[number % kStages]);\n", "", "deadlock"),
    "V read": (f"{LAST}      if (rises)", "      if (rises)", "deadlock"),
    "last V read": (f"{LAST}      ++number;\n      ++entries", "      ++number;\n      ++entries", "deadlock"),
    "Q read": ("      if (tile + 2 == end_tile) release(&shared.q_empty);\n", "", "deadlock"),
    "lanes before an arrival": ("      __syncwarp();\n      if (lane == 0) mbarrier_arrive(empty);", "      if (lane == 0) mbarrier_arrive(empty);", "race"),
    "first fence": ("      wgmma_fence();\n      begin_qk(s, query, keys + number", "      begin_qk(s, query, keys + number", "missing_fence"),
    "fence of S": ("      wgmma_fence();\n      begin_qk(s, query, keys + next", "      begin_qk(s, query, keys + next", "missing_fence"),
    "fence of O": ("      wgmma_fence();\n      begin_pv(sums, weights, values + stage * (2 * kTokens * kValueDims / 16));\n", "      begin_pv(sums, weights, values + stage * (2 * kTokens * kValueDims / 16));\n", "missing_fence"),
    "commit of S": ("  // S(t + 1)\n      wgmma_commit();\n", "  // S(t + 1)\n", "in_flight"),
    "commit of O": ("  // O += P(t)\n      wgmma_commit();\n", "  // O += P(t)\n", "in_flight"),
    "wait for S": ("      wgmma_wait<1>();\n", "", "in_flight"),
    "wait for O": (f"      wgmma_wait<0>();\n      wgmma_done(flat(sums));\n{LAST}      if (rises)", f"      wgmma_done(flat(sums));\n{LAST}      if (rises)", "in_flight"),
    "columns before zeros": ("      sync_consumers();  // all columns have them\n", "", "race"),
    "fence of zeros": ("      fence_async_shared();\n      sync_consumers();\n", "      sync_consumers();\n", "proxy_fence"),
    "zeros before products": ("      fence_async_shared();\n      sync_consumers();\n", "      fence_async_shared();\n", "race proxy_fence in_flight"),
}  # fmt: skip
SOME: Final = ("K expected", "Q fence", "V empty parity")
LEFT_OUT: Final = tuple(WITHOUT) if "KVGEN_FAMILY" in os.environ else SOME


def changed(kernels: KernelSet, name: str, folder: Path) -> ModuleType:
    """The generated package with one thing of the kernel left out."""
    before, after, _ = WITHOUT[name]
    package = "without_" + name.replace(" ", "_")
    files = render_device() | render_set(LoadedSet(kernels, "tests/ops/test_extend_wgmma_sync.py", ""))
    for path, file in files.items():
        text = file.text
        if path.endswith("/extend.cu"):
            assert text.count(before) == 1, f"{name}: the kernel has it {text.count(before)} times"
            text = text.replace(before, after)
        target = folder / package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / package / "__init__.py").touch()
    module = importlib.import_module(f"{package}.{kernels.name}")
    module.Cache.MODULE.quick = True
    return module


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FULL if name == "last V full" else CAUSAL
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setitem(harness._packages, kernels.name, (kernels, changed(kernels, name, tmp_path)))
    for schedule in ("ascending", "descending", 1):
        totals = (384, 256) if kernels is FULL else (300, 170)
        one = step(kernels, replace(PLAIN, totals=totals, new=(0, 0), fill="nan", schedule=schedule), (70, 40))
        with pytest.raises(DeviceError, match="on the CPU machine: ") as caught:
            one.run(multiprocessors=1)  # one block has all entries
        kind = str(caught.value).partition("on the CPU machine: ")[2].partition(":")[0]
        assert kind in WITHOUT[name][2].split(), f"{schedule}: {caught.value}"

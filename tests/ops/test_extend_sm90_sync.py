"""extend by warpgroups: each barrier, fence, wait, parity and expected byte, left out once, is found by the CPU machine."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

from kvgen import KernelSet, Layout, Mask, Paged, Quant, ops
from kvgen.codegen.emit import render_device, render_set
from kvgen.errors import DeviceError
from kvgen.reference.faults import Fault, FaultLog
from kvgen.schema.loader import LoadedSet
from tests.support import harness
from tests.support.batches import PLAIN
from tests.support.extend_steps import step


def _set(name: str, page_size: int = 16, v_head_dim: int = 64, quant: Quant | None = None, **fields: Any) -> KernelSet:
    layout = Layout(k="page layer token head dim", v="page layer token head dim")
    cache = Paged(
        dtype="bf16", kv_heads=1, head_dim=64, v_head_dim=v_head_dim, page_size=page_size, layout=layout, quant=quant
    )
    return KernelSet(name=name, q_heads=4, cache=cache, ops=(ops.Extend(**fields),), arch=("sm_90a",))


# Tiles of which all columns see all tokens have no other look at V before its product.
CAUSAL, FULL = _set("extend_sync"), _set("extend_sync_full", mask=Mask(causal=False))
CUT = _set("extend_sync_cut", split="invariant", chunk=128)
ROWS = _set("extend_sync_rows", page_size=1)
# V has more dims than Q's place.
DEEP = _set("extend_sync_deep", v_head_dim=128)
# Copying warps widen what comes.
CODES = _set("extend_sync_codes", quant=Quant(dtype="e4m3", scale_dtype="f32"))
OF: Final = {"last V full": FULL, "wait for a chunk": CUT, "dims before the next": DEEP}
UNREAD: Final = "in_flight race uninitialised"
# Name: a line of the kernel by a part of it, which of those that have it, what stands in place of the part (None: the line is
# left out), and the kinds of fault that say so.
WITHOUT: Final[dict[str, tuple[str, int, str | None, str]]] = {
    "init fence": ("fence_mbarrier_init();", 0, None, "proxy_fence"),
    "init barrier": ("__syncthreads();  // mbarriers are there", 0, None, "race bad_mbarrier"),
    "registers": ("release_registers<40>();", 0, None, "deadlock"),
    "K empty": ("mbarrier_wait(&shared.k_empty[stage]", 0, None, "bad_mbarrier in_flight race"),
    "K empty parity": ("k_empty[stage], number / kStages & 1 ^ 1", 0, "k_empty[stage], number / kStages & 1", "deadlock"),
    "V empty": ("mbarrier_wait(&shared.v_empty[stage_before]", 0, None, "bad_mbarrier in_flight race"),
    "V empty parity": ("(number - 1) / kStages & 1 ^ 1", 0, "(number - 1) / kStages & 1", "deadlock"),
    "K expected": ("k_full[stage], 2 * kTokens * kKeyDims)", 0, "k_full[stage], 0)", "in_flight race deadlock"),
    "V expected": ("v_full[stage_before], 2 * kTokens * kValueDims)", 0, "v_full[stage_before], 0)", "in_flight race deadlock"),
    "Q empty": ("mbarrier_wait(&shared.q_empty", 0, None, "race deadlock in_flight bad_mbarrier"),
    "Q copies": ("cp_async_wait<0>();", 0, None, "in_flight"),
    "Q fence": ("fence_async_shared();", 0, None, "proxy_fence"),
    "Q arrive": ("mbarrier_arrive(&shared.q_full);", 0, None, "deadlock"),
    "Q full": ("mbarrier_wait(&shared.q_full", 0, None, f"{UNREAD} proxy_fence"),
    "Q full parity": ("share, num_entries_done & 1", 0, "share, 0", "race in_flight proxy_fence deadlock"),
    "first K full": ("mbarrier_wait(&shared.k_full[place.stage]", 0, None, UNREAD),
    "K full": ("mbarrier_wait(&shared.k_full[next.stage]", 0, None, UNREAD),
    "K full parity": ("k_full[next.stage], next.parity", 0, "k_full[next.stage], 0", "in_flight race"),
    "V full": ("mbarrier_wait(&shared.v_full[place.stage]", 0, None, UNREAD),
    "last V full": ("mbarrier_wait(&shared.v_full[place.stage]", 1, None, UNREAD),
    "V full before it is read": ("mbarrier_wait(&share.shared.v_full[place.stage]", 0, None, UNREAD),
    "first K read": ("share.release(&shared.k_empty[place.stage]", 0, None, "deadlock"),
    "K read": ("share.release(&shared.k_empty[next.stage]);", 0, None, "deadlock"),
    "V read": ("share.release(&shared.v_empty[place.stage]);", 0, None, "deadlock"),
    "last V read": ("share.release(&shared.v_empty[place.stage]);", 1, None, "deadlock"),
    "Q read": ("if (!share.narrow && tile + 2 == end_tile) share.release(&shared.q_empty);", 0, None, "deadlock"),
    "lanes before an arrival": ("__syncwarp();", 0, None, "race"),
    "first fence": ("wgmma_fence();", 0, None, "missing_fence"),
    "fence of S": ("wgmma_fence();", 1, None, "missing_fence"),
    "fence of the last O": ("wgmma_fence();", 3, None, "missing_fence"),
    "commit of S": ("wgmma_commit();", 1, None, "in_flight"),
    "commit of O": ("wgmma_commit();", 2, None, "in_flight"),
    "commit of the last O": ("wgmma_commit();", 3, None, "in_flight"),
    "first wait": ("wgmma_wait<0>();", 0, None, "in_flight"),
    "wait for S": ("wgmma_wait<1>();", 0, None, "in_flight"),
    "wait for O": ("wgmma_wait<0>();", 1, None, "in_flight"),
    "wait for a chunk": ("wgmma_wait<0>();", 1, None, "in_flight"),
    "last wait": ("wgmma_wait<0>();", 2, None, "in_flight"),
    "columns before zeros": ("named_barrier(barrier, threads);  // all columns have added them", 0, None, "race"),
    "fence of zeros": ("fence_async_shared();", 1, None, "proxy_fence"),
    "zeros before products": ("named_barrier(barrier, threads);  // they are zeros", 0, None, "race proxy_fence in_flight"),
    # Narrow entries: the last ones of both requests.
    "arrivals for two": ("if (threadIdx.x % 32 < step())", 0, "if (threadIdx.x % 32 == 0)", "deadlock"),
    "Q read by narrow ones": ("if (share.group == 0) share.release(&share.shared.q_empty);", 0, None, "deadlock"),
    "one warpgroup's columns": (
        "4 + share.group : 3, threads = share.narrow ? 128", 0, "3 : 3, threads = share.narrow ? 256", "deadlock"
    ),
    "Q before sums": ("named_barrier(id, threads);  // products with Q are done", 0, None, "in_flight race uninitialised"),
    "dims before the next": ("if (first > 0) named_barrier(id, threads);", 0, None, "race"),
    "sums before they are read": ("named_barrier(id, threads);  // they are there", 0, None, "race"),
    "work empty": ("mbarrier_wait(&empty[place]", 0, None, "race bad_mbarrier deadlock"),
    "work empty parity": ("empty[place], round / 2 & 1 ^ 1", 0, "empty[place], round / 2 & 1", "deadlock"),
    "work asked": ("mbarrier_arrive(&full[place]);", 0, None, "deadlock"),
    "work full": ("mbarrier_wait(&full[place]", 0, None, "race uninitialised"),
    "work full parity": ("full[place], round / 2 & 1", 0, "full[place], 0", "race deadlock bad_mbarrier"),
    "lanes before work is read": ("__syncwarp();", 0, None, "race"),
    "work read": ("mbarrier_arrive(&empty[place]);", 0, None, "deadlock"),
    "codes: K copied": ("mbarrier_wait(&shared.k_copied[own.warp]", 0, None, UNREAD),
    "codes: K copied parity": ("k_copied[own.warp], number & 1", 0, "k_copied[own.warp], 0", "in_flight race"),
    "codes: V copied": ("mbarrier_wait(&shared.v_copied[own.warp]", 0, None, UNREAD),
    "codes: V copied parity": ("v_copied[own.warp], number & 1", 0, "v_copied[own.warp], 0", "in_flight race"),
    "codes: K expected": ("KeyCodes::kRows * KeyCodes::kBytes", 0, "0", UNREAD),
    "codes: V expected": ("ValueCodes::kRows * ValueCodes::kBytes", 0, "0", UNREAD),
    "codes: V empty": ("mbarrier_wait(&shared.v_empty[stage]", 0, None, "bad_mbarrier in_flight race"),
    "codes: Q empty": ("mbarrier_wait(&shared.q_empty", 0, None, "uninitialised race deadlock in_flight bad_mbarrier"),
    "codes: K fence": ("fence_async_shared();", 0, None, "proxy_fence"),
    "codes: V fence": ("fence_async_shared();", 1, None, "proxy_fence"),
    "codes: lanes before K": ("__syncwarp();", 0, None, "race proxy_fence in_flight"),
    "codes: lanes before V": ("__syncwarp();", 1, None, "race proxy_fence in_flight"),
    "codes: Q arrive": ("mbarrier_arrive(&shared.q_full);", 0, None, "deadlock"),
    "codes: K arrive": ("mbarrier_arrive(&shared.k_full[stage]);", 0, None, "deadlock"),
    "codes: V arrive": ("mbarrier_arrive(&shared.v_full[stage]);", 0, None, "deadlock"),
    "rows: empty": ("mbarrier_wait(empty + stage", 0, None, "bad_mbarrier in_flight race deadlock"),
    "rows: empty parity": ("number / kStages & 1 ^ 1", 0, "number / kStages & 1", "deadlock"),
    "rows: copies": ("cp_async_arrive(landed + stage);", 0, None, "deadlock"),
    "rows: flag": ("mbarrier_arrive(landed + stage);", 0, None, "deadlock"),
    "rows: landed": ("mbarrier_wait(landed + number", 0, None, "in_flight race bad_mbarrier uninitialised proxy_fence"),
    "rows: landed parity": ("number / kStages & 1);", 0, "0);", "in_flight race bad_mbarrier proxy_fence deadlock"),
    "rows: fence": ("fence_async_shared();", 1, None, "proxy_fence"),
    "rows: full": ("mbarrier_arrive(full + number", 0, None, "deadlock"),
    "rows: Q fence": ("fence_async_shared();", 0, None, "proxy_fence"),
    "rows: Q copies": ("cp_async_wait<0>();", 0, None, "in_flight"),
}  # fmt: skip
SOME: Final = ("K expected", "V empty parity", "codes: K fence")
LEFT_OUT: Final = tuple(WITHOUT) if "KVGEN_FAMILY" in os.environ else SOME


# A length changes while the kernel runs: copying warps are told another one than the others.
TOLD: Final = "(call.cache, chunk.b, chunk.rows) != chunk.tokens"


def changed(kernels: KernelSet, name: str, change: tuple[str, int, str | None], folder: Path) -> ModuleType:
    """The generated package with one thing of the kernel, or of its device functions, left out or changed."""
    part, which, instead = change
    package = "without_" + name.replace(": ", "_").replace(" ", "_")
    files = render_device() | render_set(LoadedSet(kernels, "tests/ops/test_extend_sm90_sync.py", ""))
    for path, file in files.items():
        text = file.text
        lines = text.splitlines(keepends=True)
        ring = next((n for n, line in enumerate(lines) if "struct WorkRing" in line), len(lines))
        at = [
            n
            for n, line in enumerate(lines)
            if part in line and "__device__" not in line and (n > ring) == ("work" in name)
        ]
        if at and path.endswith(("/extend.cu", "/row_wgmma.cuh")):
            lines[at[which]] = "" if instead is None else lines[at[which]].replace(part, instead)
            text = "".join(lines)
        target = folder / package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / package / "__init__.py").touch()
    return importlib.import_module(f"{package}.{kernels.name}")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = OF.get(name, CODES if name.startswith("codes") else ROWS if name.startswith("rows: ") else CAUSAL)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    module = changed(kernels, name, WITHOUT[name][:3], tmp_path)
    monkeypatch.setitem(harness._packages, kernels.name, (kernels, module))
    for schedule in ("ascending", "descending", 1):
        totals, rows = ((384, 256) if kernels is FULL else (300, 170)), (70, 40)
        if name == "work empty":  # entries of one tile, or stages of keys keep the copying warp from the next work
            totals, rows = (40,) * 6, (1,) * 6
        batch = replace(PLAIN, totals=totals, new=(0,) * len(rows), fill="nan", schedule=schedule)
        one = step(kernels, batch, rows)
        with pytest.raises(DeviceError, match="on the CPU machine: ") as caught:
            one.run(multiprocessors=1)  # one block has all entries
        kind = str(caught.value).partition("on the CPU machine: ")[2].partition(":")[0]
        assert kind in WITHOUT[name][3].split(), f"{schedule}: {caught.value}"


@pytest.mark.parametrize(
    "kernels", [CAUSAL, ROWS, CODES] if "KVGEN_FAMILY" in os.environ else [CAUSAL], ids=lambda k: k.name
)
def test_a_length_that_changes_meanwhile(kernels: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads it for its block: warps that read it each could wait for each other for ever. Entries have their result,
    or are stale as a whole."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    told = TOLD.replace("!=", "+ (call.cache.batch == 2 ? threadIdx.x < 256 : threadIdx.x >= 256) !=")
    module = changed(kernels, f"told_{kernels.name}", (TOLD, 0, told), tmp_path)
    monkeypatch.setitem(harness._packages, kernels.name, (kernels, module))
    batch = replace(PLAIN, totals=(300, 170), new=(0,) * 2)
    step(kernels, batch, (70, 40)).check(multiprocessors=1)
    totals = (300, 170, 40)
    one = step(kernels, replace(batch, totals=totals, new=(0,) * 3), (70, 40, 3))
    out, lse, word = one.run(multiprocessors=1)
    assert np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all()
    wanted = FaultLog()
    wanted.add(Fault.STALE, 2, 37)  # the smallest one
    assert word == wanted.word

"""extend on mma.sync: each barrier, copy's wait and commit, left out once, is found by the CPU machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from kvgen.errors import DeviceError
from tests.support.batches import PLAIN
from tests.support.extend_sets import SETS
from tests.support.extend_steps import step
from tests.support.missing_sync import MissingSync

MERGE: Final = "device/attention/common/merge.cuh"
QUERY: Final = MissingSync(
    "__syncthreads_or(tokens_now != chunk.tokens)", "race uninitialised", "tokens_now != chunk.tokens"
)
# By a set whose kernel has it: Q in registers or in shared memory, scales that are expanded, chunks that a block adds up.
WITHOUT: Final[dict[str, tuple[str, MissingSync]]] = {
    "Q of all warps": ("paged", QUERY),
    "Q of all warps in shared memory": ("int4", QUERY),
    "Q in registers": ("paged", MissingSync("__syncthreads();  // tiles take the place of Q", "race in_flight")),
    "zeros before copies": ("dims", MissingSync("__syncthreads();", "race in_flight", which=1)),
    "commit": ("paged", MissingSync("cp_async_commit();", "in_flight race")),
    "copies of a tile": ("paged", MissingSync("cp_async_wait<kStages - 2>();", "in_flight")),
    "copies of the tile before": ("paged", MissingSync("wait<kStages - 2>();", "in_flight", "wait<kStages - 1>();")),
    "copies of all threads": (
        "paged",
        MissingSync("__syncthreads();  // the other threads' have", "race in_flight uninitialised"),
    ),
    "expanded scales": ("int4", MissingSync("__syncthreads();  // the tile's scales", "race uninitialised")),
    "copies of a request that is stale": ("int4", MissingSync("cp_async_wait<0>();", "in_flight")),
    "the ring before sums": ("paged", MissingSync("failed = __syncthreads_or(failed);", "race in_flight")),
    "sums of all warps": ("paged", MissingSync("__syncthreads();  // the sums are there", "race uninitialised")),
    "the ring after sums": ("invariant", MissingSync("__syncthreads();  // the sums have been read", "race in_flight")),
    "sums of all threads": ("paged", MissingSync("  Threads::sync();", "race", path=MERGE)),
    "who is last": ("paged", MissingSync("atom.add.acq_rel.gpu", "race", "atom.add.relaxed.gpu", path=MERGE)),
}  # fmt: skip
SOME: Final = ("copies of the tile before", "the ring before sums", "expanded scales")


def test_what_a_campaign_leaves_out_is_there(tmp_path: Path) -> None:
    """Every part stands in the text of its set, so that a change of the text is noticed before the campaign runs."""
    for n, (which, what) in enumerate(WITHOUT.values()):
        what.write(SETS[which], tmp_path / str(n))


@pytest.mark.parametrize("name", WITHOUT if "KVGEN_FAMILY" in os.environ else SOME)
def test_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which, what = WITHOUT[name]
    kernels = SETS[which]
    what.put(kernels, name, tmp_path, monkeypatch)
    for schedule in ("ascending", "descending", 1):
        # A request of more keys than one block has, one of many tiles of rows.
        found = step(kernels, replace(PLAIN, totals=(1100, 300), new=(0, 0), fill="nan", schedule=schedule), (3, 150))
        workspace = found.planned(multiprocessors=4)
        if "stale" in name:
            found.scene.tables["lengths"][0] -= 1
        with pytest.raises(DeviceError, match="on the CPU machine: ") as caught:
            found.run(workspace=workspace)
        assert what.told(str(caught.value)), f"{schedule}: {caught.value}"

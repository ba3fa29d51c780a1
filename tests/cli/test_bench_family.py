"""`kvgen bench` over every way to store a cache: codes, scales, tails and latent rows, against minima worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgen.bench import measure
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.cli.project import generated
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import load_file
from tests.support.family_sets import RUN, write_project

from .conftest import Folder
from .test_bench import operations, traffic


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("family")
    write_project(root)
    folder = Folder(root)
    folder.kvgen("build")
    return folder


@pytest.mark.parametrize("name", RUN)
def test_family(name: str, family: Folder) -> None:
    """Every operation of a set is counted, and none touches less than the oracle's view says it must."""
    found = operations(family, name, "--batch", "2", "--tokens", "21", "--new", "13")
    kernels = next(s.kernels for s in load_file(family.root / "specs" / "family.py", "f") if s.kernels.name == name)
    assert [o["op"] for o in found] == [op.name for op in kernels.ops]
    for op in found:
        groups = {b["group"] for b in op["buffers"]}
        moved = traffic(op)
        assert {"kv", "tables"} <= groups and groups & {"input", "output"}
        values = [row for row in moved.values() if row[0] == "kv"]
        assert sum(row[3] for row in values) < 3 * sum(row[4] or 0 for row in values), (op["op"], values)
        scales = {t.name for t in kernels.cache.storage.tensors if t.name.endswith(("scale", "scales"))}
        if op["op"] == "append" and kernels.cache.storage.residual:
            scales.remove("k_scales")  # seal writes them
        if op["op"] != "seal":
            assert {n.partition("[")[0] for n, row in moved.items() if row[0] == "scales"} == scales


def least(scene: Scene, kernels: KernelSet, op: str) -> dict[str, int]:
    cases = cases_of(next(o for o in kernels.ops if o.name == op))
    return cases.minimum(cases.call(scene))


@pytest.fixture(scope="module")
def stored(family: Folder) -> Callable[[str, Workload], tuple[Scene, KernelSet]]:
    packages: dict[str, Any] = {}
    sets = {s.kernels.name: s.kernels for s in load_file(family.root / "specs" / "family.py", "f")}

    def make(name: str, workload: Workload) -> tuple[Scene, KernelSet]:
        if name not in packages:
            packages[name] = generated(family.out, name).__enter__()
        return Scene(sets[name], packages[name], workload), sets[name]

    return make


def test_codes_and_scales(stored: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    """By hand: a page of 8 tokens of 2 heads of 32."""
    page = Workload("page", (8,), (8,))
    scene, kernels = stored("per_head", page)
    # K and V: 8 tokens of 64 bytes, and 8 x 2 f32 scales.
    assert least(scene, kernels, "append") == {
        "pool": 2 * 16, "scales": 2 * 2, "lengths": 1, "page_table": 1, "k": 32, "v": 32, "row_offsets": 1
    }  # fmt: skip
    scene, kernels = stored("nv", page)
    # 8 tokens of 32 bytes; e4m3 scales of 16 dims, 4 a token, K's 32 beside V's.
    assert {n: least(scene, kernels, "gather")[n] for n in ("pool", "scales", "k_out")} == {
        "pool": 2 * 8, "scales": 2, "k_out": 32
    }  # fmt: skip
    scene, kernels = stored("groups", page)
    # One page of bytes: K and V of 256 bytes, then f16 scale and zero of 2 groups of 2 heads, 16 bytes a token.
    assert least(scene, kernels, "append")["pool"] == 2 * 256 // 32 + 2 * 8 * 16 // 32
    scene, kernels = stored("channels", page)
    assert least(scene, kernels, "decode")["k_scale"] == 2 * 32 * 4 // 32, (
        "a scale a head and channel, whatever the tokens"
    )
    scene, kernels = stored("own", page)
    assert least(scene, kernels, "append")["scales_page_table"] == 1


def test_latent_rows(stored: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    page = Workload("page", (8,), (8,))
    for name, pool in (
        ("latent", {"pool": 8 * 160}),
        ("latent_cast", {"pool": 8 * 96}),
        ("latent_row", {"pool[1]": 832}),
    ):
        scene, kernels = stored(name, page)
        found = least(scene, kernels, "gather")
        assert {n: 32 * found[n] for n in pool} == pool and "v_out" not in found
    scene, kernels = stored("latent_rope", page)
    found = least(scene, kernels, "append")
    assert (found["k_pool[1]"], found["rope_pool[1]"], found["k"]) == (8 * 128 // 32, 8 * 32 // 32, 8 * 160 // 32)


def test_a_tail_and_what_seal_takes_from_it(stored: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    """21 tokens, the last 13 new, groups of 8: seal stores 8 to 15, append puts 16 to 20 in the tail."""
    scene, kernels = stored("kivi", Workload("two", (21, 8), (13, 8)))
    key, codes, scales = (
        2 * 32 * 2 // 32,
        2 * 16 // 32,
        2 * 64 * 2 // 32,
    )  # sectors: a token's K as it is, as codes; a group's
    seal = least(scene, kernels, "seal")
    assert seal["pool"] == 2 * 8 * codes and seal["k_scales"] == 2 * scales and seal["k"] == 16 * key
    assert "k_tail" not in seal, "both groups are new from their first token on"
    assert (seal["k_sealed"], seal["lengths"], seal["row_offsets"]) == (1, 1, 1)
    append = least(scene, kernels, "append")
    assert append["k_tail"] == append["k"] == 5 * key and append["v"] == 21 * key
    assert append["pool"] == 21 * codes and "k_scales" not in append and "k_sealed" not in append
    gather = least(scene, kernels, "gather")
    assert gather["k_tail"] == 5 * key and gather["pool"] == (29 + 24) * codes and gather["k_scales"] == 3 * scales
    assert gather["k_sealed"] == 1
    scene, kernels = stored("kivi", Workload("later", (16,), (3,)))
    seal = least(scene, kernels, "seal")
    assert (seal["k_tail"], seal["k"]) == (5 * key, 3 * key), "older tokens of the group come from the tail"
    (measured,) = measure(scene, next(o for o in kernels.ops if o.name == "seal"), None)
    assert all(t.ratio is None or t.ratio >= 1 for t in measured.traffic)

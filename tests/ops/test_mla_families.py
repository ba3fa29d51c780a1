"""mla_decode in a set for sm_80 and sm_90a: each family's kernel and planner behind one launcher, held to the oracle."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet, presets
from kvgen.architectures import Arch
from kvgen.codegen.emit import kernel_files, render_set
from kvgen.compile import select_arch
from kvgen.errors import ArgumentError, DeviceError, SpecError
from kvgen.ops import MlaDecode
from kvgen.reference import mla_decode
from kvgen.runtime import Fault, cuda, describe
from kvgen.runtime import gpu as backend
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from kvgen.schema.loader import LoadedSet
from tests.support.batches import PLAIN
from tests.support.call_tables import calls
from tests.support.harness import Run, offsets_of, on_machine, package
from tests.support.latent_steps import SCALE, Rows, call, latent_scene, numerics, op_of
from tests.support.launching import NotingDriver
from tests.support.memory import rows_array
from tests.support.tolerance import hold


def family_set(name: str, cache: Cache, heads: int, **fields: Any) -> KernelSet:
    """A set for both families, with mla_decode alone."""
    op = MlaDecode(**({"scale": SCALE} | fields))
    return KernelSet(name=f"families_{name}", q_heads=heads, cache=cache, ops=(op,))


SETS = {
    kernels.name: kernels
    for kernels in (
        # DeepSeek V3's heads, two blocks of columns; two pools, and columns that do not fill the last block; chunks of a size.
        family_set("balanced", presets.max_mla(page_size=64), 128, split="balanced"),
        family_set("rows", presets.flashinfer_mla(dtype="bf16", page_size=16), 40, rows=2, split="balanced"),
        family_set("invariant", presets.max_mla(page_size=16, dtype="f16"), 64, split="invariant", chunk=128),
    )
}
# The campaign has V3's 128 heads as well.
ALL = pytest.mark.parametrize(
    "name", SETS if "KVGEN_FAMILY" in os.environ else [n for n in SETS if n != "families_balanced"]
)
ARCHS: tuple[Arch, ...] = ("sm_80", "sm_90a")
# Of checked-in sets: shared memory and a block's threads, by what the name of a family's files ends in.
SHIPPED: dict[str, dict[str, tuple[int, tuple[int, int, int]]]] = {
    "deepseek_v3": {"": (162560, (256, 1, 1)), "_sm_90a": (231168, (512, 1, 1))},
    "kimi_k2_flashinfer": {"": (163072, (256, 1, 1)), "_sm_90a": (229936, (256, 1, 1))},
}


@ALL
def test_a_plan_is_its_family_s_alone(name: str) -> None:
    """Requests of one token to several chunks: each kernel takes the plan of its own planner, and is right; of the other one's it
    makes NaN of every row, and reports it."""
    kernels, given = SETS[name], numerics(SETS[name])
    op, generated = op_of(kernels), package(kernels)
    counts = [op.rows, 1, op.rows, 1]
    batch = replace(PLAIN, arch="sm_80", totals=(400, 1, 97, 64), new=(0,) * 4, fill="nan", schedule=7)
    ends = np.cumsum([0, *counts]).tolist()
    scene, q = latent_scene(kernels, batch, [Rows(b, ends[b], ends[b + 1]) for b in range(4)], ends[-1] + 1)
    offsets = offsets_of(counts, kernels.kv.lengths_dtype, 0)
    cache = generated.Cache(**scene.arguments())
    (keys,) = scene.rows()
    how: dict[str, Any] = {"scale": op.scale, "lse_base": op.lse_base, "lse_empty": op.lse_empty}
    wanted = mla_decode(scene.view, keys, q, rows=op.rows, row_offsets=offsets, **how)
    for own, other in (ARCHS, reversed(ARCHS)):
        scene.batch = replace(batch, arch=own)
        with on_machine(scene.batch):
            workspace = generated.mla_decode.workspace(
                max_rows=len(q), max_tokens=cache.max_cache_length, multiprocessors=6
            )
        for planner in (own, other):
            workspace.view.owner[...] = 0xEE
            with on_machine(replace(batch, arch=planner)):
                generated.mla_decode.plan(cache[scene.layer], workspace, rows=len(q), row_offsets=offsets)
            out, _ = rows_array(len(q), (kernels.q_heads, 512), given.out, strided=False)
            lse, _ = rows_array(len(q), (kernels.q_heads,), "f32", strided=False)
            run = Run(scene, "mla_decode", generated.mla_decode, q=q, out=out, lse=lse, workspace=workspace)
            if planner == own:
                hold(wanted, given, q, out, lse)
                run.expect_word(wanted.errors)
                continue
            report = describe(run.word)
            assert report is not None and report.code is Fault.PLAN
            assert np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all()


# In every run one set for each family, the other one in a campaign.
OWN_PLANS: list[tuple[str, Arch]] = [("families_rows", "sm_80"), ("families_invariant", "sm_90a")]
if "KVGEN_FAMILY" in os.environ:
    OWN_PLANS = [(name, arch) for name in SETS for arch in ARCHS]


@pytest.mark.parametrize(("name", "arch"), OWN_PLANS)
def test_lengths_around_tiles(name: str, arch: Arch) -> None:
    """Tokens before and after where pages, tiles and pairs of them end, each family with a plan of its own machine."""
    rows = op_of(SETS[name]).rows
    totals = tuple(max(n, rows) for n in (0, 16, 17, 33, 64, 65, 161))
    batch = replace(PLAIN, arch=arch, totals=totals, new=(0,) * len(totals), fill="inf", schedule="descending")
    of = [Rows(b, b * rows, (b + 1) * rows) for b in range(len(totals))]
    scene, q = latent_scene(SETS[name], batch, of, of[-1].end + 1)
    call(scene, q)


def test_a_workspace_is_its_family_s() -> None:
    """Set by set and family by family: as in a set for that family alone, which the launcher has the numbers of."""
    for kernels in SETS.values():
        for arch in ARCHS:
            alone = with_archs(kernels, arch)
            split = op_of(kernels).plan(kernels)[0].on(arch).split
            assert split == op_of(alone).plan(alone)[0].split is not None
            with machine(arch=arch):
                assert package(kernels).mla_decode.split_plan() == split


def test_a_workspace_of_another_architecture_is_refused() -> None:
    """sm_89 has 32 columns a block: partial results and counters of four blocks a chunk, where sm_80 has two."""
    kernels = with_archs(SETS["families_balanced"], "sm_80", "sm_89", name="families_narrow")
    batch = replace(PLAIN, totals=(40,), new=(0,))
    scene, q = latent_scene(kernels, batch, [Rows(0, 0, 1)], 1)
    generated = package(kernels)
    layer = generated.Cache(**scene.arguments())[scene.layer]
    with machine(arch="sm_80"):
        workspace = generated.mla_decode.workspace(max_rows=len(q), multiprocessors=4)
    said = (
        "workspace: got one of families_narrow_mla_decode that is divided for another architecture; make it on the device, or "
        "under the CPU machine's settings, that the plan runs on"
    )
    with machine(arch="sm_89"), pytest.raises(ArgumentError, match=f"^{re.escape(said)}$"):
        generated.mla_decode.plan(layer, workspace)


def with_archs(kernels: KernelSet, *archs: str, name: str | None = None) -> KernelSet:
    given: dict[str, Any] = {field: getattr(kernels, field) for field in ("q_heads", "cache", "ops")}
    return KernelSet(**given, name=name or kernels.name, arch=archs)


def files_of(kernels: KernelSet) -> dict[str, tuple[str, ...]]:
    return {kernel.name: archs for kernel, archs in kernel_files(LoadedSet(kernels, "x.py", ""))}


def test_which_architecture_has_which_file() -> None:
    """sm_100f has room for 64 columns as sm_80 has, and shares its file; sm_89 and sm_120f have not, and share another one.
    Whatever else a set is for, sm_90a has products of warpgroups."""
    plain = SETS["families_balanced"]
    assert files_of(plain) == {
        "mla_decode": ("sm_80",),
        "mla_decode_sm_90a": ("sm_90a",),
        "mla_decode_plan": ("sm_80",),
        "mla_decode_plan_sm_90a": ("sm_90a",),
    }
    assert files_of(with_archs(plain, "sm_90a")) == {"mla_decode": ("sm_90a",), "mla_decode_plan": ("sm_90a",)}
    assert files_of(with_archs(plain, "sm_80")) == {"mla_decode": ("sm_80",), "mla_decode_plan": ("sm_80",)}
    assert files_of(with_archs(plain, "sm_90a", "sm_100f", "sm_80")) == {
        "mla_decode": ("sm_100f", "sm_80"),
        "mla_decode_sm_90a": ("sm_90a",),
        "mla_decode_plan": ("sm_100f", "sm_80"),
        "mla_decode_plan_sm_90a": ("sm_90a",),
    }
    assert files_of(with_archs(plain, "sm_80", "sm_89", "sm_90a", "sm_120f")) == {
        "mla_decode": ("sm_89", "sm_120f"),
        "mla_decode_sm_80": ("sm_80",),
        "mla_decode_sm_90a": ("sm_90a",),
        "mla_decode_plan": ("sm_89", "sm_120f"),
        "mla_decode_plan_sm_80": ("sm_80",),
        "mla_decode_plan_sm_90a": ("sm_90a",),
    }


def test_every_family_has_the_kernel_that_it_has_alone() -> None:
    """Grid, threads, shared memory and division, beside any other architecture; 128 columns are two blocks' or four's."""
    names = {
        "balanced": ("mla_mma", "mla_sm90"),
        "rows": ("mla_mma", "mla_sm90_rows"),
        "invariant": ("mla_mma", "mla_sm90"),
    }
    for name, expected in names.items():
        kernels = with_archs(SETS[f"families_{name}"], "sm_80", "sm_89", "sm_90a")
        choices, (plan, _) = op_of(kernels).choices(kernels), op_of(kernels).plan(kernels)
        assert tuple(choices[arch].name for arch in ARCHS) == expected and choices["sm_89"].name == "mla_mma"
        for arch in kernels.arch:
            alone = with_archs(kernels, arch)
            own, lone = plan.on(arch), op_of(alone).plan(alone)[0]
            fields = ("template", "grid", "threads", "shared", "division", "split")
            assert [getattr(own, f) for f in fields] == [getattr(lone, f) for f in fields]
    assert {arch: plan.on(arch).division.tiles for arch in kernels.arch} == {"sm_80": 1, "sm_89": 2, "sm_90a": 1}


def test_the_planner_s_tiles_are_those_of_its_architecture() -> None:
    """As for either family alone; a chunk of a fixed size is as many tokens everywhere."""
    files = {"sm_80": "mla_decode_plan.cu", "sm_90a": "mla_decode_plan_sm_90a.cu"}
    for name, tile, chunk in (
        ("balanced", {"sm_80": 32, "sm_90a": 64}, 0),
        ("invariant", {"sm_80": 32, "sm_90a": 64}, 128),
    ):
        texts = render_set(LoadedSet(SETS[f"families_{name}"], "x.py", ""))
        for arch, file in files.items():
            text = texts[f"families_{name}/{file}"].text
            divided = f"kChunkTiles = {chunk // tile[arch]};" if chunk else "kOverhead = "
            assert f"kTile = {tile[arch]}, {divided}" in text


def test_an_operation_cannot_have_the_other_file_s_name() -> None:
    ops = (MlaDecode(scale=SCALE), MlaDecode(name="mla_decode_sm_90a", scale=SCALE))
    with pytest.raises(SpecError, match="ops: got mla_decode_sm_90a twice"):
        KernelSet(q_heads=128, cache=presets.max_mla(page_size=64), ops=ops)


# Launches ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), ""), ((8, 6), ""), ((8, 9), ""), ((9, 0), "_sm_90a")], ids=str
)
def test_a_gpu_gets_its_files(
    name: str, capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels, their threads and their shared memory are the family's; entry, grid and arguments are one another's."""
    launches = {kernel: launched(name, kernel, capability, monkeypatch) for kernel in ("KERNEL", "PLAN")}
    other = launched(name, "KERNEL", (9, 0), monkeypatch)
    (code, entry, _), found = launches["KERNEL"]
    assert code == f"{name}/mla_decode{arch}.cu".encode() and entry == f"{name}_mla_decode"
    assert (found["shared"], found["block"]) == SHIPPED[name][arch]
    same = ("entry", "grid", "params")
    assert [found[key] for key in same] == [other[1][key] for key in same]
    assert launches["PLAN"][0][0] == f"{name}/mla_decode_plan{arch}.cu".encode()


def launched(
    name: str, kernel: str, capability: tuple[int, int], patch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """The file that a checked-in set's launcher loads on a GPU of this capability, and its launch."""
    driver = NotingDriver()
    driver.capability = lambda device: capability  # type: ignore[method-assign]
    patch.setattr(cuda, "driver", lambda: driver)
    patch.setattr(backend, "cubin", lambda module, file, entry, capability: f"{module.name}/{file}".encode())
    backend._function.cache_clear()
    found = dict(calls(name))[f"mla_decode.{kernel}"]
    given = [found.arguments[p.name] for p in found.kernel.arguments]
    found.op.prepare(found.cache()[1], given, None, found.kernel, 0)()
    backend._function.cache_clear()
    return driver.loaded[0], driver.launches[0]


def test_a_gpu_that_no_file_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DeviceError, match=r"12\.1: the kernel was compiled for sm_80, sm_90a, none of which runs .* add 'sm_120f'"
    ):
        launched("deepseek_v3", "KERNEL", (12, 1), monkeypatch)


def test_architectures_beside_both() -> None:
    """10.3 and 12.1 take the file of their target: the one that sm_80 has, or one of their own."""
    for more, capability, file in (("sm_100f", (10, 3), "mla_decode"), ("sm_120f", (12, 1), "mla_decode_sm_120f")):
        kernels = with_archs(SETS["families_balanced"], "sm_80", "sm_90a", more)
        files = {
            a: kernel.name
            for kernel, archs in kernel_files(LoadedSet(kernels, "x.py", ""))
            for a in archs
            if "plan" not in kernel.name
        }
        assert files[select_arch(capability, kernels.arch)] == file

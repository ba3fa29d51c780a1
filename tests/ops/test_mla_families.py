"""mla_decode in a set for sm_80 and sm_90a: a kernel for each family behind one launcher and one plan, held to the oracle."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet, presets
from kvgen.architectures import Arch
from kvgen.codegen.emit import kernel_files, render_set
from kvgen.compile import select_arch
from kvgen.errors import DeviceError, SpecError
from kvgen.lowering.attention.wgmma import TEMPLATE, applies
from kvgen.ops import MlaDecode
from kvgen.reference import mla_decode
from kvgen.runtime import cuda
from kvgen.runtime import gpu as backend
from kvgen.schema.cache import Cache
from kvgen.schema.loader import LoadedSet
from tests.support.batches import PLAIN
from tests.support.call_tables import calls
from tests.support.harness import Run, offsets_of, on_machine, package
from tests.support.latent_steps import SCALE, Rows, call, latent_scene, op_of, terms
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
SHIPPED = ("deepseek_v3", "kimi_k2_flashinfer")


@ALL
def test_one_plan_serves_both(name: str) -> None:
    """Requests of one token to several chunks: each kernel takes the plan that the other's machine made, and is right.
    test_lengths_around_tiles has their own plans."""
    kernels, given = SETS[name], terms(SETS[name])
    op, generated = op_of(kernels), package(kernels)
    counts = [op.rows, 1, op.rows, 1]
    totals = (400, 1, 97, 64)
    batch = replace(PLAIN, arch="sm_80", totals=totals, new=(0,) * 4, fill="nan", schedule=7)
    ends = np.cumsum([0, *counts]).tolist()
    scene, q = latent_scene(kernels, batch, [Rows(b, ends[b], ends[b + 1]) for b in range(4)], ends[-1] + 1)
    offsets = offsets_of(counts, kernels.kv.lengths_dtype, 0)
    cache = generated.Cache(**scene.arguments())
    workspace = generated.mla_decode.workspace(max_rows=len(q), max_tokens=cache.max_cache_length, multiprocessors=6)
    plans = []
    for arch in ARCHS:
        workspace.view.owner[...] = 0xEE
        with on_machine(replace(batch, arch=arch)):
            generated.mla_decode.plan(cache[scene.layer], workspace, rows=len(q), row_offsets=offsets)
        plans.append(workspace.view.owner.copy())
    assert all((plan != 0xEE).any() for plan in plans)
    (keys,) = scene.rows()
    how: dict[str, Any] = {"scale": op.scale, "lse_base": op.lse_base, "lse_empty": op.lse_empty}
    wanted = mla_decode(scene.view, keys, q, rows=op.rows, row_offsets=offsets, **how)
    for arch, plan in zip(ARCHS, reversed(plans), strict=True):
        workspace.view.owner[...] = plan
        scene.batch = replace(batch, arch=arch)
        out, _ = rows_array(len(q), (kernels.q_heads, 512), given.out, strided=False)
        lse, _ = rows_array(len(q), (kernels.q_heads,), "f32", strided=False)
        run = Run(scene, "mla_decode", generated.mla_decode, q=q, out=out, lse=lse, workspace=workspace)
        hold(wanted, given, q, out, lse)
        run.expect_word(wanted.errors)


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


def test_a_workspace_is_as_large_as_either_family_s() -> None:
    """Set by set: what both need, the one alone, the other alone."""
    for kernels in SETS.values():
        sizes = set()
        for archs in (("sm_80", "sm_90a"), ("sm_80",), ("sm_90a",)):
            split = op_of(kernels).split_plan(with_archs(kernels, *archs))
            assert split is not None
            sizes.add(split.sizes(64, 4096, 132)["bytes"])
        assert len(sizes) == 1


def with_archs(kernels: KernelSet, *archs: str) -> KernelSet:
    given: dict[str, Any] = {name: getattr(kernels, name) for name in ("name", "q_heads", "cache", "ops")}
    return KernelSet(**given, arch=archs)


def files_of(kernels: KernelSet) -> dict[str, tuple[str, ...]]:
    return {kernel.name: archs for kernel, archs in kernel_files(LoadedSet(kernels, "x.py", ""))}


def test_which_architecture_has_which_file() -> None:
    """sm_100f has room for 64 columns as sm_80 has; sm_89 and sm_120f have not, and a plan is of one number of columns."""
    plain = SETS["families_balanced"]
    assert files_of(plain) == {
        "mla_decode": ("sm_80",),
        "mla_decode_sm_90a": ("sm_90a",),
        "mla_decode_plan": ("sm_80", "sm_90a"),
    }
    assert files_of(with_archs(plain, "sm_90a")) == {"mla_decode": ("sm_90a",), "mla_decode_plan": ("sm_90a",)}
    assert files_of(with_archs(plain, "sm_80")) == {"mla_decode": ("sm_80",), "mla_decode_plan": ("sm_80",)}
    three = with_archs(plain, "sm_90a", "sm_100f", "sm_80")
    assert files_of(three)["mla_decode"] == ("sm_100f", "sm_80")
    (both, _), (one, _) = (with_archs(plain, *a).ops[0].plan(with_archs(plain, *a)) for a in (ARCHS, ("sm_90a",)))
    assert both.on("sm_90a").template == one.template == TEMPLATE != both.template == both.on("sm_80").template
    for narrow in ("sm_89", "sm_120f"):
        kernels = with_archs(plain, "sm_80", "sm_90a", narrow)
        assert files_of(kernels)["mla_decode"] == kernels.arch
        assert "room for 32 columns, a product has 64" in applies(kernels, 128, sparse=False)


def test_the_planner_s_tiles_are_those_of_its_architecture() -> None:
    """Balanced as for either family alone; chunks of a fixed size are cut alike everywhere."""
    tiles = {("sm_80",): "32,", ("sm_90a",): "64,", ARCHS: "kWarpgroups ? 64 : 32;"}
    for archs, tile in tiles.items():
        kernels = with_archs(SETS["families_balanced"], *archs)
        text = render_set(LoadedSet(kernels, "x.py", ""))["families_balanced/mla_decode_plan.cu"].text
        assert f"kTile = {tile}" in text
    text = render_set(LoadedSet(SETS["families_invariant"], "x.py", ""))["families_invariant/mla_decode_plan.cu"].text
    assert "kTile = 64, kChunkTiles = 2;" in text


def test_an_operation_cannot_have_the_other_file_s_name() -> None:
    ops = (MlaDecode(scale=SCALE), MlaDecode(name="mla_decode_sm_90a", scale=SCALE))
    with pytest.raises(SpecError, match="ops: got mla_decode_sm_90a twice"):
        KernelSet(q_heads=128, cache=presets.max_mla(page_size=64), ops=ops)


# Launches ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    ("capability", "file"),
    [((8, 0), "mla_decode.cu"), ((8, 6), "mla_decode.cu"), ((8, 9), "mla_decode.cu"), ((9, 0), "mla_decode_sm_90a.cu")],
)
def test_a_gpu_gets_its_file(
    name: str, capability: tuple[int, int], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel and its shared memory are the family's; entry, grid and arguments are one another's, and so is the planner."""
    launches = {kernel: launched(name, kernel, capability, monkeypatch) for kernel in ("KERNEL", "PLAN")}
    other = launched(name, "KERNEL", (9, 0), monkeypatch)
    (code, entry, _), found = launches["KERNEL"]
    assert code == f"{name}/{file}".encode() and entry == f"{name}_mla_decode"
    shared = {"mla_decode.cu": (162560, 163072), "mla_decode_sm_90a.cu": (229936,)}[file]
    assert found["shared"] in shared
    same = ("entry", "grid", "block", "params")
    assert [found[key] for key in same] == [other[1][key] for key in same]
    assert launches["PLAN"][0][0] == f"{name}/mla_decode_plan.cu".encode()


def launched(
    name: str, kernel: str, capability: tuple[int, int], patch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """What a checked-in set's launcher loads and launches on a GPU of this capability."""
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
    """10.3 and 12.1 take the file of their target: that of every architecture but sm_90a, or the only one."""
    for more, capability in (("sm_100f", (10, 3)), ("sm_120f", (12, 1))):
        kernels = with_archs(SETS["families_balanced"], "sm_80", "sm_90a", more)
        files = {
            a: kernel.name
            for kernel, archs in kernel_files(LoadedSet(kernels, "x.py", ""))
            for a in archs
            if "plan" not in kernel.name
        }
        assert files[select_arch(capability, kernels.arch)] == "mla_decode"

"""kvgen.verify over every way to store a cache, and over fused appends and the operations beside them: all cases of all kernels
on the CPU machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from kvgen import Continuous, ops
from kvgen.cli.project import generated
from kvgen.layout.dtypes import DTYPES, dtype
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import load_folder
from kvgen.verify.memory import GpuArray, HostMemory
from kvgen.verify.run import Verifier
from tests.cli.conftest import Folder
from tests.support import bench_sets, family_sets

FAMILIES: Final = {"family": family_sets, "fused": bench_sets}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A project with the sets of each family that are run, built."""
    found = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in found.items():
        FAMILIES[name].write_project(folder, FAMILIES[name].RUN)
        Folder(folder).kvgen("build")
    yield found


def kinds(kernels: KernelSet, family: str) -> set[tuple[str, object]]:
    """The properties that tools tell apart: how a cache is stored, or (of the family "fused") how appends change rows."""
    cache = kernels.kv
    found: set[tuple[str, object]] = {("layers", cache.layout.layers)}
    found |= {("operation", op.kind) for op in kernels.ops}
    if family == "family":
        found |= {("variant", type(cache)), *(("tensor", t.name) for t in cache.storage.tensors)}
        found.add(("table", "block" if isinstance(cache, Continuous) else cache.page_table.kind))
        fields: tuple[str, ...] = ("dtype", "scale_dtype", "scale", "zero", "place", "order", "own_table", "residual")
        for quant in cache.quants.values():
            found |= {(name, getattr(quant, name, "not quantized")) for name in fields}
        return found
    found |= {("quant", (q.dtype, q.scale_dtype, q.place)) for q in cache.quants.values() if q is not None}
    for op in (op for op in kernels.ops if isinstance(op, ops.Append)):
        fields = ("rows", "angles", "bias", "inputs", "positions", "q_out")
        found |= {(name, getattr(op, name)) for name in fields}
        found |= {("rope", op.rope and op.rope.style), ("norms", bool(op.k_norm)), ("sections", bool(op.sections))}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_is_run(family: str, tmp_path: Path) -> None:
    """The sets that are run have between them what all of them have: tensors, codes, scales and their places, operations."""
    FAMILIES[family].write_project(tmp_path)
    sets = {s.kernels.name: kinds(s.kernels, family) for s in load_folder(tmp_path / "specs", tmp_path)}
    assert set(sets) == set(FAMILIES[family].NAMES)
    assert set().union(*sets.values()) == set().union(*(sets[name] for name in FAMILIES[family].RUN))


def test_every_kind_of_table_is_run(tmp_path: Path) -> None:
    family_sets.write_project(tmp_path)
    found = set().union(*(kinds(s.kernels, "family") for s in load_folder(tmp_path / "specs", tmp_path)))
    tables = {value for key, value in found if key == "table"}
    assert tables == {"dense", "csr", "per_kv", "indirect", "mapped", "ring", "block"}


@pytest.mark.parametrize(("family", "name"), [(f, name) for f, module in FAMILIES.items() for name in module.RUN])
def test_every_kernel_of_every_set(family: str, name: str, projects: dict[str, Path]) -> None:
    folder = projects[family]
    (kernels,) = (s.kernels for s in load_folder(folder / "specs", folder) if s.kernels.name == name)
    with generated(folder / "generated", name) as package:
        hold(kernels, package)


def hold(kernels: KernelSet, package: ModuleType) -> None:
    """Nothing is wrong, in good batches and hostile ones, with any operation."""
    verifier = Verifier(kernels, package, HostMemory())
    for op in kernels.ops:
        result = verifier.run(op)
        assert result.status == "ok", (op.name, [(c.name, c.wrong) for c in result.cases])
        assert len(result.cases) >= 3 and result.hostile, op.name


def test_8_bit_floats_of_a_gpu_have_their_type() -> None:
    """The CUDA array interface has no word for them; the dtype of the array says it, for caches and for arguments."""
    for kind in (*(d.name for d in DTYPES.values() if d.bits == 8), "bf16"):
        array = GpuArray(None, 256, (2, 3), kind)
        interface: Any = array.__cuda_array_interface__
        assert interface["typestr"] == {"i8": "|i1", "u8": "|u1", "bf16": "|V2"}.get(kind, "|V1")
        assert array.dtype == dtype(kind).numpy().name

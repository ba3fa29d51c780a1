"""Builds the sets, runs their launchers on the CPU machine in check mode, and holds them to the oracle."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen import KernelSet
from kvgen.codegen.emit import render_device, render_set, write_file
from kvgen.compile.program import CPU_COMPILE
from kvgen.layout.dtypes import dtype
from kvgen.ops import Decode
from kvgen.reference import Decoded, Rows, append, decode, gather, seal
from kvgen.reference.elements import Elements
from kvgen.reference.gather import Runs
from kvgen.reference.pool import scales_word
from kvgen.reference.segments import Coded, Plain
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from kvgen.schema.loader import LoadedSet
from tests.support.batches import Batch
from tests.support.dominant_tokens import raise_edges as raise_edges
from tests.support.memory import CANARY, Bytes, Raw, rows_array
from tests.support.scenes import Memory, Scene
from tests.support.sets import ALL, archs_of
from tests.support.tolerance import HALF_ULP as HALF_ULP
from tests.support.tolerance import bounds as bounds
from tests.support.tolerance import hold, numerics

PACKAGE = "kvgen_operation_tests"


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=PACKAGE)
    for file in render_device().values():
        write_file(Path(folder.name) / PACKAGE, file)
    sys.path.insert(0, folder.name)
    return folder


def package(which: str | KernelSet) -> ModuleType:
    """The generated package of a set, or of the set of these tests that has the name."""
    kernels = ALL[which] if isinstance(which, str) else which
    before, module = _packages.get(kernels.name, (None, None))
    if before is not None and before != kernels:
        raise ValueError(f"{kernels.name}: two sets have this name; a name is a package")
    return module or _made(kernels)


_packages: dict[str, tuple[KernelSet, ModuleType]] = {}


def _made(kernels: KernelSet) -> ModuleType:
    folder = Path(_root().name) / PACKAGE
    built = kernels.model_copy(update={"arch": archs_of(kernels)})
    for file in render_set(LoadedSet(built, "tests/support/sets.py", "")).values():
        write_file(folder, file)
    importlib.invalidate_caches()
    module = importlib.import_module(f"{PACKAGE}.{kernels.name}")
    _packages[kernels.name] = (kernels, module)
    return module


@contextmanager
def optimized(kernels: KernelSet) -> Iterator[ModuleType]:
    """The generated package of a set, compiled as it ships: for what counts sectors and bank conflicts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CPU_COMPILE, "full")
        yield package(kernels)


@contextmanager
def on_machine(batch: Batch) -> Iterator[None]:
    """The CPU machine that the batch asks for, looking for races, bad accesses and uninitialised reads."""
    with machine(arch=batch.arch, mode="check", schedule=batch.schedule):
        yield


def offsets_of(counts: Sequence[int], kind: str, first: int = 0) -> Raw:
    """Row offsets of requests with these many rows, the first one's at `first`."""
    return np.cumsum([first, *counts]).astype(dtype(kind).numpy())


def index_name(kernels: KernelSet, op: str) -> str:
    """The index type of an operation's own arrays."""
    found = next(o for o in kernels.ops if o.name == op)
    default = "i64" if op == "append_slots" else kernels.cache.lengths_dtype
    return getattr(found, "index_dtype", None) or default


class Run:
    """One launch: the scene it ran on, the error word it left, and what it wrote."""

    def __init__(self, scene: Scene, op: str, call: Callable[..., None], **arguments: Any) -> None:
        self.scene = scene
        word = np.zeros(1, np.uint64)
        generated = package(scene.kernels).Cache(**scene.arguments())
        with on_machine(scene.batch):
            call(generated[scene.layer], **arguments, errors=word if scene.batch.errors else None)
        self.word = int(word[0])

    def expect_word(self, wanted: int) -> None:
        """The error word is the oracle's, or untouched where there was none; given scales that are none are reported, too."""
        wanted = max(wanted, scales_word(self.scene.rows()))
        if self.scene.batch.errors:
            assert self.word == wanted, f"error word {describe(self.word)}, not {describe(wanted)}"


def planned(
    scene: Scene,
    rows: int,
    op: str = "decode",
    *,
    arguments: Mapping[str, Any] | None = None,
    row_offsets: Raw | None = None,
    more: int = 1,
    multiprocessors: int | None = None,
) -> Any:
    """A workspace of garbage for `rows` rows and `more`, then planned for the scene's lengths and these offsets."""
    generated = package(scene.kernels)
    operation = getattr(generated, op)
    layer = generated.Cache(**scene.arguments())[scene.layer]
    given = {n: a for n, a in (arguments or {}).items() if n == "valid_tokens"}
    longest = max(layer.dims["max_cache_length"], 1)
    with on_machine(scene.batch):
        workspace = operation.workspace(
            max_rows=max(rows + more, 1), max_tokens=longest, multiprocessors=multiprocessors
        )
        workspace.view.owner[...] = 0xEE
        operation.plan(layer, workspace, **given, rows=rows, row_offsets=row_offsets)
    return workspace


def launcher(scene: Scene, op: str) -> Callable[..., None]:
    """The generated launcher of an operation."""
    found: Callable[..., None] = getattr(package(scene.kernels), op)
    return found


def new_rows(scene: Scene, rows: int) -> dict[str, Raw]:
    """k and v `[rows, heads, dim]` for append, random."""
    found = {}
    for name, role in zip("kv", scene.rows(), strict=False):
        found[name], _ = rows_array(rows, (role.heads, role.dim), scene.cache.dtype, strided=scene.batch.strided)
        found[name][...] = scene.wild(rows, role.heads, role.dim)
    return found


def check_append(scene: Scene, rows: int, new: dict[str, Raw] | None = None, **places: Raw) -> dict[str, Raw]:
    """Append, after a seal where keys wait for it, and compare all memory, byte for byte, with the oracle's.

    Returns the rows that were appended.
    """
    new = new_rows(scene, rows) if new is None else new
    if scene.residual:
        check_seal(scene, new["k"], places["row_offsets"])
    expected = scene.snapshot()
    word = append(scene.view, scene.rows(expected), list(new.values()), **places)
    op = "append_slots" if "slots" in places else "append"
    run = Run(scene, op, launcher(scene, op), **new, **places)
    hold_memory(scene, expected)
    run.expect_word(word)
    return new


def check_seal(scene: Scene, k: Raw, row_offsets: Raw) -> None:
    """Seal what these new rows complete and compare all memory with the oracle's."""
    expected = scene.snapshot()
    word = seal(scene.view, scene.rows(expected), [k], row_offsets=row_offsets)
    run = Run(scene, "seal", launcher(scene, "seal"), k=k, row_offsets=row_offsets)
    hold_memory(scene, expected)
    run.expect_word(word)


def hold_memory(scene: Scene, expected: Memory) -> None:
    """All memory of the cache is as expected; a scale that is NaN is any NaN."""
    found = scene.snapshot()
    if all(np.array_equal(a, b) for n, parts in found.items() for a, b in zip(parts, expected[n], strict=True)):
        return
    for memory in (found, expected):
        _same_nans(scene.rows(memory))
    for name, parts in found.items():
        for part, wanted in zip(parts, expected[name], strict=True):
            np.testing.assert_array_equal(part, wanted, err_msg=name)


def _same_nans(roles: Sequence[Rows]) -> None:
    """Give every scale and zero point that is NaN the same bits."""
    for part in (p for rows in roles for p in rows.parts if isinstance(p, Coded) and isinstance(p.scales, Elements)):
        assert part.scales is not None
        for page in range(part.scales.pages):
            for token in range(part.scales.tokens):
                row = part.scales.read(page, token)
                nans = np.isnan(row.astype(np.float32))
                if nans.any():
                    row[nans] = np.nan
                    part.scales.write(page, token, row)


def check_gather(scene: Scene, rows: int, *, row_offsets: Raw | Runs, starts: Raw | None) -> list[Raw]:
    """Gather and compare every byte, those around and between the outputs' rows too; returns the outputs."""
    outs, memory = {}, []
    for name, role in zip(("k_out", "v_out"), scene.rows(), strict=False):
        outs[name], around = rows_array(rows, (role.heads, role.dim), scene.cache.dtype, strided=scene.batch.strided)
        memory.append(around)
    wanted = gather(scene.view, scene.rows(), list(outs.values()), row_offsets=row_offsets, starts=starts)
    pool = scene.snapshot()
    places = {"row_offsets": row_offsets}
    if isinstance(row_offsets, Runs):
        places = {"row_begins": row_offsets.begins, "row_counts": row_offsets.counts}
    run = Run(scene, "gather", launcher(scene, "gather"), **outs, **places, starts=starts)
    for out, right, around, role in zip(outs.values(), wanted.outputs, memory, scene.rows(), strict=True):
        assert np.isnan(out[wanted.failed].astype(np.float32)).all()
        _same_values(out[~wanted.failed], right[~wanted.failed], role)
        assert (surroundings(out, around) == CANARY).all(), "written beside the rows"
    hold_untouched(scene, pool)
    run.expect_word(wanted.errors)
    return list(outs.values())


def _same_values(out: Raw, right: Raw, role: Rows) -> None:
    """Fail unless both have the same bits; where codes and scales make a NaN, any NaN."""
    bits = np.dtype(f"u{out.itemsize}")
    found, wanted = (np.ascontiguousarray(x).view(bits) for x in (out, right))
    begin = 0
    for part in role.parts:
        if not isinstance(part, Plain):
            dims = slice(begin, begin + part.dim)
            nans = np.isnan(right[..., dims].astype(np.float32)) & np.isnan(out[..., dims].astype(np.float32))
            found[..., dims] = np.where(nans, wanted[..., dims], found[..., dims])
        begin += part.dim
    np.testing.assert_array_equal(found, wanted)


def check_decode(
    scene: Scene,
    q: Raw,
    *,
    row_offsets: Raw | None = None,
    lse: bool = True,
    op: str = "decode",
    arguments: Mapping[str, Any] | None = None,
    workspace: Any = None,
) -> tuple[Raw, Raw | None, Decoded]:
    """Decode and hold every row to the oracle (tests.support.tolerance); returns out, lse and the oracle's.

    `arguments` are what the operation's mask, score and sinks take; `workspace` is planned with the same offsets (None: it is
    planned here, if the operation takes one).
    """
    given = numerics(scene.kernels, decode_of(scene.kernels, op), arguments)
    out, around = rows_array(len(q), (q.shape[1], scene.rows()[1].dim), given.out, strided=scene.batch.strided)
    sums, sums_around = rows_array(len(q), (q.shape[1],), "f32", strided=False)
    wanted = decode(scene.view, scene.rows(), q, row_offsets=row_offsets, **given.oracle())
    pool = scene.snapshot()
    brought = brought_by(scene, op, q, arguments or {}, row_offsets, workspace)
    run = Run(scene, op, launcher(scene, op), q=q, out=out, lse=sums if lse else None, **brought)
    hold(wanted, given, q, out, sums if lse else None)
    for array, memory in ((out, around), (sums, sums_around)):
        assert (surroundings(array, memory) == CANARY).all(), "written beside the rows"
    hold_untouched(scene, pool)
    run.expect_word(wanted.errors)
    return out, sums if lse else None, wanted


def brought_by(
    scene: Scene, op: str, q: Raw, arguments: Mapping[str, Any], row_offsets: Raw | None, workspace: Any = None
) -> dict[str, Any]:
    """Arguments of a decode's launcher besides q, out and lse: a planned workspace knows offsets and valid tokens already."""
    if decode_of(scene.kernels, op).split == "none":
        return dict(arguments) | {"row_offsets": row_offsets}
    if workspace is None:
        workspace = planned(scene, len(q), op, arguments=arguments, row_offsets=row_offsets)
    return {n: a for n, a in arguments.items() if n != "valid_tokens"} | {"workspace": workspace}


def decode_of(kernels: KernelSet, name: str = "decode") -> Decode:
    """A set's decode of that name."""
    return next(op for op in kernels.ops if isinstance(op, Decode) and op.name == name)


def hold_to(wanted: Decoded, scene: Scene, q: Raw, out: Raw, lse: Raw | None, op: str = "decode") -> None:
    """Every row of out and lse of a decode without arguments of its own against the oracle."""
    hold(wanted, numerics(scene.kernels, decode_of(scene.kernels, op)), q, out, lse)


def surroundings(array: Raw, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes of `memory` that are not `array`'s, which must be a view of it."""
    kind, offset = array.dtype.itemsize, array.__array_interface__["data"][0] - memory.ctypes.data
    outside = np.ones(len(memory), bool)
    places = np.ndarray((*array.shape, kind), bool, outside.data, offset, (*array.strides, 1))
    places[...] = False
    return memory[outside]


def hold_untouched(scene: Scene, pool: Mapping[str, Sequence[Bytes]]) -> None:
    for name, tensors in scene.tensors.items():
        for tensor, was in zip(tensors, pool[name], strict=True):
            np.testing.assert_array_equal(tensor.memory, was, err_msg=name)


def queries(scene: Scene, rows: int) -> Raw:
    """q `[rows, q_heads, head_dim]`, random; strided where the batch says so."""
    shape = (scene.kernels.q_heads, scene.cache.head_dim)
    q, _ = rows_array(rows, shape, scene.cache.dtype, strided=scene.batch.strided)
    q[...] = scene.values(rows, *shape)
    return q

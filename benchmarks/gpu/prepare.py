"""On a machine without a GPU: compile every kernel and write every case, so that the GPU's time is the GPU's alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.apart import FOLDER, apart_of
from benchmarks.gpu.cases import Facts, save
from benchmarks.gpu.expected import cases_of
from benchmarks.gpu.packages import generated, package_in, project
from kvgen import Continuous, KernelSet, Ring
from kvgen.bench.step import Step
from kvgen.codegen.emit import render_all, write_file
from kvgen.compile import Job, Unit, compile_many, default_cache, text_digest, write_folder
from kvgen.layout.storage import Segment
from kvgen.ops import Append, Decode, Extend
from kvgen.spec.loader import LoadedSet, load_folder
from kvgen.spec.quant import Quant
from kvgen.verify.bandwidth import bandwidth_unit
from kvgen.verify.calibrate import calibrate_unit


def prepare(folder: Path, names: Sequence[str], archs: Sequence[str] | None) -> tuple[int, int]:
    """Cubins and cases of the sets `names` (and the measuring kernels) in `folder`; returns (cubins, cases).

    `archs` replaces the architectures of the specs.
    """
    specs = {s.kernels.name: s.kernels for s in load_folder(project() / "specs", project())}
    unknown = [n for n in names if n not in specs]
    if unknown:
        raise SystemExit(f"--only: generated/ has {', '.join(unknown)}, specs/ does not; run `kvgen build`")
    units: list[tuple[Unit, Sequence[str]]] = []
    for name in names:
        module = generated(name).Cache.MODULE
        for file, entry in module.kernels:
            units.append((module.unit(file, entry), [a for a in archs or module.arch if module.runs(file, a)]))
    for name in names:
        units += [(unit, archs or kernels.arch) for kernels, unit in write_apart(folder, specs[name])]
    used = archs or sorted({a for _, own in units for a in own})
    units += [(bandwidth_unit(), used), (calibrate_unit(), used)]
    jobs: list[Job] = [(unit, arch, "cubin") for unit, own in units for arch in own]
    images = compile_many(jobs, cache=default_cache())
    write_folder(folder, images, {unit.name: text_digest(unit.text) for unit, _ in units})
    count = 0
    for name in names:
        cases, blobs = cases_of(specs[name], generated(name))
        save(folder / "cases" / f"{name}.npz", facts_of(specs[name]), cases, blobs)
        count += len(cases)
    return len(images), count


def write_apart(folder: Path, kernels: KernelSet) -> list[tuple[KernelSet, Unit]]:
    """Write the packages of the kernels in place of a fused append, and their units."""
    found: list[tuple[KernelSet, Unit]] = []
    apart = apart_of(kernels)
    for one in apart[1] if apart is not None else ():
        for file in render_all(
            [LoadedSet(one, f"{FOLDER}/{one.name}", f"{one.name}, timed beside a fused append.")]
        ).values():
            write_file(folder / FOLDER, file)
        module = package_in(folder / FOLDER, one.name).Cache.MODULE
        found += [(one, module.unit(file, entry)) for file, entry in module.kernels]
    return found


def facts_of(kernels: KernelSet) -> Facts:
    """What timings need to know of a set."""
    cache, table = kernels.cache, kernels.cache.page_table
    return Facts(
        name=kernels.name,
        dtype=cache.dtype,
        q_heads=kernels.q_heads,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        v_dim=cache.v_dim,
        stores=cache.stores,
        layers=cache.layout.layers,
        table="block" if isinstance(cache, Continuous) else table.kind,
        id_multiplier=table.id_multiplier,
        window=table.window if isinstance(table, Ring) else 0,
        lengths=cache.lengths,
        ops=tuple((op.name, op.kind, "slots" if getattr(op, "rows", "") == "slots" else "") for op in kernels.ops),
        scales={
            op.name: getattr(op, "scale", None) or 1 / math.sqrt(cache.head_dim)
            for op in kernels.ops
            if op.kind in ("decode", "extend")
        },
        rows={op.name: op.rows for op in kernels.ops if isinstance(op, Decode)},
        sees={op.name: op.mask.window or 0 for op in kernels.ops if isinstance(op, Decode | Extend) and _is_causal(op)},
        token_bytes=_token_bytes(kernels, cache.storage.segments),
        key_bytes=_token_bytes(kernels, cache.storage.roles["k"]),
        loss=max((_loss(quant) for quant in cache.quants.values() if quant is not None), default=0.0),
        residual=cache.storage.residual,
        apart=apart[0].name if (apart := apart_of(kernels)) is not None else "",
        changed={op.name: _changed(op, kernels) for op in kernels.ops if isinstance(op, Append)},
    )


def _is_causal(op: Decode | Extend) -> bool:
    """Whether a row's result is the softmax over the tokens before it, or the last of these, and nothing else."""
    mask = op.mask
    return mask.causal and not (mask.chunk or mask.padding or mask.tree) and op.score is None and op.sinks is None


def _changed(op: Append, kernels: KernelSet) -> str:
    """The roles whose rows are not stored as they come."""
    step = Step(op, kernels)
    return "".join(role for role in kernels.cache.roles if step.changes(role))


def _token_bytes(kernels: KernelSet, segments: Sequence[Segment]) -> int:
    """Bytes of one token in one layer as it is stored, with the scales that it has of its own."""
    bits = 0.0
    for segment in segments:
        bits += kernels.cache.kv_heads * segment.size * segment.region.dtype.bits
        scales = segment.scales
        if scales is not None and scales.region is not None:
            bits += scales.heads * scales.groups * (1 + scales.zero) * scales.dtype.bits / scales.block[0]
    return math.ceil(bits / 8)


def _loss(quant: Quant) -> float:
    """What it may take from values below 1, its scales below 2^-6 where integers have given ones."""
    if quant.dtype in ("e4m3", "e5m2"):
        return 2.0**-4 if quant.dtype == "e4m3" else 2.0**-3
    return {"i8": 2.0**-6, "i4": 0.125, "e2m1": 0.25}[quant.dtype]

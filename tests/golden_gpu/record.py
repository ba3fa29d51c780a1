"""Golden vectors of probes: how each is compiled and run, and the file that keeps what a GPU answered.

`benchmarks/run_gpu.py --section probes` runs them: on a GPU it writes `golden.tar`, whose folder `<gpu>` belongs into
`tests/golden_gpu/vectors/`. `<gpu>/probes.npz` holds every array of every probe before the launch and its outputs after it;
`<gpu>/<set>.<operation>.npz` are cases of generated kernels (benchmarks/gpu/golden.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.golden_gpu.backends import Backend, CpuBackend, GpuBackend
from tests.golden_gpu.compare import differences
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Probe
from tests.golden_gpu.probes import probes, units

VECTORS: Final = Path(__file__).parent / "vectors"
Vectors = dict[str, dict[str, Array]]


@cache
def by_name() -> dict[str, Probe]:
    """Every probe by its name."""
    return {p.name: p for p in probes()}


# Where there is a compiler ------------------------------------------------------------------------------------------


def compiled(name: str, text: str, arch: str) -> bytes:
    """PTX ("compute_90a"), with the names of files as #line gives them, or a cubin ("sm_90a") of a translation unit."""
    from kvgen.compile import default_cache
    from kvgen.compile.diagnostics import relative_file_table, source_files
    from kvgen.compile.nvrtc import compile_text, nvrtc_version

    kind: Any = "ptx" if arch.startswith("compute") else "cubin"
    key, cache = bytes.fromhex(digest(f"{nvrtc_version()} {arch} quick, files as in #line {text}")), default_cache()
    if (kept := cache.get(key)) is not None:
        return kept
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo"]
    if kind == "ptx" and nvrtc_version() >= (13, 0) and "wgmma" not in text:
        options.append("--Ofast-compile=mid")  # it runs once, on the CPU machine: half of the time to compile
    outcome = compile_text(text, options, kind)
    if not outcome.ok:
        raise SystemExit(f"{name}: {outcome.log}")
    output = outcome.output
    if kind == "ptx":
        output = relative_file_table(output.decode(), source_files(text)).encode()
    cache.put(key, output)
    return output


class Ptx(dict[str, str]):
    """PTX by translation unit, compiled when it is asked for."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, compiled(name, units()[name], "compute_90a").decode())


def digest(text: str) -> str:
    """What a translation unit is known by."""
    return hashlib.sha256(text.encode()).hexdigest()


# Running ------------------------------------------------------------------------------------------------------------


def backend(cubins: Path | None, ordinal: int) -> Backend:
    """A GPU with the cubins of a folder, by translation unit; or the CPU machine (None)."""
    if cubins is None:
        return CpuBackend(Ptx())
    return GpuBackend({f.stem: f.read_bytes() for f in cubins.glob("*.cubin")}, ordinal)


def run_probe(probe: Probe, backend: Backend) -> dict[str, Array]:
    """Array name -> contents: `<name>/before` of all, `<name>/after` of the outputs."""
    before = probe.inputs()
    after = backend.run(probe, before)
    outputs = probe.wanted(before)
    return {f"{n}/before": a for n, a in before.items()} | {f"{n}/after": after[n] for n in outputs}


# Vectors ------------------------------------------------------------------------------------------------------------


def save_part(path: Path, arrays: dict[str, Array]) -> None:
    """One probe's arrays, whole or not at all."""
    with path.with_suffix(".part").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    path.with_suffix(".part").replace(path)


def joined(parts: Mapping[str, Path], device: str, target: Path, earlier: Path | None = None) -> None:
    """Write the vectors of a GPU from the parts of its probes, by name; those that have none are as `earlier` has them."""
    kept = vectors_of(earlier)[0] if earlier is not None else {}
    vectors = {name: own for name, own in kept.items() if name in by_name()} | {n: load(p) for n, p in parts.items()}
    used = {by_name()[name].unit for name in vectors}
    save(target, vectors, {"device": device, "units": {name: digest(units()[name]) for name in sorted(used)}})


def save(path: Path, vectors: Vectors, facts: dict[str, Any]) -> None:
    """A GPU's answers: `<probe>/<array>/before` and `/after` as unsigned patterns, and facts as JSON."""
    arrays = {f"{probe}/{name}": a.view(f"u{a.itemsize}") for probe, own in vectors.items() for name, a in own.items()}
    text = np.frombuffer(json.dumps(facts, sort_keys=True).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, facts=text, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> dict[str, Array]:
    """The arrays of a file by name."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def vectors_of(path: Path) -> tuple[Vectors, dict[str, Any]]:
    """What `save` wrote."""
    arrays = load(path)
    facts: dict[str, Any] = json.loads(arrays.pop("facts").tobytes())
    found: Vectors = {}
    for name, array in arrays.items():
        probe, _, rest = name.partition("/")
        found.setdefault(probe, {})[rest] = array
    return found, facts


def before_and_after(probe: Probe, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """A probe's recorded inputs, in the order and types of its parameters, and its outputs."""
    now = probe.inputs()
    before = {n: arrays[f"{n}/before"].view(now[n].dtype) for n in now}
    after = {n.removesuffix("/after"): a for n, a in arrays.items() if n.endswith("/after")}
    return before, after


def against_numpy(probe: Probe, arrays: dict[str, Array]) -> Iterator[str]:
    """What contradicts the expectation, a line an output."""
    before, after = before_and_after(probe, arrays)
    for name, wanted in probe.wanted(before).items():
        yield from described(probe, name, differences(wanted, after[name]), after[name], wanted.bits)


def described(probe: Probe, name: str, broken: Any, got: Array, right: Array) -> Iterator[str]:
    """A line on the elements that are wrong, with the first of them; nothing if none is."""
    if broken.any():
        at = tuple(int(i) for i in np.argwhere(broken)[0])
        row = f", {probe.rows[at[0]]!r}" if probe.rows and len(at) == 2 else ""
        patterns = [int(a.view(f"u{a.itemsize}")[at]) for a in (got, right)]
        yield f"{probe.name}.{name}{list(at)}{row}: {patterns[0]:#x}, not {patterns[1]:#x} ({int(broken.sum())} of {broken.size})"

"""Runs every probe on a GPU and keeps what it answers.

    python -m tests.golden_gpu.record --prepare DIR        where NVRTC is: cubins, PTX, and cases of generated kernels
    python -m tests.golden_gpu.record --run DIR OUT        where a GPU is: numpy, ml_dtypes, cuda-bindings; no compiler
    python -m tests.golden_gpu.record --run DIR OUT --cpu  the same on the CPU machine, as a rehearsal

OUT/<gpu>/probes.npz holds every array of every probe before the launch and its outputs after it; OUT/<gpu>/<set>.npz are
golden cases of generated kernels, as benchmarks/run_gpu.py has them. Copy OUT/<gpu> to tests/golden_gpu/vectors/.
Exit status: 0; 1 if a probe failed or answered something else than its NumPy expectation (the vectors are written all
the same: the GPU is right); 2 for a usage error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.golden_gpu.backends import Backend, CpuBackend, GpuBackend
from tests.golden_gpu.compare import differences
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Probe
from tests.golden_gpu.probes import ROOT, probes, units

ARCH: Final = "sm_90a"
SETS: Final = ("llama3_8b", "gpt_oss_20b", "llama3_70b_tp8", "llama3_8b_fp8", "deepseek_v3_fp8", "qwen3_32b_nvfp4")
PATIENCE: Final = 60.0  # seconds without a new answer: the kernel that runs hangs
VECTORS: Final = Path(__file__).parent / "vectors"
Vectors = dict[str, dict[str, Array]]


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; the exit status."""
    parser = argparse.ArgumentParser(prog="record", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--run", type=Path, nargs=2, metavar=("DIR", "OUT"))
    parser.add_argument("--cpu", action="store_true", help="the CPU machine instead of a GPU")
    parser.add_argument("--only", default="*", metavar="GLOB", help="these probes and sets")
    parser.add_argument("--child", type=Path, metavar="PARTS", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.prepare is not None:
        prepare(options.prepare, options.only)
        return 0
    if options.run is None:
        parser.error("--prepare DIR or --run DIR OUT")
    prepared, out = options.run
    if not (prepared / "manifest.json").is_file():
        parser.error(f"{prepared} has no manifest.json; make it with --prepare {prepared}")
    if options.child is not None:
        _child(prepared, options.child, options.names, cpu=options.cpu)
        return 0
    return run(prepared, out, options.only, cpu=options.cpu)


# Where there is a compiler ------------------------------------------------------------------------------------------


def compiled(name: str, text: str, arch: str) -> bytes:
    """PTX ("compute_90a"), with the names of files as #line gives them, or a cubin ("sm_90a") of a translation unit."""
    from kvgen.compile import default_cache
    from kvgen.compile.diagnostics import relative_file_table, source_files
    from kvgen.compile.nvrtc import compile_text, nvrtc_version

    kind: Any = "ptx" if arch.startswith("compute") else "cubin"
    key, cache = bytes.fromhex(digest(f"{nvrtc_version()} {arch} files as in #line {text}")), default_cache()
    if (kept := cache.get(key)) is not None:
        return kept
    outcome = compile_text(text, [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo"], kind)
    if not outcome.ok:
        raise SystemExit(f"{name}: {outcome.log}")
    output = outcome.output
    if kind == "ptx":
        output = relative_file_table(output.decode(), source_files(text)).encode()
    cache.put(key, output)
    return output


def prepare(folder: Path, only: str = "*") -> None:
    """Write what `run` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name, text in units().items():
        if any(p.unit == name and fnmatch(p.name, only) for p in probes()):
            (folder / f"{name}.cubin").write_bytes(compiled(name, text, ARCH))
            (folder / f"{name}.ptx").write_bytes(compiled(name, text, "compute_90a"))
            digests[name] = digest(text)
    sets = [s for s in SETS if fnmatch(s, only)]
    if sets:
        from benchmarks.gpu.prepare import prepare as prepare_cases

        prepare_cases(folder / "generated", sets, [ARCH])
    (folder / "manifest.json").write_text(json.dumps({"arch": ARCH, "units": digests, "sets": sets}, indent=1) + "\n")


def digest(text: str) -> str:
    """What a translation unit is known by."""
    return hashlib.sha256(text.encode()).hexdigest()


# Where there is a GPU -----------------------------------------------------------------------------------------------


def run(prepared: Path, out: Path, only: str, *, cpu: bool) -> int:
    """Every probe and set, in processes of their own where one of them breaks the GPU's context; the exit status."""
    manifest = json.loads((prepared / "manifest.json").read_text())
    for name, known in manifest["units"].items():
        if digest(units()[name]) != known:
            raise SystemExit(f"{name}: {prepared} was prepared from another text; run --prepare {prepared}")
    wanted = [p.name for p in probes() if p.unit in manifest["units"] and fnmatch(p.name, only)]
    wanted += [s for s in manifest["sets"] if fnmatch(s, only)]
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        parts = Path(scratch)
        rest = wanted
        while rest:
            output = _start(prepared, parts, rest, cpu=cpu)
            rest = [n for n in rest if not (parts / f"{n}.npz").exists()]
            if rest:  # the first one that left nothing is to blame
                failed[rest[0]] = output
                print(f"FAILED {rest[0]}: {output}", flush=True)
                rest = rest[1:]
        gpu = (parts / "device").read_text() if (parts / "device").exists() else "unknown"
        vectors = {p.name: load(parts / f"{p.name}.npz") for p in probes() if (parts / f"{p.name}.npz").exists()}
        folder = out / gpu
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / "probes.npz", vectors, {"device": gpu, "units": manifest["units"], "failed": failed})
        for name in manifest["sets"]:
            if (parts / f"{name}.npz").exists():
                (folder / f"{name}.npz").write_bytes((parts / f"{name}.npz").read_bytes())
    unexpected = [line for p in probes() if p.name in vectors for line in against_numpy(p, vectors[p.name])]
    print("\n".join(unexpected))
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(
        f"{gpu}: {len(wanted) - len(failed)} of {len(wanted)} ran, {len(unexpected)} unexpected; {size} bytes in {folder}"
    )
    return 1 if failed or unexpected else 0


def _start(prepared: Path, parts: Path, names: Sequence[str], *, cpu: bool) -> str:
    """Run a child; what it said last if it did not get through."""
    command = [sys.executable, "-m", "tests.golden_gpu.record", "--run", str(prepared), str(parts)]
    command += ["--child", str(parts), *(["--cpu"] if cpu else []), *names]
    own = {"KVGEN_CUBINS": str(prepared / "generated"), "KVGEN_NO_JIT": "1"} if not cpu else {}
    environment = {**os.environ, **own}
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
        done, since = -1, time.monotonic()
        while child.poll() is None:
            found = len(list(parts.iterdir()))
            done, since = (found, time.monotonic()) if found != done else (done, since)
            if time.monotonic() - since > PATIENCE:
                child.kill()
                child.wait()
                return f"no answer in {PATIENCE:.0f} s"
            time.sleep(0.05)
        said.seek(0)
        return "" if child.returncode == 0 else (said.read().strip().splitlines() or ["no message"])[-1]


def _child(prepared: Path, parts: Path, names: Sequence[str], *, cpu: bool) -> None:
    """Run these; a file each, so that the parent sees how far this got."""
    found = {p.name: p for p in probes()}
    backend: Backend
    if cpu:
        backend = CpuBackend({f.stem: f.read_text() for f in prepared.glob("*.ptx")})
        (parts / "device").write_text("cpu_machine")
    else:
        backend = GpuBackend({f.stem: f.read_bytes() for f in prepared.glob("*.cubin")})
        (parts / "device").write_text(backend.name())
    for name in names:
        if name in found:
            save_part(parts / f"{name}.npz", run_probe(found[name], backend))
        else:
            _generated(prepared, parts, name, cpu=cpu)


def run_probe(probe: Probe, backend: Backend) -> dict[str, Array]:
    """Array name -> contents: `<name>/before` of all, `<name>/after` of the outputs."""
    before = probe.inputs()
    after = backend.run(probe, before)
    outputs = probe.wanted(before)
    return {f"{n}/before": a for n, a in before.items()} | {f"{n}/after": after[n] for n in outputs}


def _generated(prepared: Path, parts: Path, name: str, *, cpu: bool) -> None:
    """The golden cases of a generated set."""
    from benchmarks.gpu.cases import load as load_cases
    from benchmarks.gpu.correctness import run as run_case
    from benchmarks.gpu.correctness import store_golden
    from benchmarks.gpu.packages import generated
    from kvgen.verify.memory import GpuMemory, HostMemory

    file = load_cases(prepared / "generated" / "cases" / f"{name}.npz")
    memory = HostMemory() if cpu else GpuMemory(0)
    cases = [c for c in file.cases if c.golden]
    store_golden(file, {c.key: run_case(c, file.blobs, generated(name), memory) for c in cases}, parts)


# Vectors ------------------------------------------------------------------------------------------------------------


def save_part(path: Path, arrays: dict[str, Array]) -> None:
    """One probe's arrays, whole or not at all."""
    with path.with_suffix(".part").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    path.with_suffix(".part").replace(path)


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


if __name__ == "__main__":
    sys.exit(main())

"""The child processes of `run_gpu.py`: each has a GPU context (or the CPU machine), and does the items that it is sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from benchmarks.gpu import facts, golden, peers, tools
from benchmarks.gpu.apart import Apart, apart_of
from benchmarks.gpu.packages import generated, use
from benchmarks.gpu.plan import COMPARED, GOLDEN
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.timings import Timer
from benchmarks.gpu.workload import empty_node
from kvgen.compile import find, read_folder, select_arch, text_digest
from kvgen.errors import DeviceError
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.loader import load_file
from kvgen.verify import bandwidth, calibrate
from kvgen.verify.device import Gpu
from kvgen.verify.memory import GpuMemory, HostMemory, Memory
from kvgen.verify.probe import SMALL, CpuMachine, GpuMachine, Sizes
from kvgen.verify.probes import Bench
from kvgen.verify.run import Plan, Verifier
from kvgen.verify.worker import Clock, Done, serve

CPU_ARCH: Final = "sm_90a"  # whose PTX the CPU machine runs where nothing says otherwise


class GpuWorker:
    """The work of one child process, as kvgen.verify.worker has it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.kernels, self.parts = Path(setup.kernels), Path(setup.parts)
        self.gpu: Gpu | None = None
        self._bench: Bench | None = None
        self._backend: Any = None

    def begin(self) -> None:
        if self.setup.device == "cuda":
            self.gpu = Gpu(self.setup.ordinal)

    def alive(self) -> bool:
        try:
            if self.gpu is not None:
                self.gpu.wait()
        except DeviceError:
            return False
        return True

    def do(self, key: Sequence[str], given: Mapping[str, Any], clock: Clock) -> Done:
        section, name, op, case = key
        work: dict[str, Callable[[], Done]] = {
            "facts": lambda: self._facts(name, op, case),
            "calibrate": lambda: self._calibrate(case, clock),
            "bandwidth": self._bandwidth,
            "probes": lambda: self._probe(op, case, given["digest"], clock),
            "correctness": lambda: self._correctness(name, op, case, clock),
            "timings": lambda: self._timing(name, op, case, given, clock),
            "peers": lambda: self._peer(case, clock),
            "tools": lambda: self._tool(name, op, given),
        }
        return work[section]()

    # The device ------------------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> Gpu:
        """The GPU. Raises DeviceError on the CPU machine."""
        if self.gpu is None:
            raise DeviceError("got the CPU machine; this needs a GPU")
        return self.gpu

    @property
    def memory(self) -> Memory:
        """Where arrays lie while a kernel runs."""
        return HostMemory() if self.gpu is None else GpuMemory(self.setup.ordinal)

    def image(self, name: str, text: str) -> tuple[str, bytes]:
        """The architecture and the cubin of measuring kernels."""
        manifest = read_folder(self.kernels)
        arch = select_arch(self.on_gpu.driver.capability(self.setup.ordinal), manifest.archs(name, name))
        return arch, find(manifest, name, name, arch, text_digest(text))

    # Items -----------------------------------------------------------------------------------------------------------

    def _facts(self, name: str, what: str, case: str) -> Done:
        if what == "tensor_map":
            return Done(facts.tensor_map(self.on_gpu, case))
        if what == "tensor_maps":
            return facts.tensor_maps(self.on_gpu, self.package(name))
        if case == "occupancy":
            return Done(facts.occupancy(self.on_gpu, self.package(name), what))
        if case.startswith("nvrtc"):
            return tools.held(self.setup, name, what, self.plans(name, what)[0].name)
        return Done(facts.versions(self.gpu))

    def _calibrate(self, name: str, clock: Clock) -> Done:
        if self._bench is None:
            clock(self.setup.patience["host"])
            unit = calibrate.calibrate_unit()
            if self.gpu is None:
                self._bench = Bench(CpuMachine(unit, CPU_ARCH), SMALL)
            else:
                self._bench = Bench(GpuMachine(self.gpu, *self.image(calibrate.NAME, unit.text)), Sizes())
            clock(self.setup.patience["timing"])
        figures, wrong = calibrate.probed(self._bench, name)
        return Done({"figures": [asdict(f) for f in figures]}, [wrong] if wrong else [])

    def _bandwidth(self) -> Done:
        nbytes = min(self.setup.buffer_mib << 20, self.on_gpu.free_bytes() // 4)
        return Done({"gb_s": bandwidth.measure(self.on_gpu, self._measuring(), nbytes)})

    def _measuring(self) -> bytes:
        """The cubin of the kernels that measure bandwidth and fill memory."""
        return self.image(bandwidth.NAME, bandwidth.bandwidth_unit().text)[1]

    def _probe(self, unit: str, name: str, digest: str, clock: Clock) -> Done:
        clock(self.setup.patience["host"])  # what a probe must answer is worked out before and after its launch
        from tests.golden_gpu import record
        from tests.golden_gpu.probes import units

        if record.digest(units()[unit]) != digest:
            return Done({}, [f"{unit}: was prepared from another text; run --prepare again"])
        probe = record.by_name()[name]
        if self._backend is None:
            folder = None if self.gpu is None else self.kernels / "probes"
            self._backend = record.backend(folder, self.setup.ordinal)
        if self.gpu is not None:
            clock(self.setup.patience["probe"])
        arrays = record.run_probe(probe, self._backend)
        clock(self.setup.patience["host"])
        kept = self._keep(lambda: record.save_part(self.parts / f"{name}.probe.npz", arrays))
        return Done(kept, list(record.against_numpy(probe, arrays)))

    def _correctness(self, name: str, op_name: str, case: str, clock: Clock) -> Done:
        clock(self.setup.patience["host"])
        device = self.setup.patience["case" if self.gpu is not None else "host"]
        verifier = self.verifier(name)
        verifier.launching = lambda launches: clock(device if launches else self.setup.patience["host"])
        op = self.op(name, op_name)
        plans = self.plans(name, op_name)
        plan = next(p for p in plans if p.name == case)
        result, kept = verifier.case(op, plan), dict[str, str]()
        if not result.wrong and plan is plans[0] and name in GOLDEN and verifier.last is not None:
            (done, left), path = verifier.last, self.parts / f"{name}.{op_name}.golden.npz"
            kept = self._keep(lambda: golden.store(path, done.before, left.contents))
        found = asdict(result)
        return Done({n: found[n] for n in ("error", "share", "reported", "expected")} | kept, result.wrong)

    def _keep(self, write: Callable[[], None]) -> dict[str, str]:
        """Write a file of golden vectors. A full disk costs the file and no result: `not_kept` says why."""
        try:
            write()
        except OSError as error:
            return {"not_kept": f"{error.strerror}"}
        return {}

    def _timing(self, name: str, op: str, case: str, given: Mapping[str, Any], clock: Clock) -> Done:
        clock(self.setup.patience["host"])
        timer = self.timer(name, given["bandwidth"])
        timed = next(t for t in (*timer.cases(), *timer.steps()) if (t.op, t.case) == (op, case))
        clock(self.setup.patience["timing"])
        return Done(timed.run())

    def _peer(self, case: str, clock: Clock) -> Done:
        clock(self.setup.patience["host"])  # the import takes seconds
        torch = peers.torch_or_none()
        if torch is None:
            return Done({"skipped": "PyTorch cannot be imported here"})
        clock(self.setup.patience["timing"])
        return Done(peers.run(self.on_gpu, torch, case))

    def _tool(self, name: str, tool: str, given: Mapping[str, Any]) -> Done:
        return tools.run(tool, self.setup, name, given["op"], given["case"])

    # Sets ------------------------------------------------------------------------------------------------------------

    @cache  # noqa: B019 - one worker a process
    def set_of(self, name: str) -> KernelSet:
        """The spec of a set."""
        source, root = self.setup.specs[name], Path(self.setup.project)
        return next(s.kernels for s in load_file(root / source, source, root) if s.kernels.name == name)

    def package(self, name: str) -> ModuleType:
        """The generated package of a set."""
        return generated(name)

    def op(self, name: str, op: str) -> Op:
        """An operation of a set."""
        return next(o for o in self.set_of(name).ops if o.name == op)

    @cache  # noqa: B019
    def verifier(self, name: str) -> Verifier:
        """The verifier of a set."""
        return Verifier(self.set_of(name), self.package(name), self.memory)

    @cache  # noqa: B019
    def plans(self, name: str, op: str) -> list[Plan]:
        """The cases of an operation."""
        return self.verifier(name).plans(self.op(name, op))

    def timer(self, name: str, rates: Mapping[str, float]) -> Timer:
        """The timer of a set; `rates` are those of this GPU's memory, in GB/s."""
        gpu, kernels, image = self.on_gpu, self.set_of(name), self._measuring()
        beside = apart_of(kernels) if name in COMPARED else None
        apart = Apart(self.kernels, name, beside[0].name) if beside is not None else None
        fill, empty = bandwidth.filler(gpu, image), empty_node(gpu, image)
        return Timer(gpu, kernels, self.package(name), fill, empty, rates, apart)


def start(setup: Setup) -> GpuWorker:
    """A worker, for the project of a run."""
    use(Path(setup.project))
    return GpuWorker(setup)


def main() -> None:
    """Serve; the only argument is a Setup, as JSON."""
    serve(start(Setup(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()

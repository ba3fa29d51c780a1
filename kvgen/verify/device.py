"""One GPU: what it is, and how long launches take on it, by graph replay between events."""

from __future__ import annotations

import importlib
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvgen.errors import DeviceError
from kvgen.runtime import cuda

SAMPLES: Final = 15
SAMPLE_US: Final = 3000.0  # a sample replays the graph until about this long


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: the median and the least of the samples, and their number of launches."""

    median: float
    least: float
    launches: int


class Gpu:
    """The device `ordinal`, its primary context current in this thread, and a stream of our own."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.driver = cuda.driver()
        self.api: Any = importlib.import_module("cuda.bindings.driver")
        self.handle = self.call("cuDeviceGet", ordinal)
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", self.handle))
        # A blocking stream: copies go through the default stream, and must be over before our kernels begin.
        self.raw_stream = self.call("cuStreamCreate", 0)
        self.stream = int(self.raw_stream)
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.l2_bytes = self._attribute("L2_CACHE_SIZE")

    def call(self, name: str, *arguments: object) -> Any:
        """A driver call's result; DeviceError where it refuses."""
        result, *values = getattr(self.api, name)(*arguments)
        if int(result):
            raise DeviceError(f"{name}: got {getattr(result, 'name', result)}")
        return values[0] if len(values) == 1 else tuple(values)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self.handle))

    def name(self) -> str:
        return bytes(self.call("cuDeviceGetName", 128, self.handle)).split(b"\0")[0].decode()

    def folder(self) -> str:
        """The name as a folder's: nvidia_h200."""
        return "_".join(self.name().lower().split())

    def describe(self) -> dict[str, Any]:
        """Name, driver and sizes; clocks and throttling as nvidia-smi has them, where it runs."""
        free, total = self.call("cuMemGetInfo")
        major, minor = self.driver.capability(self.ordinal)
        version = int(self.call("cuDriverGetVersion"))
        return {
            "name": self.name(),
            "capability": f"{major}.{minor}",
            "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
            "multiprocessors": self.multiprocessors,
            "l2_bytes": self.l2_bytes,
            "free_bytes": int(free),
            "total_bytes": int(total),
            "smi": smi(self.ordinal),
        }

    def free_bytes(self) -> int:
        """Memory that can still be had."""
        return int(self.call("cuMemGetInfo")[0])

    def wait(self) -> None:
        """Wait for our stream and for the default one; reports what kernels did wrong."""
        self.driver.synchronize(self.stream, self.ordinal)
        self.driver.synchronize(0, self.ordinal)

    def time(self, launches: Sequence[Callable[[int], None]], *, samples: int = SAMPLES) -> Timing:
        """Time `launches`, captured once as a graph and replayed; each takes a stream handle.

        They have run once, uncaptured, before: a fault shows there and not inside the graph.
        """
        for launch in launches:
            launch(self.stream)
        self.wait()
        mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.raw_stream, mode)
        try:
            for launch in launches:
                launch(self.stream)
        finally:
            graph = self.call("cuStreamEndCapture", self.raw_stream)
        executable = self.call("cuGraphInstantiate", graph, 0)
        begin, end = self.call("cuEventCreate", 0), self.call("cuEventCreate", 0)

        def sample(replays: int) -> float:
            self.call("cuEventRecord", begin, self.raw_stream)
            for _ in range(replays):
                self.call("cuGraphLaunch", executable, self.raw_stream)
            self.call("cuEventRecord", end, self.raw_stream)
            self.call("cuEventSynchronize", end)
            milliseconds = float(self.call("cuEventElapsedTime", begin, end))
            return milliseconds * 1e3 / (replays * len(launches))

        try:
            sample(2)
            one = sample(2)
            replays = max(1, min(2000, round(SAMPLE_US / max(one * len(launches), 0.5))))
            found = [sample(replays) for _ in range(samples)]
        finally:
            self.call("cuEventDestroy", begin)
            self.call("cuEventDestroy", end)
            self.call("cuGraphExecDestroy", executable)
            self.call("cuGraphDestroy", graph)
        return Timing(statistics.median(found), min(found), replays * len(launches))


def smi(ordinal: int) -> dict[str, str] | None:
    """Clocks, power and throttle reasons as they are; nothing is set. None without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    names = "driver_version,power.draw,temperature.gpu,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    for wanted in (f"{names},clocks_event_reasons.active", names):  # older drivers call the last one something else
        command = [program, f"--query-gpu={wanted}", "--format=csv,noheader", f"--id={ordinal}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        values = [v.strip() for v in done.stdout.strip().split(",")]
        return dict(zip(wanted.split(","), values, strict=False))
    return None

"""What the replay and the launch need to know of a GPU: every figure with its range, unit and source.

No figure belongs to a kernel, and none is fitted to one. A value is what resources.json is counted by; the range is what the
sources, or the lack of them, leave open, and what microseconds are an interval of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

from kvgen.architectures import AMPERE, ARCHITECTURES, HOPPER

# Of the rest, which are cycles and microseconds, less is.
_MORE_IS_BETTER: Final = frozenset(
    ("clock_memory", "clock_tensor", "bandwidth", "reachable", "shared_bytes", "mio_queue", "multiprocessors")
)
_READS: Final = "that a kernel of reads alone reaches"


@dataclass(frozen=True)
class Parameter:
    """A figure: what is taken, between what it may lie, and who says so."""

    value: float
    low: float
    high: float
    unit: str
    what: str
    source: str

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.what}: got {self.value}; it must lie in {self.low} to {self.high}")


@dataclass(frozen=True)
class Device:
    """A GPU. Rates are of one multiprocessor unless they say otherwise, cycles those of its clock."""

    name: str
    arch: str
    multiprocessors: Parameter
    clock_memory: Parameter
    clock_tensor: Parameter
    bandwidth: Parameter
    reachable: Parameter
    ldg: Parameter
    ldgsts: Parameter
    ldg_l2: Parameter
    tma: Parameter
    tma_box: Parameter
    shared_bytes: Parameter
    shared_accept: Parameter
    mio_interval: Parameter
    mio_queue: Parameter
    lds: Parameter
    ldsm: Parameter
    shfl: Parameter
    operands: Parameter
    mufu: Parameter
    mufu_interval: Parameter
    convert: Parameter
    fma_interval: Parameter
    half_interval: Parameter
    alu_interval: Parameter
    imad_interval: Parameter
    convert_interval: Parameter
    uniform_interval: Parameter
    hmma_interval: Parameter
    hmma: Parameter
    hgmma_rate: Parameter
    hgmma: Parameter
    barrier: Parameter
    mbarrier: Parameter
    membar: Parameter
    branch: Parameter
    constant: Parameter
    node: Parameter
    dependent: Parameter
    atomic: Parameter

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """By name, in the order above."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Parameter):
                yield field.name, value

    def at(self, **values: float) -> Device:
        """The same GPU with other figures, inside their ranges or not."""
        found = dict(self.parameters())
        changed = {
            name: dataclasses.replace(found[name], value=v, low=min(v, found[name].low), high=max(v, found[name].high))
            for name, v in values.items()
        }
        return dataclasses.replace(self, **cast("dict[str, Any]", changed))

    def measured(self, figures: Mapping[str, tuple[float, float, float]]) -> Device:
        """With the values, least and most that were measured on one; figures that it does not have are left out."""
        known = dict(self.parameters())
        changed = {
            name: dataclasses.replace(known[name], value=value, low=low, high=high, source="measured")
            for name, (value, low, high) in figures.items()
            if name in known
        }
        return dataclasses.replace(self, **cast("dict[str, Any]", changed))

    def slow(self) -> Device:
        """Every latency and interval at its high end; what is better the more of it there is at its low one."""
        return self.at(**{n: p.low if n in _MORE_IS_BETTER else p.high for n, p in self.parameters()})

    def fast(self) -> Device:
        """The other end of every range."""
        return self.at(**{n: p.high if n in _MORE_IS_BETTER else p.low for n, p in self.parameters()})

    @property
    def budget_rate(self) -> float:
        """Bytes that a multiprocessor gets in a cycle where all of them read at the reachable bandwidth."""
        return self.reachable.value / (self.multiprocessors.value * self.clock_memory.value)


# Sources, by the short names that the entries use.
SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Luo": "W. Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv 2402.13499 and 2501.12084: "
        "H100 PCIe, A100 PCIe",
        "Abdelkhalik": "H. Abdelkhalik et al., Demystifying the Nvidia Ampere Architecture through Microbenchmarking, 2022: A100",
        "Jia": "Z. Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, arXiv 1804.06826",
        "Huerta": "R. Huerta et al., Dissecting and Modeling the Architecture of Modern GPU Cores, MICRO 2025, arXiv 2503.20481: "
        "RTX A6000, whose model errs by 14 %",
        "guide": "NVIDIA, CUDA C++ Programming Guide, table of arithmetic instructions by compute capability",
        "paper": "NVIDIA, architecture white papers and data sheets of A100, H100 and H200",
        "review": "figures from experience on H100, not measured for this table",
        "assumed": "no source: a round figure inside a range that is meant to hold it",
    }
)


def _p(value: float, low: float, high: float, unit: str, what: str, source: str) -> Parameter:
    return Parameter(value, low, high, unit, what, source)


def _exact(value: float, unit: str, what: str, source: str = "paper") -> Parameter:
    return Parameter(value, value, value, unit, what, source)


# What does not depend on how many multiprocessors a chip has, nor on its memory.
_CORE: Final[Mapping[str, Parameter]] = MappingProxyType(
    {
        "shared_bytes": _exact(128, "B/clk", "shared memory, all warps of a multiprocessor together", "Jia, paper"),
        "shared_accept": _p(1, 1, 2, "clk", "between two accesses to shared memory, of all sub-cores", "guide: shuffles; Huerta"),
        "mio_interval": _p(4, 2, 4, "clk", "between two accesses to memory of one sub-core", "Huerta"),
        "mio_queue": _p(5, 4, 8, "instructions", "accesses that wait in a sub-core before the next one blocks issue", "Huerta"),
        "lds": _p(29, 23, 33, "clk", "shared memory to register", "Luo, Abdelkhalik"),
        "ldsm": _p(33, 29, 37, "clk", "ldmatrix to registers", "Abdelkhalik: LDS; assumed"),
        "shfl": _p(24, 22, 28, "clk", "a shuffle's result", "Jia; assumed"),
        "operands": _p(12, 9, 20, "clk", "until an access to memory has read its registers", "Huerta"),
        "mufu": _p(22, 18, 40, "clk", "a special function's result", "Abdelkhalik; assumed"),
        "mufu_interval": _exact(8, "clk", "a sub-core and special function: 16 lanes a clk and multiprocessor", "guide"),
        "convert": _p(14, 10, 24, "clk", "a conversion's result that comes by scoreboard", "assumed"),
        "half_interval": _p(1, 1, 2, "clk", "a sub-core and half2 instruction", "guide"),
        "alu_interval": _exact(2, "clk", "a sub-core and integer, compare, select or permute: 64 lanes a clk", "guide"),
        "imad_interval": _exact(2, "clk", "a sub-core and integer product: 64 lanes a clk", "guide"),
        "convert_interval": _p(2, 2, 4, "clk", "a sub-core and conversion: 64 lanes a clk", "guide"),
        "uniform_interval": _p(2, 1, 2, "clk", "a sub-core and instruction of the uniform path", "assumed"),
        "barrier": _p(20, 10, 30, "clk", "a named barrier, from the last arrival on", "Luo; assumed"),
        "mbarrier": _p(30, 15, 60, "clk", "an mbarrier, from what completes its phase to the waiter", "assumed"),
        "membar": _p(100, 20, 700, "clk", "a fence of the block inside a loop", "assumed"),
        "branch": _p(8, 4, 16, "clk", "a branch that is taken, to the next issue", "assumed"),
        "constant": _p(40, 8, 60, "clk", "a constant, by scoreboard", "Jia; assumed"),
        "node": _p(1.0, 0.6, 2.0, "us", "a kernel's node in a graph, launched behind another one", "review"),
        "dependent": _p(0.30, 0.20, 0.55, "us", "a load behind a load, at a kernel's start", "Luo: L2 263, DRAM 479 clk"),
        "atomic": _p(0.6, 0.4, 1.3, "us", "a fence over the device and an atomic behind it", "review"),
    }
)  # fmt: skip

_HOPPER: Final[Mapping[str, Parameter]] = MappingProxyType(
    {
        **_CORE,
        "ldg": _p(800, 480, 1200, "clk", "a load from DRAM under load; 479 idle", "Luo: idle; review: loaded"),
        "ldgsts": _p(800, 500, 1200, "clk", "cp.async from DRAM under load", "as ldg"),
        "ldg_l2": _p(300, 200, 400, "clk", "a load that L2 serves", "Luo: 263"),
        "tma_box": _p(32, 8, 128, "clk", "between two boxes of a multiprocessor's bulk copies", "assumed: 4 KB at 128 B/clk"),
        "tma": _p(900, 600, 1300, "clk", "a bulk copy from DRAM under load", "Luo: about 170 clk more than a load; assumed"),
        "fma_interval": _exact(1, "clk", "a sub-core and f32 instruction: 128 lanes a clk", "guide"),
        "hmma_interval": _p(6.5, 4, 8, "clk", "a sub-core and HMMA.16816: 62 % of 512 products a clk", "Luo: mma.sync on Hopper"),
        "hmma": _p(33, 24, 36, "clk", "an HMMA's result", "Luo"),
        "hgmma_rate": _exact(0.5, "clk", "a column of HGMMA m64nNk16: 128 clk at N = 256", "Luo; paper"),
        "hgmma": _p(20, 13, 40, "clk", "an HGMMA's result, beyond its products", "Luo: N = 8 takes 18"),
        "clock_memory": _p(1.98, 1.755, 1.98, "GHz", "where memory is the limit: highest boost", "paper"),
        "clock_tensor": _p(1.6, 1.4, 1.755, "GHz", "where tensor cores are the limit: throttled by power", "review"),
        "multiprocessors": _exact(132, "", "multiprocessors"),
    }
)  # fmt: skip


def _hopper(name: str, bandwidth: float, reachable: Parameter, **other: Parameter) -> Device:
    peak = _exact(bandwidth, "GB/s", "of the data sheet")
    return Device(name=name, arch=HOPPER, bandwidth=peak, reachable=reachable, **{**_HOPPER, **other})


DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        "H200": _hopper("H200", 4800, _p(4600, 4300, 4650, "GB/s", _READS, "review: 4.3 and 4.6 both stand")),
        "H100 SXM": _hopper("H100 SXM", 3352, _p(3050, 2900, 3150, "GB/s", _READS, "assumed: 91 % of peak")),
        "H800": _hopper("H800", 3352, _p(3050, 2900, 3150, "GB/s", _READS, "assumed: 91 % of peak")),
        "A100": Device(
            name="A100",
            arch=AMPERE,
            **{
                **_CORE,
                "multiprocessors": _exact(108, "", "multiprocessors"),
                "clock_memory": _p(1.41, 1.275, 1.41, "GHz", "where memory is the limit: highest boost", "paper"),
                "clock_tensor": _p(1.35, 1.1, 1.41, "GHz", "where tensor cores are the limit: throttled by power", "assumed"),
                "bandwidth": _exact(2039, "GB/s", "of the data sheet (80 GB)"),
                "reachable": _p(1800, 1700, 1880, "GB/s", _READS, "assumed: 88 % of peak"),
                "ldg": _p(700, 466, 1000, "clk", "a load from DRAM under load; 466 idle", "Luo: idle; assumed: loaded"),
                "ldgsts": _p(700, 480, 1000, "clk", "cp.async from DRAM under load", "as ldg"),
                "ldg_l2": _p(262, 200, 350, "clk", "a load that L2 serves", "Luo: 261.5"),
                "tma": _exact(0, "clk", "sm_80 has none"),
                "tma_box": _exact(0, "clk", "sm_80 has none"),
                "fma_interval": _exact(2, "clk", "a sub-core and f32 instruction: 64 lanes a clk", "guide"),
                "hmma_interval": _exact(8, "clk", "a sub-core and HMMA.16816: 256 products a clk"),
                "hmma": _p(33, 25, 36, "clk", "an HMMA's result", "Luo, Abdelkhalik"),
                "hgmma_rate": _exact(0, "clk", "sm_80 has none"),
                "hgmma": _exact(0, "clk", "sm_80 has none"),
            },
        ),
    }
)  # fmt: skip

# By whose table the trips of resources.json are counted: never by figures measured on the machine at hand.
REFERENCE: Final[Mapping[str, str]] = MappingProxyType(
    {a.name: a.reference for a in ARCHITECTURES.values() if a.reference}
)

"""The architectures that kvgen generates for: memory, threads and instructions of each. No other module spells one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

Arch = Literal["sm_80", "sm_89", "sm_90a", "sm_100f", "sm_120f"]
ARCHS: Final[tuple[Arch, ...]] = get_args(Arch)
# The generations whose GPUs have published figures.
AMPERE: Final = "sm_80"
HOPPER: Final = "sm_90a"
# Architectures of a set that names none.
DEFAULT_ARCHS: Final[tuple[Arch, ...]] = ("sm_80", "sm_90a")
# Registers and shared memory of a multiprocessor.
REGISTERS: Final = 65_536  # 32 bits each
BLOCK_CHARGE: Final = 1 << 10  # bytes of shared memory that a block takes besides its own


@dataclass(frozen=True)
class Architecture:
    """A compilation target and the hardware behind it.

    `major` and `minor` are the compute capability of its GPUs; a `minor` of None stands for every minor version.
    `shared` is the shared memory of a multiprocessor in bytes, of which each block takes BLOCK_CHARGE besides its own;
    `threads` are the most threads of a multiprocessor. `warp_products` are multiplications of 16-bit numbers a clock and
    multiprocessor by mma.sync, as the loops of kernels reach them at most; `warpgroup_products` by wgmma, 0 without.
    `on_cpu`: the CPU machine executes its PTX. `programmatic`: a kernel may start before its predecessor ends.
    `gpus` are names that people give instead of the target. `reference` is the GPU of kvgen.cycles.device by whose figures
    recorded trips are counted; "" where no figures are known.
    """

    name: Arch
    major: int
    minor: int | None
    shared: int
    threads: int
    warp_products: float
    warpgroup_products: float = 0.0
    wgmma: bool = False
    tma: bool = False
    tcgen05: bool = False
    fp8_conversion: bool = False
    fp4_conversion: bool = False
    block_scaled_mma: bool = False
    on_cpu: bool = False
    programmatic: bool = False
    gpus: tuple[str, ...] = ()
    reference: str = ""

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that one block can have: a multiprocessor's, less the block's charge."""
        return self.shared - BLOCK_CHARGE

    @property
    def family(self) -> bool:
        """The target is one of a family of GPUs, which NVRTC knows from 12.9 on."""
        return self.name.endswith("f")


_TABLE: Final = (
    Architecture("sm_80", 8, None, 164 << 10, 2048, 1024.0, on_cpu=True, gpus=("ampere", "a100"), reference="A100"),
    Architecture("sm_89", 8, 9, 100 << 10, 1536, 1024.0, fp8_conversion=True, on_cpu=True, gpus=("ada", "l4")),
    Architecture(
        "sm_90a", 9, 0, 228 << 10, 2048, 1260.0, 2048.0,
        wgmma=True, tma=True, fp8_conversion=True, on_cpu=True, programmatic=True, gpus=("hopper", "h100"),
        reference="H200",
    ),
    Architecture(
        "sm_100f", 10, None, 228 << 10, 2048, 1260.0,
        tma=True, tcgen05=True, fp8_conversion=True, fp4_conversion=True, block_scaled_mma=True, programmatic=True,
    ),
    Architecture(
        "sm_120f", 12, None, 100 << 10, 1536, 1024.0,
        tma=True, fp8_conversion=True, fp4_conversion=True, block_scaled_mma=True, programmatic=True,
    ),
)  # fmt: skip
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType({a.name: a for a in _TABLE})
# Names of GPUs and of their generations, in lower case -> the target that runs there.
GPUS: Final = MappingProxyType({gpu: a.name for a in _TABLE for gpu in a.gpus})


def architecture(name: str) -> Architecture:
    """The architecture of this name; KeyError for a name that is none of ARCHS."""
    return ARCHITECTURES[name]


def on_cpu(names: Iterable[str]) -> list[str]:
    """The targets of `names` whose PTX the CPU machine executes, in their order."""
    return [name for name in names if architecture(name).on_cpu]


def cpu_targets() -> str:
    """The targets that the CPU machine executes, for a message: "sm_80, sm_89 and sm_90a"."""
    *names, last = on_cpu(ARCHS)
    return f"{', '.join(names)} and {last}"


def gpu_targets() -> str:
    """The compute capabilities that have a target, for a message: "8.x (sm_80, sm_89), 9.0 (sm_90a) or 10.x (sm_100f)"."""
    by_major: dict[int, list[Architecture]] = {}
    for one in _TABLE:
        by_major.setdefault(one.major, []).append(one)
    *texts, last = (
        f"{major}.{'x' if any(a.minor is None for a in of) else '/'.join(str(a.minor) for a in of)} "
        f"({', '.join(a.name for a in of)})"
        for major, of in by_major.items()
    )
    return f"{', '.join(texts)} or {last}"


def candidates_for(major: int, minor: int) -> list[Arch]:
    """The targets that run on a GPU of this compute capability, best first: one made for a minor version comes before one
    that covers all of them."""
    fitting = [a for a in _TABLE if a.major == major and a.minor in (None, minor)]
    return [a.name for a in sorted(fitting, key=lambda a: a.minor is None)]

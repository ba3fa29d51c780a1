"""Every recorded kernel fits a multiprocessor: registers of all threads, shared memory, and what warpgroups give each other."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvgen.codegen.emit import kernel_files
from kvgen.runtime.kernel import Kernel
from tests import sets

ROOT = Path(__file__).parents[1]
REGISTERS = 65536  # of a multiprocessor
UNIT = 8  # registers of a thread are given out so many at a time
# Shared memory of a block at most, in bytes; 1 KB of a multiprocessor's is the system's.
SHARED = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10, "sm_100f": 227 << 10, "sm_120f": 99 << 10}
MATH = 256  # threads of the two warpgroups that multiply, where warpgroups have roles


class Recorded(NamedTuple):
    """A kernel of generated/ as ptxas left it: resources.json, with its launcher's threads and dynamic shared memory."""

    name: str
    arch: str
    threads: int
    dynamic: int
    text: str
    resources: dict[str, Any]

    @property
    def held(self) -> int:
        """Registers that a block holds."""
        return -(-self.resources["registers"] // UNIT) * UNIT * -(-self.threads // 32) * 32


def recorded() -> Iterator[Recorded]:
    for file in sorted((ROOT / "generated").glob("*/resources.json")):
        package = importlib.import_module(f"generated.{file.parent.name}")
        classes = [type(x) for x in vars(package).values() if not isinstance(x, type)]
        kernels = [k for c in classes for base in c.__mro__ for k in vars(base).values() if isinstance(k, Kernel)]
        of = {
            (k.file_on(a).removesuffix(".cu"), a): (k.threads_on(a), k.shared_on(a))
            for k in kernels
            for a in k.module.arch
        }
        for kernel, found in json.loads(file.read_text())["kernels"].items():
            text = (file.parent / f"{kernel}.cu").read_text()
            for arch, resources in found.items():
                if arch in SHARED:
                    yield Recorded(f"{file.parent.name}/{kernel}", arch, *of[kernel, arch], text, resources)
    plans = {f"{s.kernels.name}/{k.name}": k for s in sets.loaded() for k, _ in kernel_files(s)}
    for key, (_, facts) in sets.recorded().items():
        name, arch = key.split(" ")
        plan, text = plans[name], sets.files()[f"{name}.cu"].text
        yield Recorded(name, arch, plan.threads_on(arch), plan.shared_on(arch), text, facts)


@pytest.fixture(scope="module")
def every() -> list[Recorded]:
    return list(recorded())


def test_a_block_fits_a_multiprocessor(every: list[Recorded]) -> None:
    assert len(every) > 500 and len({k.name.partition("/")[0] for k in every}) > 60
    for kernel in every:
        assert kernel.held <= REGISTERS, (kernel.name, kernel.arch, kernel.threads, kernel.resources["registers"])
        assert kernel.dynamic <= kernel.resources["shared"] <= SHARED[kernel.arch], (kernel.name, kernel.arch)


def test_as_many_blocks_as_launch_bounds_say(every: list[Recorded]) -> None:
    """By registers, which ptxas is told of; and by shared memory, of which it is not."""
    several = 0
    for kernel in every:
        bounds = re.search(r"__launch_bounds__\(kThreads, (\w+)\)", kernel.text)
        number = bounds and (bounds[1] if bounds[1].isdigit() else re.search(rf"\b{bounds[1]} = (\d+)", kernel.text))
        # kFullBlocks of device/rows/full_blocks.cuh, where the kernel has no number of its own.
        full = 8 if kernel.arch in ("sm_80", "sm_90a") else 6
        blocks = (
            1 if bounds is None else full if number is None else int(number if isinstance(number, str) else number[1])
        )
        several += blocks > 1
        assert blocks * kernel.held <= REGISTERS, (kernel.name, kernel.arch, blocks)
        room = SHARED[kernel.arch] + 1024
        if kernel.arch in ("sm_80", "sm_90a", "sm_100f"):  # others take the number as a wish: docs/architectures.md
            assert blocks * (kernel.resources["shared"] + 1024) <= room, (kernel.name, kernel.arch, blocks)
    assert several > 100


def test_what_warpgroups_give_each_other(every: list[Recorded]) -> None:
    """ptxas gives the most that launch bounds leave, and setmaxnreg divides exactly that: a register more, and take_registers
    would wait for ever; fewer, and they lie idle."""
    found = set()
    for kernel in every:
        given, taken = (re.findall(rf"{way}_registers<(\d+)>", kernel.text) for way in ("release", "take"))
        if not given and not taken:
            continue
        assert len(given) == len(taken) == 1 and kernel.arch == "sm_90a", kernel.name
        registers, (few, many) = kernel.resources["registers"], (int(given[0]), int(taken[0]))
        assert registers == REGISTERS // kernel.threads // UNIT * UNIT, kernel.name
        assert few < registers < many and few % 8 == many % 8 == 0, kernel.name
        assert (kernel.threads - MATH) * few + MATH * many == kernel.threads * registers, kernel.name
        found.add((kernel.threads, registers, few, many))
    assert {(384, 168, 40, 232), (384, 168, 72, 216), (512, 128, 64, 192)} <= found

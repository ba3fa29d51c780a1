"""Golden vectors of generated kernels: all memory of a case before its launch and after it, bit by bit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Case, Contents
from kvgen.cases.operation import cases_of
from kvgen.layout.dtypes import dtype
from kvgen.schema.kernel_set import KernelSet
from kvgen.verify.launch import Left, kind_of, launch
from kvgen.verify.memory import HostMemory, Memory
from kvgen.verify.run import Verifier, differences

Raw = NDArray[Any]


def store(path: Path, before: Contents, left: Contents) -> None:
    """Write a case's arrays: `before/<name>`, and those that changed as `after/<name>`."""
    then, now = before.flat(), left.flat()
    arrays = {f"before/{name}": _bits(array) for name, array in then.items()}
    changed = {
        name: _bits(array) for name, array in now.items() if _bits(array).tobytes() != _bits(then[name]).tobytes()
    }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays, **{f"after/{name}": a for name, a in changed.items()})  # type: ignore[arg-type]


def compare(
    path: Path, kernels: KernelSet, package: ModuleType, op_name: str, memory: Memory | None = None
) -> tuple[list[str], dict[str, float]]:
    """Hold a recorded case, and the CPU machine's launch of the same case, to the oracle: (what is wrong, facts).

    Computed numbers may each differ by as much as the oracle allows; all other bytes must be equal. The facts are of the arrays
    that the launch changed: `elements`, the number that is `different`, and `ulps`, the largest distance in units of their types.
    """
    op = next(op for op in kernels.ops if op.name == op_name)
    verifier = Verifier(kernels, package, memory or HostMemory())
    case = verifier.built(op, verifier.plans(op)[0])
    with np.load(path) as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    flat = case.before.flat()
    for name, array in flat.items():
        array[...] = _array(stored[f"before/{name}"], array)
    recorded = {name: _array(stored.get(f"after/{name}", stored[f"before/{name}"]), a) for name, a in flat.items()}
    gpu = Left(case.before.over(recorded), ())
    cpu = launch(case, verifier.memory)
    wrong = [f"the GPU: {line}" for line in wrong_of(case, gpu)] + [
        f"the CPU machine: {line}" for line in wrong_of(case, cpu)
    ]
    facts = {"elements": 0.0, "different": 0.0, "ulps": 0.0}
    for name, array in cpu.contents.flat().items():
        if f"after/{name}" in stored and name != "errors":
            apart = _ulps(array, recorded[name])
            facts["elements"] += apart.size
            facts["different"] += int((apart > 0).sum())
            facts["ulps"] = max(facts["ulps"], float(apart.max(initial=0)))
    return wrong, facts


def wrong_of(case: Case, left: Left) -> list[str]:
    """The differences between the memory that a launch left and the oracle's, a line each."""
    found = Comparison(case, case.before.copy(), left.contents)
    cases = cases_of(case.call.op)
    word = cases.compare(found)
    if "errors" in found.wanted.arrays:
        found.wanted.arrays["errors"][0] = word
    return [
        *(f"{name}: written beside the array" for name in left.beside),
        *found.wrong,
        *differences(found, near=cases.fused),
    ]


def _bits(array: Raw) -> Raw:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _array(bits: Raw, like: Raw) -> Raw:
    return bits.view(like.dtype).reshape(like.shape)


def _ulps(one: Raw, other: Raw) -> Raw:
    """Distance in representable numbers, 0 for NaN against NaN; float64."""
    bits = dtype(kind_of(one)).bits
    words = []
    for array in (one, other):
        plain = np.ascontiguousarray(array).view(f"i{array.itemsize}").astype(np.int64)
        words.append(np.where(plain < 0, -(plain & (2 ** (bits - 1) - 1)), plain))
    both = np.isnan(one.astype(np.float64)) & np.isnan(other.astype(np.float64))
    return np.where(both, 0, np.abs(words[0] - words[1])).astype(np.float64)

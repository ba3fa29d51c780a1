"""The machine code of the calibration's kernels: loops hold the instructions that they are named for and nothing that takes their
place, and no clock is read before what it times has ended."""

from __future__ import annotations

import functools
import re

import pytest

from kvgen.compile.sass import sass
from kvgen.verify.calibrate import calibrate_cubin

# Kernel -> the opcodes of a step (a pattern), the most other instructions of a loop, and its steps of a trip, in each loop.
LOOPS = {
    "fma": ("FFMA", 4, (16, 128)),
    "half": ("HFMA2", 8, (16, 128)),
    "permute": ("PRMT", 4, (16, 128)),
    "imad": (r"IMAD$", 4, (16, 128)),
    "exp2": (r"MUFU\.EX2", 4, (16, 128)),
    "to_half": (r"F2FP\.", 9, (16, 128)),
    "floor": (r"FRND\.FLOOR", 4, (16, 128)),
    "shuffle": (r"SHFL\.IDX", 4, (16, 128)),
    "lds": (r"LDS$", 4, (16, 128)),
    "ldsm": (r"LDSM\.16\.M88\.4", 4, (16, 64)),
    "hmma": (r"HMMA\.16816\.F32", 18, (16, 64)),
    "ldc": (r"LDC", 4, (16, 16)),
    "barrier": (r"BAR\.SYNC", 5, (16, 16)),
}
HOPPER = {
    "fp8": (r"F2FP\..*E4M3", 4, (32, 256)),
    **{f"wgmma_{n}": (rf"HGMMA\.64x{n}x16\.F32", 30, (8, 8)) for n in (8, 16, 32, 64, 128, 256)},
}
AT = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:\d|T) )?(.*?)\s*;")
LABEL = re.compile(r"\s*\.(L_x_\d+):")


@functools.cache
def kernels(arch: str) -> dict[str, tuple[list[str], dict[str, int]]]:
    """Of every kernel its instructions, without predicates, and where labels stand."""
    found: dict[str, tuple[list[str], dict[str, int]]] = {}
    for name, body in re.findall(
        r"\.section\s+\.text\.calibrate_(\w+),(.*?)(?=\n\s*\.section\s|\Z)", sass(calibrate_cubin(arch)), re.S
    ):
        lines, labels = found.setdefault(name, ([], {}))
        for line in body.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(lines)
            elif at := AT.match(line):
                lines.append(at[1])
    return found


def loops(arch: str, name: str) -> list[list[str]]:
    """The opcodes of the innermost loops of a kernel."""
    lines, labels = kernels(arch)[name]
    spans = []
    for i, line in enumerate(lines):
        back = re.match(r"BRA .*`\(\.(L_x_\d+)\)", line)
        if back and labels[back[1]] < i:
            spans.append((labels[back[1]], i + 1))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[line.split()[0] for line in lines[a:b]] for a, b in inner]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_loops_hold_what_they_say(arch: str) -> None:
    for name, (pattern, others, wanted) in (LOOPS | (HOPPER if arch == "sm_90a" else {})).items():
        counts = []
        for loop in loops(arch, name):
            steps = sum(bool(re.match(pattern, opcode)) for opcode in loop)
            if steps:
                # Between products that hang on each other.
                fillers = sum(opcode in ("UIADD3", "NOP") for opcode in loop)
                assert len(loop) - steps - fillers <= others, (name, loop)
                counts.append(steps)
        # ptxas unrolls some loops further.
        assert len(counts) == 2 and all(n % steps == 0 for n, steps in zip(sorted(counts), wanted, strict=True)), (
            name,
            counts,
        )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_clock_is_read_too_early(arch: str) -> None:
    """The compare that waits for the last result stands in front of the clock, with one instruction between them at most."""
    seen = 0
    for name, (lines, _) in kernels(arch).items():
        for i, line in enumerate(lines):
            if "-0x61c88647" in line and line.startswith("ISETP"):
                assert any("SR_CLOCKLO" in other for other in lines[i + 1 : i + 3]), (name, lines[i : i + 4])
                seen += 1
    assert seen >= 2 * len(LOOPS)


def test_products_are_not_serialised() -> None:
    """No wait between the products of a group."""
    for n in (8, 16, 32, 64, 128, 256):
        rate = next(loop for loop in loops("sm_90a", f"wgmma_{n}") if loop.count("WARPGROUP.DEPBAR.LE") == 1)
        first = next(i for i, opcode in enumerate(rate) if opcode.startswith("HGMMA"))
        last = max(i for i, opcode in enumerate(rate) if opcode.startswith("HGMMA"))
        assert "WARPGROUP.DEPBAR.LE" not in rate[first:last]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_loads_are_issued_between_the_clocks(arch: str) -> None:
    """24, 23, .. 1 of them."""
    lines, _ = kernels(arch)["queue"]
    letters = {"LDS": "l", "CS2R": "c"}
    text = "".join(letters.get(line.split()[0], "") for line in lines if "SR_CLOCKLO" in line or line.startswith("LDS"))
    assert text == "".join(f"c{'l' * n}c" for n in range(24, 0, -1))


def test_a_fence_is_in_front_of_the_second_clock() -> None:
    lines, _ = kernels("sm_90a")["membar"]
    text = " ".join(line.split()[0] + line.partition(",")[2] for line in lines)
    assert len(re.findall(r"MEMBAR\.ALL\.CTA\S*(?: FENCE\.VIEW\.ASYNC\.S) CS2R SR_CLOCKLO", text)) == 2

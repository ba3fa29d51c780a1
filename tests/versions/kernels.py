"""Kernels through the NVRTC of this process: a handful that compile and one that runs, or every template once.

    python -m tests.versions.kernels             # 6 s of CPU from an empty cache
    python -m tests.versions.kernels --every     # each template line of every architecture's code: 200 s of CPU
    python -m tests.versions.under 13.0.88 tests.versions.kernels --every

Exit status 0 where all compile, and where the one that runs is right; 1 otherwise, with the compiler's words.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvgen import KernelSet
from kvgen.codegen.emit import File, kernel_files, load_and_render, render_device, render_set, units_of
from kvgen.compile import Arch, ImageKind, Job, Unit, compile_many, default_cache
from kvgen.compile.flatten import flatten
from kvgen.compile.nvrtc import nvrtc_version
from kvgen.config import find_config
from kvgen.errors import CompileError
from kvgen.paths import templates_root
from kvgen.schema.loader import LoadedSet

# What versions of NVRTC differ in, a kernel or two each: bodies of generic lambdas (pages, held row offsets, copies of extend's
# tiles), wgmma, narrow floats, and the families of architectures. All are in generated/. PTX where the assembler takes longest.
HANDFUL: Final[tuple[tuple[str, Arch, ImageKind], ...]] = (
    ("state_qwen3_next/copy_pages", "sm_90a", "cubin"),
    ("state_qwen3_next/zero_pages", "sm_80", "cubin"),
    ("deepseek_v41_flash_c2/remap_indices", "sm_90a", "cubin"),
    ("layout_ragged/extend_sm_90a", "sm_90a", "ptx"),
    ("mxfp4/append", "sm_90a", "cubin"),
    ("llama3_70b_tp8/append", "sm_100f", "cubin"),
    ("llama3_70b_tp8/append", "sm_120f", "cubin"),
)


def handful() -> list[Job]:
    """HANDFUL, as it is checked in."""
    root = find_config().root
    entry = re.compile(r"__global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\(")
    jobs: list[Job] = []
    for name, arch, kind in HANDFUL:
        text = flatten(f"generated/{name}.cu", lambda path: (root / path).read_text(encoding="utf-8"))
        match = entry.search(text)
        assert match is not None, name
        jobs.append((Unit(name, match[1], text), arch, kind))
    return jobs


def run_copy() -> None:
    """Copy a page on the CPU machine, through this NVRTC; AssertionError where a byte is wrong."""
    from kvgen import Paged, load, ops

    cache = Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4)
    small = load(KernelSet(name="versions", q_heads=2, cache=cache, ops=[ops.CopyPages()], arch=["sm_80"]))
    pool = np.arange(3 * 2 * 1 * 4 * 2 * 16).reshape(3, 2, 1, 4, 2, 16).astype(np.float16)
    wanted = pool[[0, 1, 1]]
    one = np.array([1], np.int32)
    small.copy_pages(small.Cache(pool, lengths=one, page_table=one[:, None]), np.array([[1, 2]], np.int64))
    assert (pool == wanted).all()


@dataclass(frozen=True)
class Candidate:
    """A kernel for an architecture, and the (template line or header, architecture) pairs that it has."""

    unit: Unit
    arch: str
    parts: frozenset[tuple[str, str]]


def _candidates(loaded: LoadedSet, files: Mapping[str, File], prefix: str) -> Iterator[Candidate]:
    header = {o for o in files[f"{loaded.kernels.name}/cache.cuh"].origins if o.startswith("templates/")}
    for unit, (_, archs) in zip(units_of(loaded, files, prefix), kernel_files(loaded), strict=True):
        lines = {o for o in files[f"{unit.name}.cu"].origins if o.startswith("templates/")}
        if not lines:
            continue  # a kernel of the user's
        lines |= header | {f"templates/{path}" for path in re.findall(r'#line 1 "[^"]*?(device/[^"]+)"', unit.text)}
        for arch in archs:
            yield Candidate(unit, arch, frozenset((line, arch) for line in lines))


def _sets_of_tests() -> Iterable[KernelSet]:
    """Sets with lines of templates that no spec of specs/ renders."""
    from tests import sets
    from tests.ops.test_gather import RUNS
    from tests.ops.test_indexer_query import KERNELS, PACKED
    from tests.ops.test_mla_sources import SETS as SOURCES
    from tests.support.append_sets import SETS as APPENDS
    from tests.support.page_lists import SETS as LISTS

    own = (item.kernels for item in sets.loaded())
    return (*own, *RUNS.values(), KERNELS, PACKED, *SOURCES, *APPENDS.values(), *LISTS.values())


def every_template() -> list[Job]:
    """Few kernels that have, together, each template line that sets of specs/ and of tests render, for each of their
    architectures; AssertionError for a kernel template or a device header that no set has."""
    config = find_config()
    sets, files = load_and_render(config)
    pool = [c for loaded in sets for c in _candidates(loaded, files, config.out.name)]
    device = render_device()
    for kernels in _sets_of_tests():
        loaded = LoadedSet(kernels, f"tests/{kernels.name}.py", "")
        pool += _candidates(loaded, device | render_set(loaded), "generated")
    left = {part for c in pool for part in c.parts}
    root = templates_root()
    wanted = {f"templates/{p.relative_to(root).as_posix()}" for p in (root / "ops").rglob("*.cu.j2")} | {
        f"templates/{path}" for path in device
    }
    absent = wanted - {line.rpartition(":")[0] if ".j2:" in line else line for line, _ in left}
    assert not absent, f"no set has {', '.join(sorted(absent))}"
    return [(c.unit, c.arch, "cubin") for c in _cover(pool, left)]


def _cover(pool: list[Candidate], left: set[tuple[str, str]]) -> Iterator[Candidate]:
    """Greedily: next whoever has most of what is left, a byte of its text."""
    while left:
        best = max(pool, key=lambda c: len(c.parts & left) / len(c.unit.text))
        left -= best.parts
        yield best


def main() -> None:
    """Compile; exit with 1 where one of the kernels is refused."""
    every = "--every" in sys.argv[1:]
    begin = time.process_time()
    jobs = every_template() if every else handful()
    try:
        compile_many(jobs, cache=default_cache())
    except CompileError as error:
        sys.exit(f"NVRTC {'.'.join(map(str, nvrtc_version()))}: {error}")
    if not every:
        run_copy()
    version = ".".join(map(str, nvrtc_version()))
    print(f"NVRTC {version}: {len(jobs)} kernels compile, {time.process_time() - begin:.0f} s of CPU")


if __name__ == "__main__":
    main()

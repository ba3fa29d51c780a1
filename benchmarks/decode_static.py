"""What decode kernels cost as machine code: instructions a token, registers, occupancy, bytes in flight, compile time. No GPU.

    python benchmarks/decode_static.py                       sm_90a, every shape
    python benchmarks/decode_static.py --arch sm_80 --only 'bf16*'
    python benchmarks/decode_static.py --executed            also what the CPU machine executes of the PTX
    python benchmarks/decode_static.py --json

`a token` is warp instructions per token and kv head: those of a usual trip round the main loop (kvgen/cycles/flow.py says what
that is, and that the figure is an upper bound), of all warps that work on the trip's tokens, and again for every tile of
columns. A trip is one tile, or as many as it commits groups of copies. `+`: a loop within the loop, of which one trip is counted.
`executed` is the same from the other side: PTX instructions that warps executed for 256 and for 1280 tokens, the difference
divided by 1024 and the kv heads. PTX is not machine code (an address is several instructions there, or none), so the two agree
only roughly; what they share is that neither counts the start and the end of a chunk.

`KB in flight` is what the asynchronous copies of an SM's blocks have asked for and not yet used; `blocks` are those that an SM
holds, by registers, shared memory and threads. Compile times are CPU seconds of this process, cache off, so that other jobs
on the machine hardly matter: of the decode kernel alone, and of the set with its planner.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from kvgen import Block, KernelSet, Paged, Quant, ops, presets
from kvgen.architectures import architecture
from kvgen.codegen.emit import kernel_files, render_all, units_of, write_file
from kvgen.compile import ARCHS, Image, compile_unit
from kvgen.compile import Cache as CompileCache
from kvgen.compile.sass import sass
from kvgen.cycles.flow import main_loop
from kvgen.cycles.kernel import blocks_per_multiprocessor
from kvgen.schema.cache import Cache
from kvgen.schema.loader import LoadedSet

HEADS: Final = 8  # kv heads of every set but MLA's
_PACKAGE: Final = "kvgen_decode_static"


def _paged(page: int, head_dim: int = 128, **fields: Any) -> Cache:
    return Paged(dtype="bf16", kv_heads=HEADS, head_dim=head_dim, page_size=page, **fields)


def _mla(name: str, cache: Cache, heads: int, arch: Any) -> KernelSet:
    op = ops.MlaDecode(name="decode", scale=192**-0.5, split="balanced")
    return KernelSet(name=name, q_heads=heads, cache=cache, ops=(op,), arch=(arch,))


def shapes(arch: Any) -> dict[str, KernelSet]:
    """The sets of the table, by name."""
    quants: dict[str, Quant] = {
        "fp8": Quant(dtype="e4m3"),
        "fp8_scaled": Quant(dtype="e4m3", scale_dtype="f32"),
        "int8": Quant(dtype="i8", scale_dtype="f16"),
        "int4": Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=64)),
        "nvfp4": Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16)),
    }
    found: dict[str, tuple[Cache, int]] = {}
    for page in (16, 64):
        for group in (1, 2, 4, 8, 16):
            found[f"bf16_d128_p{page}_g{group}"] = (_paged(page), group)
    for page in (16, 64):
        for head_dim in (64, 256):
            found[f"bf16_d{head_dim}_p{page}_g8"] = (_paged(page, head_dim), 8)
        for name, quant in quants.items():
            found[f"{name}_d128_p{page}_g8"] = (_paged(page, quant=quant), 8)
    made = {
        name: KernelSet(
            name=name, q_heads=group * HEADS, cache=cache, ops=(ops.Decode(split="balanced"),), arch=(arch,)
        )
        for name, (cache, group) in found.items()
    }
    latent = {"mla_bf16": presets.max_mla(page_size=64), "mla_fp8": presets.max_mla_fp8(page_size=64)}
    for name, cache in {**latent, "mla_fp8_rows": presets.flashmla_fp8()}.items():
        # More heads go to warpgroups where there are some, whose loops `kvgen bench --cycles` examines.
        for heads in (16,) if architecture(arch).wgmma else (16, 128):
            made[f"{name}_h{heads}"] = _mla(f"{name}_h{heads}", cache, heads, arch)
    return made


@dataclass(frozen=True)
class Static:
    """One kernel for one architecture. Instructions are of warps, per token and kv head; `executed` of PTX."""

    name: str
    arch: str
    a_token: float
    classes: Mapping[str, float]
    trip: int
    tokens: int
    registers: int
    spills: int
    shared: int
    blocks: int
    threads: int
    kb_in_flight: int
    seconds: float
    set_seconds: float
    more: bool
    executed: float | None = None


def compiled(kernels: KernelSet, arch: str, known: CompileCache | None = None) -> tuple[list[Image], list[float]]:
    """A set's kernels for an architecture, the decode first, and the CPU seconds that each took: without a cache, what NVRTC
    took."""
    loaded = LoadedSet(kernels, "benchmarks/decode_static.py", "")
    images, seconds = [], []
    own = {f"{kernels.name}/{kernel.name}" for kernel, archs in kernel_files(loaded, archs=[arch]) if archs}
    for unit in (u for u in units_of(loaded, render_all([loaded]), "generated") if u.name in own):
        begin = time.process_time()
        images.append(compile_unit(unit, arch, cache=known))
        seconds.append(time.process_time() - begin)
    return images, seconds


def examine(kernels: KernelSet, arch: str, known: CompileCache | None = None) -> Static:
    """Compile a set's decode and read its machine code."""
    plan = kernels.ops[0].plan(kernels)[0].on(arch)
    division = plan.division
    assert division is not None
    images, seconds = compiled(kernels, arch, known)
    used = images[0].resources
    assert used is not None
    loop = main_loop(sass(images[0].data, cache=known))
    tiles_a_trip = sum(x.opcode == "LDGDEPBAR" for x in loop.usual)
    if tiles_a_trip < 1:
        raise ValueError(f"{kernels.name}: a trip round the main loop commits no copies; is it the main loop?")
    # Of warps that share a tile, and blocks that share the columns.
    per = division.tokens * tiles_a_trip / (division.team_warps // division.heads) / division.tiles
    shared = plan.shared + used.static_shared
    blocks = blocks_per_multiprocessor(arch, used.registers, shared, plan.threads)
    return Static(
        name=kernels.name,
        arch=arch,
        a_token=len(loop.usual) / per,
        classes={name: n / per for name, n in loop.classes().items()},
        trip=len(loop.usual),
        tokens=division.tokens * tiles_a_trip,
        registers=used.registers,
        spills=used.spill_stores + used.spill_loads,
        shared=shared,
        blocks=blocks,
        threads=plan.threads,
        kb_in_flight=division.in_flight(blocks) // 1024,
        seconds=seconds[0],
        set_seconds=sum(seconds),
        more=loop.holds_loops,
    )


# Executed PTX ----------------------------------------------------------------------------------------------------------------


@contextmanager
def package(kernels: KernelSet) -> Iterator[ModuleType]:
    """The set's generated package."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / _PACKAGE
        for file in render_all([LoadedSet(kernels, "benchmarks/decode_static.py", "")]).values():
            write_file(root, file)
        sys.path.insert(0, folder)
        try:
            importlib.invalidate_caches()
            yield importlib.import_module(f"{_PACKAGE}.{kernels.name}")
        finally:
            sys.path.remove(folder)
            for name in [n for n in sys.modules if n.split(".")[0] == _PACKAGE]:
                del sys.modules[name]


def executed(kernels: KernelSet, arch: str, least: int = 256, more: int = 1024) -> float:
    """PTX instructions of warps per token and kv head: what `more` tokens of one request add."""
    from kvgen.bench import measure
    from kvgen.cases.scene import Scene
    from kvgen.cases.workload import Workload

    alone = kernels.ops[0].model_copy(update={"split": "none"})
    kernels = kernels.model_copy(update={"ops": (alone,)})
    with package(kernels) as module:
        counts = [
            measure(Scene(kernels, module, Workload.uniform(1, tokens, 1)), alone, arch)[-1].counters.warp_instructions
            for tokens in (least, least + more)
        ]
    return (counts[1] - counts[0]) / more / kernels.cache.kv_heads


# Output -------------------------------------------------------------------------------------------------------------------


def _print(found: list[Static], loops: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("kernel", "arch"):
        table.add_column(title, no_wrap=True)
    numbers = (
        "a token",
        "executed",
        "trip",
        "tokens",
        "registers",
        "spills",
        "shared KB",
        "threads",
        "blocks",
        "KB in flight",
    )
    for title in (*numbers, "s", "set s"):
        table.add_column(title, justify="right", no_wrap=True)
    for s in found:
        table.add_row(
            s.name,
            s.arch,
            f"{s.a_token:.1f}{'+' if s.more else ''}",
            "-" if s.executed is None else f"{s.executed:.1f}",
            *map(str, (s.trip, s.tokens, s.registers, s.spills, s.shared // 1024, s.threads, s.blocks, s.kb_in_flight)),
            f"{s.seconds:.2f}",
            f"{s.set_seconds:.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if loops:
        classes = Table(box=None, pad_edge=False, header_style="bold")
        classes.add_column("kernel", no_wrap=True)
        names = list(dict.fromkeys(name for s in found for name in s.classes))
        for name in names:
            classes.add_column(name, justify="right", no_wrap=True)
        for s in found:
            classes.add_row(s.name, *(f"{s.classes.get(name, 0):.2f}" for name in names))
        console.print("\nwarp instructions a token by class")
        console.print(classes)


def main() -> int:
    parser = argparse.ArgumentParser(description="Machine code of decode kernels, counted.")
    parser.add_argument("--arch", choices=ARCHS, action="append", help="a target, may be repeated; default: sm_90a")
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--executed", action="store_true", help="also run the PTX on the CPU machine")
    parser.add_argument("--classes", action="store_true", help="also where the instructions go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for arch in options.arch or ["sm_90a"]:
        chosen = {name: k for name, k in shapes(arch).items() if fnmatch.fnmatch(name, options.only)}
        if not chosen:
            parser.error(f"--only: got {options.only!r}; no shape is called so; there are {', '.join(shapes(arch))}")
        for kernels in chosen.values():
            static = examine(kernels, arch)
            ran = executed(kernels, arch) if options.executed else None
            found.append(Static(**{**asdict(static), "executed": ran}))
    if options.json:
        print(json.dumps([asdict(s) for s in found], indent=1))
    else:
        _print(found, options.classes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

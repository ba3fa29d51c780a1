"""The machine code of reading a cache: that of indexing by hand, in accesses as wide as the layout allows."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from kvgen import ops, presets
from kvgen.codegen.emit import render_all
from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.compile.flatten import flatten
from kvgen.compile.sass import count, histogram, sass
from kvgen.runtime.cpu import machine
from kvgen.schema.loader import LoadedSet
from tests.compile.test_sass import needs_tool
from tests.surface.harness import BF16, GATHERED, HERE, PAGE, filled, kernel_set, package, unit
from tests.surface.loops import instructions, kernels, loops

ARCHS = ("sm_80", "sm_90a", "sm_120f")

# Two rows of each tile of 16 tokens; 16 threads read a row of a head of 128.
_READS = """#include "cache.cuh"
__device__ __forceinline__ void mix(Vec<uint32_t, 4>& x, const Vec<bf16, 8>& v) {
  union { Vec<bf16, 8> v; Vec<uint32_t, 4> words; } both{v};
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) x.e[j] ^= both.words.e[j];
}
"""
_READ = """
extern "C" __global__ void __launch_bounds__(128) NAME(
    const __grid_constant__ Cache cache, Vec<uint32_t, 4>* out, uint32_t tokens) {
  const uint32_t b = blockIdx.x, head = blockIdx.y, row = threadIdx.x / 16, dim = threadIdx.x % 16 * 8;
  const KeyCache k = get_key_cache(cache);
  Vec<uint32_t, 4> x = {};
#pragma unroll 1
  for (uint32_t token = 0; token < tokens; token += 16) {
    LOOKUP
    mix(x, FIRST);
    mix(x, SECOND);
  }
  out[(b * gridDim.y + head) * 128 + threadIdx.x] = x;
}
"""
_BY_HAND = """
    if (token / 16 >= cache.table_pages) continue;
    const uint32_t id = cache.page_table[b * cache.table_stride + token / 16];
    if (id >= cache.num_pages) continue;
    const bf16* page = cache.k + id * cache.k_page_stride;"""
_ROW = "*(const Vec<bf16, 8>*)(page + ((row + {}) * 8 + head) * 128 + dim)"
READS = {
    # Every element by its own index.
    "load": ("const auto page = k.page(b, token);\n    if (!page.valid) continue;",
             "k.load<8>(page, head, row, dim)", "k.load<8>(page, head, row + 8, dim)"),
    "load_by_hand": (_BY_HAND, _ROW.format(0), _ROW.format(8)),
    # A pointer to the tile, and steps from it.
    "pointer": ("const auto page = k.page(b, token);\n    if (!page.valid) continue;\n"
                "    const bf16* p = k.block_paged_ptr<1>(page, head, row, dim);",
                "*(const Vec<bf16, 8>*)p", "*(const Vec<bf16, 8>*)(p + 8192)"),
    "pointer_by_hand": (_BY_HAND + "\n    const bf16* p = page + (row * 8 + head) * 128 + dim;",
                        "*(const Vec<bf16, 8>*)p", "*(const Vec<bf16, 8>*)(p + 8192)"),
}  # fmt: skip


def machine_code(unit: Unit, arch: str) -> dict[str, str]:
    """The listing of every kernel of a unit, none of which spills."""
    found = kernels(sass(compile_unit(unit, arch, cache=default_cache()).data, cache=default_cache()))
    assert not any(re.search(r"\b(LDL|STL)\b", listing) for listing in found.values()), "registers are spilled"
    return found


@cache
def main_loops(arch: str) -> dict[str, list[str]]:
    """The instructions of each read's main loop. The reads are one unit: a disassembler takes half a second to start."""
    text = _READS
    for name, parts in READS.items():
        text += _READ.replace("NAME", name)
        for word, code in zip(("LOOKUP", "FIRST", "SECOND"), parts, strict=True):
            text = text.replace(word, code)
    params = (ops.Array("out", "u32", ("T", 4), "out"), ops.Scalar("tokens", "u32"))
    kernel = ops.Custom(name="load", text=text, params=params, grid=("B", 8))
    found = {name: loops(listing) for name, listing in machine_code(unit(GATHERED, kernel), arch).items()}
    assert set(found) == set(READS) and all(len(own) == 1 for own in found.values())
    return {name: own for name, (own,) in found.items()}


@needs_tool
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("read", ["load", "pointer"])
def test_the_accessor_is_indexing_by_hand(read: str, arch: str) -> None:
    """The page is looked up once a tile, and checked: the loop has no more instructions than the one by hand, give or take
    two moves."""
    mine, hand = (main_loops(arch)[name] for name in (read, f"{read}_by_hand"))
    assert sum("LDG.E.128" in x for x in mine) == sum("LDG.E.128" in x for x in hand) == 2
    assert sum("LDG" in x for x in mine) == 3, "one entry of the page table a tile"
    assert len(mine) <= len(hand) + 2


def gathers() -> Unit:
    """The kernel of gather.cu behind the generated one, in one unit."""
    loaded = LoadedSet(kernel_set("one", GATHERED, ops.Gather()), "tests/surface/test_machine_code.py", "")
    files = {path: file.text for path, file in render_all([loaded]).items()}
    files["one/by_hand.cu"] = (HERE / "gather.cu").read_text(encoding="utf-8")
    files["one/both.cu"] = '#include "gather.cu"\nnamespace by_hand {\n#include "by_hand.cu"\n}\n'
    return Unit("one/both", "one_gather", flatten("one/both.cu", files.__getitem__))


@needs_tool
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])  # the others unroll the loops away
def test_gather_copies_as_a_kernel_by_hand(arch: str) -> None:
    found = {}
    for name, listing in machine_code(gathers(), arch).items():
        copies = [loop for loop in loops(listing) if any("STG" in x for x in loop)]
        assert len(copies) == 2
        for loop in copies:
            assert sum("LDG.E.128" in x for x in loop) == sum("STG.E.128" in x for x in loop) == 2
            assert sum("LDG" in x or "STG" in x for x in loop) == 4
        found[name] = [len(loop) for loop in copies]
    mine, hand = found["one_gather"], found["by_hand"]
    assert mine <= hand and all(m <= h for m, h in zip(mine, hand, strict=True)), f"{mine}, by hand {hand}"


# Neighbouring dims of K and of V that are neighbours in memory too.
RUNS = {
    "max_paged": (128, 128), "max_continuous": (128, 128), "vllm": (128, 128), "vllm_hnd": (128, 128),
    "vllm_interleaved": (128, 128), "vllm_packed": (128, 128), "vllm_xpacked": (8, 1), "flashinfer_nhd": (128, 128),
    "flashinfer_hnd": (128, 128), "tensorrt_llm": (128, 128), "sglang": (128, 128), "flash_attention": (128, 128),
}  # fmt: skip
# Each preset on one architecture in turn; one whose dims lie together and one whose do not on all of them.
WIDE = [
    (preset, arch)
    for i, preset in enumerate(RUNS)
    for j, arch in enumerate(("sm_80", "sm_90a", "sm_100f"))
    if preset in ("max_paged", "vllm_xpacked") or (i % 2 == j)
]


@needs_tool
@pytest.mark.parametrize(("preset", "arch"), WIDE)
def test_accesses_as_wide_as_the_layout_allows(preset: str, arch: str) -> None:
    """Two vectors a thread in flight for K and for V: 16 bytes where dims lie together, else the elements one by one."""
    kv = getattr(presets, preset)(dtype="bf16", kv_heads=2, head_dim=128)
    (listing,) = machine_code(unit(kv, ops.Gather()), arch).values()
    found = histogram(listing)
    wide = sum(2 for run in RUNS[preset] if run >= 8)
    narrow = sum(2 for run in RUNS[preset] if run < 8)
    if arch != "sm_100f":  # which may leave out what a second trip would do
        assert (count(found, "STG.128"), count(found, "STG.U16")) == (wide, narrow)
        assert (count(found, "LDG.128"), count(found, "LDG.U16")) == (wide, narrow)
    assert count(found, "STG") == count(found, "STG.128") + count(found, "STG.U16")
    assert all(bool(count(found, f"{op}.128")) == bool(wide) for op in ("LDG", "STG"))
    assert all(bool(count(found, f"{op}.U16")) == bool(narrow) for op in ("LDG", "STG"))
    assert count(found, "LDL") == count(found, "STL") == count(found, "LD") == count(found, "ST") == 0


def test_no_sector_is_moved_twice() -> None:
    """Gather of the default layout: sectors of 32 bytes loaded and stored are those that its rows consist of."""
    pool = filled((6, 2, 2, PAGE, 8, 128), BF16)
    tables = {"lengths": np.zeros(2, np.uint32), "page_table": np.array([[3, 0, 5], [1, 4, 2]], np.uint32)}
    rows = 37 + 20
    outs = [filled((rows, 8, 128), BF16, 5) for _ in range(2)]
    with machine(arch="sm_90a", mode="check") as log:
        package("gathered").gather(
            package("gathered").Cache(pool, **tables)[1],
            row_offsets=np.array([0, 37, rows], np.uint32),
            k_out=outs[0],
            v_out=outs[1],
        )
    for role, out in enumerate(outs):
        for row in (0, 16, 36, 37, 56):
            b, token = (0, row) if row < 37 else (1, row - 37)
            page = tables["page_table"][b, token // PAGE]
            assert out[row].tobytes() == pool[page, role, 1, token % PAGE].tobytes()
    (launched,) = log.launches
    minimum = rows * 8 * 128 * 2 // 32
    traffic = launched.counters.per_buffer
    assert traffic["pool"].load_sectors == 2 * minimum
    assert traffic["k_out"].store_sectors == traffic["v_out"].store_sectors == minimum
    assert all(found.coalescing == 1.0 for name, found in traffic.items() if name in ("pool", "k_out", "v_out"))


def test_loops_are_read_from_text() -> None:
    text = ".L_x_1:\n /*0010*/ MOV R1, R2 ;\n /*0020*/ @!P0 BRA `(.L_x_1) ;\n /*0030*/ EXIT ;\n"
    text += ".L_x_2:\n /*0040*/ BRA `(.L_x_2) ;\n"
    assert loops(text) == [["MOV R1, R2 ", "@!P0 BRA `(.L_x_1) "]]
    assert len(instructions(text)) == 4
    heads = [f'\t.section\t.text.{name},"ax",@progbits\n' for name in ("a", "b")]
    assert kernels(f"// head\n{heads[0]}{text}{heads[1]}") == {"a": f'"ax",@progbits\n{text}', "b": '"ax",@progbits\n'}

"""The CPU machine against NumPy on every probe, and against the answers of every GPU that has recorded some."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.gpu.golden import compare
from benchmarks.gpu.packages import generated
from kvgen.schema.loader import load_folder
from tests.golden_gpu import record
from tests.golden_gpu.backends import CpuBackend
from tests.golden_gpu.compare import Rule, Wanted, differences, lanes, values
from tests.golden_gpu.numbers import Array, bits_of, is_float
from tests.golden_gpu.probe import Probe
from tests.golden_gpu.probes import ROOT, probes, units

RECORDED = sorted(p.parent for p in record.VECTORS.glob("*/probes.npz"))
BY_NAME = record.by_name()
# Units whose functions find places, divide work or move rows: tests/ops holds the operations that call them to the byte, on this
# machine, in every run. A campaign runs each alone too.
OF_OPERATIONS = frozenset(
    {
        *(
            "plan_kv",
            "plan_rows",
            "plan_keys",
            "page_lists",
            "listed_pages",
            "key_lists",
            "pages",
            "kv_cache",
            "stored",
        ),
        *(
            "copy_rows",
            "convert_rows",
            "compact",
            "pool_tokens",
            "seal_group",
            "states",
            "row_lanes",
            "row_units",
            "operands",
        ),
        *(
            "angles",
            "heads",
            "new_rows",
            "write_rows",
            "add",
            "extend_tiles",
            "indexer_lists",
            "indexer_work",
            "simt_tokens",
        ),
        *("ring", "row_tile", "tile_channels", "tile_scales", "latent", "latent_tile"),
    }
)
PROBES = [p for p in probes() if "KVGEN_FAMILY" in os.environ or p.unit not in OF_OPERATIONS]


@pytest.fixture(scope="session")
def machine() -> CpuBackend:
    return CpuBackend(record.Ptx())


# Against NumPy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_the_cpu_machine_does_what_ptx_says(probe: Probe, machine: CpuBackend) -> None:
    """Under several thread schedules; a family's threads have nothing to do with one another, so one is enough. What must come
    out is worked out once a probe, which takes longest: the same test tries that the comparison sees a wrong bit in it."""
    before = probe.inputs()
    wanted = probe.wanted(before)
    check_that_a_wrong_bit_is_seen(wanted)
    for machine.schedule in ("ascending",) if probe.unit == "families" else ("ascending", "descending", 1):
        after = machine.run(probe, before)
        for name, array in after.items():
            if name in wanted:
                broken = differences(wanted[name], array)
                assert not broken.any(), "\n".join(record.described(probe, name, broken, array, wanted[name].bits))
            else:
                assert array.tobytes() == before[name].tobytes(), f"{name} is an input"


def tellable(rule: Rule, bits: Array) -> NDArray[np.bool_]:
    """Elements whose first number is told from its neighbour, or from its negative where the rule tolerates that."""
    if not is_float(rule.kind):
        return np.ones(len(bits), bool)
    numbers = values(rule.kind, lanes(rule, bits)[:, 0])
    least = 2 * rule.absolute if rule.close or rule.any_zero else -1.0
    return ~np.isnan(numbers) & (np.abs(numbers) > least)


def check_that_a_wrong_bit_is_seen(expected: dict[str, Wanted]) -> None:
    """In every output, beyond what its rule tolerates: the sign, or the lowest bit where all of them count."""
    for name, wanted in expected.items():
        rules = wanted.rules if isinstance(wanted.rules, tuple) else (wanted.rules,)
        bits = wanted.bits.reshape(len(rules), -1)
        for row, rule in enumerate(rules):
            sign = rule.close or rule.any_zero
            at = int(np.flatnonzero(tellable(rule, bits[row]))[0])
            damaged = bits.copy()
            damaged[row, at] ^= bits.dtype.type(1 << (bits_of(rule.kind) - 1 if sign else 0))
            broken = differences(wanted, damaged.reshape(wanted.bits.shape)).reshape(bits.shape)
            assert broken.sum() == 1 and broken[row, at], (name, row, rule)


def test_units_that_are_left_out_are_units() -> None:
    assert set(units()) > OF_OPERATIONS


def test_what_only_a_gpu_can_tell_is_asked_first() -> None:
    """Boxes outside of their tensor, and the strides of descriptors that no peer uses: kernels worth most stand on them."""
    first = [p.unit for p in probes()]
    begin = {unit: first.index(unit) for unit in ("tma", "tiles", "wgmma", "row_wgmma", "latent_wgmma", "latent_widen")}
    assert max(begin.values()) < first.index("families")
    assert all(
        n < first.index("families") for n, p in enumerate(probes()) if p.name.startswith("library_groups_of_rows")
    )


ONLY_CONSTANTS = {"full_blocks", "warpgroups", "tensor_map", "page_addresses"}  # headers without functions
# Header -> the texts that call its functions, each of which a probe launches.
KERNELS = "tests/golden_gpu/kernels"
CALLED_IN = {
    **dict.fromkeys(("types", "launch", "copy"), (f"{KERNELS}/device_library.cu",)),
    "fault": tuple(f"{KERNELS}/{name}.cu" for name in ("device_library", "columns", "segment")),
    **dict.fromkeys(("fp8", "fp4"), (f"{KERNELS}/elements.cu",)),
    **dict.fromkeys(("bytes", "elements", "integers"), (f"{KERNELS}/elements.cu", f"{KERNELS}/narrow.cu")),
    "index": (f"{KERNELS}/device_library.cu", f"{KERNELS}/copy_rows.cu"),
    "stored": (f"{KERNELS}/stored.cu", f"{KERNELS}/copy_rows.cu"),
    **dict.fromkeys(("copy_rows", "row_runs", "move_tokens"), (f"{KERNELS}/copy_rows.cu",)),
    "convert_rows": (f"{KERNELS}/convert_rows.cu",),
    "plan_kv": (f"{KERNELS}/plan_kv.cu",),
    "plan_keys": (f"{KERNELS}/plan_keys.cu",),
    "plan_rows": (f"{KERNELS}/plan_rows.cu",),
    "row_tile": (f"{KERNELS}/row_tile.cu",),
    "row_lanes": (f"{KERNELS}/row_lanes.cu",),
    **dict.fromkeys(("row_wgmma", "row_copies"), (f"{KERNELS}/row_wgmma.cu",)),
    **dict.fromkeys(("latent_warpgroups", "listed_rows", "wgmma_narrow"), (f"{KERNELS}/latent_warpgroups.cu",)),
    "row_widen": (f"{KERNELS}/row_widen.cu",),
    "row_units": (f"{KERNELS}/row_units.cu",),
    "latent_sources": (f"{KERNELS}/latent_tile.cu", f"{KERNELS}/row_units.cu"),
    "extend_tiles": (f"{KERNELS}/extend_tiles.cu", f"{KERNELS}/row_tile.cu"),
    "strided": (f"{KERNELS}/narrow.cu",),
    **dict.fromkeys(("quantize", "e8m0", "codebook"), (f"{KERNELS}/quantize.cu", f"{KERNELS}/narrow.cu")),
    "segment": tuple(f"{KERNELS}/{name}.cu" for name in ("segment", "row_units", "quantize", "narrow")),
    **{
        name: (f"{KERNELS}/{name}.cu",)
        for name in ("kv_cache", "operands", "angles", "heads", "new_rows", "add", "pages")
    },
    "entries": (f"{KERNELS}/new_rows.cu",),
    **dict.fromkeys(
        ("head_norms", "first_pairs", "position_scale", "hadamard", "head_blocks", "packed_blocks", "pad_heads"),
        (f"{KERNELS}/head_steps.cu",),
    ),
    **dict.fromkeys(("store_heads", "row_norm", "write_rows"), (f"{KERNELS}/write_rows.cu",)),
    **{
        name: (f"{KERNELS}/{name}.cu",)
        for name in (
            "ring",
            "fp4_tables",
            "tile_channels",
            "latent",
            "latent_pairs",
            "latent_tile",
            "latent_wgmma",
            "latent_widen",
        )
    },
    "wgmma": (f"{KERNELS}/wgmma.cu", f"{KERNELS}/row_wgmma.cu"),
    "indexer_work": (f"{KERNELS}/indexer_work.cu",),
    "indexer_lists": (f"{KERNELS}/indexer_lists.cu",),
    **dict.fromkeys(
        ("indexer_scores", "indexer_packed", "mma_codes", "wgmma_codes"), (f"{KERNELS}/indexer_scores.cu",)
    ),
    "split_kv": (f"{KERNELS}/split_kv.cu", f"{KERNELS}/row_wgmma.cu"),
    "columns": (f"{KERNELS}/columns.cu", f"{KERNELS}/split_kv.cu"),
    "merge": (f"{KERNELS}/split_kv.cu",),
    **dict.fromkeys(("mma_tile", "tile_copy", "tile_tables"), (f"{KERNELS}/mma_tile.cu",)),
    **dict.fromkeys(("tile_powers", "bf16_codes"), (f"{KERNELS}/tile_powers.cu",)),
    "tile_scales": (f"{KERNELS}/tile_scales.cu", f"{KERNELS}/fp4_tables.cu"),
    **{
        name: (f"{KERNELS}/{name}.cu",)
        for name in ("key_lists", "listed_pages", "page_lists", "pool_tokens", "merge_states", "seal_group", "states")
    },
    "simt_tokens": (f"{KERNELS}/simt_tokens.cu",),
    **dict.fromkeys(("compact", "table_rows"), (f"{KERNELS}/compact.cu",)),
    "scan": (f"{KERNELS}/scan.cu", f"{KERNELS}/split_kv.cu"),
    **dict.fromkeys(("mbarrier", "tma", "tma_tile"), ("tests/tma/tiles.cu", f"{KERNELS}/tma_more.cu")),
    "cp_async": ("tests/tma/cp_async.cu", f"{KERNELS}/ring.cu", f"{KERNELS}/row_wgmma.cu"),
    **dict.fromkeys(
        ("mma", "fragments"),
        ("tests/device_fragments/fragments.cu", f"{KERNELS}/kv_fragments.cu", f"{KERNELS}/tile_scales.cu"),
    ),
}
DEFINED = re.compile(r"__device__ [^(=;{}]*?\b(\w+)\(")


def functions(header: str) -> set[str]:
    """What a header's users may call on a GPU that probes run on: not what is private or needs a newer one, nor
    operators, which are called without a name.
    """
    newer = re.sub(r"#if __CUDA_ARCH__ >= 1\d{3}\b.*?#endif", "", header, flags=re.DOTALL)
    refused = {"get_value_cache"}  # of a cache without V: it cannot be instantiated
    return set(DEFINED.findall(re.sub(r"\n private:.*?\n};", "", newer, flags=re.DOTALL))) - {"operator"} - refused


def calls(text: str, name: str) -> bool:
    """Whether a text calls a function, with whatever template arguments; its own definitions are no calls."""
    code = re.sub(r"//.*", "", text)
    own = re.sub(rf"__(?:device|global)__ [^(=;{{}}]*?\b{name}\(", "", code)
    return re.search(rf"\b{name}(?:<[^;{{}}()]*>)?\(", own) is not None


# Methods of caches and their page tables: kernels of all sets call them, whose cases run on a GPU beside the probes.
OF_CACHES = ("paged", "kv_cache", *(p.stem for p in (ROOT / "templates" / "device" / "cache" / "tables").glob("*.cuh")))


def test_every_function_of_the_device_library_is_called() -> None:
    missing = []
    library = [p.read_text() for p in (ROOT / "templates").rglob("*") if p.suffix in (".j2", ".cuh")]
    for header in sorted((ROOT / "templates" / "device").rglob("*.cuh")):
        texts = [(ROOT / name).read_text() for name in CALLED_IN.get(header.stem, ())]
        texts += library if header.stem in OF_CACHES else []
        found = functions(header.read_text())
        assert found or header.stem in ONLY_CONSTANTS, header.name
        missing += [f"{header.name}: {name}()" for name in sorted(found) if not any(calls(t, name) for t in texts)]
    assert not missing, f"no probe calls {', '.join(missing)}"


def test_what_counts_as_a_call() -> None:
    header = """\
template <uint32_t N>
__device__ __forceinline__ Vec<float, N> f(int x) { return g(x); }
__host__ __device__ constexpr int h(int x) { return x; }
#if __CUDA_ARCH__ >= 1000
__device__ __forceinline__ void only_newer() {}
#endif
struct A {
  __device__ static constexpr const char* name() { return ""; }
  __device__ __forceinline__ float operator()(int x) const { return 1.0f; }
 private:
  __device__ int hidden() const { return 1; }
};
"""
    assert functions(header) == {"f", "h", "name"}
    for text in ("f(1);", "x.template f<Vec<float, 4>, 3>(1);", "f<kRows / 2, true>(1);"):
        assert calls(text, "f")
    for text in ("// f(1)", "of(1);", "f;", "__device__ __forceinline__ int f(int x) {", "f < 3; g(1);"):
        assert not calls(text, "f")


def pasted(text: str) -> set[str]:
    """Kernels that KERNELS(name, type) makes of the types that a text lists first."""
    types = re.search(r"#define TYPES((?:.*\\\n)*.*)", text)
    names = re.findall(r"\bKERNELS\((\w+),", types[1]) if types else []
    return {kernel + name for kernel in re.findall(r" void (\w+)##NAME\(", text) for name in names}


def test_every_kernel_of_the_device_library_is_launched() -> None:
    """A call in a kernel that no probe launches would probe nothing."""
    written = re.compile(
        r'extern "C" __global__ void (?:__\w+\([^)]*\) )?(\w+)\('
        r"|^(?:SEGMENT|AMAX|ASYMMETRIC|HEADS|SLOTS|ADD|QUANTIZED|ATTEND|PARTIALS)\((\w+),",
        re.M,
    )
    for unit in {p.unit for p in probes() if p.name.startswith("library_")}:
        kernels = {one or two for one, two in written.findall(units()[unit])} - {"name"}  # a macro's parameter
        kernels |= pasted(units()[unit])
        launched = {p.kernel for p in probes() if p.unit == unit}
        guarded = {"elements_signs"} if unit == "elements" else set()  # only without conversions in hardware
        assert kernels == launched | guarded, unit


# Against GPUs -------------------------------------------------------------------------------------------------------


# Where no GPU has answered yet, the summary says so.
NOBODY = pytest.param(None, marks=pytest.mark.xfail(reason="no GPU has recorded vectors yet", strict=True))
HOW = "benchmarks/run_gpu.py --section probes,correctness"


def contradictions(folder: Path, name: str, machine: CpuBackend) -> Iterator[str]:
    """What the CPU machine answers otherwise than the GPU did on the same inputs."""
    vectors, facts = record.vectors_of(folder / "probes.npz")
    probe = BY_NAME[name]
    before, recorded = record.before_and_after(probe, vectors[name])
    after, wanted = machine.run(probe, before), probe.wanted(before)
    for output, right in recorded.items():
        # Both may be off by what the rule tolerates, in opposite directions.
        broken = differences(wanted[output], after[output], right, slack=2.0)
        stale = (
            ""
            if facts["units"].get(probe.unit) == record.digest(units()[probe.unit])
            else " (recorded with other text)"
        )
        yield from (line + stale for line in record.described(probe, output, broken, after[output], right))


@pytest.mark.parametrize("folder", RECORDED or [NOBODY], ids=lambda f: f.name if f else "nobody")
def test_the_cpu_machine_does_what_a_gpu_did(folder: Path | None, machine: CpuBackend) -> None:
    assert folder is not None, HOW
    machine.schedule = "ascending"
    recorded = record.vectors_of(folder / "probes.npz")[0]
    found = [line for name in recorded if name in BY_NAME for line in contradictions(folder, name, machine)]
    assert not found, "\n".join(found)


def differing_cases(files: list[Path]) -> list[str]:
    """The contradictions in recorded cases of generated kernels; their files are called <set>.<operation>.npz."""
    sets = {s.kernels.name: s.kernels for s in load_folder(ROOT / "specs", ROOT)} if files else {}
    found = []
    for file in files:
        name, _, op = file.stem.partition(".")
        found += [f"{file.stem}: {line}" for line in compare(file, sets[name], generated(name), op)[0]]
    return found


@pytest.mark.parametrize("folder", RECORDED or [NOBODY], ids=lambda f: f.name if f else "nobody")
def test_generated_kernels_do_what_a_gpu_did(folder: Path | None) -> None:
    assert folder is not None, HOW
    found = differing_cases([f for f in sorted(folder.glob("*.npz")) if f.stem != "probes"])
    assert not found, "\n".join(found)


# The file ------------------------------------------------------------------------------------------------------------

KEPT = "library_copy*"  # probes of two units


def test_what_a_gpu_answered_is_kept(tmp_path: Path, machine: CpuBackend) -> None:
    """As if the CPU machine were a GPU: the parts of its probes become one file, which is then compared, and compared damaged."""
    machine.schedule = "ascending"
    names = [p.name for p in probes() if fnmatch(p.name, KEPT)]
    for name in names:
        record.save_part(tmp_path / f"{name}.npz", record.run_probe(BY_NAME[name], machine))
    record.joined({name: tmp_path / f"{name}.npz" for name in names}, "cpu_machine", tmp_path / "probes.npz")
    vectors, facts = record.vectors_of(tmp_path / "probes.npz")
    assert list(vectors) == names and facts["device"] == "cpu_machine" and len(facts["units"]) > 1
    assert not [line for name in names for line in contradictions(tmp_path, name, machine)]
    vectors["library_copy"]["out/after"][77] ^= 4
    record.save(tmp_path / "probes.npz", vectors, facts | {"units": {}})
    (line,) = contradictions(tmp_path, "library_copy", machine)
    assert line.startswith("library_copy.out[77]: 0x") and line.endswith("(recorded with other text)")


def test_the_gpu_path_through_the_bindings(tmp_path: Path) -> None:
    """On a libcuda whose launches do nothing: all else is as on a GPU, tensor maps (of units tma and tiles) included."""
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).parents[1] / "support" / "fake_gpu.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    (tmp_path / "cubins").mkdir()
    asked = [p.name for p in probes() if fnmatch(p.name, "*_2d*")]
    for unit in {BY_NAME[name].unit for name in asked}:
        (tmp_path / "cubins" / f"{unit}.cubin").write_bytes(record.compiled(unit, units()[unit], "sm_90a"))
    code = f"""
from pathlib import Path
from tests.golden_gpu import record
backend = record.backend(Path({str(tmp_path / "cubins")!r}), 0)
assert backend.name() == "fake_gpu"
for name in {asked}:
    arrays = record.run_probe(record.by_name()[name], backend)
    assert list(record.against_numpy(record.by_name()[name], arrays)), "nothing was computed"
    for array in arrays:
        if array.endswith("/after"):
            assert arrays[array].tobytes() == arrays[array.replace("/after", "/before")].tobytes()
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and len(asked) > 1, done.stderr

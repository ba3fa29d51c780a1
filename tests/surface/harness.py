"""The sets of these tests, their generated packages, and launches of their kernels on the CPU machine in check mode."""

from __future__ import annotations

import importlib
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from kvgen import CSR, Block, Dense, KernelSet, Latent, Layout, Paged, PerKV, Quant, Ring, ops, presets
from kvgen.codegen.emit import render_all, units_of, write_file
from kvgen.compile import Unit
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from kvgen.schema.loader import LoadedSet
from kvgen.schema.tables import Indirect, Mapped

HERE: Final = Path(__file__).parent
PACKAGE: Final = "kvgen_surface_tests"
PAGE: Final = 16
MAX: Final[dict[str, Any]] = {"dtype": "bf16", "kv_heads": 2, "head_dim": 64, "page_size": PAGE}
Array = NDArray[Any]

NUMBERS: Final = (
    "cache_length", "lengths_nd", "empty", "max_prompt", "max_context", "max_tile", "coords_row", "coords_block", "coords_valid",
    "row_idx", "col_idx", "num_kv_rows", "tma_row", "scale_row_idx", "num_scale_rows", "pointer", "scale_pointer",
    "scales_begin", "num_heads", "head_size", "is_mla", "page_size", "quantized", "granularity", "head_granularity",
    "type_name", "operand", "device_type", "copied", "base",
)  # fmt: skip
FLOATS: Final = ("value0", "value1", "page0", "page1", "code0", "code1", "scale", "zero")


def probe(cache: Cache) -> ops.Custom:
    """The kernel of surface.cu: everything a cache says about (b, token, head, dim)."""
    has = f"#define HAS_V {int('v' in cache.storage.roles)}\n#define HAS_LENGTHS {int(_has_lengths(cache))}\n"
    return ops.Custom(
        name="probe",
        text=has + (HERE / "surface.cu").read_text(encoding="utf-8"),
        params=(
            ops.Array("queries", "u32", ("T", 4), untrusted=True),
            ops.Array("numbers", "u64", ("T", 2, len(NUMBERS)), "inout"),
            ops.Array("floats", "f32", ("T", 2, len(FLOATS)), "inout"),
            ops.Size("count", "T"),
            ops.Scalar("stores", "u32"),
        ),
        grid="ceil_div(T, 32)",
        threads=32,
        writes=True,
    )


def _has_lengths(cache: Cache) -> bool:
    return not (cache.ragged or (isinstance(cache.page_table, CSR) and cache.page_table.last_page_len))


def populate(cache: Cache) -> ops.Custom:
    """The kernel of populate.cu."""
    return ops.Custom(
        name="populate",
        text=f"#define HAS_V {int('v' in cache.storage.roles)}\n" + (HERE / "populate.cu").read_text(encoding="utf-8"),
        params=(
            ops.Array("places", "u32", ("T", 2)),
            ops.Array("rows", "u32", ("T", 2, 64), "inout"),
            ops.Size("count", "T"),
        ),
        grid="T",
        threads=32,
    )


def operands(offset: str) -> ops.Custom:
    """The kernel of operands.cu: the operands without a cache, whose offsets are of this type."""
    return ops.Custom(
        name="operands",
        text=(HERE / "operands.cu").read_text(encoding="utf-8").replace("OFFSET", OFFSETS[offset]),
        params=(
            ops.Array("tensor", "bf16", ("N", "S", 3, 24), "inout"),
            ops.Array("scales", "f32", ("N", "S", 3, 2), "inout"),
            ops.Array("offsets", offset, ("R+1",), untrusted=True),
            ops.Array("queries", "u32", ("T", 4)),
            ops.Array("numbers", "u64", ("T", 2, 16), "inout"),
            ops.Size("tensors", "N"),
            ops.Size("tokens", "S"),
            ops.Scalar("requests", "u32"),
            ops.Size("count", "T"),
        ),
        grid="ceil_div(T, 32)",
        threads=32,
    )


GATHERED: Final = presets.max_paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=PAGE)
TILES: Final = ops.Custom(
    name="tiles",
    text=(HERE / "tiles.cu").read_text(encoding="utf-8"),
    params=(ops.TensorMap("map"), ops.Array("out", "bf16", ("B", 2, 64, 64), "out"), ops.Scalar("head", "u32")),
    grid=("B", 2),
    threads=32,
)
OFFSETS: Final = {"u32": "uint32_t", "i32": "int32_t", "i64": "int64_t"}
CACHES: Final[dict[str, Cache]] = {
    "paged": Paged(**MAX),
    "continuous": presets.max_continuous(dtype="bf16", kv_heads=2, head_dim=64),
    "hnd": presets.vllm_hnd(dtype="bf16", kv_heads=2, head_dim=64, page_size=PAGE),
    "scaled": Paged(**MAX, quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=32))),
    "own": Paged(**MAX, quant=Quant(dtype="i8", scale_dtype="f32", own_table=True)),
    "given": Paged(**MAX, quant=Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None))),
    "latent": Latent(dtype="bf16", page_size=PAGE),
    "mixed": Latent(dtype="bf16", page_size=PAGE, quant=Quant(dtype="e4m3")),
    "csr_last": presets.flashinfer_nhd(dtype="bf16", kv_heads=2, head_dim=64, page_size=PAGE),
}
TABLES: Final[dict[str, Cache]] = {
    **{f"dense{n}": Paged(**MAX, table=Dense(align=n)) for n in (1, 2, 4, 8)},
    "dense_i64": Paged(**MAX, table=Dense(align=4, dtype="i64", id_multiplier=3)),
    "csr": Paged(**MAX, table=CSR()),
    "ring": Paged(**MAX, table=Ring(window=80)),
    "per_kv": Paged(**MAX, layout=Layout(kv="page layer token head dim"), table=PerKV()),
    "indirect": Paged(**(MAX | {"page_size": 1}), table=Indirect()),
    "mapped": Paged(**MAX, table=Mapped(request_dtype="i64", id_multiplier=3)),
    "blocks": presets.max_continuous(dtype="bf16", kv_heads=2, head_dim=64),
}


def kernel_set(name: str, cache: Cache, *found: Any) -> KernelSet:
    return KernelSet(name=name, q_heads=cache.kv_heads, cache=cache, ops=found, arch=("sm_90a",))


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=PACKAGE)
    sets = [kernel_set(n, c, probe(c)) for n, c in CACHES.items()]
    sets += [kernel_set(n, c, populate(c)) for n, c in TABLES.items()]
    sets.append(kernel_set("tiles", CACHES["paged"], TILES))
    sets.append(kernel_set("gathered", GATHERED, ops.Gather()))
    sets += [kernel_set(f"operands_{o}", Paged(**MAX), operands(o)) for o in OFFSETS]
    for file in render_all([LoadedSet(s, "tests/surface/harness.py", "") for s in sets]).values():
        write_file(Path(folder.name) / PACKAGE, file)
    sys.path.insert(0, folder.name)
    return folder


@cache
def package(name: str) -> ModuleType:
    """The generated package of a set."""
    _root()
    return importlib.import_module(f"{PACKAGE}.{name}")


def unit(cache: Cache, kernel: Any, name: str = "one") -> Unit:
    """One kernel over a cache, as the compiler takes it."""
    loaded = LoadedSet(kernel_set(name, cache, kernel), "tests/surface/harness.py", "")
    (found,) = units_of(loaded, render_all([loaded]), "generated")
    return found


def run(kernel: Any, layer: Any, **arguments: Any) -> None:
    """One launch in check mode: races, uninitialised reads and accesses outside of the arrays are errors."""
    with machine(arch="sm_90a", mode="check"):
        kernel(layer, **arguments)


def filled(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Random numbers of any type, codes as bytes; aligned as an allocation of the GPU's."""
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    memory = np.empty(int(np.prod(shape)) * kind.itemsize + 256, np.uint8)
    start = -memory.ctypes.data % 256
    out = memory[start : start + int(np.prod(shape)) * kind.itemsize].view(kind).reshape(shape)
    if kind == np.uint8:
        out[...] = rng.integers(0, 0x70, shape)  # no NaN of fp8
    else:
        out[...] = (rng.standard_normal(shape) * 2).astype(kind)
    return out


BF16: Final = bfloat16

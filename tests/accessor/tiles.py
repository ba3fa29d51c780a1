"""The tiles that a configuration's tensor maps can bring, as kernels."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvgen import Indirect, ops
from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_header import roles
from kvgen.lowering.lowered import lower
from kvgen.runtime.role_cache import RoleCache, TileMap
from kvgen.tensor_map import chunk_elements, padded_depth
from tests.accessor.grid import LEVELS, Config, Levels, full_grid
from tests.accessor.kernels import text

SHARED: Final = 65536
SWIZZLES: Final = (0, 32, 64, 128)
# What a tensor copy can tell apart: layouts that have a tensor map, elements by their size (f16 is as large as bf16, every code
# of a byte as another), scales by where they lie and with zero points, every variant and every table. What the accessor does
# with all else is tests/accessor/test_bytes.py's.
TENSOR_COPIES: Final[Levels] = {
    "layout": {
        "hnd": (), "apart": (), "kv_inner": (), "pointers": (), "own_table": (), "in_page": (), "max": LEVELS["layout"]["max"],
    },
    "quant": {"none": (), "token_head": (), "zero": (), "packed": ("i4", "nvfp4_global")},
    "variant": LEVELS["variant"],
    "table": LEVELS["table"] | {"indirect": ("mapped", "indirect")},
    "dtype": {"bf16": (), "f32": ()},
}  # fmt: skip
# cp.async asks the accessor for each address: what is left is the size of elements by the swizzle, and layouts without a map.
PLAIN_COPIES: Final[Levels] = {
    "layout": {"max": (), "x_packed": (), "split": (), "swizzled": ()},
    "quant": {"none": (), "token_head": (), "i4": ()},
    "variant": {"k_only": (), "latent": ()},
    "table": {"dense": (), "ring": ()},
    "dtype": {"bf16": (), "f32": ()},
}


@dataclass(frozen=True)
class Tile:
    """A tile of K (`role` 0) or V: `part` "main", "rope", "scale", "index_scale" or "ragged"."""

    role: int
    part: str
    form: str
    swizzle: int
    rows: int
    depth: int
    gran: int

    @property
    def call(self) -> str:
        """The call of tiles.cu."""
        cache = "values" if self.role else "keys"
        struct = "ValueRole" if self.role else "KeyRole"
        if self.part in ("main", "rope"):
            shape = f"{self.swizzle}, {self.rows}, {self.depth}, {self.gran}"
            rope = str(self.part == "rope").lower()
            return f"Tile<Form::{self.form}, {rope}, {shape}>::run({cache}, &map, copied, direct, requests, tokens);"
        if self.part == "ragged":
            shape = f"{self.swizzle}, {self.rows}, {self.depth}, {self.gran}"
            return f"store_tile<{shape}>({cache}, &map, copied, place_b, place_base, place_valid);"
        index = str(self.part == "index_scale").lower()
        return f"scale_tiles<{struct}, {index}, {self.rows}>({cache}, &map, copied, direct, requests, tokens);"

    def map(self, cache: RoleCache) -> TileMap:
        """Its tensor map, by the collection."""
        if self.part == "scale":
            return cache.create_scale_tma_tile(self.rows * self.depth)
        if self.part == "index_scale":
            return cache.create_index_scale_tma_tile(self.rows)
        if self.part == "rope":
            return cache.create_rope_tma_tile(self.rows, swizzle=self.swizzle)
        dims = self.depth * cache.role.values.codes  # maps are asked for in dims, copies count elements
        if self.part == "ragged":
            return cache.create_ragged_tma_tile(self.rows, dims, swizzle=self.swizzle)
        fold = {"fold": self.form in ("folded", "folded_pages", "row_major"), "row_major": self.form == "row_major"}
        return cache.create_tma_tile(self.rows, dims, swizzle=self.swizzle, **fold)


def heights(config: Config) -> tuple[int, ...]:
    """Tokens of a tile: half a page, a page, several."""
    page = getattr(config.cache, "page_size", None)
    if page is None:
        return (8, 16)
    if page == 1:
        return (4, 8) if isinstance(config.cache.page_table, Indirect) else (1,)
    return tuple(n for n in (page // 2, page, 2 * page, 4 * page) if n <= 256)


def possible(config: Config, caches: list[RoleCache]) -> Iterator[Tile]:
    """What the maps of these caches can do; what they refuse is left out."""
    for role, (cache, spec) in enumerate(zip(caches, roles(lower(config.cache)), strict=True)):
        size = cache.role.values
        numbered = "rows" if spec.row and cache.page_stride % size.row == 0 else "pages"
        for height in heights(config):
            yield from _of_values(cache, role, height, numbered)
            if cache.role.rope is not None:
                for swizzle in SWIZZLES:
                    pages = "page" in _coordinates(Tile(role, "rope", "rows", swizzle, height, 0, 0), cache)
                    gran = chunk_elements(cache.role.rope.dtype, swizzle)  # type: ignore[arg-type]
                    depth = padded_depth(cache.role.rope.dim, gran)
                    yield Tile(role, "rope", "pages" if pages else "rows", swizzle, height, depth, gran)
            scales = cache.role.scales
            if scales is not None and spec.scale_row and height <= (cache.page_size or height):
                yield Tile(role, "scale", "", 0, height, spec.scale_row, 1)
                yield Tile(role, "index_scale", "", 0, height, spec.scale_row, 1)


def _of_values(cache: RoleCache, role: int, height: int, numbered: str) -> Iterator[Tile]:
    values = cache.role.values
    for swizzle in SWIZZLES:
        gran = chunk_elements(values.dtype, swizzle)  # type: ignore[arg-type]
        depth = padded_depth(values.dim, gran)
        yield Tile(role, "main", numbered, swizzle, height, depth, gran)
        yield Tile(role, "main", "folded" if numbered == "rows" else "folded_pages", swizzle, height, depth, gran)
        if numbered == "rows":
            yield Tile(role, "main", "row_major", swizzle, height, depth, gran)
            yield Tile(role, "ragged", "", swizzle, height, depth, gran)


def _coordinates(tile: Tile, cache: RoleCache) -> tuple[str, ...]:
    try:
        return tile.map(cache).plan.coordinates
    except ArgumentError:
        return ()


def fitting(config: Config, caches: list[RoleCache]) -> list[Tile]:
    """The possible ones that the collection makes and shared memory holds; all in the campaign, else one or two of each part
    and form, of two heights and two swizzles where it can be (tests/accessor/test_grid.py: every form has them all)."""
    found = []
    for tile in possible(config, caches):
        if tile.rows * tile.depth * 4 > SHARED:
            continue
        try:
            tile.map(caches[tile.role])
        except ArgumentError:
            continue
        found.append(tile)
    if full_grid():
        return found
    turn, chosen = zlib.crc32(config.name.encode()), dict[Tile, None]()
    for kind in sorted({(t.part, t.form) for t in found}):
        some = [t for t in found if (t.part, t.form) == kind]
        first = some[turn % len(some)]
        others = [t for t in some if t.swizzle != first.swizzle and t.rows != first.rows]
        chosen[first] = None
        if others and kind not in (("main", "rows"), ("main", "pages")):  # most configurations have these
            chosen[max(others, key=lambda t: (t.swizzle, (t.rows * turn) % 7))] = None  # wide swizzles fit the fewest
    return list(chosen)


def copies_of_16(config: Config) -> bool:
    """Whether cp.async can copy it: K has runs of 16 bytes."""
    region = config.cache.storage.roles["k"][0].region
    return region.vector * region.dtype.bits >= 128


def plain(config: Config, caches: list[RoleCache]) -> list[Tile]:
    """Tiles of K that cp.async makes, a swizzle each: two of them, but all of elements of 32 bits, which fewest caches have."""
    values, tall = caches[0].role.values, heights(config)
    found = []
    for i, swizzle in enumerate(SWIZZLES):
        gran = chunk_elements(values.dtype, swizzle)  # type: ignore[arg-type]
        found.append(Tile(0, "main", "pages", swizzle, tall[i % len(tall)], padded_depth(values.dim, gran), gran))
    turn = zlib.crc32(config.name.encode()) % 4
    return found if full_grid() or dtype(values.dtype).bits == 32 else [found[turn], found[(turn + 1) % 4]]


def kernel(config: Config, tiles: list[Tile], rope_dims: int) -> ops.Custom:
    """One kernel for them all: `which` says which."""
    # cp.async has nothing but tiles of the main part.
    lines = [f"  if (which == {i}) {t.call}" for i, t in enumerate(tiles)]
    plain = [line for line, t in zip(lines, tiles, strict=True) if t.part == "main"]
    values = "  const auto values = get_value_cache(cache);\n" if "v" in config.cache.storage.roles else ""
    body = "\n#if __CUDA_ARCH__ >= 900\n" + "\n".join(lines) + "\n#else\n" + "\n".join(plain) + "\n#endif\n"
    end = f"""
extern "C" __global__ void tiles(const __grid_constant__ Cache cache, const __grid_constant__ TensorMap map, uint8_t* copied,
                                 uint8_t* direct, uint32_t requests, uint32_t tokens, uint32_t which, uint32_t place_b,
                                 uint32_t place_base, uint32_t place_valid) {{
  pdl_wait();
  const auto keys = get_key_cache(cache);
{values}{body}}}
"""
    whole = text(config, "tiles.cu").replace(
        "struct Tile {", f"struct Tile {{\n  static constexpr uint32_t kRopeDims = {rope_dims};", 1
    )
    params: list[Any] = [
        ops.TensorMap("map"),
        ops.Array("copied", "u8", ("copied_bytes",), "inout", align=16),
        ops.Array("direct", "u8", ("direct_bytes",), "inout", align=16),
        ops.Size("requests", "B"),
        *(ops.Scalar(n, "u32") for n in ("tokens", "which", "place_b", "place_base", "place_valid")),
    ]
    return ops.Custom(
        name="tiles", text=whole + end, params=params, grid=1, threads=64, shared=SHARED, writes=True
    )  # fmt: skip

"""Which tensor maps there are: what the tile tests leave out because it is refused is refused for a reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen import CSR, Latent, Layout, Paged, Quant
from kvgen.errors import ArgumentError
from kvgen.schema.cache import Cache
from tests.accessor.grid import Config
from tests.accessor.kernels import accessor, kernel_set
from tests.accessor.places import Session, build
from tests.accessor.scene import Scene
from tests.accessor.test_tiles import role_caches
from tests.accessor.tiles import SWIZZLES, possible

XPACKED = Layout(k="page head dim/8 token dim%8", v="page head dim token", layers="pointers")
ROWS, PAGES = {"rows", "folded", "row_major"}, {"pages", "folded_pages"}


def keys(name: str, cache: Cache, pad: str = "tight") -> tuple[Config, Any]:
    """K of the cache's layer, on the host."""
    config = Config(f"maps_{name}", cache, pad)
    scene = Scene(config)
    package = build(kernel_set(config, accessor(config), of=f"maps_{name}"))
    return config, role_caches(Session("cpu", package, scene.arrays(), scene.tables), scene)


def paged(**more: Any) -> Paged:
    return Paged(**({"dtype": "bf16", "kv_heads": 2, "head_dim": 128, "page_size": 16} | more))


@pytest.mark.parametrize(
    ("name", "cache", "pad", "forms"),
    [
        ("max", paged(), "tight", ROWS),
        ("padded", paged(), "rows", ROWS - {"row_major"}),
        ("part", paged(), "part", PAGES),
        ("hnd", paged(layout="page kv layer head token dim"), "tight", PAGES),
        ("xpacked", paged(layout=XPACKED), "tight", set()),
        ("split", paged(layout="page kv layer token/4 head token%4 dim"), "tight", set()),
        ("latent", Latent(dtype="bf16", page_size=16), "tight", ROWS),
    ],
)  # fmt: skip
def test_every_swizzle_of_every_form(name: str, cache: Cache, pad: str, forms: set[str]) -> None:
    """Tiles of whole pages, in all four swizzles, in each form that the layout has."""
    config, caches = keys(name, cache, pad)
    made = set()
    for tile in possible(config, caches):
        if tile.part == "main" and tile.rows == 16:
            try:
                tile.map(caches[tile.role])
            except ArgumentError:
                continue
            made.add((tile.form, tile.swizzle))
    assert made == {(form, swizzle) for form in forms for swizzle in SWIZZLES}


def test_row_major_tiles_begin_at_multiples_of_8_rows() -> None:
    """A page of 18 rows would begin in the middle of a group, and the tile be another page's."""
    _, (found, _) = keys("pitch", paged(page_size=24, layout="page kv layer token head dim"))
    assert found.create_tma_tile(24, 128, fold=True, row_major=True)
    _, (found, _) = keys("odd", paged(page_size=12))
    with pytest.raises(ArgumentError, match=r"row_major|depth"):
        found.create_tma_tile(24, 128, fold=True, row_major=True)
    _, (found, _) = keys(
        "gap", paged(page_size=8, layout=Layout(k="page layer token head dim", v="page layer token head dim")), "rows"
    )
    with pytest.raises(ArgumentError, match="row_major: got pages"):
        found.create_tma_tile(8, 128, fold=True, row_major=True)


def test_rope_rows_are_numbered_as_the_values() -> None:
    """Where the RoPE tensor has pages elsewhere its map numbers pages, and rows cannot be gathered by row_idx."""
    apart = Layout(k="page layer token dim", rope="layer page token dim")
    _, (found,) = keys("rope_apart", Latent(dtype="bf16", page_size=16, layout=apart))
    assert "page" in found.create_rope_tma_tile(16).plan.coordinates
    with pytest.raises(ArgumentError, match="k_rope: got pages"):
        found.create_rope_gather4_tma_tile()
    alike = Layout(k="page layer token dim", rope="page layer token dim")
    _, (found,) = keys("rope_alike", Latent(dtype="bf16", page_size=16, layout=alike))
    assert "row" in found.create_rope_tma_tile(16).plan.coordinates
    assert found.create_rope_gather4_tma_tile()


def test_no_scale_is_out_of_a_maps_reach() -> None:
    """A map of scales counts fours; a pool of others is refused, and not cut off."""
    quant = Quant(dtype="e4m3", scale_dtype="f32")
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=16, page_size=3, stores="k", quant=quant, table=CSR(),
                  layout=Layout(k="page token head dim", layers="pointers"))  # fmt: skip
    _, (found,) = keys("threes", cache)
    total = found.num_scale_rows
    if total % 4:
        with pytest.raises(ArgumentError, match="multiple of 4"):
            found.create_scale_tma_tile(3)
    else:
        assert found.create_scale_tma_tile(3).plan.dims[0] == total

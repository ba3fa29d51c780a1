"""A tile in shared memory is what the accessor loads: by tensor copies, and where there are none by cp.async."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvgen import Continuous, Ring
from kvgen.layout.dtypes import dtype
from kvgen.reference.segments import Coded
from kvgen.reference.tables import Place, TableView
from kvgen.runtime import cuda
from kvgen.runtime.faults import Fault
from tests.accessor.grid import FACTORS, Config, config, configs, full_grid
from tests.accessor.kernels import Trial, accessor, kernel_set, same
from tests.accessor.places import DEVICES, Session, build, session
from tests.accessor.scene import LAYER, REQUESTS, Bytes, Scene, aligned
from tests.accessor.tiles import PLAIN_COPIES, SWIZZLES, TENSOR_COPIES, Tile, copies_of_16, fitting, kernel, plain

CONFIGS = configs(TENSOR_COPIES)
if not full_grid():
    # Pages without gaps, which the most forms need, where the cover has them.
    CONFIGS = [replace(c, pad="tight") if c.other_pad == "tight" else c for c in CONFIGS]
    # Rows of 256 bytes, which fold in swizzles of 128, beside RoPE of the swizzles that are left
    choices = [("max", "none", "latent_two", "csr", "f32"), ("pointers", "none", "latent_two", "csr", "f32")]
    CONFIGS += [one for c in choices if (one := config(dict(zip(FACTORS, c, strict=True)))) is not None]
PLAIN = [c for c in configs(PLAIN_COPIES) if copies_of_16(c)]


def filled(scene: Scene) -> tuple[Scene, list[Trial]]:
    """The scene whose tokens all have random contents, put there by the oracle."""
    config = scene.config
    memory = scene.snapshot()
    trials = [Trial(scene, role, memory) for role in range(len(config.cache.storage.roles))]
    for trial in trials:
        trial.write()
    for name, tensors in scene.tensors.items():
        for tensor, written in zip(tensors, memory[name], strict=True):
            tensor.memory[:] = written
    return scene, trials


def role_caches(run: Session, scene: Scene) -> list[Any]:
    layer = run.cache
    found = [layer.get_key_cache(LAYER)]
    return found + ([layer.get_value_cache(LAYER)] if "v" in scene.cache.storage.roles else [])


def elements(scene: Scene, trial: Trial, tile: Tile, place: Place, at: int) -> np.ndarray:
    """A token's row as the tile has it, `[heads][depth]` unsigned numbers."""
    rows = scene.rows()[trial.role]
    if tile.part == "rope":
        return rows.parts[1].elements.read(place.page, at)
    part = rows.parts[0]
    if tile.part in ("scale", "index_scale"):
        return part.scales.read(place.scales, at).reshape(1, -1)
    if not isinstance(part, Coded):
        return part.elements.read(place.page, at)
    row = part.codes.read(place.page, at)
    return row[:, 0::2] | row[:, 1::2] << 4 if trial.shape.packed == 2 else row


def wanted(scene: Scene, trial: Trial, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """([request][tile][head][row][column] of what lies there, 0 where nothing does; whether a tile may have more than
    the accessor there: tokens out of a ring's reach or in a tail, the next request's block, K where the id of V is wrong)."""
    view = scene.view
    per_token = tile.part in ("scale", "index_scale")
    heads = 1 if per_token else trial.shape.heads
    tiles = -(-scene.tokens // tile.rows)
    sample = elements(scene, trial, tile, Place(0, 0), 0)
    kind = np.dtype(f"u{sample.dtype.itemsize}")
    found = np.zeros((REQUESTS, tiles, heads, tile.rows, tile.depth), kind)
    more = np.zeros(found.shape, bool)
    for b in range(REQUESTS):
        for token in range(tiles * tile.rows):
            at = (b, token // tile.rows, slice(None), token % tile.rows)
            page = token // scene.page_tokens
            places = view.places(b, page)
            if isinstance(scene.cache, Continuous) and page > 0:
                more[at] = tile.form not in ("pages", "folded_pages")
            elif isinstance(places, Fault):
                more[at] = its_own(view, trial.role, b, page, scales=per_token)
            elif not scene.reaches(b, token) or not trial.sealed(b, token):
                more[at] = True
            else:
                row = elements(scene, trial, tile, places[trial.role], token % scene.page_tokens)
                found[at][..., : row.shape[1]] = np.ascontiguousarray(row).view(kind)
    return found, more


def its_own(view: TableView, role: int, b: int, page: int, *, scales: bool) -> bool:
    """Whether a page without K and V, or without values and scales, has the one of them that a tile is made of."""
    if scales and view.own_table:
        return True
    entries = view.form.entries(b, page)
    return not isinstance(entries, Fault) and view.page_of(entries[role * (len(entries) - 1)], view.pages) is not None


NOWHERE = {"place_b": 0, "place_base": 0, "place_valid": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one", CONFIGS, ids=lambda c: c.name)
def test_tensor_copies(one: Config, device: str) -> None:
    """Tiles of every form that the layout has, past a request's end and past its pages; then stores of part of a tile."""
    if device != "cpu" and cuda.driver().capability(0)[0] != 9:
        pytest.skip("the sets are built for sm_90a")
    if not check_tiles(Scene(one), device):
        pytest.skip("no tensor map for this layout")


def check_tiles(empty: Scene, device: str) -> int:
    """The same of any scene; returns how many tiles there were."""
    scene, trials = filled(empty)
    config = scene.config
    found = fitting(config, probed(scene))
    if not found:
        return 0
    package = build(kernel_set(config, kernel(config, found, trials[0].shape.rope), of="tiles"))
    loads = [(n, t) for n, t in enumerate(found) if t.part != "ragged"]
    stores = [(n, t) for n, t in enumerate(found) if t.part == "ragged"]
    check_loads(scene, trials, package, device, "sm_90a", loads)
    for number, tile in stores:
        check_store(scene, trials[tile.role], package, device, number, tile)
    return len(found)


@pytest.mark.skipif(full_grid(), reason="the campaign has all tiles")
def test_every_form_has_every_swizzle_and_height() -> None:
    """Of the tiles that the test above copies."""
    swizzles, heights, plain_ones = set(), set(), set()
    for one in CONFIGS:
        scene = Scene(one)
        for tile in fitting(one, probed(scene)):
            swizzles.add((tile.part, tile.form, tile.swizzle))
            tall = "page" if tile.rows == scene.page_tokens else "part" if tile.rows < scene.page_tokens else "pages"
            heights.add((tile.part, tile.form, tall))
    main, pages = ("rows", "pages", "folded", "folded_pages", "row_major"), ("part", "page", "pages")
    parts = [("main", form) for form in main] + [("rope", "rows"), ("rope", "pages"), ("ragged", "")]
    assert swizzles == {(*part, s) for part in parts for s in SWIZZLES} | {("scale", "", 0), ("index_scale", "", 0)}
    folded = {("main", form, "pages") for form in ("folded", "folded_pages")}  # one copy, of one page
    wanted = {
        (*part, tall) for part in parts if part[0] != "rope" for tall in pages
    } - folded  # RoPE is asked for alike
    assert wanted <= heights, wanted - heights
    assert {("scale", "", "part"), ("scale", "", "page"), ("index_scale", "", "page")} <= heights
    for one in PLAIN:
        caches = probed(Scene(one))
        size = dtype(caches[0].role.values.dtype).bits
        plain_ones.update((size, tile.swizzle) for tile in plain(one, caches))
    assert plain_ones == {(size, s) for size in (8, 16, 32) for s in SWIZZLES}


def probed(scene: Scene) -> list[Any]:
    """K and V of the scene's layer on the host, of a package that is not compiled."""
    package = build(kernel_set(scene.config, accessor(scene.config), of="probe"))
    return role_caches(Session("cpu", package, scene.arrays(), scene.tables), scene)


@pytest.mark.parametrize("one", PLAIN, ids=lambda c: c.name)
def test_plain_copies(one: Config) -> None:
    """Where there are no tensor copies (sm_80) cp.async makes the same tiles, also of layouts that no map describes."""
    scene, trials = filled(Scene(one))
    found = plain(one, probed(scene))
    package = build(kernel_set(one, kernel(one, found, trials[0].shape.rope), of="plain"))
    check_loads(scene, trials, package, "cpu", "sm_80", list(enumerate(found)))


def check_loads(
    scene: Scene, trials: list[Trial], package: ModuleType, device: str, arch: str, tiles: list[tuple[int, Tile]]
) -> None:
    """The tile, the accessor and the oracle agree, and nothing is written."""
    before, results = scene.snapshot(), []
    with session(device, package, scene.arrays(), scene.tables, arch) as run:
        caches = role_caches(run, scene)
        for number, tile in tiles:
            right, more = wanted(scene, trials[tile.role], tile)
            out = {"copied": aligned(right.nbytes), "direct": aligned(right.nbytes)}
            results.append((tile, right, more, out))
            map_ = tile.map(caches[tile.role]) if arch == "sm_90a" else bytes(128)
            run.launch("tiles", LAYER, map=map_, **out, tokens=scene.tokens, which=number, **NOWHERE)
    unchanged(scene, before)
    for tile, right, more, out in results:
        copied, direct = (out[n].view(right.dtype).reshape(right.shape) for n in ("copied", "direct"))
        same(direct, right, f"the accessor: {tile}")
        # cp.async asks the accessor for every address.
        same(np.where(more, right, copied) if arch == "sm_90a" else copied, right, str(tile))


def check_store(scene: Scene, trial: Trial, package: ModuleType, device: str, number: int, tile: Tile) -> None:
    """Some rows of a tile, to the first tokens of the first request; all other memory stays as it was."""
    if isinstance(scene.cache.page_table, Ring):
        return
    valid = min(tile.rows, scene.page_tokens)
    valid -= valid > 2
    place = scene.view.places(0, 0)
    assert not isinstance(place, Fault)
    memory = scene.snapshot()
    part = scene.rows(memory)[trial.role].parts[0]
    target = part.codes if isinstance(part, Coded) else part.elements
    kind = trial.shape.element
    rows = scene.rng.integers(0, 256, (trial.shape.heads, tile.rows, tile.depth * kind.itemsize)).astype(np.uint8)
    for token in range(valid):
        row = rows[:, token].view(kind)[:, : trial.shape.main // trial.shape.packed]
        if trial.shape.packed == 2:
            row = np.stack([row & 15, row >> 4], axis=-1).reshape(len(row), -1)
        target.write(place[trial.role].page, token, row)
    copied = aligned(rows.nbytes)
    copied[:] = rows.reshape(-1)
    where = {"place_b": 0, "place_base": 0, "place_valid": valid}
    with session(device, package, scene.arrays(), scene.tables) as run:
        map_ = tile.map(role_caches(run, scene)[tile.role])
        run.launch(
            "tiles", LAYER, map=map_, copied=copied, direct=aligned(16), tokens=scene.tokens, which=number, **where
        )
    unchanged(scene, memory)


def unchanged(scene: Scene, before: dict[str, list[Bytes]]) -> None:
    """All memory is as in `before`."""
    for name, tensors in scene.tensors.items():
        for tensor, memory in zip(tensors, before[name], strict=True):
            assert bytes(tensor.memory) == bytes(memory), name

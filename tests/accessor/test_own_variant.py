"""A variant of one's own is some lines of layout: no operation knows it, and all of them run on it."""

from __future__ import annotations

import inspect
from functools import cached_property

import numpy as np
import pytest

from kvgen import Layout, Paged, Quant, ops
from kvgen.layout.axes import parse_axes
from kvgen.layout.dtypes import dtype
from kvgen.layout.regions import Region
from kvgen.layout.storage import Base, PoolTensor, Segment, Storage
from kvgen.reference import Rows, append, decode
from kvgen.reference.elements import Elements, cut
from kvgen.reference.segments import Coded, Plain
from kvgen.schema.cache import Cache
from tests.accessor.grid import Config
from tests.accessor.kernels import kernel_set
from tests.accessor.places import DEVICES, build, session
from tests.accessor.scene import LAYER, REQUESTS, Bytes, Scene
from tests.accessor.test_bytes import check_bytes
from tests.accessor.test_tiles import check_tiles, unchanged


class Fused(Paged):
    """K in the cache's dtype and V in e4m3, head by head in one row of bytes: [page, layer, token, head, K dims | V dims]."""

    layout: Layout = Layout(k="page layer token head dim", v="page layer token head dim")
    v_quant: Quant | None = Quant(dtype="e4m3")

    @cached_property
    def storage(self) -> Storage:
        begin, heads, tokens = self.head_dim * dtype(self.dtype).bytes, self.kv_heads, self.page_size
        width = begin + self.v_dim
        axes = parse_axes("page layer token head dim")

        def part(role: str, dim: int) -> Segment:
            kind, at = (dtype(self.dtype), 0) if role == "k" else (dtype("e4m3"), begin)
            extents = (("kv", 1), ("token", tokens), ("head", heads), ("dim", dim))
            region = Region(role, kind, axes, extents, byte_offset=at, pitch=width // kind.bytes)
            return Segment(0, dim, "row", region, self.quants[role])

        shape, steps = ("pages", "layers", tokens, heads, width), (None, None, heads * width, width, 1)
        names = ("page", "layer", "token", "head", "byte")
        pool = PoolTensor("pool", ("u8",), names, shape, steps, 16, " ".join(names), (None,) * 5)
        roles = {"k": (part("k", self.head_dim),), "v": (part("v", self.v_dim),)}
        return Storage((pool,), (Base("row", "pool", dtype("u8")),), roles)


class FusedScene(Scene):
    """Its memory, read by NumPy."""

    def rows(self, memory: dict[str, list[Bytes]] | None = None) -> tuple[Rows, ...]:
        cache, pool, kind = self.cache, self.arrays(memory)["pool"], dtype(self.cache.dtype).numpy()
        found = []
        for begin, dim, what in ((0, cache.head_dim, kind), (cache.head_dim * kind.itemsize, cache.v_dim, np.uint8)):
            part = cut(pool, begin, [dim], np.dtype(what))
            found.append(Elements(part, "page layer token head dim", heads=cache.kv_heads, dim=dim, layer=LAYER))
        quant = cache.quants["v"]
        assert quant is not None
        codes = Coded(quant, (1, 1, cache.v_dim), found[1], None, None, None, kind)
        return Rows([Plain(found[0])]), Rows([codes])


def test_it_is_short() -> None:
    """The claim is that a variant is 30 lines."""
    assert len(inspect.getsource(Fused).rstrip().splitlines()) <= 30


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "v_dim"), [("f32", 32), ("f16", 48)])
def test_everything_runs_on_it(kind: str, v_dim: int, device: str) -> None:
    """Stores, loads, gather, tiles, append, decode."""
    cache: Cache = Fused(dtype=kind, kv_heads=2, head_dim=64, v_head_dim=v_dim, page_size=8)
    config = Config(f"fused_{kind}", cache, "rows")
    check_bytes(config, device, FusedScene)
    assert check_tiles(FusedScene(config), device)

    scene, package = FusedScene(config), build(kernel_set(config, ops.Append(), ops.Decode(), of="own"))
    lengths = scene.tables["lengths"]
    lengths[:] = [7, 3, 0]
    value, count = dtype(kind).numpy(), np.array([5, 1, 2])
    offsets = np.cumsum([0, *count]).astype(np.int32)
    new = [scene.rng.standard_normal((8, r.heads, r.dim)).astype(value) for r in scene.rows()]
    memory = scene.snapshot()
    append(scene.view, scene.rows(memory), new, row_offsets=offsets)
    with session(device, package, scene.arrays(), scene.tables) as run:
        run.launch("append", LAYER, k=new[0], v=new[1], row_offsets=offsets)
    unchanged(scene, memory)

    q = scene.rng.standard_normal((REQUESTS, 2, 64)).astype(value)
    out = np.zeros((REQUESTS, 2, v_dim), value)
    lengths[:] = [5, 2, 0]
    wanted = decode(scene.view, scene.rows(), q, scale=0.125)
    with session(device, package, scene.arrays(), scene.tables) as run:
        run.launch("decode", LAYER, q=q, out=out)
    np.testing.assert_allclose(out.astype(np.float64), wanted.out, rtol=2e-2, atol=2e-2)

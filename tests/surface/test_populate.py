"""populate against NumPy: every table form, tiles of several pages, one, and part of one; hostile ids; the width of its reads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvgen import CSR, Dense, Paged
from kvgen.compile import UnitError, compile_unit
from kvgen.errors import ArgumentError
from kvgen.ops import Array as ArrayArgument
from kvgen.ops import Custom
from kvgen.schema.cache import Cache
from tests.surface.harness import BF16, CACHES, MAX, TABLES, filled, package, run, unit
from tests.surface.marks import proves
from tests.surface.tables import BAD, bind, page_of

COUNT, LAYERS, COLUMNS, NO_ROW = 6, 2, 13, 0x7FFFFF00
# BN, base_alignment, whether it is a pair's CTA, whether the leader's: as populate.cu has them.
FORMS = ((128, 128, False, True), (64, 32, True, False), (16, 16, True, True), (8, 8, True, False))
SLOT_FORMS = ((8, 8, False, True), (4, 2, False, True), (1, 1, False, True), (8, 8, True, False))
# The last request has ids outside of the pool; so has the first, in the middle of a chunk.
IDS = (
    (0, 5, 1, 4, 2, 3, 3, COUNT, 0, 1, 5, BAD, 2),
    (5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0, 5),
    (COUNT, COUNT + 1, 0, 1, 1000, 2, BAD, 3, 4, 5, 0, 1, COUNT),
)
V_IDS = tuple(tuple(reversed(row)) for row in IDS)


def pool(cache: Cache, padded: bool) -> Any:
    """(the pool, rows from one page to the next)."""
    heads, dim = cache.kv_heads, cache.head_dim
    tokens = cache.page_tokens or 48
    if "kv" not in (cache.layout.kv or ""):
        return filled((COUNT, LAYERS, tokens, heads, dim), BF16), LAYERS * tokens
    whole = filled((COUNT, 3 if padded else 2, LAYERS, tokens, heads, dim), BF16)
    return whole[:, :2], (3 if padded else 2) * LAYERS * tokens


def expected(cache: Cache, ids: tuple[int, ...], base: int, bn: int, pitch: int) -> list[int]:
    """The rows of the sub-pages of a tile."""
    size = cache.page_tokens or 48
    step = bn if cache.page_tokens is None or size >= bn else size
    rows = []
    for token in range(base, base + bn, step):
        page = page_of(cache, ids, token // size, COUNT)
        rows.append(NO_ROW if page is None else page * pitch + token % size)
    return rows


@proves("KVCacheMHAOperand", "populate")
@pytest.mark.parametrize("name", TABLES)
def test_populate(name: str) -> None:
    cache = TABLES[name]
    found, pitch = pool(cache, padded=name == "dense1")
    tables = bind(cache, IDS, V_IDS)
    layer = package(name).Cache(found, **tables)[1]
    places = np.array([(b, tile) for b in range(len(IDS)) for tile in range(15)], np.uint32)
    rows = np.full((len(places), 2, 64), 7, np.uint32)
    run(package(name).populate, layer, places=places, rows=rows)
    forms = SLOT_FORMS if cache.page_tokens == 1 else FORMS
    seen = 0
    for (b, tile), both in zip(places.tolist(), rows, strict=True):
        for ids, one in zip((IDS, V_IDS if name == "per_kv" else IDS), both, strict=True):
            for (bn, align, pair, leader), numbers in zip(forms, one.reshape(4, 16).tolist(), strict=True):
                wanted = expected(cache, ids[b], tile * align, bn, pitch)
                step = bn // len(wanted)
                assert numbers[12] == len(wanted)
                assert numbers[: len(wanted)] == wanted, (b, tile, bn)
                half = bn // 2 if pair and not leader else 0
                for at, token in ((8, 0), (9, bn - 1), (10, half), (11, half + bn // 2 - 1 if bn > 1 else None)):
                    if token is not None:
                        assert numbers[at] == wanted[token // step] + token % step
                seen += sum(row != NO_ROW for row in wanted)
    assert seen > 40


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_clamped_tail_reads_nothing_past_the_table(cut: int) -> None:
    """A table of `cut` columns ends with its last entry; the tiles begin before its end and go on far behind it."""
    cache = TABLES["dense8"]
    found, pitch = pool(cache, padded=False)
    ids = tuple(row[:cut] for row in IDS)
    layer = package("dense8").Cache(found, **bind(cache, ids, ids))[0]
    rows = np.zeros((len(ids), 2, 64), np.uint32)
    run(package("dense8").populate, layer, places=np.array([(b, 0) for b in range(len(ids))], np.uint32), rows=rows)
    for b in range(len(ids)):
        wanted = expected(cache, ids[b], 0, 128, pitch)
        assert wanted.count(NO_ROW) >= 8 - cut
        assert rows[b, 0, :8].tolist() == wanted


@proves("KVCacheMHAOperand", "populate", "create_tma_tile")
@proves("KVCacheT", "create_tma_tile")
@pytest.mark.parametrize("layer", range(LAYERS))
def test_tiles_come_through_maps_and_rows(layer: int) -> None:
    """Pages that are none, and those behind the table, come as zeros."""
    cache = CACHES["paged"]
    whole, _ = pool(cache, padded=True)
    ids = tuple(row[:6] for row in IDS)
    found = package("tiles").Cache(whole, **bind(cache, ids, ids))
    out = filled((len(ids), 2, 64, 64), BF16, 3)
    head = 1
    run(
        package("tiles").tiles, found[layer], map=found.get_key_cache(layer).create_tma_tile(64, 64), out=out, head=head
    )
    for b, row in enumerate(ids):
        for token in range(128):
            page = page_of(cache, row, token // 16, COUNT)
            wanted = np.zeros(64, BF16) if page is None else whole[page, 0, layer, token % 16, head]
            assert out[b, token // 64, token % 64].tobytes() == np.ascontiguousarray(wanted).tobytes()


def one(cache: Cache, call: str) -> Custom:
    text = f"""#include "cache.cuh"
extern "C" __global__ void one(const __grid_constant__ Cache cache, uint32_t* out) {{
  const auto rows = get_key_cache(cache).{call};
  for (uint32_t i = 0; i < sizeof(rows.rows) / 4; ++i) out[i] = rows.rows[i];
}}
"""
    return Custom(name="one", text=text, params=[ArrayArgument("out", "u32", ("T",), "out")], grid=1)


@pytest.mark.parametrize(
    ("table", "call", "loads"),
    [
        (Dense(align=1), "populate<128, 128>(0, 128)", {1: 8}),
        (Dense(align=2), "populate<128, 128>(0, 128)", {2: 4}),
        (Dense(align=4), "populate<128, 128>(0, 128)", {4: 2}),
        (Dense(align=8), "populate<128, 128>(0, 128)", {4: 2}),  # 32 bytes: two reads of 16
        (Dense(align=8), "populate<64, 64>(0, 64)", {4: 1}),
        (Dense(align=8), "populate<128, 32>(0, 32)", {2: 4}),  # the mask promises no more
        (Dense(align=4, dtype="i64"), "populate<64, 64>(0, 64)", {2: 2}),
        (CSR(), "populate<64, 64>(0, 64)", {}),
    ],
)
def test_the_table_is_read_in_vectors(table: Any, call: str, loads: dict[int, int]) -> None:
    cache = Paged(**MAX, table=table)
    ptx = compile_unit(unit(cache, one(cache, call)), "sm_90a", "ptx", cache=None).data.decode()
    vectors = [int(n) for n in re.findall(r"ld\.global(?:\.nc)?\.v(\d)\.\w+", ptx)]
    wanted = [n for n, count in loads.items() for _ in range(count) if n > 1]
    assert sorted(vectors) == sorted(wanted)


def test_unaligned_tables_are_refused_when_bound() -> None:
    cache = TABLES["dense8"]
    found, _ = pool(cache, padded=False)
    tables = bind(cache, IDS, IDS)
    whole = np.zeros(16 * 4 + 1, np.int32)
    start = (-whole.ctypes.data % 32 // 4 + 1) % 8  # one entry past a multiple of 8
    shifted = np.lib.stride_tricks.as_strided(whole[start:], (3, COLUMNS), (64, 4))
    odd = np.zeros((3, COLUMNS), np.int32)
    for table, wrong in ((shifted, "address"), (odd, "stride")):
        with pytest.raises(ArgumentError, match=rf"page_table.*\n?.*({wrong}|align|multiple)"):
            package("dense8").Cache(found, **tables | {"page_table": table})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("populate<64, 8>(0, 8)", "base_alignment must be a multiple of the page size"),
        ("populate<24, 8>(0, 8)", "BN must be a multiple of the page size or divide it"),
        ("populate<12, 4>(0, 4)", "BN must be a multiple of the page size or divide it"),
    ],
)
def test_tiles_that_do_not_fit_pages_are_refused(call: str, message: str) -> None:
    cache = Paged(**MAX)
    with pytest.raises(UnitError) as error:
        compile_unit(unit(cache, one(cache, call)), "sm_90a", "ptx", cache=None)
    assert message in str(error.value)

"""What a launch on a GPU is made of: grid, block, and the bytes of every parameter, against a driver that takes notes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime import gpu
from tests.support.launching import BF16, DeviceArray, NotingDriver, package

POOL, K_ROWS, V_ROWS, OFFSETS, LENGTHS, TABLE, ERRORS, OUT = (n << 24 for n in range(1, 9))
GPU_1 = 1 << 40  # addresses from here on are the second GPU's


@pytest.fixture(autouse=True)
def cubins(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels without code."""
    monkeypatch.setattr(gpu, "cubin", lambda module, file, entry, capability: f"{file} {capability}".encode())
    gpu._function.cache_clear()
    yield
    gpu._function.cache_clear()


def paged_cache(batch: int = 2, *, at: int = 0) -> Any:
    """A pool of five pages, padded tables."""
    return package("paged").Cache(
        DeviceArray((5, 2, 2, 4, 2, 16), BF16, at + POOL),
        lengths=DeviceArray((batch,), np.int32, at + LENGTHS),
        page_table=DeviceArray((batch, 3), np.int32, at + TABLE, strides=(32, 4)),
    )


def packed(kinds: str, *values: int) -> list[bytes]:
    """Values as the driver reads them: P pointer, I u32, q i64."""
    return [struct.pack("<" + kind.replace("P", "Q"), value) for kind, value in zip(kinds, values, strict=True)]


def struct_of(kinds: str, *values: int) -> list[bytes]:
    """The cache's struct; x stands for the four bytes that C leaves free before the next 8-byte field, or at the end."""
    return [struct.pack("<" + kinds.replace("P", "Q").replace("x", "4x"), *values)]


# Of the pool above: K, V, page strides, pages, lengths, B, table, its stride and columns, the most tokens of a step and of a
# request: what the table's columns hold.
FIELDS = "PPqqIxPIxPqIIIx"
# Layer 1: K one layer in, V one kv further.
LAYER_1 = struct_of(FIELDS, POOL + 256, POOL + 256 + 512, 512, 512, 5, LENGTHS, 2, TABLE, 8, 3, 12, 12)


def test_append(driver: NotingDriver) -> None:
    rows = 70
    k = DeviceArray((rows, 2, 16), BF16, K_ROWS, strides=(192, 32, 2))
    v = DeviceArray((rows, 2, 16), BF16, V_ROWS)
    offsets = DeviceArray((3,), np.int32, OFFSETS)
    errors = DeviceArray((1,), np.uint64, ERRORS)
    package("paged").append(paged_cache()[1], k, v, offsets, errors=errors, stream=0x55)
    assert driver.launches == [
        {
            "entry": "paged_append",
            "device": 0,
            "grid": (9, 1, 1),  # 8 rows a block
            "block": (256, 1, 1),
            "shared": 0,
            "pdl": True,
            "stream": 0x55,
            "params": LAYER_1 + packed("PPPqqIP", K_ROWS, V_ROWS, OFFSETS, 96, 32, rows, ERRORS),
        }
    ]
    assert driver.loaded == [(b"append.cu (9, 0)", "paged_append", 0)]


def test_gather_without_optional_arrays_passes_null(driver: NotingDriver) -> None:
    k, v = (DeviceArray((32, 2, 16), BF16, p) for p in (K_ROWS, V_ROWS))
    package("paged").gather(paged_cache()[1], DeviceArray((3,), np.int32, OFFSETS), k, v)
    (launch,) = driver.launches
    assert (launch["grid"], launch["block"], launch["stream"]) == ((1, 1, 1), (256, 1, 1), 0)
    assert launch["params"] == LAYER_1 + packed("PPPPqqIP", OFFSETS, K_ROWS, V_ROWS, 0, 32, 32, 32, 0)


@pytest.mark.parametrize("op", ["decode", "fixed"])
def test_decode_and_its_planner(driver: NotingDriver, op: str) -> None:
    """Sizes of the workspace go to both; the grid is the GPU's, not the batch's."""
    decode, cache = getattr(package("paged"), op), paged_cache(batch=3)
    workspace = decode.workspace(5, device="cuda:0", max_tokens=12)
    q, out = (DeviceArray((3, 4, 16), BF16, p) for p in (K_ROWS, OUT))
    offsets = DeviceArray((4,), np.int32, OFFSETS)
    decode.plan(cache[0], workspace, rows=3, row_offsets=offsets, stream=9)
    decode(cache[0], q, out, workspace, stream=9)
    plan, launch = driver.launches
    layer_0 = struct_of(FIELDS, POOL, POOL + 512, 512, 512, 5, LENGTHS, 3, TABLE, 8, 3, 12, 12)
    memory, sm_parts = workspace.view.pointer, 132 * decode.SPLIT_PLAN.blocks_per_sm // 2
    # A slot is a partial result: two of each SM part, or one of each chunk that five rows may have.
    chunks, slots = (5 + sm_parts, 2 * sm_parts) if op == "decode" else (5 * 2, 5 * 2)
    sizes = (sm_parts, 5, chunks, slots)
    assert (plan["entry"], plan["grid"], plan["block"]) == (f"paged_{op}_plan", (1, 1, 1), (decode.PLAN.threads, 1, 1))
    assert plan["params"] == layer_0 + packed("PPIIIII", memory, OFFSETS, 3, *sizes)
    shared = decode.KERNEL.shared_on("sm_90a")
    assert launch["entry"] == f"paged_{op}" and launch["shared"] == shared == driver.shared.get(f"paged_{op}", shared)
    assert launch["grid"] == (2 * sm_parts, 1, 1), "a block for every SM part and kv head"
    assert launch["params"] == layer_0 + packed("PPPPqqIIIIIP", K_ROWS, OUT, memory, 0, 64, 64, 3, *sizes, 0)
    assert plan["pdl"] and launch["pdl"] and plan["stream"] == launch["stream"] == 9


def test_layers_with_tensors_of_their_own(driver: NotingDriver) -> None:
    apart = package("apart")
    cache = apart.Cache(
        [DeviceArray((5, 4, 2, 8), np.float32, POOL + n) for n in (0, 1 << 16)],
        [DeviceArray((5, 4, 2, 4), np.float32, OUT + n) for n in (0, 1 << 16)],
        lengths=DeviceArray((2,), np.int32, LENGTHS),
        page_table=DeviceArray((2, 3), np.int32, TABLE),
    )
    k, v = DeviceArray((2, 2, 8), np.float32, K_ROWS), DeviceArray((2, 2, 4), np.float32, V_ROWS)
    apart.append_slots(cache[1], k, v, DeviceArray((2,), np.int64, OFFSETS))
    layer_1 = struct_of(FIELDS, POOL + (1 << 16), OUT + (1 << 16), 64, 32, 5, LENGTHS, 2, TABLE, 3, 3, 12, 12)
    rows = packed("PPPqqIP", K_ROWS, V_ROWS, OFFSETS, 16, 8, 2, 0)
    assert driver.launches[0]["params"] == layer_1 + rows


def test_a_block_of_a_continuous_cache_is_a_page(driver: NotingDriver) -> None:
    blocks = package("blocks")
    cache = blocks.Cache(
        DeviceArray((5, 2, 2, 6, 1, 8), np.float16, POOL),
        lengths=DeviceArray((2,), np.int32, LENGTHS),
        page_table=DeviceArray((2,), np.int32, TABLE),
    )
    k, v = (DeviceArray((2, 1, 8), np.float16, p) for p in (K_ROWS, V_ROWS))
    blocks.append(cache[0], k, v, DeviceArray((3,), np.int32, OFFSETS))
    struct = driver.launches[0]["params"][0]
    assert struct[-24:] == b"".join(packed("qIIII", 1, 1, 6, 6, 0)), "one page a request of 6 tokens, tables packed"


def test_the_second_gpu(driver: NotingDriver) -> None:
    """The launch goes where the arrays are, and loads its kernel there, once."""
    append = package("paged").append
    for at in (GPU_1, 0, GPU_1):
        k, v = (DeviceArray((2, 2, 16), BF16, at + p) for p in (K_ROWS, V_ROWS))
        append(paged_cache(at=at)[0], k, v, DeviceArray((3,), np.int32, at + OFFSETS))
    assert [launch["device"] for launch in driver.launches] == [1, 0, 1]
    assert [device for _, _, device in driver.loaded] == [1, 0]


def test_a_bound_call_launches_on_each_stream_it_is_given(driver: NotingDriver) -> None:
    k, v = (DeviceArray((2, 2, 16), BF16, p) for p in (K_ROWS, V_ROWS))
    step = package("paged").append.bind(paged_cache()[0], k, v, DeviceArray((3,), np.int32, OFFSETS))
    assert not driver.launches and driver.loaded, "bound, loaded, not launched"
    step(1)
    step()
    assert [launch["stream"] for launch in driver.launches] == [1, 0]
    assert driver.launches[0]["params"] == driver.launches[1]["params"]
    with pytest.raises(ArgumentError, match=r"^stream: got 'x'; it must be None, a stream handle, or a stream"):
        step("x")


def test_a_stream_given_to_bind_is_that_of_calls_without_one(driver: NotingDriver) -> None:
    k, v = (DeviceArray((2, 2, 16), BF16, p) for p in (K_ROWS, V_ROWS))
    step = package("paged").append.bind(paged_cache()[0], k, v, DeviceArray((3,), np.int32, OFFSETS), stream=5)
    assert not driver.launches
    step()
    step(1)
    assert [launch["stream"] for launch in driver.launches] == [5, 1]


def test_an_empty_batch_is_not_launched(driver: NotingDriver) -> None:
    k, v = (DeviceArray((0, 2, 16), BF16, 0) for _ in range(2))
    cache = package("paged").Cache(
        DeviceArray((5, 2, 2, 4, 2, 16), BF16, POOL),
        lengths=DeviceArray((0,), np.int32, 0),
        page_table=DeviceArray((0, 3), np.int32, 0),
    )
    package("paged").append(cache[0], k, v, DeviceArray((1,), np.int32, OFFSETS), stream=3)
    assert not driver.launches and not driver.loaded


@pytest.mark.parametrize("wrong", ["workspace", "k"])
def test_one_gpus_arrays_for_the_other(driver: NotingDriver, wrong: str) -> None:
    rule = f"{wrong}: got an array on cuda:1; the call runs on cuda:0, where the cache is; pass an array on cuda:0"
    module, cache = package("paged"), paged_cache()
    with pytest.raises(ArgumentError) as caught:
        if wrong == "workspace":
            module.decode.plan(cache[0], module.decode.workspace(2, device="cuda:1"))
        else:
            k, v = (DeviceArray((2, 2, 16), BF16, p) for p in (GPU_1 + K_ROWS, V_ROWS))
            module.append(cache[0], k, v, DeviceArray((3,), np.int32, OFFSETS))
    assert str(caught.value) == rule
    assert not driver.launches


@pytest.mark.parametrize(("capability", "pdl"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_kernels_overlap_where_they_can_wait(
    driver: NotingDriver, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], pdl: bool
) -> None:
    """Code before sm_90 has no griddepcontrol.wait, so it must not start early."""
    monkeypatch.setattr(driver, "capability", lambda device: capability)
    k, v = (DeviceArray((2, 2, 16), BF16, p) for p in (K_ROWS, V_ROWS))
    package("paged").append(paged_cache()[0], k, v, DeviceArray((3,), np.int32, OFFSETS))
    assert [launch["pdl"] for launch in driver.launches] == [pdl]
    assert driver.loaded[0][0] == f"append.cu {capability}".encode()


def test_more_than_32_bits_count(driver: NotingDriver) -> None:
    """Refused before anything is launched, by the argument's name; what the cache's struct holds when it is made."""
    table = {"lengths": DeviceArray((2,), np.int32, LENGTHS), "page_table": DeviceArray((2, 3), np.int32, TABLE)}
    rule = r"= 4294967296; kernels count it in 32 bits; pass less than 2\^32"
    with pytest.raises(ArgumentError, match=rf"^pool: got pages {rule}"):
        package("paged").Cache(DeviceArray((2**32, 2, 2, 4, 2, 16), BF16, POOL), **table)
    with pytest.raises(
        ArgumentError, match=r"^pool: got 2147483649 pages; ids in tables of i32 are below 2\^31; pass a smaller"
    ):
        package("paged").Cache(DeviceArray((2**31 + 1, 2, 2, 4, 2, 16), BF16, POOL), **table)
    table["page_table"] = DeviceArray((2, 2**32), np.int32, TABLE)
    with pytest.raises(ArgumentError, match=rf"^page_table: got M {rule}"):
        package("paged").Cache(DeviceArray((5, 2, 2, 4, 2, 16), BF16, POOL), **table)
    module, cache, offsets = package("paged"), paged_cache(), DeviceArray((3,), np.int32, OFFSETS)
    k, v = (DeviceArray((2**32, 2, 16), BF16, p) for p in (K_ROWS, V_ROWS))
    with pytest.raises(
        ArgumentError, match=r"^k: got T = 4294967296; kernels count it in 32 bits; pass less than 2\^32"
    ):
        module.append(cache[0], k, v, offsets)
    apart = package("apart")
    layer = apart.Cache(
        [DeviceArray((5, 4, 2, 8), np.float32, POOL)],
        [DeviceArray((5, 4, 2, 4), np.float32, OUT)],
        lengths=DeviceArray((2,), np.int32, LENGTHS),
        page_table=DeviceArray((2, 3), np.int32, TABLE),
    )[0]
    q, out = (DeviceArray((2**31, 2, dim), np.float32, p) for dim, p in ((8, 1 << 38), (4, 1 << 39)))
    with pytest.raises(
        ArgumentError, match=r"^apart_decode: got a grid of 4294967296 blocks; a grid holds at most 2\^31 - 1"
    ):
        apart.decode(layer, q, out)
    assert not driver.launches


def test_a_bound_plan_is_a_launch(driver: NotingDriver) -> None:
    module, cache = package("paged"), paged_cache()
    workspace = module.decode.workspace(2, device="cuda:0")
    plan = module.decode.bind_plan(cache[0], workspace)
    assert not driver.launches
    plan(4)
    assert [launch["stream"] for launch in driver.launches] == [4]

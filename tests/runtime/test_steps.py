"""Steps: calls like the last one, bound launches with other arrays, tables of another step, caches without tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvgen
from generated import llama3_8b
from kvgen import KernelSet, ops, presets
from kvgen.errors import ArgumentError
from kvgen.runtime import gpu
from tests.support.harness import package as harness_package
from tests.support.launching import BF16, DeviceArray, NotingDriver, package

POOL, Q, K, V, Q_OUT, OFFSETS, LENGTHS, TABLE, ERRORS = (n << 24 for n in range(1, 10))
GPU_1 = 1 << 40


@pytest.fixture
def launches(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Kernels without code; what was launched."""
    monkeypatch.setattr(gpu, "cubin", lambda module, file, entry, capability: file.encode())
    gpu._function.cache_clear()
    yield driver.launches
    gpu._function.cache_clear()


def cache_on_gpu(batch: int = 2, pool: int = POOL, table: int = TABLE) -> Any:
    return package("paged").Cache(
        DeviceArray((5, 2, 2, 4, 2, 16), BF16, pool),
        lengths=DeviceArray((batch,), np.int32, LENGTHS),
        page_table=DeviceArray((batch, 3), np.int32, table),
    )


def arrays(rows: int = 6, batch: int = 2, **at: int) -> dict[str, Any]:
    """What append takes."""
    where = {"k": K, "v": V, "row_offsets": OFFSETS, **at}
    return {
        "k": DeviceArray((rows, 2, 16), BF16, where["k"]),
        "v": DeviceArray((rows, 2, 16), BF16, where["v"]),
        "row_offsets": DeviceArray((batch + 1,), np.int32, where["row_offsets"]),
    }


def fresh(name: str) -> Any:
    """An operation that remembers no call."""
    return type(getattr(package("paged"), name))()


# Calls like the last one ---------------------------------------------------------------------------------------------


def test_a_repeated_call_launches_what_a_first_one_does(launches: list[dict[str, Any]]) -> None:
    """Other layers, addresses, pools, tables and streams: the same bytes as by a launcher that checks in full."""
    append, cache = fresh("append"), cache_on_gpu()
    append(cache[0], **arrays())
    checked = count_checks(append)
    random = np.random.default_rng(7)
    for number in range(50):
        other = cache_on_gpu(pool=POOL + 4096 * int(random.integers(4)), table=TABLE + 16 * int(random.integers(99)))
        at = {
            name: base + 256 * int(random.integers(1000))
            for name, base in (("k", K), ("v", V), ("row_offsets", OFFSETS))
        }
        layer = other[number % 2]
        append(layer, **arrays(**at), stream=number)
        fresh("append")(layer, **arrays(**at), stream=number)
        assert launches[-1] == launches[-2]
    assert checked() == 0, "each was like the first"


def count_checks(launcher: Any) -> Callable[[], int]:
    """How often the launcher has checked a call in full from here on."""
    before = {entry: list(calls) for entry, calls in launcher.now._calls.items()}

    def found() -> int:
        return sum(
            len([c for c in calls if c not in before.get(entry, [])]) for entry, calls in launcher.now._calls.items()
        )

    return found


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "dtype": lambda a: a.update(k=DeviceArray((6, 2, 16), np.float16, K)),
    "shape": lambda a: a.update(v=DeviceArray((6, 2, 8), BF16, V)),
    "rows": lambda a: a.update(v=DeviceArray((7, 2, 16), BF16, V)),
    "strides": lambda a: a.update(k=DeviceArray((6, 2, 16), BF16, K, strides=(64, 2, 4))),
    "unaligned": lambda a: a.update(k=DeviceArray((6, 2, 16), BF16, K + 2)),
    "null": lambda a: a.update(k=DeviceArray((6, 2, 16), BF16, 0)),
    "in_the_pool": lambda a: a.update(k=DeviceArray((6, 2, 16), BF16, POOL + 64)),
    "other_gpu": lambda a: a.update(v=DeviceArray((6, 2, 16), BF16, GPU_1 + V)),
    "on_the_cpu": lambda a: a.update(v=np.zeros((6, 2, 16), BF16)),
    "none": lambda a: a.update(v=None),
    "no_array": lambda a: a.update(v="v"),
    "offsets": lambda a: a.update(row_offsets=DeviceArray((4,), np.int32, OFFSETS)),
    "errors": lambda a: a.update(errors=DeviceArray((2,), np.uint64, ERRORS)),
    "errors_in_the_pool": lambda a: a.update(errors=DeviceArray((1,), np.uint64, POOL + 8)),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_call_that_is_wrong_is_refused_as_at_first(launches: list[dict[str, Any]], wrong: str) -> None:
    append, layer = fresh("append"), cache_on_gpu()[0]
    append(layer, **arrays())
    append(layer, **arrays(), errors=DeviceArray((1,), np.uint64, ERRORS))
    bad = arrays()
    WRONG[wrong](bad)
    texts = []
    for launcher in (append, fresh("append")):
        with pytest.raises(ArgumentError) as caught:
            launcher(layer, **bad)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert len(launches) == 2


def test_rows_and_batches_of_another_size(launches: list[dict[str, Any]]) -> None:
    append = fresh("append")
    for rows, batch in ((6, 2), (6, 2), (40, 2), (6, 3), (6, 2), (40, 2), (0, 2)):
        append(cache_on_gpu(batch)[0], **arrays(rows, batch))
    assert [launch["grid"][0] for launch in launches] == [1, 1, 5, 1, 1, 5]


def test_in_place_stays_in_place(launches: list[dict[str, Any]]) -> None:
    """q_out may be q itself, and nothing else of q: at the first call and at each one like it."""
    cache = llama3_8b.Cache(
        DeviceArray((5, 2, 2, 16, 8, 128), BF16, POOL),
        lengths=DeviceArray((2,), np.int32, LENGTHS),
        page_table=DeviceArray((2, 3), np.int32, TABLE),
    )
    append, layer = type(llama3_8b.append)(), cache[0]
    k, v = (DeviceArray((6, 8, 128), BF16, at) for at in (K, V))

    def call(q: int, q_out: int) -> None:
        first, last = (DeviceArray((6, 32, 128), BF16, at) for at in (q, q_out))
        append(layer, first, k, v, last, arrays()["row_offsets"])

    for _ in range(2):
        call(Q, Q)
        call(Q + 256, Q + 256)
        call(Q, Q_OUT)
        with pytest.raises(ArgumentError, match=r"^q_out: got memory that q lies in too"):
            call(Q, Q + 256)
    assert len(launches) == 6


# Bound launches ------------------------------------------------------------------------------------------------------


def test_a_bound_launch_takes_other_arrays(launches: list[dict[str, Any]]) -> None:
    cache = cache_on_gpu()
    append = fresh("append")
    bound = append.bind(cache[0], **arrays())
    for number, cached in ((0, cache[1]), (1, cache_on_gpu(table=TABLE + 64)[0])):
        bound(5, cache=cached, k=arrays(k=K + 64 * number)["k"], v=arrays(v=V + 64)["v"])
        append(cached, **arrays(k=K + 64 * number, v=V + 64), stream=5)
        assert launches[-1] == launches[-2]
    bound(6)
    assert launches[-1] == {**launches[-2], "stream": 6}, "what was replaced stays"


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"k": DeviceArray((5, 2, 16), BF16, K)},
        r"k: got shape \(5, 2, 16\); the launch was bound for \(6, 2, 16\)",
    ),
    "dtype": ({"k": DeviceArray((6, 2, 16), np.float16, K)}, "k: got dtype f16; the launch was bound for bf16"),
    "strides": (
        {"k": DeviceArray((6, 2, 16), BF16, K, strides=(128, 32, 2))},
        r"k: got strides \(64, 16, 1\); the launch was bound for \(32, 16, 1\)",
    ),
    "unaligned": ({"v": DeviceArray((6, 2, 16), BF16, V + 2)}, r"v: got address 0x\w+; it must be a multiple of"),
    "null": ({"v": DeviceArray((6, 2, 16), BF16, 0)}, "v: got address 0x0"),
    "device": (
        {"v": DeviceArray((6, 2, 16), BF16, GPU_1 + V)},
        "v: got device cuda:1; the launch was bound for cuda:0",
    ),
    "host": ({"v": np.zeros((6, 2, 16), BF16)}, "v: got device cpu"),
    "no_array": ({"v": 3}, "v: got int; it must be an array"),
    "unknown": (
        {"q": DeviceArray((6, 2, 16), BF16, V)},
        "q: got an array; this launch was bound with k, v, row_offsets;",
    ),
    "left_out": ({"errors": DeviceArray((1,), np.uint64, ERRORS)}, "errors: got an array; this launch was bound with"),
    "no_layer": ({"cache": 7}, "cache: got 7; it must be a layer of paged.Cache"),
    "whole_cache": ({"cache": "whole"}, "cache: got 'whole'"),
}


@pytest.mark.parametrize("case", list(BAD_ROWS))
def test_a_bound_launch_refuses_others(launches: list[dict[str, Any]], case: str) -> None:
    given, message = BAD_ROWS[case]
    bound = fresh("append").bind(cache_on_gpu()[0], **arrays())
    with pytest.raises(ArgumentError, match=f"^{message}"):
        bound(**given)
    bound()
    assert launches[-1]["params"][1:4] == [int(a).to_bytes(8, "little") for a in (K, V, OFFSETS)], "as it was bound"


def test_replacing_takes_all_arrays_or_none(launches: list[dict[str, Any]]) -> None:
    bound = fresh("append").bind(cache_on_gpu()[0], **arrays())
    for bad in ({"v": arrays(v=V + 2)["v"]}, {"q": arrays()["k"]}, {"cache": cache_on_gpu(3)[0]}):
        with pytest.raises(ArgumentError):
            bound(k=arrays(k=K + 64)["k"], **bad)
    bound()
    assert launches[-1]["params"][1:4] == [int(a).to_bytes(8, "little") for a in (K, V, OFFSETS)], "as it was bound"


def test_calls_of_a_bound_launch_may_replace_other_names_than_the_last(launches: list[dict[str, Any]]) -> None:
    """One name, another, both, none that it has; every call leaves the arrays alive that the launch would read."""
    bound = fresh("append").bind(cache_on_gpu()[0], **arrays())
    first, second = arrays(k=K + 64, v=V + 64), arrays(k=K + 128, v=V + 128)
    dead = {name: weakref.ref(array) for name, array in first.items()}
    for replaced, seen in (
        ({"k": first["k"]}, (K + 64, V)),
        ({"v": first["v"]}, (K + 64, V + 64)),
        ({"k": first["k"], "v": first["v"]}, (K + 64, V + 64)),
        ({"v": first["v"], "k": second["k"]}, (K + 128, V + 64)),
        ({"row_offsets": first["row_offsets"], "k": second["k"]}, (K + 128, V + 64)),
    ):
        bound(**replaced)
        assert launches[-1]["params"][1:3] == [address.to_bytes(8, "little") for address in seen]
    with pytest.raises(
        ArgumentError, match=r"^q: got an array; this launch was bound with k, v, row_offsets;"
    ) as error:
        bound(k=first["k"], q=first["v"])
    assert error.value.__suppress_context__
    del first, replaced, error
    assert {name for name, array in dead.items() if array() is not None} == {"v", "row_offsets"}
    with pytest.raises(ArgumentError, match=r"^v: got address"):
        bound(v=arrays(v=V + 2)["v"])
    assert dead["v"]() is not None, "as long as it is bound"
    bound(v=second["v"])
    bound(v=second["v"])
    assert dead["v"]() is None
    assert launches[-1]["params"][1:3] == [(K + 128).to_bytes(8, "little"), (V + 128).to_bytes(8, "little")]


def test_an_array_whose_memory_moved_gives_its_new_address(launches: list[dict[str, Any]]) -> None:
    """The same object as before: bound, in a repeated call; and what else it says is looked at again."""
    given, append, layer = arrays(), fresh("append"), cache_on_gpu()[0]
    bound, array = append.bind(layer, **given), given["k"]

    def says(**changed: Any) -> None:
        array.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changed}

    append(layer, **given)
    for step in (64, 128):
        says(data=(K + step, False))
        bound(k=array)
        append(layer, **given)
        assert [launch["params"][1] for launch in launches[-2:]] == [(K + step).to_bytes(8, "little")] * 2
    for changed in (
        {"shape": (5, 2, 16)},
        {"strides": (64, 34, 2)},
        {"typestr": "<f2"},
        {"data": (K + 2, False)},
        {"data": (GPU_1 + K, False)},
        {"data": (0, False)},
        {"mask": arrays()["k"]},
    ):
        before = array.__cuda_array_interface__
        says(**changed)
        for call in (lambda: bound(k=array), lambda: append(layer, **given)):
            with pytest.raises(ArgumentError, match=r"^(k|v): got "):
                call()
        array.__cuda_array_interface__ = before
    count = len(launches)
    says(strides=(64, 32, 2))  # in other words, the same
    bound(k=array)
    append(layer, **given)
    assert len(launches) == count + 2


def test_read_only_arrays_are_replaced_where_they_are_read(launches: list[dict[str, Any]]) -> None:
    cache, gather = cache_on_gpu(), fresh("gather")
    k_out, v_out, offsets = arrays().values()
    bound = gather.bind(cache[0], offsets, k_out, v_out)
    for array in (offsets, k_out):
        address, _ = array.__cuda_array_interface__["data"]
        array.__cuda_array_interface__ = {**array.__cuda_array_interface__, "data": (address, True)}
    bound(row_offsets=offsets)
    with pytest.raises(ArgumentError, match=r"^k_out: got a read-only array; the kernel writes to it"):
        bound(k_out=k_out)
    with pytest.raises(ArgumentError, match=r"^k_out: got a read-only array"):
        gather(cache[0], offsets, k_out, v_out)


@pytest.mark.parametrize("stream", [-1, "7", True, object()])
def test_a_bound_launch_refuses_what_is_no_stream(launches: list[dict[str, Any]], stream: object) -> None:
    append, layer = fresh("append"), cache_on_gpu()[0]
    bound = append.bind(layer, **arrays(), stream=9)
    for call in (lambda: bound(stream), lambda: append.bind(layer, **arrays(), stream=stream)):
        with pytest.raises(ArgumentError, match=r"^stream: got "):
            call()
    bound()
    bound(0)
    assert [launch["stream"] for launch in launches] == [9, 0]


def test_a_layer_of_another_batch_is_bound_again(launches: list[dict[str, Any]]) -> None:
    bound = fresh("append").bind(cache_on_gpu()[0], **arrays())
    with pytest.raises(
        ArgumentError, match=r"^cache: got a layer with B=3; the launch was bound with B=2; pass a layer of"
    ):
        bound(cache=cache_on_gpu(3)[0])
    assert not launches


# On the CPU: numbers -------------------------------------------------------------------------------------------------


def host_cache(pages: int = 5) -> tuple[Any, Any, Any]:
    pool = np.zeros((pages, 2, 2, 4, 2, 16), BF16)
    lengths, table = np.array([3, 0], np.int32), np.array([[2, 0, 1], [3, 4, 4]], np.int32)
    return package("paged").Cache(pool, lengths=lengths, page_table=table), pool, table


def new_rows(start: int) -> Any:
    return (np.arange(3 * 2 * 16, dtype=np.float32).reshape(3, 2, 16) % 64 + start).astype(BF16)


def test_steps_write_where_their_tables_say(checking: None) -> None:
    cache, pool, _ = host_cache()
    offsets, append = np.array([0, 2, 3], np.int32), package("paged").append
    bound = append.bind(cache[1], new_rows(0), new_rows(1), offsets)
    bound()
    assert (pool[2, 0, 1, 3] == new_rows(0)[0]).all() and (pool[0, 0, 1, 0] == new_rows(0)[1]).all()
    assert (pool[3, 1, 1, 0] == new_rows(1)[2]).all()
    later = cache.step(lengths=np.array([5, 1], np.int32))
    bound(cache=later[0], k=new_rows(2), v=new_rows(3))
    assert (pool[0, 0, 0, 1] == new_rows(2)[0]).all() and (pool[3, 1, 0, 1] == new_rows(3)[2]).all()
    moved = later.step(page_table=np.array([[2, 1, 1], [4, 4, 4]], np.int32))
    append(moved[0], new_rows(4), new_rows(5), offsets)
    assert (pool[1, 0, 0, 1] == new_rows(4)[0]).all() and (pool[4, 1, 0, 1] == new_rows(5)[2]).all()
    assert moved.max_cache_length == 12 and len(moved) == 2
    assert (moved.cache_length(0), cache.cache_length(0)) == (5, 3), "a step leaves the ones before it alone"


def test_a_step_is_checked() -> None:
    cache, _, table = host_cache()
    with pytest.raises(ArgumentError, match=r"^page_table: got shape \(3, 2\)"):
        cache.step(page_table=np.zeros((3, 2), np.int32))
    with pytest.raises(ArgumentError, match=r"^lengths: got dtype f32"):
        cache.step(np.zeros(2, np.float32))
    with pytest.raises(ArgumentError, match=r"^max_cache_length: got -1"):
        cache.step(max_cache_length=-1)
    assert cache.step(max_cache_length=7).step(page_table=table).max_cache_length == 7, "stays as it was given"


def test_calls_return_what_they_wrote(checking: None) -> None:
    cache, _, _ = host_cache()
    module, offsets = package("paged"), np.array([0, 2, 3], np.int32)
    assert module.append(cache[0], new_rows(0), new_rows(1), offsets) is None, "in place"
    k_out, v_out = np.empty((3, 2, 16), BF16), np.empty((3, 2, 16), BF16)
    found = module.gather(cache[0], offsets, k_out, v_out)
    assert found.k_out is k_out and found.v_out is v_out and found._fields == ("k_out", "v_out")
    q, out, lse = np.ones((2, 4, 16), BF16), np.empty((2, 4, 16), BF16), np.empty((2, 4), np.float32)
    workspace = module.decode.workspace(2)
    assert module.decode.plan(cache, workspace) is None, "any layer will do"
    assert module.decode(cache[0], q, out, workspace)._asdict() == {"out": out, "lse": None}
    assert module.decode(cache[0], q, out, workspace, lse=lse).lse is lse
    assert module.decode.bind(cache[0], q, out, workspace)() is None


# Without tables, from nothing, in one line ------------------------------------------------------------------------------


def test_operations_that_read_no_table_ask_for_none() -> None:
    cache = package("paged").Cache(np.zeros((5, 2, 2, 4, 2, 16), BF16))
    assert not cache.has_tables and cache.max_cache_length == 0
    with pytest.raises(
        ArgumentError, match=r"^cache: got one without page tables and lengths; append reads them; pass"
    ):
        package("paged").append(cache[0], new_rows(0), new_rows(0), np.array([0], np.int32))
    stepped = cache.step(np.array([0, 0], np.int32), np.array([[1], [2]], np.int32))
    package("paged").append(stepped[0], new_rows(0), new_rows(1), np.array([0, 2, 3], np.int32))
    assert (cache.blocks[0][1, 0, 0, :2] == new_rows(0)[:2]).all()


def test_an_empty_cache_holds_nothing_and_names_no_page(checking: None) -> None:
    module = package("paged")
    cache = module.Cache.empty(layers=2, requests=2, pages=6)
    assert cache.blocks[0].shape == (6, 2, 2, 4, 2, 16) and cache.lookup_table.shape == (2, 3)
    assert not cache.blocks[0].astype(np.float32).any() and not cache.cache_lengths.any()
    errors = kvgen.ErrorWord("cpu")
    module.append(cache[0], new_rows(0), new_rows(1), np.array([0, 2, 3], np.int32), errors=errors)
    assert "PAGE_ID" in str(errors.poll()), "pages are handed out by whoever owns the pool"
    cache.lookup_table[:, 0] = (4, 5)
    errors.clear()
    module.append(cache[0], new_rows(0), new_rows(1), np.array([0, 2, 3], np.int32), errors=errors)
    assert errors.poll() is None and (cache.blocks[0][4, 0, 0, :2] == new_rows(0)[:2]).all()


def test_an_empty_cache_has_the_strides_of_its_layout() -> None:
    """Of eight pages that heads leave room for it has five, and no more than eight."""
    cache = presets.vllm_packed(dtype="bf16", kv_heads=2, head_dim=16, order="LHBNC", total_pages=8)
    module = harness_package(KernelSet(name="with_room", q_heads=2, cache=cache, ops=[ops.SwapPages(direction="out")]))
    pool = module.Cache.empty(layers=2, requests=1, pages=5).blocks[0][1]
    assert pool.shape == (2, 5, 16, 2, 16) and pool.strides == (8 * 1024, 1024, 64, 32, 2) and not pool.any()
    with pytest.raises(
        ArgumentError, match="pool: got 9 pages; head lies outside of them, at a stride that leaves no room"
    ):
        module.Cache.empty(layers=2, requests=1, pages=9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": 0, "requests": 1, "pages": 1}, "layers: got 0; it is a count; pass a whole number of at least 1"),
        ({"layers": 1, "requests": True, "pages": 1}, "requests: got True"),
        ({"layers": 1, "requests": 1}, "pages: got None; pool has an axis of so many"),
        ({"layers": 1, "requests": 1, "pages": 1, "device": "tpu"}, "device: got 'tpu'"),
    ],
)
def test_sizes_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        package("paged").Cache.empty(**given)
    assert str(caught.value).startswith(message)


def test_everything_says_what_it_is_in_one_line() -> None:
    """And looks at no array for it."""
    module = package("paged")
    cache, _, _ = host_cache()
    workspace = module.decode.workspace(2)
    bound = module.append.bind(cache[0], new_rows(0), new_rows(0), np.array([0, 0, 0], np.int32))
    shown = {
        repr(cache): "paged.Cache(2 layers, 2 requests, 'cpu')",
        repr(cache[1]): "layer 1 of paged.Cache on 'cpu'",
        repr(module.append): "paged.append",
        repr(bound): "Bound(paged_append)",
        repr(workspace): f"Workspace(paged_decode, 2 rows, {workspace.nbytes} bytes, 'cpu')",
        repr(kvgen.ErrorWord("cpu")): "ErrorWord('cpu')",
        repr(cache.get_key_cache(1)): "K of layer 1 of paged.Cache on 'cpu'",
        repr(module._MODULE): "Module(paged)",
    }
    assert list(shown) == list(shown.values())

"""swap_pages against the oracle: out and in, pools of other sizes; and host memory that a GPU reaches or not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Layout, Paged, ops, presets
from kvgen.errors import ArgumentError, DeviceError
from kvgen.reference import swap_pages
from kvgen.runtime import Fault, cuda, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import package
from tests.support.launching import DeviceArray, NotingDriver
from tests.support.memory import Raw, Tensor
from tests.support.page_moves import SETS, expect, having, hold_bytes, launch, lists, moving_scene, sizes, steps
from tests.support.scenes import LAYERS, Scene

NAMES = having("swap_pages")


class Other:
    """Another pool of a scene's layout: memory with canaries, random pages."""

    def __init__(self, scene: Scene, pages: int, scale_pages: int) -> None:
        self.scene = scene
        extents = {"pages": pages, "scale_pages": scale_pages, "layers": LAYERS, "tokens": scene.tokens, "B": 0}
        self.pages, self.scale_pages, self.tensors = pages, scale_pages, dict[str, list[Tensor]]()
        pointers = scene.cache.layout.layers == "pointers"
        for tensor in scene.cache.storage.tensors:
            if "page" in tensor.axes:
                kind = str(scene.rng.choice(tensor.dtypes))
                self.tensors[tensor.name] = [
                    Tensor.of(tensor, extents, kind, "nan") for _ in range(LAYERS if pointers else 1)
                ]
        for name in self.tensors:
            for array in self._each(name, self.snapshot_of()):
                raw = scene.rng.integers(0, 256, array.size * array.itemsize, dtype=np.uint8)
                array[...] = raw.view(array.dtype).reshape(array.shape)

    def snapshot_of(self) -> dict[str, list[Any]]:
        """Its memory itself."""
        return {name: [t.memory for t in each] for name, each in self.tensors.items()}

    def snapshot(self) -> dict[str, list[Any]]:
        return {name: [t.memory.copy() for t in each] for name, each in self.tensors.items()}

    def _each(self, name: str, memory: Any) -> list[Raw]:
        return [t.view(memory[name][i]) for i, t in enumerate(self.tensors[name])]

    def arrays(self, memory: Any = None) -> dict[str, Any]:
        """What `Pages` takes."""
        views = {name: self._each(name, memory or self.snapshot_of()) for name in self.tensors}
        return {n: v if self.scene.cache.layout.layers == "pointers" else v[0] for n, v in views.items()}


def bytes_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same arrays as bytes' own type, so that the oracle may copy between codes and the bytes that hold them."""

    def plain(array: Raw) -> Raw:
        return array.view(f"u{array.itemsize}")

    return {n: plain(a) if isinstance(a, np.ndarray) else [plain(x) for x in a] for n, a in arrays.items()}


def check(scene: Scene, other: Other, direction: Literal["out", "in"], **given: Any) -> int:
    """Swap, and compare both pools with the oracle's; the oracle's error word."""
    outwards, mine, theirs = direction == "out", scene.snapshot(), other.snapshot()
    pool = {n: a for n, a in scene.arrays(mine).items() if n in other.tensors}
    pool, host = bytes_of(pool), bytes_of(other.arrays(theirs))
    given = {n: a.astype(np.int64 if outwards else np.int32) for n, a in given.items()}
    word = swap_pages(scene.cache, pool, host, direction, **given)
    pages = package(scene.kernels).Pages(**other.arrays())
    pairs = given.pop("pairs")
    found, log = launch(scene, f"swap_{direction}", pages, pairs, **given)
    hold_bytes(scene.snapshot(), mine)
    hold_bytes(other.snapshot(), theirs)
    expect(found, word)
    assert len(log) == bool(len(pairs) or len(given.get("scale_pairs", ())))
    return word


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(data=st.data())
def test_pairs(name: str, data: Any) -> None:
    """Any pages of one to any of the other, none written twice; bad ids; both directions."""
    scene = moving_scene(SETS[name], data.draw(steps(SETS[name])))
    other = Other(scene, *data.draw(st.sampled_from(((3, 4), (12, 12), (1, 1)))))
    direction = data.draw(st.sampled_from(("out", "in")))
    given: dict[str, Any] = {}
    for which, mine, theirs in zip(lists(SETS[name]), sizes(scene), (other.pages, other.scale_pages), strict=False):
        left, right = (mine, theirs) if direction == "out" else (theirs, mine)
        targets = data.draw(st.lists(st.integers(-2, right), unique=True, max_size=8))
        sources = [data.draw(st.integers(-2, left)) for _ in targets]
        given[which] = np.array([*zip(sources, targets, strict=True)]).reshape(-1, 2)
    check(scene, other, direction, **given)


def test_a_replica() -> None:
    """Another Cache takes the place of Pages."""
    scene = moving_scene(SETS["moving_hnd"], replace(PLAIN, totals=(9, 9), new=(0, 0)))
    replica = moving_scene(SETS["moving_hnd"], replace(PLAIN, totals=(9, 9), new=(0, 0), seed=9))
    generated = package(scene.kernels)
    expected = replica.snapshot()
    pairs = np.array([[0, 4], [2, 0]])
    swap_pages(scene.cache, scene.arrays(), replica.arrays(expected), "out", pairs)
    launch(scene, "swap_out", generated.Cache(**replica.arguments()), pairs)
    hold_bytes(replica.snapshot(), expected)


def test_what_does_not_fit() -> None:
    """Pools of other sets, other layers, read-only memory."""
    scene = moving_scene(SETS["moving_hnd"], replace(PLAIN, totals=(9, 9), new=(0, 0)))
    other, pairs = Other(scene, 4, 4), np.array([[0, 1]])
    generated, stranger = package(scene.kernels), package(SETS["moving_per_kv"])
    with pytest.raises(
        ArgumentError, match=r"^other: got object; it must be memory of this set's layout; pass moving_hnd"
    ):
        launch(scene, "swap_out", object(), pairs)
    foreign = moving_scene(SETS["moving_per_kv"], replace(PLAIN, totals=(2,), new=(0,)))
    with pytest.raises(ArgumentError, match=r"^other: got pages of moving_per_kv; "):
        launch(scene, "swap_out", stranger.Pages(**Other(foreign, 2, 2).arrays()), pairs)
    with pytest.raises(ArgumentError, match=r"^other: got 1 layers; the cache has 2; "):
        launch(scene, "swap_out", generated.Pages(other.arrays()["pool"][:1]), pairs)
    with pytest.raises(ArgumentError, match=r"^pool: got ndarray; the spec's layers='pointers' takes a list"):
        generated.Pages(other.arrays()["pool"][0])
    fixed = other.arrays()["pool"]
    for array in fixed:
        array.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"^other.pool\[0\]: got a read-only array"):
        launch(scene, "swap_out", generated.Pages(fixed), pairs)
    launch(scene, "swap_in", generated.Pages(fixed), pairs.astype(np.int32))


def test_layers_that_one_launch_cannot_take() -> None:
    """More layers than the struct has room for, strides that differ, K and V that do not alternate."""
    cache = Paged(
        dtype="f32", kv_heads=1, head_dim=4, page_size=2, layout=Layout(kv="page kv token head dim", layers="pointers")
    )
    kernels = KernelSet(name="few_layers", q_heads=1, cache=cache, ops=(ops.CopyPages(max_layers=2),))
    tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
    pools, copy = [np.zeros((4, 2, 2, 1, 4), np.float32) for _ in range(3)], package(kernels).copy_pages
    with pytest.raises(
        ArgumentError, match=r"^cache: got 3 layers; the operation was generated for at most 2; raise max_layers"
    ):
        copy(package(kernels).Cache(pools, **tables), np.array([[0, 1]]))
    wide = np.zeros((4, 3, 2, 1, 4), np.float32)[:, :2]
    with pytest.raises(ArgumentError, match=r"^k: got pages 96 bytes apart in layer 1 and 64 in layer 0"):
        copy(package(kernels).Cache([pools[0], wide], **tables), np.array([[0, 1]]))
    kernels, pool = SETS["moving_kv_inside"], np.zeros((2, 6, 1, 3, 2, 2, 24), np.float32)
    apart = np.ndarray((6, 1, 3, 2, 2, 24), np.float32, pool, 0, (1152, 1152, 384, 192, pool[0].nbytes, 4))
    tables = {
        "lengths": np.zeros(1, np.int32),
        "page_indices": np.zeros(1, np.uint32),
        "page_indptr": np.zeros(2, np.uint32),
    }
    with pytest.raises(
        ArgumentError, match=r"^k: got K and V 6912 bytes apart in layer 0; they alternate inside a page"
    ):
        package(kernels).copy_pages(package(kernels).Cache(apart, **tables), np.array([[0, 1]]))
    with pytest.raises(ValueError, match=r"max_layers: got 500, which makes a kernel parameter of 1\d{4} bytes"):
        KernelSet(name="many", q_heads=1, cache=presets.max_nvfp4(dtype="bf16", kv_heads=1, head_dim=64, page_size=16),
                  ops=(ops.CopyPages(max_layers=500),))  # fmt: skip


# Host memory and a GPU ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Pinning(NotingDriver):
    """A driver that knows some host memory as pinned, `far` bytes away where the GPU sees it."""

    pinned: list[tuple[int, int]] = field(default_factory=list)
    far: int = 0

    def mapped(self, pointer: int, device: int) -> int:
        if any(low <= pointer < high for low, high in self.pinned):
            return pointer + self.far
        return super().mapped(pointer, device)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    found = Pinning()
    monkeypatch.setattr(cuda, "driver", lambda: found)
    return found


def on_gpu(kernels: KernelSet, pages: int) -> Any:
    """A cache whose memory is a GPU's."""
    shape = (pages, 2, 2, 16, 2, 64)
    pool = DeviceArray(shape, np.float16, 1 << 30)
    lengths, table = DeviceArray((1,), np.uint32, 1 << 20), DeviceArray((1, 2), np.uint32, 1 << 21)
    return package(kernels).Cache(pool, lengths=lengths, page_table=table)


def host_pool(pages: int) -> Raw:
    raw = np.zeros(pages * 2 * 2 * 16 * 2 * 64 * 2 + 64, np.uint8)
    return np.ndarray((pages, 2, 2, 16, 2, 64), np.float16, raw.data, -raw.ctypes.data % 64)


GPU = KernelSet(
    name="swapped",
    q_heads=2,
    cache=presets.max_paged(dtype="f16", kv_heads=2, head_dim=64, page_size=16),
    ops=(ops.SwapPages(direction="out"),),
)


def test_pinned_host_memory_is_reached_where_the_gpu_sees_it(driver: Pinning) -> None:
    """The kernel gets the device's address of it: host memory need not have one address for both."""
    host = host_pool(3)
    driver.pinned, driver.far = [(host.ctypes.data, host.ctypes.data + host.nbytes)], 1 << 20
    generated = package(GPU)
    pairs = DeviceArray((5, 2), np.int64, 1 << 22)
    generated.swap_out(on_gpu(GPU, 4), generated.Pages(host, host=True), pairs, stream=7)
    (done,) = driver.launches
    assert done["grid"] == (3, 2, 1) and done["stream"] == 7
    struct = done["params"][1]
    first = [int.from_bytes(struct[8 * i : 8 * i + 8], "little") for i in (0, 1, 2, 128)]
    steps = host.strides
    assert first == [host.ctypes.data + (1 << 20) + at for at in (0, steps[2])] + [
        0,
        host.ctypes.data + (1 << 20) + steps[1],
    ]


def test_pageable_host_memory_is_refused(driver: Pinning) -> None:
    host, generated, pairs = host_pool(3), package(GPU), DeviceArray((5, 2), np.int64, 1 << 22)
    with pytest.raises(ArgumentError, match=r"^pool: got an array on cpu; .* or pinned host memory with host=True"):
        generated.swap_out(on_gpu(GPU, 4), generated.Pages(host), pairs)
    for pinned in ([], [(host.ctypes.data, host.ctypes.data + host.nbytes - 8)]):  # none of it, all but its end
        driver.pinned = pinned
        with pytest.raises(
            ArgumentError, match=r"^pool: got pageable host memory .*pin_memory\(\) of torch, .* cudaHostRegister"
        ):
            generated.swap_out(on_gpu(GPU, 4), generated.Pages(host, host=True), pairs)
    elsewhere = DeviceArray((3, 2, 2, 16, 2, 64), np.float16, (1 << 40) + (1 << 30))
    with pytest.raises(ArgumentError, match=r"^pool: got an array on cuda:1; the call runs on cuda:0"):
        generated.swap_out(on_gpu(GPU, 4), generated.Pages(elsewhere, host=True), pairs)
    assert not driver.launches


def test_the_driver_is_asked_for_the_devices_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuPointerGetAttribute(DEVICE_POINTER), in the device's context; what it does not know raises."""
    asked: list[tuple[int, str, tuple[object, ...]]] = []

    class Api:
        class CUpointer_attribute:
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER = "device pointer"

    def within(device: int, name: str, *arguments: object) -> int:
        asked.append((device, name, arguments))
        if arguments[1] == 5:
            raise DeviceError("no")
        return 77

    real = cuda.CudaDriver.__new__(cuda.CudaDriver)
    monkeypatch.setattr(real, "_api", Api, raising=False)
    monkeypatch.setattr(real, "_within", within)
    assert real.mapped(4, 3) == 77
    assert asked == [(3, "cuPointerGetAttribute", ("device pointer", 4))]
    with pytest.raises(DeviceError):
        real.mapped(5, 3)


def test_host_memory_serves_the_cpu_machine() -> None:
    """host=True says nothing new of NumPy arrays that the CPU machine works on; ids outside the host pool are reported."""
    generated, host = package(GPU), host_pool(3)
    pool = np.random.default_rng(0).standard_normal((4, 2, 2, 16, 2, 64)).astype(np.float16)
    aligned = host_pool(4)
    aligned[...] = pool
    word = np.zeros(1, np.uint64)
    cache = generated.Cache(aligned, lengths=np.zeros(1, np.uint32), page_table=np.zeros((1, 2), np.uint32))
    with machine(mode="check"):
        generated.swap_out(cache, generated.Pages(host, host=True), np.array([[3, 0], [1, 2], [0, 3]]), errors=word)
    assert host[0].tobytes() == pool[3].tobytes() and host[2].tobytes() == pool[1].tobytes() and not host[1].any()
    report = describe(word)
    assert report is not None and (report.code, report.position) == (Fault.PAIR, 2)

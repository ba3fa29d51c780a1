"""Bad scale pools, tails and given scales: the error names the argument, what it got, and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime import cuda
from tests.support.batches import PLAIN
from tests.support.engine_sets import QUANTIZED
from tests.support.harness import index_name, launcher, new_rows, offsets_of, package
from tests.support.launching import NotingDriver, on_device
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.sets import ALL, FAMILY

Change = Callable[[Raw], Any]


def named(*needed: str, **quant: object) -> str:
    """The first quantized set with these tensors and this quantization, of K and of V."""
    return next(
        n
        for n, s in (FAMILY | QUANTIZED).items()
        if set(needed) <= {t.name for t in s.cache.storage.tensors}
        and s.cache.layout.layers == "axis"
        and not s.cache.latent_part
        and all(getattr(q, k, None) == v for q in s.cache.quants.values() for k, v in quant.items())
    )


def strided(axis: int, step: int) -> Change:
    """The same shape, with another stride in elements along an axis, over memory of its own."""

    def make(array: Raw) -> Raw:
        steps = list(array.strides)
        steps[axis] = step * array.itemsize
        memory = np.zeros(4 * sum(abs(s) * n for s, n in zip(steps, array.shape, strict=True)) + 64, np.uint8)
        found: Raw = np.ndarray(array.shape, array.dtype, memory.data, -memory.ctypes.data % 64, steps)
        return found

    return make


def shifted(array: Raw) -> Raw:
    """The same shape and strides, half an element further."""
    memory = np.zeros(4 * array.size * array.itemsize * 8 + 64, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize // 2
    found: Raw = np.ndarray(array.shape, array.dtype, memory.data, start, array.strides)
    return found


OWN, KIVI = "own_k", "grouped"
POOLS: dict[str, tuple[str, str, Change, str]] = {
    "granularity": (OWN, "k_scales", lambda a: np.zeros((*a.shape[:-1], 1), a.dtype), "k_scales: got shape ("),
    "scale_dtype": (
        OWN,
        "v_scales",
        lambda a: a.astype(np.float16),
        "v_scales: got dtype f16; it must be f32, v_quant.scale_dtype of the spec",
    ),
    "code_dtype": (
        KIVI,
        "pool",
        lambda a: a.view(np.int8),
        "pool: got dtype i8; it must be u8, k_quant.dtype of the spec",
    ),
    "code_dims": (
        KIVI,
        "pool",
        lambda a: np.zeros((*a.shape[:-1], 16), a.dtype),
        "pool: got shape (6, 2, 2, 8, 2, 16); dimension 5 must be 8, half of head_dim of the spec",
    ),
    "page_size": (OWN, "k_scales", lambda a: a[..., :5, :, :], "k_scales: got shape ("),
    "two_pools_differ": (OWN, "v_scales", lambda a: a[:-1], "v_scales: got shape ("),
    "misaligned": (OWN, "v_scales", shifted, "v_scales: got address 0x"),
    "page_stride": (OWN, "v_scales", strided(0, 3), "v_scales: got stride "),
    "token_stride": (OWN, "v_scales", strided(2, 40), "v_scales: got stride 40 in dimension 2"),
    "no_pool": (OWN, "k_scales", lambda a: None, "k_scales: got NoneType; it must be an array"),
    "tail_tokens": (KIVI, "k_tail", lambda a: a[:, :, :3], "k_tail: got shape ("),
    "tail_requests": (KIVI, "k_tail", lambda a: a[:, :1], "k_tail: got shape ("),
    "tail_dtype": (KIVI, "k_tail", lambda a: a.astype(np.float32), "k_tail: got dtype f32; it must be bf16"),
    "tail_places": (KIVI, "k_tail", strided(1, 64), "k_tail: got stride "),
    "sealed_dtype": (KIVI, "k_sealed", lambda a: a.astype(np.uint32), "k_sealed: got dtype u32; it must be i32"),
    "sealed_requests": (KIVI, "k_sealed", lambda a: np.zeros(3, np.int32), "k_sealed: got shape (3,)"),
    "scale_table_dtype": (
        OWN,
        "scales_page_table",
        lambda a: a.astype(np.int64),
        "scales_page_table: got dtype i64; it must be i32",
    ),
    "scale_table_requests": (OWN, "scales_page_table", lambda a: a[:1], "scales_page_table: got shape (1, "),
}


def right(name: str) -> tuple[Scene, dict[str, Any]]:
    """A scene, and arguments that its Cache takes."""
    scene = Scene(ALL[name], PLAIN.__class__(**(vars(PLAIN) | {"totals": (9, 9), "new": (1, 1)})), [8, 8])
    found = scene.arguments()
    package(name).Cache(**found)
    return scene, found


def refused(action: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        action()
    assert str(caught.value).startswith(message), str(caught.value)
    assert str(caught.value).count("; ") >= 1


@pytest.mark.parametrize("label", POOLS)
def test_caches(label: str) -> None:
    name, argument, change, message = POOLS[label]
    _, arguments = right(name)
    arguments[argument] = change(arguments[argument])
    refused(lambda: package(name).Cache(**arguments), message)


@pytest.mark.parametrize("name", [named("k_scales", own_table=False), "own_k"])
def test_too_few_pages_of_scales(name: str) -> None:
    """Scales that lie in the pages of their values need as many, also beside others with a table of their own."""
    scene, arguments = right(name)
    for tensor in scene.cache.storage.tensors:
        if "scale_pages" in tensor.shape:
            axis = tensor.axes.index("page")
            arguments[tensor.name] = arguments[tensor.name][(slice(None),) * axis + (slice(scene.pages - 1),)]
    with pytest.raises(ArgumentError, match=r"^[kv]_scales: got \d+ pages; scales lie in the pages of their values"):
        package(name).Cache(**arguments)


@pytest.mark.parametrize("name", ["max_cache_length", "max_seq_length"])
@pytest.mark.parametrize("given", [-1, 2**32 - 1, 1.5, "9", True])
def test_longest(name: str, given: object) -> None:
    _, arguments = right("own")
    refused(lambda: package("own").Cache(**arguments, **{name: given}), f"{name}: got {given!r}; it counts tokens")
    package("own").Cache(**arguments, **{name: 2**32 - 2})


def test_longest_by_default() -> None:
    """What the narrower table holds, and any whole number."""
    scene, arguments = right("own")
    columns = min(arguments[t].shape[1] for t in ("page_table", "scales_page_table"))
    assert package("own").Cache(**arguments).max_cache_length == columns * scene.tokens
    assert package("own").Cache(**arguments, max_seq_length=np.int64(5)).max_seq_length == 5


def test_one_given_scale_for_all_layers() -> None:
    """What operations only read may stand for several layers."""
    name = named("k_scale", "v_scale")
    _, arguments = right(name)
    for scale in ("k_scale", "v_scale"):
        arguments[scale] = np.broadcast_to(arguments[scale][:1], arguments[scale].shape)
    package(name).Cache(**arguments)


def test_codes_as_bytes_or_as_numbers() -> None:
    """8-bit codes are taken as their type and as u8, packed ones as u8 alone."""
    name = named("scales", dtype="e4m3", place="pool")
    _, arguments = right(name)
    pool = next(n for n in arguments if n.endswith("pool"))
    for kind in ("float8_e4m3fn", "uint8"):
        import ml_dtypes

        package(name).Cache(**arguments | {pool: arguments[pool].view(getattr(ml_dtypes, kind, kind))})
    refused(
        lambda: package(name).Cache(**arguments | {pool: arguments[pool].view(np.int8)}),
        f"{pool}: got dtype i8; it must be e4m3",
    )
    _, arguments = right("grouped")
    refused(
        lambda: package("grouped").Cache(**arguments | {"pool": arguments["pool"].view(np.int8)}), "pool: got dtype i8"
    )


def frozen(array: Raw) -> Raw:
    found = array.view()
    found.flags.writeable = False
    return found


@pytest.mark.parametrize(("name", "tensor"), [("own_k", "k_scales"), ("own_k", "v_scales"), ("grouped", "k_tail")])
def test_read_only_scales(name: str, tensor: str) -> None:
    """append writes computed scales and the tail; gather does not."""
    scene, arguments = right(name)
    cache = package(name).Cache(**arguments | {tensor: frozen(arguments[tensor])})
    new, offsets = new_rows(scene, 2), offsets_of((1, 1), index_name(ALL[name], "append"))
    refused(lambda: launcher(scene, "append").bind(cache[0], **new, row_offsets=offsets), f"{tensor}: got ")  # type: ignore[attr-defined]
    outs = {f"{n}_out": rows for n, rows in new.items()}
    launcher(scene, "gather").bind(cache[0], **outs, row_offsets=offsets)  # type: ignore[attr-defined]


def test_read_only_given_scales() -> None:
    """Given scales are only read."""
    name = named("k_scale", "v_scale")
    scene, arguments = right(name)
    cache = package(name).Cache(**arguments | {"k_scale": frozen(arguments["k_scale"])})
    new, offsets = new_rows(scene, 2), offsets_of((1, 1), index_name(ALL[name], "append"))
    launcher(scene, "append").bind(cache[0], **new, row_offsets=offsets)  # type: ignore[attr-defined]


def test_given_scales_of_another_shape() -> None:
    name = named("k_scale", "v_scale")
    _, arguments = right(name)
    wrong = np.zeros((*arguments["k_scale"].shape[:-1], 99), arguments["k_scale"].dtype)
    refused(lambda: package(name).Cache(**arguments | {"k_scale": wrong}), "k_scale: got shape (")


def test_scales_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    noting = NotingDriver()
    monkeypatch.setattr(cuda, "driver", lambda: noting)
    _, arguments = right("own_k")
    for name in ("k_scales", "v_scales"):
        elsewhere = on_device(np.zeros(arguments[name].shape, arguments[name].dtype), 1 << 20)
        refused(
            lambda n=name, a=elsewhere: package("own_k").Cache(**arguments | {n: a}),
            f"{name}: got an array on cuda:0; the call runs on cpu",
        )

"""What the tests of operations on whole pages share: sets, pages full of random bytes, launches over all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvgen import CSR, KernelSet, ops
from kvgen.lowering.id_lists import IdLists
from kvgen.runtime import describe
from kvgen.runtime.cpu import Launched, machine
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op
from tests.support.batches import PLAIN, Batch, batches
from tests.support.cache_matrix import CHOSEN, FEW_BITS, chosen
from tests.support.harness import package
from tests.support.memory import Raw, rows_array
from tests.support.scenes import Memory, Scene

# Copying and zeroing ask what a page is made of; compacting and reordering, which copy in the same way, ask for its table.
TABLES = (
    "dense",
    "hnd",
    "kv_inside",
    "per_kv",
    "indirect",
    "mapped",
    "ring",
    "continuous_open",
    "int8_own_table",
    "heads_outside",
)


def _operations(cache: Cache) -> Sequence[Op]:
    zero = ops.ZeroPages(index_dtype="i32" if cache.lengths == "after" else "i64")
    found: list[Op] = [ops.CopyPages(), zero] if cache not in (CHOSEN["ring"], CHOSEN["mapped"]) else []
    if any(cache is CHOSEN[name] for name in TABLES):
        found += [ops.Compact()] if isinstance(cache.page_table, CSR) else [ops.Compact(), ops.Reorder()]
    if cache.layout.layers == "pointers" or cache.storage.own_table or cache.page_table.id_multiplier == 3:
        found += [ops.SwapPages(direction="out"), ops.SwapPages(direction="in", index_dtype="i32")]
    return found


# Every form of table, layers by axis and by pointers, K and V inside one another, scales in pools, pages and tables of
# their own, heads outside of layers, pages whose runs no 16 bytes divide, and blocks whose size only the pool knows.
SETS = chosen(
    "moving",
    _operations,
    (
        "dense", "hnd", "kv_inside", "per_kv", "indirect", "mapped", "ring", "continuous_open", "latent_row", "mixed",
        "int8_own_table", "int4_in_page", "kivi", "heads_outside", *FEW_BITS,
    ),
)  # fmt: skip


def having(kind: str) -> list[str]:
    """The sets that have an operation."""
    return [name for name, kernels in SETS.items() if any(op.kind == kind for op in kernels.ops)]


@st.composite
def steps(draw: st.DrawFn, kernels: KernelSet) -> Batch:
    """Batches whose requests hold what lengths say, stored: no token is on its way."""
    batch = draw(batches(kernels))
    return replace(batch, new=(0,) * len(batch.totals))


def moving_scene(kernels: KernelSet, batch: Batch = PLAIN) -> Scene:
    """A scene whose pages hold random bytes."""
    scene = Scene(kernels, batch, batch.totals)
    scramble(scene, scene.arrays())
    return scene


def scramble(scene: Scene, arrays: Mapping[str, Any]) -> None:
    """Random bytes in everything that has pages."""
    for tensor in scene.cache.storage.tensors:
        if "page" in tensor.axes:
            given = arrays[tensor.name]
            for array in [given] if isinstance(given, np.ndarray) else given:
                raw = scene.rng.integers(0, 256, array.size * array.itemsize, dtype=np.uint8)
                array[...] = raw.view(array.dtype).reshape(array.shape)


def launch(
    scene: Scene, op: str, *arguments: Any, step: str = "", mode: Any = "check", **named: Any
) -> tuple[int | None, tuple[Launched, ...]]:
    """Launch an operation on all layers; its error word (None without one), and the log."""
    generated, batch = package(scene.kernels), scene.batch
    call = getattr(generated, op)
    call = getattr(call, step) if step else call
    word = np.zeros(1, np.uint64)
    with machine(arch=batch.arch, mode=mode, schedule=batch.schedule) as log:
        call(generated.Cache(**scene.arguments()), *arguments, errors=word if batch.errors else None, **named)
    return (int(word[0]) if batch.errors else None), tuple(log.launches)


def hold_bytes(found: Memory, expected: Memory) -> None:
    """All memory, guards and gaps included."""
    for name, parts in found.items():
        for part, wanted in zip(parts, expected[name], strict=True):
            np.testing.assert_array_equal(part, wanted, err_msg=name)


def expect(word: int | None, wanted: int) -> None:
    """The error word is the oracle's, where there is one."""
    assert word is None or word == wanted, f"{describe(word)}, not {describe(wanted)}"


def vector(values: Any, kind: str) -> tuple[Raw, Raw]:
    """An array of one axis or of pairs with these values, and all memory around it: canaries."""
    values = np.asarray(values)
    if values.ndim == 1:
        array, memory = rows_array(1, values.shape, kind, strided=False, guard=8)
        array = array[0]
    else:
        array, memory = rows_array(len(values), values.shape[1:], kind, strided=False, guard=8)
    array[...] = values
    return array, memory


def sizes(scene: Scene) -> tuple[int, int]:
    """How many entries can name pages, and pages of scales with a table of their own."""
    multiplier = scene.cache.page_table.id_multiplier
    return -(-scene.pages // multiplier), -(-scene.scale_pages // multiplier)


@st.composite
def apart(draw: st.DrawFn, entries: int, most: int = 9) -> list[list[int]]:
    """Pairs that may be copied at once: nothing is written twice, nor read if it is written; some to skip, some no-ops."""
    order = draw(st.permutations(range(entries)))
    count = draw(st.integers(0, min(most, entries // 2)))
    targets, sources = order[:count], order[count:]
    pairs = [[draw(st.sampled_from(sources)), to] for to in targets]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(pairs)))
        odd = [[-1, 0], [0, -1], [-1, -1], *([[sources[0], sources[0]]] if sources else [])]
        pairs.insert(place, draw(st.sampled_from(odd)))
    return pairs


def lists(kernels: KernelSet) -> list[str]:
    """The lists of pairs that a set's copies take."""
    return list(IdLists(kernels.cache, "pairs").runs)

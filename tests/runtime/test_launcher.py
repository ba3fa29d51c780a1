"""Every bad argument of a launcher: the error names the argument, what it got, and the rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime.cpu import Machine, Memory, machine
from tests.support.calls import Call, Change, argument, frozen, pool, refused, shifted, with_strides
from tests.support.launching import BF16, DeviceArray, NotingDriver, i32, package, zeros

pytestmark = pytest.mark.usefixtures("checking", "driver")


def other_set(call: Call) -> None:
    call.other_cache = Call("apart", "append").cache()[0]


def whole_cache(call: Call) -> None:
    call.other_cache = call.cache()


CALLS: dict[str, tuple[str, str, Change, str]] = {
    "dtype": (
        "paged",
        "append",
        argument("k", zeros(2, 2, 16, dtype=np.float16)),
        "k: got dtype f16; it must be bf16, dtype of the spec; pass a bf16 array",
    ),
    "float64": (
        "paged",
        "append",
        argument("k", zeros(2, 2, 16, dtype=np.float64)),
        "k: got dtype float64; it must be one",
    ),
    "rank": (
        "paged",
        "append",
        argument("v", zeros(2, 32)),
        "v: got shape (2, 32); it must have 3 dimensions; pass shape (2, 2, 16)",
    ),
    "kv_heads": (
        "paged",
        "append",
        argument("k", zeros(2, 3, 16)),
        "k: got shape (2, 3, 16); dimension 1 must be 2, kv_heads of the spec; pass shape (2, 2, 16)",
    ),
    "head_dim": (
        "paged",
        "append",
        argument("v", zeros(2, 2, 8)),
        "v: got shape (2, 2, 8); dimension 2 must be 16, head_dim of the spec; pass shape (2, 2, 16)",
    ),
    "q_heads": (
        "paged",
        "decode",
        argument("q", zeros(2, 2, 16)),
        "q: got shape (2, 2, 16); dimension 1 must be 4, q_heads of the spec; pass shape (2, 4, 16)",
    ),
    "v_head_dim": (
        "apart",
        "decode",
        argument("out", zeros(2, 2, 8, dtype=np.float32)),
        "out: got shape (2, 2, 8); dimension 2 must be 4, v_head_dim of the spec; pass shape (2, 2, 4)",
    ),
    "rows": (
        "paged",
        "append",
        argument("v", zeros(3, 2, 16)),
        "v: got shape (3, 2, 16); k has T = 2 but v has 3; pass shape (2, 2, 16)",
    ),
    "offsets_rows": (
        "paged",
        "append",
        argument("row_offsets", i32(0, 1)),
        "row_offsets: got shape (2,); lengths has B = 2 but row_offsets has 1; pass shape (3,)",
    ),
    "offsets_dtype": (
        "paged",
        "append",
        argument("row_offsets", np.array([0, 1, 2])),
        "row_offsets: got dtype i64; it must be i32, index_dtype of the spec",
    ),
    "slots_rows": (
        "apart",
        "append_slots",
        argument("slots", np.array([1])),
        "slots: got shape (1,); k has T = 2 but slots has 1; pass shape (2,)",
    ),
    "starts": (
        "paged",
        "gather",
        argument("starts", i32(0, 0, 0)),
        "starts: got shape (3,); lengths has B = 2 but starts has 3; pass shape (2,)",
    ),
    "head_stride": (
        "paged",
        "append",
        argument("k", zeros(2, 2, 32)[..., :16]),
        "k: got stride 32 in dimension 1 (shape (2, 2, 16), strides (64, 32, 1), in elements); it must be 16: packed",
    ),
    "row_stride": (
        "paged",
        "append",
        argument("k", with_strides(36, 16, 1)(zeros(2, 2, 16))),
        "k: got stride 36 in dimension 0 (shape (2, 2, 16), strides (36, 16, 1), in elements); it must be a multiple of 8",
    ),
    "shared_rows": (
        "paged",
        "gather",
        argument("k_out", with_strides(0, 16, 1)(zeros(2, 2, 16))),
        "k_out: got stride 0 in dimension 0 (shape (2, 2, 16), strides (0, 16, 1), in elements); rows that are written",
    ),
    "misaligned": ("paged", "append", argument("k", shifted(zeros(2, 2, 16))), "k: got address 0x"),
    "device": (
        "paged",
        "append",
        argument("k", DeviceArray((2, 2, 16), BF16, 1 << 20)),
        "k: got an array on cuda:0; the call runs on cpu, where the cache is; pass an array on cpu",
    ),
    "read_only_out": (
        "paged",
        "decode",
        argument("out", frozen(zeros(2, 4, 16))),
        "out: got a read-only array; the kernel writes to it; pass a writable one",
    ),
    "read_only_errors": (
        "paged",
        "append",
        argument("errors", frozen(np.zeros(1, np.uint64))),
        "errors: got a read-only array; the kernel writes to it",
    ),
    "errors_dtype": (
        "paged",
        "append",
        argument("errors", np.zeros(1, np.int64)),
        "errors: got dtype i64; it must be u64; pass a u64 array",
    ),
    "errors_shape": (
        "paged",
        "append",
        argument("errors", np.zeros((), np.uint64)),
        "errors: got shape (); it must have 1 dimensions; pass shape (1,)",
    ),
    "lse": (
        "paged",
        "decode",
        argument("lse", zeros(2, 2, dtype=np.float32)),
        "lse: got shape (2, 2); dimension 1 must be 4, q_heads of the spec; pass shape (2, 4)",
    ),
    "none": ("paged", "append", argument("k", None), "k: got None; the operation needs it; pass a bf16 array"),
    "none_offsets": ("paged", "append", argument("row_offsets", None), "row_offsets: got None; the operation needs it"),
    "number": ("paged", "append", argument("k", 3), "k: got int; it must be an array"),
    "another_sets_cache": (
        "paged",
        "append",
        other_set,
        "cache: got a layer of a cache of apart; it must be a layer of this set's Cache; pass paged.Cache(...)[layer]",
    ),
    "whole_cache": (
        "paged",
        "append",
        whole_cache,
        "cache: got a cache of paged; it must be a layer of this set's Cache",
    ),
    "read_only_pool": (
        "paged",
        "append",
        pool(frozen),
        "pool: got a read-only array; this operation writes to it; pass a writable one",
    ),
    "read_only_layer": (
        "apart",
        "append",
        pool(lambda p: [p[0], frozen(p[1])], "v_pool"),
        "v_pool[1]: got a read-only array; this operation writes to it",
    ),
    "no_workspace": (
        "paged",
        "decode",
        argument("workspace", None),
        "workspace: got None; the operation needs it; pass a workspace",
    ),
    "array_for_workspace": (
        "paged",
        "decode",
        argument("workspace", zeros(4096, dtype=np.uint8)),
        "workspace: got ndarray; it must be a Workspace; pass the operation's workspace(max_rows=...)",
    ),
    "too_small": (
        "paged",
        "decode",
        argument("workspace", lambda c: c.workspace(1)),
        "workspace: got one for 1 rows and q with 2; it must hold every row; pass workspace(max_rows=2)",
    ),
    "another_operations": (
        "paged",
        "fixed",
        argument("workspace", lambda c: Call("paged", "decode").workspace(64)),
        "workspace: got one of paged_decode; every operation divides its own differently; pass one of paged_fixed",
    ),
    "workspace_device": (
        "paged",
        "decode",
        argument("workspace", lambda c: c.set.decode.workspace(2, device="cuda:1")),
        "workspace: got an array on cuda:1; the call runs on cpu, where the cache is",
    ),
}


@pytest.mark.parametrize("label", CALLS)
def test_calls(label: str, driver: NotingDriver) -> None:
    name, op, change, message = CALLS[label]
    change(call := Call(name, op))
    refused(call.bind, message)
    if call.other_cache is None:
        with machine(mode="check") as log:
            refused(call.run, message)
        assert not log.launches and not driver.launches
    Call(name, op).bind()  # right where it is not spoilt


def test_gather_reads_a_read_only_pool_that_append_refuses() -> None:
    for op in ("gather", "decode"):
        call = Call("paged", op)
        pool(frozen)(call)
        call.bind()


def test_plan_checks_its_workspace() -> None:
    call = Call("paged", "decode")
    layer, decode = call.cache()[0], call.set.decode
    other = call.set.fixed.workspace(2, max_tokens=12)
    refused(lambda: decode.plan(layer, other), "workspace: got one of paged_fixed; every operation divides its own")
    refused(
        lambda: decode.plan(layer, None), "workspace: got None; it must be a Workspace; pass the operation's workspace("
    )
    workspace = decode.workspace(2)
    refused(lambda: decode.plan(layer, workspace, stream=7), "stream: got int on the CPU")
    for rows in (-1, 3, True, 1.5):
        rule = f"rows: got {rows!r} for a workspace of 2 rows; it counts the rows of q; pass 0 to 2, or a workspace made for more"
        refused(lambda rows=rows: decode.plan(layer, workspace, rows=rows), rule)  # type: ignore[misc]
    offsets = i32(0, 1)
    refused(
        lambda: decode.plan(layer, workspace, row_offsets=offsets), "row_offsets: got shape (2,); lengths has B = 2"
    )


@pytest.mark.parametrize("rows", [None, 1])
def test_plan_checks_the_longest_request(rows: Any) -> None:
    """Requests that are cut alike in every batch need room for the longest one there can be."""
    call = Call("paged", "fixed")
    short = call.set.fixed.workspace(2, max_tokens=11)
    refused(
        lambda: call.set.fixed.plan(call.cache()[0], short, rows=rows),
        "workspace: got one for requests of up to 11 tokens and a cache of requests of up to 12; all of a request's chunks must "
        "fit; make workspace(max_rows=2, max_tokens=12), or give the cache its max_cache_length",
    )
    given = call.set.Cache(*call.pools.values(), **call.tables, max_cache_length=11)
    call.set.fixed.plan(given[0], short, rows=rows)


@pytest.mark.parametrize("op", ["decode", "fixed"])
@pytest.mark.parametrize("rows", [0, -1, 2**31, 1.5, None, True])
def test_workspace_rows(op: str, rows: Any) -> None:
    launcher = getattr(package("paged"), op)
    for make in (launcher.workspace, launcher.workspace_bytes):
        refused(
            lambda make=make: make(rows, max_tokens=12),  # type: ignore[misc]
            f"max_rows: got {rows!r}; it must be a whole number of at least 1 and below 2^31; pass the largest batch",
        )


@pytest.mark.parametrize("count", [0, -1, 2**16, 1.5, True])
def test_workspace_multiprocessors(count: Any) -> None:
    refused(
        lambda: package("paged").decode.workspace(2, multiprocessors=count),
        f"multiprocessors: got {count!r}; it must be a whole number of at least 1 and below 2^16; pass how many the GPU has",
    )


@pytest.mark.parametrize("tokens", [None, -1, 2**32, 1.5, True])
def test_workspace_tokens(tokens: Any) -> None:
    fixed = package("paged").fixed
    for make in (fixed.workspace, fixed.workspace_bytes):
        refused(
            lambda make=make: make(2, max_tokens=tokens),  # type: ignore[misc]
            f"max_tokens: got {tokens!r}; requests are cut into chunks of 512 tokens, so a workspace is as large as the longest "
            "one asks; pass the most tokens of a request, cache.max_cache_length",
        )


def test_workspace_device() -> None:
    with pytest.raises(ArgumentError, match=r"^device: got 'tpu'; it must be \"cpu\" or \"cuda:<ordinal>\""):
        package("paged").decode.workspace(1, device="tpu")


def test_a_device_workspace_is_freed(driver: NotingDriver) -> None:
    workspace = package("paged").decode.workspace(3, device="cuda:1")
    address, nbytes = workspace.view.pointer, workspace.nbytes
    assert (address, workspace.view.device) == ((1 << 40) + (1 << 30), "cuda:1")
    decode = package("paged").decode
    assert nbytes == decode.workspace_bytes(3, device="cuda:1") == decode.workspace_bytes(3, multiprocessors=132)
    sm_parts = 132 * decode.SPLIT_PLAN.blocks_per_sm // 2  # two kv heads
    assert nbytes == sum(
        -(-n // 16) * 16 for n in (64, 4 * (sm_parts + 1), 3, 2 * sm_parts * 2 * 4, 48 * (3 + sm_parts))
    ) + (2 * sm_parts * 2 * 4 * (2 * 8 + 8 * 16)), "starts, rows, counters, chunks, and partial results of 8 columns"
    del workspace
    assert driver.freed == [address]


def test_streams_are_the_gpus() -> None:
    call = Call("paged", "append")
    call.stream = 0
    refused(call.run, "stream: got int on the CPU; its machine has no streams; pass None")


@pytest.mark.parametrize("op", ["append", "gather", "decode"])
@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_batch_launches_what_its_rows_need(op: str, rows: int) -> None:
    """No rows: no launch. Rows of no request, as CUDA graphs pad with: a launch that stores nothing."""
    call = Call("paged", op)
    call.tables = {"lengths": i32(), "page_table": np.zeros((0, 3), np.int32)}
    if op != "decode":
        call.arguments["row_offsets"] = i32(0)
    for name, array in call.arguments.items():
        if name not in ("row_offsets", "workspace"):
            call.arguments[name] = array[:rows]
    if op == "decode":
        with machine():
            call.set.decode.plan(call.cache()[0], call.arguments["workspace"], rows=rows)
    with machine(mode="check") as log:
        call.run()
    # What a workspace says is the GPU's work, whatever there is of it.
    assert [launch.entry for launch in log.launches] == ([f"paged_{op}"] if rows or op == "decode" else [])
    assert not call.pools["pool"].any()


def test_an_empty_request_changes_nothing_of_its_own() -> None:
    call = Call("paged", "append")
    call.tables["page_table"][...] = [[1, 7, 7], [2, 3, 4]]
    call.tables["lengths"][...] = [0, 3]
    call.arguments = {
        "k": zeros(1, 2, 16) + BF16.type(1),
        "v": zeros(1, 2, 16) + BF16.type(2),
        "row_offsets": i32(0, 0, 1),
    }
    with machine(mode="check"):
        call.run()
    stored = call.pools["pool"].astype(np.float32)
    assert (stored[2, 0, 1, 3] == 1).all() and (stored[2, 1, 1, 3] == 2).all()
    assert stored.sum() == 2 * 16 * 3, "one token, and nothing for the request without rows"


@pytest.mark.parametrize("op", ["append", "gather", "decode", "plan"])
def test_what_a_launch_may_touch(op: str) -> None:
    """The cache's pool and tables by name, then the call's own; the pool is append's alone to write."""
    seen: dict[str, bool] = {}

    def watch(entry: str, memory: Sequence[Memory]) -> Callable[[], None]:
        seen.update({m.name: m.writes for m in memory})
        return lambda: None

    call = Call("paged", "decode" if op == "plan" else op)
    if op == "decode":
        call.set.decode.plan(call.cache()[0], call.arguments["workspace"])
    with machine(mode="check", watch=watch):
        if op == "plan":
            call.set.decode.plan(call.cache()[0], call.arguments["workspace"])
        else:
            call.run()
    own = {
        "append": {"k": False, "v": False, "row_offsets": False},
        "gather": {"row_offsets": False, "k_out": True, "v_out": True},
        "decode": {"q": False, "out": True, "workspace": True},
        "plan": {"workspace": True},
    }
    assert seen == {"pool": op == "append", "lengths": False, "page_table": False, **own[op]}


def test_the_machine_runs_what_the_set_is_generated_for() -> None:
    with (
        machine(arch="sm_89"),
        pytest.raises(DeviceError, match=r"^arch: got sm_89; paged is generated for sm_80, sm_90a"),
    ):
        Call("paged", "append").bind()
    with (
        machine(arch="sm_100f"),
        pytest.raises(DeviceError, match=r"^arch: got sm_100f; the CPU machine runs .*pass sm_80"),
    ):
        Call("apart", "append").bind()


def test_a_bound_call_keeps_its_arrays_and_its_machine() -> None:
    call = Call("paged", "append")
    call.arguments["k"] += BF16.type(1)
    with machine(mode="check") as log:
        step = call.bind()
    del call.arguments
    step()
    step()
    assert isinstance(log, Machine) and len(log.launches) == 2
    assert call.pools["pool"][0, 0, 1].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, c, x: m.append(c, x, x), "append() missing 1 required positional argument: 'row_offsets'"),
        (lambda m, c, x: m.append.bind(c, x, x), "append() missing 1 required positional argument: 'row_offsets'"),
        (lambda m, c, x: m.append(c, x, x, x, error=x), "append() got an unexpected keyword argument 'error'"),
        (lambda m, c, x: m.append(c, x, x, x, x), "append() takes 5 positional arguments but 6 were given"),
        (lambda m, c, x: m.decode.plan(c), "decode.plan() missing 1 required positional argument: 'workspace'"),
        (lambda m, c, x: m.decode.bind_plan(c, x, row=1), "decode.plan() got an unexpected keyword argument 'row'"),
    ],
)
def test_arguments_missing_or_unknown(call: Callable[..., None], message: str) -> None:
    """Python's own words, under the name that was written."""
    with pytest.raises(TypeError) as raised:
        call(package("paged"), None, None)
    assert str(raised.value).startswith(message)  # Python may add what it takes for meant


def test_a_call_has_the_signature_and_the_words_of_its_bind() -> None:
    decode = package("paged").decode
    for call, bind in ((decode.__call__, decode.bind), (decode.plan, decode.bind_plan)):
        assert inspect.signature(call) == inspect.signature(bind) and call.__doc__ == bind.__doc__
    assert list(inspect.signature(decode).parameters) == ["cache", "q", "out", "workspace", "lse", "errors", "stream"]

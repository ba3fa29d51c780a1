"""The error word: what it says, and ErrorWord on the CPU machine, over a libcuda that logs, and on a GPU."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen.errors import ArgumentError, KvgenError
from kvgen.paths import templates_root
from kvgen.runtime import ErrorWord, Fault, FaultError, FaultReport, clear, cuda, describe
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.memory import DeviceMemory
from kvgen.testing import Check
from tests.support.calls import Call, refused
from tests.support.launching import i32, zeros

ALL_ONES = 2**64 - 1

MEANINGS = {
    Fault.PAGE_ID: "PAGE_ID: a page id outside the pool, at token 9 of request 5",
    Fault.POSITION: "POSITION: token 9 of request 5 lies past its page table, or past the angles of RoPE",
    Fault.LENGTH: "LENGTH: request 5 (over lists: row 5) has a length or count that its page table, its list, its rows or "
    "its k_sealed cannot have (token or count 9)",
    Fault.SLOT: "SLOT: row 9 has a slot outside the pool",
    Fault.ROW_OFFSETS: "ROW_OFFSETS: row offsets that decrease, pass the rows, or give request 5 too many rows (row 9)",
    Fault.TABLE: "TABLE: an index into the page table that leaves it, at token 9 of request 5",
    Fault.LORA_END: "LORA_END: lora_end_idx counts rows that this step does not have, from row 9 (request 5) on",
    Fault.PAIR: "PAIR: pair 9 names a page outside its pool",
    Fault.OVERLAP: "OVERLAP: pair 9 writes to a page that another pair reads, or that an earlier one writes",
    Fault.PLAN: "PLAN: a workspace without a plan for this operation, batch and rows, or one that was overwritten",
    Fault.SCALE: "SCALE: v_global_scale is 0, negative or not finite at place 9 of its layer; what is made with it is NaN",
    Fault.STALE: "STALE: request 5 (over lists: row 5) has 9 tokens now, and the workspace was planned for another "
    "number; plan again",
}


def word_of(code: int, request: int, position: int) -> int:
    """The word of a fault, bit by bit."""
    return ALL_ONES ^ (position << 32 | request << 8 | code)


@pytest.mark.parametrize("code", Fault)
def test_every_code_is_described(code: Fault) -> None:
    word = word_of(code, 5, 9)
    for given in (word, np.uint64(word), np.array([word], np.uint64)):
        found = describe(given)
        assert found == FaultReport(code, request=5, position=9)
        assert str(found) == MEANINGS[code]


def test_the_codes_are_the_kernels() -> None:
    text = (templates_root() / "device/base/fault.cuh").read_text(encoding="utf-8")
    kernels = dict(re.findall(r"^  (\w+) = (\d+),", text, re.MULTILINE))
    assert {name.upper(): int(code) for name, code in kernels.items() if code != "0"} == Fault.__members__


def test_a_count_of_minus_one_is_shown_as_such() -> None:
    """Kernels report 32 bits; no place is 2^31 or more."""
    found = describe(word_of(Fault.LENGTH, 5, 2**32 - 1))
    assert str(found).endswith("(token or count -1)") and found.position == 2**32 - 1  # type: ignore[union-attr]
    assert "(token or count 2147483647)" in str(describe(word_of(Fault.LENGTH, 5, 2**31 - 1)))


def test_requests_past_the_words_field_are_not_named_wrongly() -> None:
    found = describe(word_of(1, 0xFFFFFF, 1))
    assert str(found) == "PAGE_ID: a page id outside the pool, at token 1 of request >= 16777215"


def test_the_last_fault_there_is() -> None:
    assert describe(word_of(max(Fault), 0xFFFFFF, 2**32 - 1)) == FaultReport(max(Fault), 0xFFFFFF, 2**32 - 1)


def test_zeros_say_nothing_and_clear_makes_them() -> None:
    assert describe(0) is None and describe(np.zeros(1, np.uint64)) is None
    word = np.array([word_of(1, 2, 3)], np.uint64)
    clear(word)
    assert word[0] == 0 and describe(word) is None


@pytest.mark.parametrize(
    "word", [1, 9 << 32 | 5 << 8 | 1, ALL_ONES ^ (max(Fault) + 1), ALL_ONES ^ 0xFF, ALL_ONES ^ 1 << 8, -1, 2**64]
)
def test_words_that_no_kernel_writes(word: int) -> None:
    """A fault of ABI 4 among them; one error, without another behind it."""
    with pytest.raises(
        ArgumentError, match=rf"^word: got {word:#018x}; no kernel writes that: .*set to 0 \(clear\)"
    ) as caught:
        describe(word)
    assert isinstance(caught.value, ValueError) and caught.value.__cause__ is None is caught.value.__context__


def test_a_word_that_was_cleared_for_an_older_kvgen() -> None:
    """Kernels could not report over it, so it is no silence."""
    with pytest.raises(ArgumentError) as caught:
        describe(np.full(1, ALL_ONES, np.uint64))
    assert str(caught.value) == (
        "word: got 0xffffffffffffffff; all ones meant no fault up to ABI 4; 0 does now, and kernels cannot report over all "
        "ones; pass the u64 that launches got as `errors`, set to 0 (clear) before them"
    )


# On the CPU machine ---------------------------------------------------------------------------------------------------


def spoiled(requests: int = 10) -> tuple[Call, dict[str, Any]]:
    """append of four rows to each of ten requests, eight rows a block; 3, 7 and 9 have pages outside the pool."""
    call = Call("paged", "append")
    call.pools["pool"] = zeros(3 * requests, 2, 2, 4, 2, 16)
    pages = np.arange(3 * requests, dtype=np.int32).reshape(requests, 3)
    pages[[3, 7, 9], 1:] = 3 * requests
    call.tables = {"lengths": i32(*[4] * requests), "page_table": pages}
    call.tables["lengths"][3] = 5
    rows = 4 * requests
    offsets = np.arange(0, rows + 1, 4, dtype=np.int32)
    return call, {"k": zeros(rows, 2, 16), "v": zeros(rows, 2, 16), "row_offsets": offsets}


FIRST = FaultReport(Fault.PAGE_ID, request=7, position=4)


def test_the_word_does_not_depend_on_the_order_of_blocks() -> None:
    """Check holds every run to the first one's bits; request 9 reports the same token, request 3 the next one."""
    call, arguments = spoiled()
    plain, held = np.zeros(1, np.uint64), ErrorWord("cpu")
    for errors in (plain, held):
        Check(schedules=("ascending", "descending", 7))(call.set.append, call.cache()[1], **arguments, errors=errors)
    assert describe(plain) == FIRST == held.poll()


@pytest.mark.usefixtures("checking")
def test_a_word_on_the_cpu() -> None:
    call, arguments = spoiled()
    word, cache = ErrorWord("cpu"), call.cache()
    word.raise_if_set()
    assert word.poll() is None and word.device == "cpu" and repr(word) == "ErrorWord('cpu')"
    call.set.append(cache[1], **arguments, errors=word)
    for _ in range(2):  # it stays reported
        with pytest.raises(FaultError) as caught:
            word.raise_if_set()
        assert caught.value.report == word.poll() == FIRST
        assert str(caught.value) == "PAGE_ID: a page id outside the pool, at token 4 of request 7"
    word.clear()
    word.raise_if_set()
    call.tables["page_table"][...] = np.arange(30).reshape(10, 3)
    call.set.append(cache[1], **arguments, errors=word)
    assert word.poll() is None


@pytest.mark.usefixtures("checking")
def test_every_launcher_takes_one() -> None:
    """Bound calls, planners and planned ones too; each reports a length that no page table of three columns holds."""
    for op in ("append", "gather", "decode"):
        call, word = Call("paged", op), ErrorWord("cpu")
        call.tables["lengths"][...] = 13
        call.arguments["errors"] = word
        if op == "gather":
            call.arguments["starts"] = i32(12, 12)
        if op == "decode":
            call.set.decode.plan(call.cache()[1], call.arguments["workspace"])
        call.bind()()
        report = word.poll()
        assert report is not None and report.code in (Fault.POSITION, Fault.LENGTH), op


def test_the_error_can_be_caught_and_carried() -> None:
    error = FaultError(FIRST)
    assert isinstance(error, KvgenError) and not isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.report, str(again)) == (FIRST, str(FIRST))
    assert kvgen.ErrorWord is ErrorWord and kvgen.FaultError is FaultError


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:", "cuda:-1", "cpu:0", "", 0, None])
def test_devices_that_are_none(device: Any) -> None:
    refused(
        lambda: ErrorWord(device), f'device: got {device!r}; it must be "cpu" or "cuda:<ordinal>"; pass cache.device'
    )


def test_a_word_of_another_device_is_refused() -> None:
    call = Call("paged", "append")
    call.arguments["errors"] = ErrorWord("cpu")
    call.arguments["errors"].view = call.arguments["errors"].view._replace(device="cuda:0")
    refused(call.run, "errors: got an array on cuda:0; the call runs on cpu")


@pytest.mark.parametrize("method", ["raise_if_set", "clear", "poll"])
def test_there_are_no_streams_on_the_cpu(method: str) -> None:
    refused(
        lambda: getattr(ErrorWord("cpu"), method)(3),
        "stream: got int on the CPU; its machine has no streams; pass None",
    )


def test_a_word_on_the_cpu_loads_nothing() -> None:
    code = (
        "import sys, kvgen; word = kvgen.ErrorWord('cpu'); word.clear(); word.raise_if_set(); word.poll();"
        "print([m for m in ('numpy', 'cuda', 'pydantic', 'jinja2', 'ml_dtypes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Over a libcuda that logs ---------------------------------------------------------------------------------------------

PRELUDE = f"""
from kvgen.errors import ArgumentError
from kvgen.runtime import ErrorWord, FaultError
word = ErrorWord("cuda:1")
def report(position):
    bits = {ALL_ONES} ^ (position << 32 | 5 << 8 | 1)
    ctypes.c_uint64.from_address(word.view.pointer).value = bits
def log():
    text = fake.fake_log().decode().splitlines()
    fake.fake_clear()
    return text
"""


@pytest.fixture
def word_in(in_fake_cuda: Callable[[str], str]) -> Callable[[str], list[str]]:
    """Runs Python that has `word` on the second GPU; `report(position)` is what a kernel writes to it."""
    return lambda code: in_fake_cuda(PRELUDE + code).splitlines()


def test_polls_tell_what_arrived_and_never_wait(word_in: Callable[[str], list[str]]) -> None:
    assert word_in("""
print(word.poll(0x55), log())
report(9)
print(word.poll(0x55), log())  # the copy is under way: nothing new is asked for
fake.fake_run(1)
print(word.poll(0x55), log())  # copied, but its event has not been reached
fake.fake_run(1)
print(word.poll(0x55), log())
report(4)
print(word.poll(0x55), log())
fake.fake_run(2)
print(word.poll(0x55), log())
print(fake.fake_held(), current())
del word
print(fake.fake_held(), fake.fake_broken())
""") == [
        "None ['copy in 101 stream 55', 'event in 101 stream 55']",
        "None []",
        "None []",
        # The copy was made after the fault.
        "PAGE_ID: a page id outside the pool, at token 9 of request 5 ['copy in 101 stream 55', 'event in 101 stream 55']",
        "PAGE_ID: a page id outside the pool, at token 9 of request 5 []",
        "PAGE_ID: a page id outside the pool, at token 4 of request 5 ['copy in 101 stream 55', 'event in 101 stream 55']",
        "3 0x0",
        "0 0",
    ]


def test_a_cleared_word_forgets_copies_that_are_under_way(word_in: Callable[[str], list[str]]) -> None:
    assert word_in("""
report(9)
word.poll(0x55)
word.clear(0x55)
print(log()[-1])
fake.fake_run(2)  # the fault arrives, from before the clear
print(word.poll(0x55))
fake.fake_run(64)
print(word.poll(0x55))
report(3)
fake.fake_run(64)  # what the poll before this report asked for; it is made now
print(word.poll(0x55))
""") == ["fill in 101 stream 55", "None", "None", "PAGE_ID: a page id outside the pool, at token 3 of request 5"]


def test_raise_if_set_waits_and_outdates_older_copies(word_in: Callable[[str], list[str]]) -> None:
    assert word_in("""
word.raise_if_set()
print(log())
word.poll(0x55)
fake.fake_run(1)
report(9)
for stream in (0x55, None):
    try:
        word.raise_if_set(stream)
    except FaultError as error:
        print(error.report, log()[-2:])
print(word.poll(0x55))  # the copy that it finds was made before the fault
word.clear()
word.raise_if_set()
print(word.poll())
""") == [
        "['copy in 101 stream 0', 'wait 0']",
        "PAGE_ID: a page id outside the pool, at token 9 of request 5 ['copy in 101 stream 55', 'wait 55']",
        "PAGE_ID: a page id outside the pool, at token 9 of request 5 ['copy in 101 stream 0', 'wait 0']",
        "PAGE_ID: a page id outside the pool, at token 9 of request 5",
        "None",
    ]


def test_captures_are_not_broken(word_in: Callable[[str], list[str]]) -> None:
    """The stream that captures, the default stream beside it, another stream; queries and frees while it does."""
    assert word_in("""
other = ErrorWord("cuda:0")
report(9)
fake.fake_capture(0x55)
print(word.poll(0x55), word.poll(), log())
for stream in (0x55, None):
    try:
        word.raise_if_set(stream)
    except ArgumentError as error:
        print(error)
word.poll(0x66)
fake.fake_run(64)
print(word.poll(0x55), log())
del other
print(fake.fake_broken())
fake.fake_capture(0)
print(word.poll(0x55), log())
""") == [
        "None None []",
        *[
            "stream: got one that captures a graph, or the default stream beside one; reading the word waits for it; pass a "
            "stream outside the capture, or ask after a replay"
        ]
        * 2,
        "PAGE_ID: a page id outside the pool, at token 9 of request 5 ['copy in 101 stream 66', 'event in 101 stream 66']",
        "0",
        "PAGE_ID: a page id outside the pool, at token 9 of request 5 ['copy in 101 stream 55', 'event in 101 stream 55']",
    ]


def test_a_refusal_of_the_driver_is_no_silence(word_in: Callable[[str], list[str]]) -> None:
    assert word_in("""
word.poll()
fake.fake_lose()
for call in (word.poll, word.raise_if_set):
    try:
        call()
    except DeviceError as error:
        print(str(error).partition(";")[0])
print(current())
""") == [
        "cuEventQuery: got CUDA_ERROR_ILLEGAL_ADDRESS",
        "cuStreamIsCapturing: got CUDA_ERROR_ILLEGAL_ADDRESS",
        "0x0",
    ]


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_word_on_a_gpu() -> None:
    """A fault of a real launch, polled and raised; then a capture in the mode that minds most, asked while it goes on."""
    api: Any = pytest.importorskip("cuda.bindings.driver")
    driver = cuda.driver()
    word, waiting = ErrorWord("cuda:0"), ErrorWord("cuda:0")

    def there(array: Any) -> ArrayView:
        memory = DeviceMemory(array.nbytes, 0)
        driver.write(memory.pointer, np.ascontiguousarray(array).tobytes(), 0)
        return view(array, "array")._replace(pointer=memory.pointer, device="cuda:0", owner=memory)

    call, given = spoiled()
    tables = {name: there(array) for name, array in call.tables.items()}
    cache = call.set.Cache(there(call.pools["pool"]), **tables)
    bound = call.set.append.bind(cache[1], **{n: there(a) for n, a in given.items()}, errors=word)
    api.cuCtxSetCurrent(api.cuDevicePrimaryCtxRetain(api.cuDeviceGet(0)[1])[1])
    raw = api.cuStreamCreate(0)[1]
    stream = int(raw)
    bound(stream)
    assert word.poll(stream) is None
    waiting.poll(stream)
    driver.synchronize(stream, 0)
    assert word.poll(stream) == FIRST
    with pytest.raises(FaultError, match=r"^PAGE_ID: .* token 4 of request 7$"):
        word.raise_if_set(stream)
    assert api.cuStreamBeginCapture(raw, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)[0] == 0
    word.clear(stream)
    bound(stream)
    assert word.poll(stream) is None is word.poll()
    assert waiting.poll(stream) is None
    del waiting
    refused(lambda: word.raise_if_set(stream), "stream: got one that captures a graph")
    result, graph = api.cuStreamEndCapture(raw)
    assert result == 0, "the capture was broken"
    executable = api.cuGraphInstantiate(graph, 0)[1]
    word.clear(stream)
    word.raise_if_set(stream)
    assert api.cuGraphLaunch(executable, raw)[0] == 0
    with pytest.raises(FaultError):
        word.raise_if_set(stream)

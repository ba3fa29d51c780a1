"""kvgen.verify.supervisor: work that hangs, crashes or loses its device costs one item; nothing outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import DeviceError
from kvgen.verify.supervisor import Answer, Item, Supervisor

ROOT = Path(__file__).resolve().parents[2]
# The first word of an item's key says what the worker does.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from kvgen.errors import DeviceError
from kvgen.verify.worker import Done, serve

class Worker:
    lost = False
    def begin(self):
        starts = Path(os.environ["STARTS"])
        with starts.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        count = len(starts.read_text().split())
        if count in map(int, os.environ.get("REFUSES", "").split()):
            raise DeviceError("no device")
        print("a library says hello")
    def do(self, key, given, clock):
        what = key[0].partition(" ")[0]
        begin = time.time()
        if what == "hang":
            time.sleep(60)
        if what == "slow":
            clock(20)
            time.sleep(1.2)
        if what == "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "leave":
            sys.exit(3)
        if what == "raise":
            raise ValueError("a wrong number")
        if what == "lose":
            self.lost = True
            return Done(wrong=["illegal address"])
        if what == "wait":
            time.sleep(0.05)
        return Done({"pid": os.getpid(), "given": dict(given), "begin": begin, "end": time.time()})
    def alive(self):
        return not self.lost

serve(Worker())
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "starts"


def run(items: Sequence[str | Item], until: float | None = None, **how: Any) -> list[Answer]:
    patience = {"hang": 0.25, "slow": 1.0}  # all others answer at once
    each = [
        item if isinstance(item, Item) else Item((item,), patience.get(item, 20.0), {"n": i})
        for i, item in enumerate(items)
    ]
    with Supervisor([sys.executable, "-c", WORKER], **how) as children:
        return list(children.run(each, until))


def pids(starts: Path) -> list[int]:
    return [int(line) for line in starts.read_text().split()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_what_goes_wrong_costs_one_item(starts: Path) -> None:
    begin = time.monotonic()
    found = run(["right", "hang", "slow", "crash", "raise", "leave", "lose", "right"])
    assert time.monotonic() - begin < 60
    said = [(a.item.key[0], a.wrong, a.ended) for a in found]
    assert said == [
        ("right", (), False),
        ("hang", ("no answer after 0.25 s",), True),
        ("slow", (), False),
        ("crash", ("the process ended by SIGSEGV: about to crash",), True),
        ("raise", ("ValueError: a wrong number",), False),
        ("leave", ("the process ended with exit code 3: a library says hello",), True),
        ("lose", ("illegal address",), True),
        ("right", (), False),
    ]
    assert found[0].content["given"] == {"n": 0} and found[-1].content["given"] == {"n": 7}
    assert "Traceback" in found[4].content["traceback"] and found[1].seconds >= 0.25
    assert all(gone(pid) for pid in pids(starts))
    used = [a.content["pid"] for a in found if a.content.get("pid")]
    assert len(set(used)) == 3  # before the hang, before the crash, at the end


def test_a_child_does_so_many_items(starts: Path) -> None:
    found = run(["right"] * 5, items_each=2)
    used = [a.content["pid"] for a in found]
    assert used[0] == used[1] != used[2] == used[3] != used[4]
    assert len(pids(starts)) == 3 and all(gone(pid) for pid in pids(starts))


def test_several_at_once_and_some_alone(starts: Path) -> None:
    """Exclusive items run while no other does, before and behind others that run at once."""
    exclusive = Item(("wait alone",), 20.0, exclusive=True)
    found = run([*["wait"] * 6, exclusive, *["wait"] * 4], jobs=2)
    spans = [(a.item, a.content["begin"], a.content["end"], a.content["pid"]) for a in found]
    assert len({pid for *_, pid in spans}) == 2
    ((begin, end),) = [(b, e) for item, b, e, _ in spans if item is exclusive]
    assert all(e <= begin or b >= end for item, b, e, _ in spans if item is not exclusive)


def test_time_is_up(starts: Path) -> None:
    """No item begins after it; one that runs then has a little longer, and no answer."""
    found = run(["right", Item(("hang",), 60.0), "right"], until=time.monotonic() + 5, grace=0.3)
    assert [a.item.key[0] for a in found] == ["right"]
    assert all(gone(pid) for pid in pids(starts))


def test_a_child_that_cannot_start(starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "1")
    with pytest.raises(DeviceError, match="no device"):
        run(["right"])
    starts.unlink()
    monkeypatch.setenv("REFUSES", "2 3")  # a device that needs a moment behind a crash
    assert [a.wrong for a in run(["right", "crash", "right"])][::2] == [(), ()]
    starts.unlink()
    monkeypatch.setenv("REFUSES", "2 3 4")
    with pytest.raises(DeviceError, match="no device"):
        run(["right", "crash", "right"])
    said = "did not start: the process ended with exit code 1: no such thing"
    with (
        Supervisor([sys.executable, "-c", "raise SystemExit('no such thing')"]) as children,
        pytest.raises(DeviceError, match=said),
    ):
        list(children.run([Item(("right",), 1.0)]))


def test_a_device_that_takes_one_process(starts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a second context is refused, the first child does everything."""
    monkeypatch.setenv("REFUSES", "2 3 4 5")
    found = run(["wait"] * 8, jobs=2)
    assert len(found) == 8 and len({a.content["pid"] for a in found}) == 1


PARENT = f"""
import signal, sys
from kvgen.verify.supervisor import Item, Supervisor
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with Supervisor([sys.executable, "-c", {WORKER!r}]) as children:
    for answer in children.run([Item(("right",), 20.0), Item(("hang",), 60.0)]):
        print(answer.item.key[0], flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_parent(starts: Path, how: signal.Signals) -> None:
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends children with their parent")
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "right\n"
    parent.send_signal(how)
    parent.communicate()
    assert parent.returncode == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -9}[how]
    for _ in range(100):
        if all(map(gone, pids(starts))):
            return
        time.sleep(0.05)
    raise AssertionError("a child lives on")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Signals are as they were."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before

"""The cache of host objects: damage of any kind is mended, never loaded, and killed builders leave nothing for long."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvgen import emulator
from kvgen.emulator import host, launch, objects
from tests.emulator.programs import HEADER, entry, run

ROOT = Path(__file__).resolve().parents[2]
TEXT = HEADER + entry("k", "ld.global.u32 %r1, [%rd0]; add.u32 %r1, %r1, 3; st.global.u32 [%rd0], %r1;")


def ran(cache: Path) -> int:
    """What the kernel adds to 4: 7 from a build that works."""
    out = np.array([4], np.uint32)
    run(emulator.build([TEXT], mode="fast", cache_dir=cache), "k", out, block=1)
    return int(out[0])


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # this process has loaded it
    path.write_bytes(data)


def truncate(path: Path) -> None:
    replace(path, path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    replace(path, data)


def empty(path: Path) -> None:
    replace(path, b"")


def garbage(path: Path) -> None:
    replace(path, np.random.default_rng(5).bytes(20_000))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("in it")


def link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def other_name(path: Path) -> None:
    """The other object of the folder, whole."""
    other = next(p for p in path.parent.glob("*.so") if p.name.startswith("runtime") != path.name.startswith("runtime"))
    replace(path, other.read_bytes())


@pytest.fixture
def made(own_cache: Path) -> Path:
    """A cache with one kernel and its runtime."""
    assert ran(own_cache) == 7
    return own_cache


@pytest.mark.parametrize("which", ["k", "runtime"])
@pytest.mark.parametrize("damage", [truncate, flip, empty, garbage, folder, link, dangling, pipe, other_name])
def test_damage_is_mended(
    made: Path, tmp_path: Path, damage: Callable[[Path], None], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = made
    (victim,) = (p for p in cache.glob("*.so") if p.name.startswith("runtime") == (which == "runtime"))
    before = victim.read_bytes()
    damage(victim)
    if which == "runtime":  # compiling it takes seconds, and is not what is tested here
        monkeypatch.setattr(host, "_RUNTIME_SOURCES", (("machine.cpp",),))
        monkeypatch.setattr(launch, "_runtimes", dict(launch._runtimes))  # loaded already, under its name
    compiled = []
    function = "_compile" if which == "k" else "_compile_runtime"
    real = getattr(host, function)
    monkeypatch.setattr(host, function, lambda *a: compiled.append(a) or real(*a))
    assert ran(cache) == 7
    assert len(compiled) == 1
    assert victim.is_file() and not victim.is_symlink() and objects.read_facts(victim) is not None
    if which == "k":
        assert victim.read_bytes() == before
    assert ran(cache) == 7 and len(compiled) == 1  # the mended one is used
    assert not list(cache.glob("tmp*"))
    if damage is link:
        assert (tmp_path / "elsewhere").read_bytes() == before  # nothing is written through it


def test_an_object_the_loader_refuses_is_made_once_more(made: Path, tmp_path: Path) -> None:
    """Its checksum is right, as of one for another system in a home folder that two systems share."""
    cache = tmp_path / "not loaded yet"
    shutil.copytree(made, cache)
    (victim,) = (p for p in cache.glob("*.so") if not p.name.startswith("runtime"))
    facts = objects.read_facts(victim)
    assert facts is not None
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"no ELF")
    objects.put(foreign, facts, victim)
    real, rounds = host._runtime, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_runtime", lambda *a: rounds.append(a[-1]) or real(*a[:-1], False))
        assert ran(cache) == 7
    assert rounds == [False, True]


def test_objects_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(launch.ctypes, "CDLL", refuse)
    real = host.build_object
    monkeypatch.setattr(launch, "build_object", lambda *a, afresh=False: real(*a))
    with pytest.raises(emulator.HostCompilerError, match=r"failed to map segment.*; set KVGEN_CACHE_DIR to a folder"):
        emulator.build([TEXT], mode="fast", cache_dir=made)


def test_a_lock_is_no_way_out_of_the_folder(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "lock").symlink_to(precious)
    with objects.locked(tmp_path / "lock"):
        pass
    assert precious.read_text() == "kept"


def test_a_killed_builder(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compiler = tmp_path / "slow-g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) echo slow;; *) exec sleep 60;; esac\n')
    compiler.chmod(0o755)
    place = f"pathlib.Path({str(cache)!r})"
    code = f"import pathlib; from kvgen import emulator; emulator.build([{TEXT!r}], mode='fast', cache_dir={place})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": str(compiler)}
    builders = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, start_new_session=True)
        for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while not list(cache.glob("tmp*/unit0.cpp")):  # one compiles the runtime, the other waits for it
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (left,) = cache.glob("tmp*")
        hour_ago = time.time() - 3600
        os.utime(left, (hour_ago, hour_ago))
        with objects.scratch(cache) as own:
            assert left.is_dir()  # its owner lives
        os.killpg(builders[0].pid, signal.SIGKILL)
        os.killpg(builders[1].pid, signal.SIGKILL)
    finally:
        for builder in builders:
            builder.kill()
            builder.wait(timeout=60)
    for path in cache.glob("tmp*"):
        os.utime(path, (hour_ago, hour_ago))
    assert left.is_dir()
    with objects.scratch(cache) as own:
        assert [*cache.glob("tmp*")] == [own]
    assert not list(cache.glob("tmp*"))


def test_scratch_that_nobody_locked(tmp_path: Path) -> None:
    """As builders of old left it, or one killed between two system calls: by age alone."""
    for name, hours in (("tmpnew", 0), ("tmpmiddle", 2), ("tmpold", 25)):
        (tmp_path / name).mkdir()
        then = time.time() - 3600 * hours
        os.utime(tmp_path / name, (then, then))
    (tmp_path / "tmpfile").write_text("no folder")
    (tmp_path / "tmplink").symlink_to(tmp_path)
    with objects.scratch(tmp_path) as own:
        assert {p.name for p in tmp_path.iterdir()} == {"tmpnew", "tmpmiddle", "tmpfile", "tmplink", own.name}


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "SIZE_LIMIT", 3500)
    for i in range(4):
        made = tmp_path / "made"
        made.write_bytes(b"x" * 1000)
        objects.put(made, b"", tmp_path / f"{i}.so")
        os.utime(tmp_path / f"{i}.so", (1000 + i, 1000 + i))
        assert objects.read_facts(tmp_path / "0.so") == b""  # in use
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.so", "2.so", "3.so"]

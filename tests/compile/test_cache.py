"""The compile cache: what makes a hit, and that no state of the disk stops a compile or is trusted blindly."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path

import pytest

from kvgen.compile import Cache, Unit, cache_folder, compile_many, compile_unit, default_cache
from kvgen.compile import nvrtc as nvrtc_module
from kvgen.errors import CompileError, ConfigError, ToolError

from .tiny import TEXT, unit_of


def entry_files(cache: Cache) -> list[Path]:
    return sorted(path for path in (cache.folder / "entries").rglob("*") if path.is_file())


def test_second_compile_is_a_hit_with_everything_in_it(unit: Unit, cache: Cache) -> None:
    first = compile_unit(unit, "sm_80", cache=cache)
    second = compile_unit(unit, "sm_80", cache=Cache(cache.folder))
    assert (first.cached, second.cached) == (False, True)
    assert (second.data, second.resources, second.log) == (first.data, first.resources, first.log)
    assert first.resources is not None
    stats = cache.stats()
    assert (stats.entries, stats.hits, stats.misses, stats.corrupt, stats.trouble) == (1, 0, 1, 0, None)
    assert stats.nbytes > len(first.data)


def test_what_the_key_depends_on(cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cached(unit: Unit, arch: str = "sm_80") -> bool:
        return compile_unit(unit, arch, cache=cache).cached

    two = TEXT + 'extern "C" __global__ void other(int* p) { *p = 1; }\n'
    assert not cached(unit_of(two))
    assert not cached(unit_of(two, entry="other"))
    assert not cached(unit_of(two + "\n"))
    assert not cached(unit_of(two), "sm_90a")
    assert not compile_unit(unit_of(two), "sm_80", "ptx", cache=cache).cached
    monkeypatch.chdir(tmp_path)
    assert cached(unit_of(two, name="elsewhere/reverse")), "neither the unit's name nor the folder matters"
    monkeypatch.setattr(nvrtc_module, "nvrtc_version", lambda: (98, 7))
    assert not cached(unit_of(two))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap"])
def test_damaged_entry_is_recompiled_and_replaced(unit: Unit, cache: Cache, damage: str) -> None:
    good = compile_unit(unit, "sm_80", cache=cache)
    (path,) = entry_files(cache)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    elif damage == "truncate":
        del data[-1:]
    elif damage == "empty":
        data.clear()
    else:  # an intact entry, but of another key
        other = Cache(cache.folder.parent / "other")
        compile_unit(unit_of(TEXT + "\n"), "sm_80", cache=other)
        data = bytearray(entry_files(other)[0].read_bytes())
    path.write_bytes(data)
    again = compile_unit(unit, "sm_80", cache=cache)
    assert not again.cached
    assert again.data == good.data
    assert cache.stats().corrupt == 1
    assert compile_unit(unit, "sm_80", cache=cache).cached


RESOURCES = '"registers": 1, "static_shared": 0, "spill_stores": 0, "spill_loads": 0, "stack": 0'


@pytest.mark.parametrize(
    "head",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"resources": null}',
        '{"resources": null, "log": 3}',
        '{"resources": [], "log": ""}',
        f'{{"resources": {{{RESOURCES}}}, "log": ""}}',
        f'{{"resources": {{{RESOURCES}, "constant": "x"}}, "log": ""}}',
        f'{{"resources": {{{RESOURCES}, "constant": true}}, "log": ""}}',
        f'{{"resources": {{{RESOURCES}, "constant": NaN}}, "log": ""}}',
        '{"resources": ' + "[" * 100_000,
        "\udcff",
    ],
)
def test_an_entry_with_another_head_is_compiled_anew(unit: Unit, cache: Cache, head: str) -> None:
    """Its checksum is right: whoever can write to the folder can make one."""
    good = compile_unit(unit, "sm_80", cache=cache)
    stored, put = Cache.put, dict[bytes, bytes]()

    class Noting(Cache):
        def put(self, key: bytes, payload: bytes) -> None:
            put[key] = payload

    compile_unit(unit, "sm_80", cache=Noting(cache.folder.parent / "noted"))
    (key,) = put
    stored(cache, key, head.encode("utf-8", "surrogateescape") + b"\n" + good.data)
    again = compile_unit(unit, "sm_80", cache=cache)
    assert not again.cached and (again.data, again.resources) == (good.data, good.resources)
    assert compile_unit(unit, "sm_80", cache=cache).cached


def test_refused_kernels_are_not_stored(cache: Cache) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            compile_unit(unit_of("nonsense"), "sm_80", cache=cache)
    assert cache.stats().entries == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_folder_that_cannot_be_made_warns_once(unit: Unit) -> None:
    cache = Cache(Path("/proc/kvgen"))
    with pytest.warns(RuntimeWarning, match=r"compile cache /proc/kvgen: .*set KVGEN_CACHE_DIR"):
        assert not compile_unit(unit, "sm_80", cache=cache).cached
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compile_unit(unit, "sm_80", cache=cache).cached
    assert cache.stats().trouble == "No such file or directory"
    assert (cache.stats().hits, cache.stats().misses) == (0, 2)


def test_folder_that_is_a_file_warns_once(unit: Unit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="File exists") as caught:
        images = compile_many([(unit, "sm_80", "cubin"), (unit, "sm_90a", "cubin")], cache=cache, workers=2)
    assert len(caught) == 1
    assert len(images) == 2


def test_folder_that_turns_unwritable_is_still_read(unit: Unit, cache: Cache) -> None:
    compile_unit(unit, "sm_80", cache=cache)
    (cache.folder / "tmp").rmdir()
    (cache.folder / "tmp").write_text("")  # a file where the folder was: writing fails, for root as well
    with pytest.warns(RuntimeWarning, match="compile cache"):
        compile_unit(unit, "sm_90a", cache=cache)
    assert compile_unit(unit, "sm_80", cache=cache).cached
    assert cache.stats().entries == 1


def test_writers_racing_for_one_entry_all_get_their_bytes(unit: Unit, cache: Cache) -> None:
    barrier = threading.Barrier(4)
    results: list[bytes] = []

    def work() -> None:
        mine = Cache(cache.folder)  # as another process would have
        barrier.wait()
        results.append(compile_unit(unit, "sm_80", cache=mine).data)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(entry_files(cache)) == 1
    assert list((cache.folder / "tmp").iterdir()) == []


def test_counters_add_up_over_threads(cache: Cache) -> None:
    jobs = [(unit_of(TEXT + "\n" * i), "sm_80") for i in range(6)]
    compile_many([(u, a, "cubin") for u, a in jobs], cache=cache, workers=3)
    images = compile_many([(u, a, "cubin") for u, a in jobs * 3], cache=cache, workers=3)
    assert all(image.cached for image in images)
    assert (cache.stats().hits, cache.stats().misses) == (18, 6)


def test_nothing_is_made_before_it_is_used(cache: Cache) -> None:
    assert cache.stats().entries == 0
    assert not cache.folder.exists()


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    first = default_cache()
    assert first is default_cache()
    assert first.folder == tmp_path / "own" / "nvrtc"
    monkeypatch.delenv("KVGEN_CACHE_DIR")
    assert cache_folder() == tmp_path / "xdg" / "kvgen"
    assert default_cache() is not first
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "kvgen"


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVGEN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="KVGEN_CACHE_DIR: not set, and this user has no home"):
        default_cache()


def test_missing_cuda_core_says_what_to_install(unit: Unit, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
    with pytest.raises(ToolError, match=r"cuda\.core: its FileStreamProgramCache .*pip install"):
        compile_unit(unit, "sm_80", cache=cache)


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_entries_are_private(unit: Unit, cache: Cache) -> None:
    compile_unit(unit, "sm_80", cache=cache)
    assert entry_files(cache)[0].stat().st_mode & 0o022 == 0, "what is run on the GPU is writable by its owner only"

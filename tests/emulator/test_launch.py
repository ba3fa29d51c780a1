"""Arguments of build and launch, the cache, counters, determinism, and very large sparse buffers."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np
import pytest

from kvgen import emulator
from kvgen.emulator import Buffer, EmulatorError, HostCompilerError, KernelFault, Library
from tests.emulator.conftest import Build
from tests.emulator.programs import HEADER, aligned, entry, nvrtc_ptx, run
from tests.support.each_case import each_case

KERNELS = r"""
typedef long long i64;
extern "C" __global__ void __launch_bounds__(256) simple(int* out, short a, double b, int n) {
  __shared__ int s[1024]; int t = threadIdx.x; s[t] = (int)b + a; __syncthreads();
  if (t < n) out[t + blockIdx.x * n] = s[t ^ 1];
}
extern "C" __global__ void shape(int* out) {
  int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z
    + 1000 * blockIdx.x + 10000 * blockIdx.y + 100000 * blockIdx.z;
}
extern "C" __global__ void far(char* pool, i64 stride, int rounds) {
  for (int i = 0; i < rounds; i++) { char* p = pool + (blockIdx.x + i) * stride; *(int*)(p + 4 * threadIdx.x) = i; }
}
extern "C" __global__ void stride(const int* in, int* out, int step) {
  int t = threadIdx.x; out[t] = in[t * step];
}
extern "C" __global__ void order(int* out, int* next) { out[threadIdx.x] = atomicAdd(next, 1); }
"""


@pytest.fixture(scope="module")
def library(build: Build) -> Library:
    return build([nvrtc_ptx(KERNELS)])


def simple(library: Library, **changes: object) -> emulator.Counters:
    out = np.zeros(64, np.int32)
    args = [struct.pack("<Q", out.ctypes.data), struct.pack("<h", 3), struct.pack("<d", 4.5), struct.pack("<i", 32)]
    options: dict[str, object] = {"grid": (2, 1, 1), "block": (64, 1, 1), "args": args,
                                  "buffers": [Buffer("out", out.ctypes.data, out.nbytes, True)]}  # fmt: skip
    options.update(changes)
    done: emulator.Counters = library.kernels["simple"].launch(**options)  # type: ignore[arg-type]
    assert set(out) == {7}
    return done


def test_parameters_of_every_size(library: Library) -> None:
    assert library.kernels["simple"].parameter_sizes == (8, 2, 8, 4)
    assert library.kernels["simple"].static_shared == 4096
    simple(library)


ARGS = [b"\0" * 8, b"\0" * 2, b"\0" * 8, b"\0" * 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (0, 1, 1)}, "grid.*x must be 1 to"),
        ({"grid": (1, 65536, 1)}, "grid.*y must be 1 to 65535"),
        ({"grid": (1, 1)}, "three extents"),
        ({"block": (0, 1, 1)}, "block.*x must be"),
        ({"block": (64, 32, 1)}, "2048 threads.*at most 256"),
        ({"block": (512, 1, 1)}, "at most 256"),
        ({"block": (1, 1, 65)}, "z must be 1 to 64"),
        ({"dynamic_shared": 232448}, "at most 232448 in all"),
        ({"dynamic_shared": -1}, "dynamic_shared: got -1"),
        ({"args": ARGS[:3]}, "got 3 values; simple takes 4"),
        ({"args": [*ARGS, b""]}, "got 5 values"),
        ({"args": [ARGS[0], b"\0" * 4, *ARGS[2:]]}, r"args\[1\]: got 4 bytes; this parameter of simple has 2"),
        ({"schedule": "sideways"}, "schedule: got 'sideways'"),
        ({"schedule": -3}, "schedule: got -3"),
        ({"buffers": [Buffer("a", 64, 64, True), Buffer("a", 256, 64, True)]}, "'a' twice"),
        ({"buffers": [Buffer("a", 64, -1, True)]}, "no memory is there"),
    ],
)
def test_bad_launches(changes: dict[str, object], message: str, library: Library) -> None:
    with pytest.raises(EmulatorError, match=message) as caught:
        simple(library, **changes)
    assert not isinstance(caught.value, KernelFault)


def test_bad_builds(build: Build) -> None:
    with pytest.raises(EmulatorError, match="mode: got 'slow'"):
        build([HEADER + entry("k", "")], mode="slow")
    with pytest.raises(EmulatorError, match="one str"):
        build(HEADER + entry("k", ""))


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")
    with pytest.raises(HostCompilerError, match="apt install g\\+\\+"):
        emulator.build([HEADER + entry("k", "")], cache_dir=tmp_path)


def test_cache_is_reused(own_cache: Path) -> None:
    text = HEADER + entry("k", "mov.u32 %r1, 41; st.global.u32 [%rd0], %r1;")
    emulator.build([text], mode="fast", cache_dir=own_cache)
    made = {p: p.stat().st_ino for p in own_cache.iterdir()}
    assert [p.suffix for p in made] == [".so", ".so"]
    out = np.zeros(1, np.uint32)
    run(emulator.build([text], mode="fast", cache_dir=own_cache), "k", out, block=1)
    assert out[0] == 41
    assert {p: p.stat().st_ino for p in own_cache.iterdir()} == made


def test_unwritable_cache_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(blocker / "below"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker / "below"))
    folder = emulator.host.cache_directory(None)
    assert folder.is_dir() and not folder.is_relative_to(blocker)


def test_thread_and_block_indices(library: Library) -> None:
    out = np.zeros(2 * 3 * 2 * 24, np.int32)
    run(library, "shape", out, grid=(2, 3, 2), block=(4, 3, 2))
    z, y, x, tz, ty, tx = np.indices((2, 3, 2, 2, 3, 4))
    np.testing.assert_array_equal(out, (tx + 10 * ty + 100 * tz + 1000 * x + 10000 * y + 100000 * z).reshape(-1))


def test_buffers_beyond_32_bits_cost_only_what_is_touched(library: Library) -> None:
    size = 3 * 2**32
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)) as memory:
        pool = np.frombuffer(memory, np.uint8)
        address = pool.ctypes.data
        args = [struct.pack("<Q", address), struct.pack("<q", 2**31 + 4096), struct.pack("<i", 1)]
        buffers = [Buffer("pool", address, size, True)]
        library.kernels["far"].launch((6, 1, 1), (64, 1, 1), args, buffers=buffers)
        with pytest.raises(KernelFault, match="'pool'") as caught:
            library.kernels["far"].launch((7, 1, 1), (64, 1, 1), args, buffers=buffers)
        assert caught.value.kind == "global_out_of_bounds" and caught.value.block == (6, 0, 0)
        with pytest.raises(KernelFault) as raced:
            library.kernels["far"].launch((2, 1, 1), (64, 1, 1), [*args[:2], struct.pack("<i", 2)], buffers=buffers)
        assert raced.value.kind == "race" and raced.value.buffer == "pool"
        del pool


@pytest.mark.parametrize(("step", "sectors"), [(1, 4), (2, 8), (8, 32), (32, 32)])
@each_case("schedule", ["ascending", "descending", 9])
def test_sectors_of_strided_loads(step: int, sectors: int, schedule: str | int, library: Library) -> None:
    data, out = aligned(64 * 32 * 4).view(np.int32), aligned(256).view(np.int32)
    counters = run(library, "stride", data, out, step, block=64, read_only=(0,), schedule=schedule)
    got = counters.per_buffer["arg0"]
    assert (got.load_requests, got.load_bytes, got.load_sectors) == (2, 256, 2 * sectors)
    got = counters.per_buffer["arg1"]
    assert (got.store_requests, got.store_bytes, got.store_sectors) == (2, 256, 8)
    assert (got.load_requests, got.atomic_requests) == (0, 0)


def test_instruction_counts(build: Build) -> None:
    body = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 8; @%p1 bra SKIP;\n mov.u32 %r2, 1; mov.u32 %r3, 1;\nSKIP:"
    counters = run(build([HEADER + entry("counted", body)]), "counted", np.zeros(1, np.int32), block=64)
    # Four instructions for all 64 threads, two for 8 of them, ret for all; warp 1 never runs the middle.
    assert counters.thread_instructions == 64 * 4 + 8 * 2 + 64
    assert counters.warp_instructions == 2 * 4 + 2 + 2


def test_schedules_are_repeatable_and_differ(library: Library) -> None:
    def observed(schedule: str | int) -> list[int]:
        out, counter = np.zeros(64, np.int32), np.zeros(1, np.int32)
        run(library, "order", out, counter, block=64, schedule=schedule)
        assert sorted(out) == list(range(64))
        return [int(x) for x in out]

    assert observed("ascending") == list(range(64)) == observed("descending")[::-1]
    assert observed(3) == observed(3) != observed(4)


def test_package_imports_nothing_above_it() -> None:
    folder = Path(emulator.__file__).parent
    for path in folder.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("from kvgen", "import kvgen")):
                assert line.startswith("from kvgen.emulator"), f"{path.name}: {line}"


def test_two_cache_folders_share_one_runtime(build: Build, own_cache: Path) -> None:
    """A second copy of the runtime, under the same name, would not be the one that its kernels find."""
    text = HEADER + entry("k", "mov.u32 %r1, 41; st.global.u32 [%rd0], %r1;")
    for library in (build([text], "fast"), emulator.build([text], mode="fast", cache_dir=own_cache)):
        out = np.zeros(1, np.uint32)
        run(library, "k", out, block=1)
        assert out[0] == 41
    assert list(own_cache.glob("runtime-*.so")), "there is a copy"

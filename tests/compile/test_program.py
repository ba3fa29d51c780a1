"""Real NVRTC compiles of tiny kernels, without a GPU or a driver."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgen.compile import (
    ARCHS,
    Cache,
    Image,
    ImageKind,
    Unit,
    compile_many,
    compile_unit,
    jit_allowed,
    nvrtc_version,
    quick_on_cpu,
    supported_archs,
)
from kvgen.compile import nvrtc as nvrtc_module
from kvgen.compile.resources import parse_resources
from kvgen.errors import ArgumentError, CompileError, ConfigError, ToolError

from .tiny import TEXT, unit_of

SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024) spill(float* p) {
    float a[96];
#pragma unroll
    for (int i = 0; i < 96; i++) a[i] = p[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = a[95 - i] * a[(i * 7) % 96];
}
extern "C" __global__ void plain(int* p) { p[threadIdx.x] = 1; }
"""


@pytest.fixture
def without_nvrtc_memory() -> Iterator[None]:
    """NVRTC is looked up anew in the test, and anew after it."""
    cached = (nvrtc_module._bindings, nvrtc_module.nvrtc_version, nvrtc_module.supported_numbers)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_import_loads_nothing_of_cuda() -> None:
    program = "import sys, kvgen.compile; print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'numpy')])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_versions() -> None:
    assert nvrtc_version() >= (12, 0)
    assert set(supported_archs()) <= set(ARCHS)
    assert "sm_80" in supported_archs()


@pytest.mark.parametrize("arch", ARCHS)
def test_cubin_for_every_arch(unit: Unit, arch: str) -> None:
    image = compile_unit(unit, arch, cache=None)
    assert image.data.startswith(b"\x7fELF")
    assert (image.unit_name, image.entry, image.arch, image.kind) == ("tiny/reverse", "reverse", arch, "cubin")
    assert not image.cached
    assert image.seconds > 0
    assert image.resources is not None
    assert 0 < image.resources.registers < 64
    assert image.resources.static_shared == 128
    assert (image.resources.spill_stores, image.resources.spill_loads, image.resources.stack) == (0, 0, 0)
    assert image.warnings == ()


@pytest.mark.parametrize(("arch", "target"), [("sm_80", "sm_80"), ("sm_90a", "sm_90a"), ("sm_120f", "sm_120f")])
def test_ptx_has_line_information_without_absolute_paths(unit: Unit, arch: str, target: str) -> None:
    image = compile_unit(unit, arch, "ptx", cache=None)
    ptx = image.data.decode()
    assert re.search(rf"^\.target {target}\b", ptx, re.M)
    assert ".visible .entry reverse(" in ptx
    assert re.search(r"\.loc\s+\d+ 3 ", ptx), "line 3 of reverse.cu is the first store"
    files = re.findall(r'\.file\s+\d+\s+"([^"]*)"', ptx)
    assert set(files) == {"generated/tiny/reverse.cu", "generated/tiny/vec.cuh"}
    assert image.resources is None
    assert ptx.endswith("\n")
    assert "\0" not in ptx


LONG = """\
extern "C" __global__ void sums(float* p) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 512; i++) sum = sum * p[i] + p[512 - i];
    p[0] = sum;
}
"""


def test_a_quick_compile_leaves_out_optimizations(tmp_path: Path) -> None:
    long, cache = dataclasses.replace(unit_of(LONG), entry="sums"), Cache(tmp_path)
    whole = compile_unit(long, "sm_90a", "ptx", cache=cache)
    quick = compile_unit(long, "sm_90a", "ptx", cache=cache, quick=True)
    assert not quick.cached, "one is not taken for the other"
    assert ".visible .entry sums(" in quick.data.decode()
    assert quick.data != whole.data
    assert compile_unit(long, "sm_90a", "ptx", cache=cache, quick=True).data == quick.data


def test_a_kernel_with_wgmma_is_compiled_in_full(tmp_path: Path) -> None:
    long, cache = dataclasses.replace(unit_of(LONG + "// wgmma\n"), entry="sums"), Cache(tmp_path)
    whole = compile_unit(long, "sm_90a", "ptx", cache=cache)
    assert compile_unit(long, "sm_90a", "ptx", cache=cache, quick=True).cached
    assert compile_many([(long, "sm_90a", "ptx")], cache=cache, quick=True)[0].data == whole.data


def test_how_kernels_of_the_cpu_machine_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, quick in ((None, False), ("", False), ("full", False), ("quick", True)):
        monkeypatch.delenv("KVGEN_CPU_COMPILE", raising=False)
        if value is not None:
            monkeypatch.setenv("KVGEN_CPU_COMPILE", value)
        assert quick_on_cpu() is quick
    monkeypatch.setenv("KVGEN_CPU_COMPILE", "fast")
    with pytest.raises(ConfigError, match=r"KVGEN_CPU_COMPILE: got 'fast'; it says how .* give one of these"):
        quick_on_cpu()


def test_an_nvrtc_without_the_option_compiles_as_always(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compile_unit(unit, "sm_80", "ptx", cache=None).data
    monkeypatch.setattr(nvrtc_module, "nvrtc_version", lambda: (12, 9))
    asked: list[list[str]] = []
    compile_text = nvrtc_module.compile_text
    monkeypatch.setattr(nvrtc_module, "compile_text", lambda t, o, k: asked.append(list(o)) or compile_text(t, o, k))
    assert compile_unit(unit, "sm_80", "ptx", cache=None, quick=True).data == whole
    assert not any("fast-compile" in option for option in asked[0])


def test_ptx_is_the_same_from_another_folder(unit: Unit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_unit(unit, "sm_80", "ptx", cache=None).data
    monkeypatch.chdir(tmp_path)
    assert compile_unit(unit, "sm_80", "ptx", cache=None).data == here


def test_text_cannot_include_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "present.cuh").write_text("typedef int present;\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"could not open source file \"present\.cuh\""):
        compile_unit(unit_of('#include "present.cuh"\n' + TEXT), "sm_80", cache=None)


def test_resources_are_those_of_the_entry() -> None:
    spill = compile_unit(unit_of(SPILLING, "tiny/spill", "spill"), "sm_80", cache=None).resources
    plain = compile_unit(unit_of(SPILLING, "tiny/plain", "plain"), "sm_80", cache=None).resources
    assert spill is not None
    assert plain is not None
    assert spill.registers == 64, "65536 registers over 1024 threads"
    assert spill.spill_stores > 0
    assert spill.spill_loads > 0
    assert spill.stack > 0
    assert plain.spill_stores == 0
    assert plain.registers < 32


def test_resources_of_the_report_older_toolkits_write() -> None:
    log = (
        "ptxas info    : 0 bytes gmem, 24 bytes cmem[4]\n"
        "ptxas info    : Compiling entry function 'a' for 'sm_80'\n"
        "ptxas info    : Function properties for a\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, 1024 bytes smem, 368 bytes cmem[0], 8 bytes cmem[2]\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_80'\n"
        "ptxas info    : Function properties for b\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 7 registers\n"
    )
    a, b = parse_resources(log, "a"), parse_resources(log, "b")
    assert dataclasses.astuple(a) == (40, 1024, 4, 12, 8, 376)
    assert dataclasses.astuple(b) == (7, 0, 0, 0, 0, 0)
    with pytest.raises(ToolError, match="unknown form"):
        parse_resources(log.replace("Used", "Needs"), "a")


def test_lineinfo_cubin_is_never_cached(unit: Unit, cache: Cache) -> None:
    compile_unit(unit, "sm_80", cache=cache, lineinfo=True)
    again = compile_unit(unit, "sm_80", cache=cache, lineinfo=True)
    assert not again.cached
    assert b"reverse.cu" in again.data
    assert cache.stats().entries == 0


def test_warnings_are_reported_and_survive_the_cache(cache: Cache) -> None:
    noisy = unit_of(TEXT.replace("__shared__", "int unused;\n    __shared__"))
    for cached in (False, True):
        image = compile_unit(noisy, "sm_80", cache=cache)
        assert image.cached is cached
        assert len(image.warnings) == 1
        assert image.warnings[0].startswith('generated/tiny/reverse.cu:2: variable "unused" was declared')


@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_missing_entry_names_those_there_are(kind: ImageKind) -> None:
    with pytest.raises(CompileError, match=r"entry: got 'forward'; .*found: reverse"):
        compile_unit(unit_of(entry="forward"), "sm_80", kind, cache=None)


def test_unknown_arch(unit: Unit) -> None:
    with pytest.raises(CompileError, match=r"arch: got 'sm_70'; it must be one of sm_80, .*sm_120f"):
        compile_unit(unit, "sm_70", cache=None)


def test_arch_newer_than_nvrtc(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    # What NVRTC 12.8 says of itself: it knows 100 and 120, but not yet their family targets.
    monkeypatch.setattr(nvrtc_module, "nvrtc_version", lambda: (12, 8))
    monkeypatch.setattr(nvrtc_module, "supported_numbers", lambda: frozenset({80, 89, 90, 100, 120}))
    assert supported_archs() == ["sm_80", "sm_89", "sm_90a"]
    with pytest.raises(ToolError, match=r"got sm_120f; NVRTC 12\.8 compiles for sm_80, sm_89, sm_90a; install a newer"):
        compile_unit(unit, "sm_120f", cache=None)


@pytest.mark.usefixtures("without_nvrtc_memory")
def test_missing_bindings_say_what_to_install(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(ToolError, match=r"cuda\.bindings: cannot be imported .*pip install 'kvgen\[cu13\]'"):
        compile_unit(unit, "sm_80", cache=None)


@pytest.mark.usefixtures("without_nvrtc_memory")
def test_missing_library_says_what_to_install(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Failure finding libnvrtc.so\nand a long story")

    monkeypatch.setattr(importlib.import_module("cuda.bindings.nvrtc"), "nvrtcVersion", fail)
    with pytest.raises(ToolError) as caught:
        compile_many([(unit, "sm_80", "cubin")], cache=None)
    assert "Failure finding libnvrtc.so)" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert "long story" not in str(caught.value)


def test_unknown_option_is_a_tool_error() -> None:
    with pytest.raises(ToolError, match=r"NVRTC \d+\.\d+: NVRTC_ERROR_INVALID_OPTION: .*--no-such-option"):
        nvrtc_module.compile_text(TEXT, ["--gpu-architecture=sm_80", "--no-such-option"], "cubin")


def test_many_keep_the_order_of_the_jobs() -> None:
    slow = "".join(f"__device__ float f{i}(float x) {{ return sinf(x) * {i}; }}\n" for i in range(200))
    units = [unit_of(TEXT.replace("2.0f", f"{i}.0f"), f"tiny/reverse{i}") for i in range(6)]
    units[0] = unit_of(slow + TEXT, "tiny/slow")
    jobs = [(unit, arch, "cubin") for unit in units for arch in ("sm_80", "sm_90a")]
    seen: list[Image] = []
    images = compile_many([(u, a, "cubin") for u, a, _ in jobs], cache=None, workers=4, progress=seen.append)
    assert [(i.unit_name, i.arch) for i in images] == [(u.name, a) for u, a, _ in jobs]
    assert len(seen) == len(jobs)
    assert {id(image) for image in seen} == {id(image) for image in images}
    one_by_one = [compile_unit(u, a, cache=None).data for u, a, _ in jobs]
    assert [image.data for image in images] == one_by_one


def test_many_collects_every_refusal_once() -> None:
    good = unit_of()
    bad = unit_of(TEXT.replace("s[31 -", "bogus[31 -"), "tiny/bad")
    worse = unit_of(TEXT.replace("float* p", "floot* p"), "tiny/worse")
    seen: list[Image] = []
    with pytest.raises(CompileError) as caught:
        compile_many(
            [(good, "sm_80", "cubin"), (bad, "sm_80", "cubin"), (worse, "sm_80", "ptx"), (bad, "sm_90a", "cubin")],
            cache=None,
            workers=2,
            progress=seen.append,
        )
    message = str(caught.value)
    assert message.startswith("3 of 4 compiles failed\n\ntiny/bad for sm_80, sm_90a: does not compile\n")
    assert message.count('"bogus" is undefined') == 1
    assert "tiny/worse for sm_80: does not compile\ngenerated/tiny/reverse.cu:1: error: " in message
    assert [image.unit_name for image in seen] == ["tiny/reverse"]


def test_many_of_nothing_and_with_no_workers(unit: Unit) -> None:
    assert compile_many([], cache=None) == []
    with pytest.raises(ArgumentError, match="workers: got 0; it must be at least 1"):
        compile_many([(unit, "sm_80", "cubin")], cache=None, workers=0)


def test_a_failing_progress_callback_stops_the_rest(unit: Unit) -> None:
    def fail(_: Image) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_many([(unit, "sm_80", "cubin")] * 4, cache=None, workers=1, progress=fail)


@pytest.mark.parametrize(("value", "allowed"), [(None, True), ("", True), ("0", True), ("1", False)])
def test_jit_allowed(value: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGEN_NO_JIT", raising=False)
    if value is not None:
        monkeypatch.setenv("KVGEN_NO_JIT", value)
    assert jit_allowed() is allowed


def test_jit_allowed_refuses_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_NO_JIT", "yes")
    with pytest.raises(ConfigError, match="KVGEN_NO_JIT: got 'yes'; it must be 0 or 1"):
        jit_allowed()

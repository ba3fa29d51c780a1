"""The fixture kvgen_check in test files of its own, and what those tests say."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.testing import Check
from tests.testing.toy import write_package

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

HEAD = """
import numpy as np
from toy import Cache, fill, padded, past, racy, ticket

def case(rows=64):
    pool = np.zeros((1, 1, 4, 32), np.float32)
    return pool, Cache(pool, lengths=np.array([3], np.uint32))[0], np.full((rows, 2), 9, np.uint32)
"""


@pytest.fixture(scope="session")
def home_cache() -> str:
    """The user's cache, as it is without pytester, who moves the home folder: all tests build the same kernels."""
    return os.environ.get("KVGEN_CACHE_DIR") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgen"
    )


@pytest.fixture(autouse=True)
def toy(home_cache: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", home_cache)
    write_package(pytester.path)
    pytester.syspathinsert()  # pytester forgets the modules of each test


# The entry point loads it where kvgen is installed as it stands; a second load by name would be refused.
INSTALLED = any(e.value == "kvgen.testing.plugin" for e in entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "kvgen.testing.plugin"]


def run(pytester: pytest.Pytester, body: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(HEAD + body)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN, *arguments)


def test_a_right_kernel_passes_and_its_counters_come_back(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_fill(kvgen_check):
    pool, cache, out = case(60)
    (launch,) = kvgen_check(fill, cache, out)
    assert (launch.entry, launch.grid) == ("toy_fill", (1, 1, 1))
    assert launch.counters.per_buffer["out"].store_bytes == 60 * 8
    assert (out == np.stack([np.arange(60), np.full(60, 7)], axis=1)).all()
    assert pool[0, 0, 0, 0] == 1 and pool.sum() == 1, "put back between the schedules"

def test_several(kvgen_check):
    pool, cache, out = case()
    total = np.zeros(1)

    def step(total):
        fill(cache, out)
        fill.bind(cache, out[::2].copy())()
        total += out.sum()

    launches = kvgen_check(step, total)
    assert [launch.entry for launch in launches] == ["toy_fill"] * 2
    assert pool[0, 0, 0, 0] == 2 and total == out.sum(), "what the function changes is put back, if it is an argument"

def test_garbage(kvgen_check):
    pool, cache, _ = case()
    kvgen_check(lambda: fill(cache, np.random.default_rng().integers(0, 2**32, (70, 2), np.uint32)))
""",
    )
    result.assert_outcomes(passed=3)


def test_the_example_in_the_documentation(pytester: pytest.Pytester) -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    example = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")).partition(
        "python benchmarks"
    )[0]
    pytester.makepyfile(example.replace("engine.kernels", "generated"))
    (pytester.path / "row_sum.ptx").write_text((Path(__file__).parent / "row_sum.ptx").read_text())
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN).assert_outcomes(passed=2)


def assert_short(text: str) -> None:
    """No line of kvgen's own, nor of the generated package."""
    for internal in ("kvgen/", "self.run", "self.prepare"):
        assert internal not in text, f"{internal} in\n{text}"


def test_a_fault_is_the_assertion_and_all_there_is_to_read(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_race(kvgen_check):
    _, cache, out = case()
    kvgen_check(racy, cache, out)

def step(cache, out):
    fill(cache, out)
    past(cache, out)  # the line to show

def test_bounds(kvgen_check):
    _, cache, out = case(60)
    kvgen_check(step, cache, out)
""",
    )
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: *toy_racy*toy/racy.cu:*",
            "E*thread schedule: 'ascending'",
            "*# the line to show",
            "E*toy_past*",
        ]
    )
    assert_short(text)
    assert "DeviceError" not in text and "KernelFault" not in text, text


def test_a_fault_past_a_buffer_names_it(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, "\ndef test(kvgen_check):\n    _, cache, out = case(60)\n    kvgen_check(past, cache, out)\n"
    )
    result.stdout.fnmatch_lines(["E*global_out_of_bounds*past.cu:7*"])


def test_schedules_that_disagree(pytester: pytest.Pytester) -> None:
    body = """
def test(kvgen_check):
    _, cache, out = case()
    kvgen_check(ticket, cache, out)

def test_one_schedule(kvgen_check):
    _, cache, out = case()
    kvgen_check.under(schedules=("descending",))(ticket, cache, out)
    assert sorted(out[:, 1]) == list(range(64))
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: out: schedules 'ascending' and 'descending' disagree at [[]0, 1[]]: * of 128 elements); "
            "written by toy_ticket (launch 0)"
        ]
    )
    run(pytester, body, "--kvgen-schedules", "ascending").assert_outcomes(passed=2)


def test_nothing_is_skipped(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps a kernel from being checked fails the test."""
    body = """
import pytest
from kvgen.errors import DeviceError

def test_nothing_launched(kvgen_check):
    with pytest.raises(AssertionError, match="nothing was checked"):
        kvgen_check(lambda: None)

def test_bound_before(kvgen_check):
    _, cache, out = case()
    step = fill.bind(cache, out)
    with pytest.raises(ValueError, match="bound before"):
        kvgen_check(step)

def test_other_architecture(kvgen_check):
    _, cache, out = case()
    with pytest.raises(DeviceError, match="arch: got sm_89; toy is generated for sm_80, sm_90a"):
        kvgen_check.under(arch="sm_89")(fill, cache, out)

def test_plain(kvgen_check):
    _, cache, out = case()
    kvgen_check(fill, cache, out)
"""
    run(pytester, body).assert_outcomes(passed=4)
    result = run(pytester, body, "--kvgen-arch", "sm_100f", "-k", "plain")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*DeviceError: arch: got sm_100f; *"])
    assert_short(result.stdout.str())
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run(pytester, body, "-k", "plain")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*DeviceError: toy/fill.cu on the CPU machine: the C++ compiler 'no-such-compiler' is not installed*"]
    )
    assert_short(result.stdout.str())


def test_options(pytester: pytest.Pytester) -> None:
    body = "\ndef test(kvgen_check):\n    assert repr(kvgen_check) == {!r}\n"
    arguments = "--kvgen-arch=sm_80", "--kvgen-schedules=descending, 7", "--kvgen-mode=fast"
    run(pytester, body.format(repr(Check()))).assert_outcomes(passed=1)
    run(pytester, body.format(repr(Check("sm_80", ("descending", 7), "fast"))), *arguments).assert_outcomes(passed=1)


def test_hardware_reports_less(pytester: pytest.Pytester) -> None:
    body = """
def test_padding(kvgen_check):
    _, cache, out = case()
    kvgen_check(padded, cache, out)

def test_race(kvgen_check):
    _, cache, out = case()
    kvgen_check(racy, cache, out)

def test_one_launch():
    from kvgen.runtime.cpu import machine
    _, cache, out = case()
    with machine(mode="hardware"):
        padded(cache, out)
"""
    run(pytester, body, "--kvgen-mode=hardware").assert_outcomes(passed=2, failed=1)
    result = run(pytester, body, "--kvgen-mode=check")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["E*toy_padded*level hardware)", "E*toy_racy*level hardware)"])


@pytest.mark.parametrize("given", ["sideways", "ascending,-1", ""])
def test_a_wrong_schedule(given: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, "\ndef test(kvgen_check):\n    pass\n", f"--kvgen-schedules={given}")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*--kvgen-schedules: got *; a schedule is ascending, descending or a seed*"])


def test_without_pytest(pytester: pytest.Pytester) -> None:
    import toy  # type: ignore[import-not-found]

    cache = toy.Cache(np.zeros((1, 1, 4, 32), np.float32), lengths=np.array([3], np.uint32))[0]
    (launch,) = Check(arch="sm_80", schedules=(3,))(toy.fill, cache, np.zeros((8, 2), np.uint32))
    assert launch.entry == "toy_fill"
    with pytest.raises(ArgumentError, match="schedules: got none"):
        Check(schedules=())


def test_pytest_starts_without_it(pytester: pytest.Pytester) -> None:
    """Loading the plugin loads neither NumPy nor the CPU machine."""
    pytester.makepyfile("def test_nothing():\n    pass\n")
    heavy = "numpy ml_dtypes kvgen.runtime kvgen.emulator kvgen.testing.check"
    code = (
        "import sys, pytest\n"
        "import kvgen.testing.plugin\n"
        "assert pytest.main(['-q']) == 0\n"
        f"print('loaded', sorted(set({heavy.split()}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pytester.path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.endswith("loaded []\n"), done.stdout + done.stderr

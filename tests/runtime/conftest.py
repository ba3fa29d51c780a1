"""The CPU machine in check mode, so that a set is built for it once, and device arrays without a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgen.runtime import cuda, launcher, pool_map
from kvgen.runtime.cpu import machine
from kvgen.runtime.packing import TENSOR_MAP
from tests.support.launching import NotingDriver

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def checking() -> Iterator[None]:
    """Launches look for races, bad accesses and uninitialised reads."""
    with machine(mode="check"):
        yield


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> NotingDriver:
    """Device arrays can be made; launches are written down."""
    noting = NotingDriver()
    monkeypatch.setattr(cuda, "driver", lambda: noting)
    return noting


@pytest.fixture(scope="session")
def in_fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Runs Python in a process whose libcuda is fake_driver.c, so that CudaDriver is tested through cuda.bindings."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the fake libcuda needs Linux and a C compiler")
    pytest.importorskip("cuda.bindings.driver")
    folder = tmp_path_factory.mktemp("libcuda")
    source = str(HERE / "fake_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), source, "-ldl"], check=True)
    prelude = """
import ctypes
import cuda.bindings.driver as api
from kvgen.errors import DeviceError
from kvgen.runtime import cuda, packing
driver = cuda.driver()
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_log.restype = ctypes.c_char_p
def current():
    return hex(int(api.cuCtxGetCurrent()[1]))
"""

    def run(code: str) -> str:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
        command = [sys.executable, "-c", prelude + code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def unlaunched(driver: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are checked as on a GPU of 9.0, and go nowhere."""
    monkeypatch.setattr(launcher, "_launch", lambda checked, args: lambda stream: None)
    monkeypatch.setattr(pool_map, "_encoded", lambda *_: bytes(TENSOR_MAP.size))

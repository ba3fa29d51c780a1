"""`run_gpu.py --prepare` for rehearsals on the CPU machine, which runs PTX and opens no cubin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import run_gpu
from benchmarks.gpu import prepare
from benchmarks.gpu.packages import ROOT, use
from kvgen.compile import Cache, Image, Job, Resources, compile_many


def _as_ptx(jobs: Sequence[Job], *, cache: Cache | None) -> list[Image]:
    images = compile_many([(unit, arch, "ptx") for unit, arch, _ in jobs], cache=cache)
    return [replace(image, kind="cubin", resources=Resources(0, 0, 0, 0, 0, 0)) for image in images]


@contextmanager
def prepared(folder: Path) -> Iterator[Path]:
    """In `folder`/cubins what --prepare writes for a built project, PTX in the place of machine code: the same text for the
    same kernels, without assembling them (tests/test_run_gpu.py does). `generated` finds the project's sets meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "compile_many", _as_ptx)
        arguments = ["--project", str(folder), "--prepare", str(folder / "cubins"), "--arch", "sm_90a"]
        assert run_gpu.main(arguments) == 0
    try:
        yield folder
    finally:
        use(ROOT)

"""The targets kernels are compiled for, and which GPU each one runs on."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from kvgen.architectures import ARCHITECTURES, ARCHS, candidates_for, gpu_targets
from kvgen.compile import nvrtc
from kvgen.errors import CompileError, DeviceError, SpecError


def check_arch(arch: str) -> None:
    """Raise CompileError unless `arch` is one of ARCHS."""
    if arch not in ARCHS:
        raise CompileError(f"arch: got {arch!r}; it must be one of {', '.join(ARCHS)}")


def archs_given(arch: object) -> list[object]:
    """`arch` of a call as a list of at least one name; one name may stand alone. Raises SpecError for what has no names.

    Names are not compared with ARCHS: who takes them says which ones are there.
    """
    given = [arch] if isinstance(arch, str) else list(arch) if isinstance(arch, Collection) else None
    if not given or isinstance(arch, (bytes, Mapping)):
        raise SpecError(
            f"arch: got {arch!r}; pass a list of architectures, such as ['sm_90a']; one of {', '.join(ARCHS)}"
        )
    return given


def supported_archs() -> list[str]:
    """The targets of ARCHS that the installed NVRTC can compile for; ToolError without NVRTC."""
    known = nvrtc.supported_numbers()
    family_targets = nvrtc.nvrtc_version() >= (12, 9)  # the `f` suffix came with 12.9; the list of numbers hides it
    found: list[str] = []
    for arch, target in ARCHITECTURES.items():
        number = int(re.sub(r"\D", "", arch))
        if number in known and (family_targets or not target.family):
            found.append(arch)
    return found


def select_arch(compute_capability: tuple[int, int], available: Sequence[str]) -> str:
    """The best of the `available` targets for a GPU of this compute capability (major, minor).

    Raises DeviceError, naming the target to generate, when none of them runs there, and CompileError for an unknown
    target in `available`.
    """
    for arch in available:
        check_arch(arch)
    major, minor = compute_capability
    fitting = candidates_for(major, minor)
    for arch in fitting:
        if arch in available:
            return arch
    have = ", ".join(available) or "nothing"
    if fitting:
        wanted = " or ".join(repr(arch) for arch in fitting)
        raise DeviceError(
            f"compute capability {major}.{minor}: the kernel was compiled for {have}, none of which runs on this GPU; "
            f"add {wanted} to `arch` in the spec"
        )
    raise DeviceError(
        f"compute capability {major}.{minor}: no target of kvgen runs on this GPU; it must be {gpu_targets()}"
    )

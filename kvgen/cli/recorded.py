"""resources.json: what each kernel of a set occupies on each architecture, kept beside its text for reviewers."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Literal

from kvgen.cli.project import RESOURCES, Project
from kvgen.compile import nvrtc_version, text_digest
from kvgen.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.compile import Image
    from kvgen.plan import KernelPlan

_WRITER: Final = "kvgen compile --record"
_OPCODES: Final = 12  # the most frequent ones tell a kernel's character; the tail is noise in a review


def installed() -> str:
    """The NVRTC in use, as "13.5"."""
    major, minor = nvrtc_version()
    return f"{major}.{minor}"


def check_pin(project: Project) -> None:
    """Raise ConfigError where `[tool.kvgen] nvrtc` names another NVRTC than the installed one."""
    pin = project.config.nvrtc
    if pin is None:
        return
    if not re.fullmatch(r"\d+\.\d+", pin):
        raise ConfigError(f"tool.kvgen.nvrtc: got {pin!r}; it must be major.minor, such as {installed()!r}")
    if pin != installed():
        raise ConfigError(
            f"tool.kvgen.nvrtc: got {pin!r}, but NVRTC {installed()} is installed; numbers recorded under another one "
            f"would change for no reason; "
            f"`pip install 'nvidia-cuda-nvrtc=={pin}.*'`, or change the pin and record every set"
        )


def is_recorded(text: str) -> bool:
    """Whether a text is a resources.json that kvgen wrote."""
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("written_by") == _WRITER


def read(text: str) -> dict[str, Any] | None:
    """The kernels of a resources.json, or None where it is not one."""
    if not is_recorded(text):
        return None
    kernels = json.loads(text).get("kernels")
    return kernels if isinstance(kernels, dict) else None


def record(images: list[Image], digests: dict[str, str], plans: Mapping[str, KernelPlan]) -> str:
    """The text of one set's resources.json; `digests` and `plans` by unit name. Needs the SASS tools."""
    from kvgen.compile.sass import histogram, sass

    with ThreadPoolExecutor() as pool:
        listings = list(pool.map(lambda image: sass(image.data), images))
    kernels: dict[str, dict[str, Any]] = {}
    for image, listing in zip(images, listings, strict=True):
        assert image.resources is not None
        opcodes = histogram(listing)
        most = sorted(opcodes, key=lambda name: (-opcodes[name], name))[:_OPCODES]
        kernel = kernels.setdefault(image.unit_name.partition("/")[2], {"digest": digests[image.unit_name]})
        kernel[image.arch] = {
            "registers": image.resources.registers,
            "shared": image.resources.static_shared + plans[image.unit_name].shared_on(image.arch),
            "spill_stores": image.resources.spill_stores,
            "spill_loads": image.resources.spill_loads,
            "instructions": sum(opcodes.values()),
            "sass": {name: opcodes[name] for name in most},
        }
    content = {"written_by": _WRITER, "nvrtc": installed(), "kernels": kernels}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def problem(project: Project, name: str) -> tuple[Literal["missing", "stale", "edited"], str] | None:
    """What is wrong with a set's resources.json, without NVRTC. A project that pins no NVRTC need not record any."""
    path = project.config.out / name / RESOURCES
    pin = project.config.nvrtc
    if not path.is_file():
        return ("missing", "[tool.kvgen] pins an NVRTC, so resources are recorded") if pin else None
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except ValueError:
        return "edited", "it is not JSON any more"
    kernels = read(text)
    if kernels is None:
        return "edited", "it is not in the form that kvgen writes"
    if pin and content.get("nvrtc") != pin:
        return "stale", f"recorded under NVRTC {content.get('nvrtc')}; [tool.kvgen] pins {pin}"
    expected = {u.name.partition("/")[2]: text_digest(u.text) for u in project.units[name]}
    for kernel in sorted(expected.keys() | kernels.keys()):
        entry = kernels.get(kernel)
        if kernel not in expected:
            return "stale", f"{kernel} is no kernel of the set any more"
        if not isinstance(entry, dict):
            return "stale", f"{kernel} is not recorded"
        if entry.get("digest") != expected[kernel]:
            return "stale", f"{kernel} was recorded for another text"
    archs = {s.kernels.name: s.kernels.arch for s in project.sets}[name]
    for kernel, entry in kernels.items():
        have = set(entry) - {"digest"}
        if have != set(archs):
            got = ", ".join(sorted(have)) or "nothing"
            return "stale", f"{kernel} is recorded for {got}; the spec has {', '.join(archs)}"
    return None

"""resources.json: what each kernel of a set occupies on each architecture, kept beside its text for reviewers."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Literal

from kvgen.cli.ondisk import CRLF, in_its_place, read_generated
from kvgen.cli.project import RESOURCES, Project
from kvgen.codegen.emit import body_digest
from kvgen.compile import nvrtc_version, text_digest
from kvgen.errors import ConfigError, ToolError
from kvgen.files import kind_of, named
from kvgen.json_file import parse_object, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.compile import Image
    from kvgen.plan.kernel import KernelPlan

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


def _content(text: str) -> dict[str, Any] | None:
    """A resources.json that kvgen wrote, edited since or not; None for any other text."""
    try:
        content = parse_object(text.encode(), RESOURCES)
    except ToolError:
        return None
    return content if content.get("written_by") == _WRITER else None


def _text(content: Mapping[str, Any]) -> str:
    """A resources.json: the content, and under "body" the digest of its text without that."""

    def dumped(value: Mapping[str, Any]) -> str:
        return json.dumps(value, indent=1, sort_keys=True) + "\n"

    rest = {key: value for key, value in content.items() if key != "body"}
    return dumped(rest | {"body": body_digest(dumped(rest))})


def edited(text: str) -> str | None:
    """What shows that a resources.json is not as kvgen wrote it; None where it is. Older ones, without a digest, are."""
    content = _content(text)
    if content is None:
        return "it is not in the form that kvgen writes"
    if "body" in content and text.replace("\r\n", "\n") != _text(content):
        return "its text does not match the digest in it"
    return None


def is_recorded(text: str) -> bool:
    """Whether a text is a resources.json that kvgen wrote."""
    return _content(text) is not None


def read(text: str) -> dict[str, Any] | None:
    """The kernels of a resources.json, or None where it is not one."""
    kernels = (_content(text) or {}).get("kernels")
    return kernels if isinstance(kernels, dict) else None


def record(images: list[Image], digests: dict[str, str], plans: Mapping[str, KernelPlan]) -> str:
    """The text of one set's resources.json; `digests` and `plans` by unit name. Needs the SASS tools."""
    from kvgen.compile import default_cache
    from kvgen.compile.sass import histogram, sass

    with ThreadPoolExecutor() as pool:
        listings = list(pool.map(lambda image: sass(image.data, cache=default_cache()), images))
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
    return _text({"written_by": _WRITER, "nvrtc": installed(), "kernels": kernels})


def problem(project: Project, name: str) -> tuple[Literal["missing", "stale", "edited"], str] | None:
    """What is wrong with a set's resources.json, without NVRTC. A project that pins no NVRTC need not record any."""
    path = project.config.out / name / RESOURCES
    pin, kind = project.config.nvrtc, kind_of(path)
    if kind == "missing":
        return ("missing", "[tool.kvgen] pins an NVRTC, so resources are recorded") if pin else None
    if kind != "file":
        return "edited", in_its_place(path, kind)
    text = read_generated(path)
    found = "it is no UTF-8 any more" if text is None else edited(text)
    if text is None or found:
        return "edited", found or ""
    if "\r\n" in text:
        return "edited", CRLF
    content, kernels = _content(text) or {}, read(text) or {}
    if "body" not in content:
        return "stale", "recorded by an older kvgen, without a digest of its own"
    if pin and content.get("nvrtc") != pin:
        return "stale", f"recorded under NVRTC {shown(content.get('nvrtc'))}; [tool.kvgen] pins {pin}"
    expected = {u.name.partition("/")[2]: text_digest(u.text) for u in project.units[name]}
    for kernel in sorted(expected.keys() | kernels.keys()):
        entry = kernels.get(kernel)
        if kernel not in expected:
            return "stale", f"{named(kernel)} is no kernel of the set any more"
        if not isinstance(entry, dict):
            return "stale", f"{kernel} is not recorded"
        if entry.get("digest") != expected[kernel]:
            return "stale", f"{kernel} was recorded for another text"
    archs = {s.kernels.name: s.kernels.arch for s in project.sets}[name]
    for kernel, entry in kernels.items():
        have = set(entry) - {"digest"}
        if have != set(archs):
            got = named(", ".join(sorted(have))) or "nothing"
            return "stale", f"{kernel} is recorded for {got}; the spec has {', '.join(archs)}"
    return None

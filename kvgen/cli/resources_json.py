"""resources.json: what each kernel of a set occupies on each architecture, kept beside its text for reviewers."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvgen.cli.ondisk import CRLF, in_its_place, read_generated
from kvgen.cli.project import RESOURCES, Project
from kvgen.codegen.emit import body_digest, kernel_files
from kvgen.compile import nvrtc_version
from kvgen.errors import ConfigError, ToolError
from kvgen.files import kind_of, named
from kvgen.json_file import parse_object, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgen.codegen.emit import File
    from kvgen.compile import Image
    from kvgen.plan.kernel import KernelPlan
    from kvgen.schema.loader import LoadedSet

_WRITER: Final = "kvgen compile --record"
_FORM: Final = 5  # of the text; what an older kvgen wrote is recorded anew
_CODE: Final = 5  # the first form whose digests are of code; those of older ones are of every character


@dataclass(frozen=True)
class Recorded:
    """A kernel in a resources.json: the digest of its code, or in records of older forms (`exact`) of its text, and facts by
    architecture."""

    digest: object
    exact: bool
    facts: dict[str, dict[str, int]]


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
    rest = {key: value for key, value in content.items() if key != "body"}
    return _dumped(rest | {"body": body_digest(_dumped(rest))}) + "\n"


def _dumped(value: object, indent: str = "") -> str:
    """JSON, a line a value; facts, which are numbers, are one line an architecture."""
    if not isinstance(value, dict) or all(isinstance(part, int) for part in value.values()):
        return json.dumps(value)
    inner = f"{indent} "
    lines = [f"{inner}{json.dumps(key)}: {_dumped(value[key], inner)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def edited(text: str) -> str | None:
    """The sign that a resources.json is not as kvgen wrote it; None where it is, and for a file of an older form."""
    content = _content(text)
    if content is None:
        return "it is not in the form that kvgen writes"
    if not _is_older(content) and text.replace("\r\n", "\n") != _text(content):
        return "its text does not match the digest in it"
    return None


def _is_older(content: Mapping[str, Any]) -> bool:
    """An older kvgen wrote this, in a form that this one would not write."""
    return "body" not in content or content.get("form") != _FORM


def is_recorded(text: str) -> bool:
    """A text is a resources.json that kvgen wrote."""
    return _content(text) is not None


def read(text: str) -> dict[str, Recorded] | None:
    """The kernels of a resources.json, whatever is none of them left out; None where it is not one."""
    content = _content(text) or {}
    kernels, form = content.get("kernels"), content.get("form")
    if not isinstance(kernels, dict):
        return None
    exact = not isinstance(form, int) or form < _CODE
    return {
        name: Recorded(
            entry.get("digest"),
            exact,
            {arch: _facts(facts) for arch, facts in entry.items() if isinstance(facts, dict)},
        )
        for name, entry in kernels.items()
        if isinstance(entry, dict)
    }


def nvrtc_of(text: str) -> str | None:
    """The NVRTC that a resources.json was recorded under; None where it names none."""
    name = (_content(text) or {}).get("nvrtc")
    return named(name) if isinstance(name, str) else None


def _facts(given: Mapping[str, object]) -> dict[str, int]:
    return {name: n for name, n in given.items() if isinstance(n, int) and not isinstance(n, bool)}


def record(
    loaded: LoadedSet,
    files: Mapping[str, File],
    prefix: str,
    images: list[Image],
    digests: Mapping[str, str],
    plans: Mapping[str, KernelPlan],
    sources: Mapping[str, str],
) -> str:
    """The text of one set's resources.json; code digests by kernel, plans and sources by unit name. `files` are
    all generated ones, below the output folder `prefix`. Needs the SASS tools."""
    from kvgen.cli.candidates import compared, others

    kernels = measured(images, digests, plans, sources)
    content = {"written_by": _WRITER, "form": _FORM, "nvrtc": installed(), "kernels": kernels}
    found = others(loaded, files, prefix)
    return _text(content | ({"candidates": compared(loaded, kernels, found)} if found else {}))


def measured(
    images: list[Image], digests: Mapping[str, str], plans: Mapping[str, KernelPlan], sources: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """By a set's kernels: the digest of the code and, by architecture, the facts. Arguments as those of `record`."""
    from kvgen.bench.tiles import tile_of
    from kvgen.cli.attention_cycles import attends, kernel_of, recorded
    from kvgen.compile import default_cache
    from kvgen.compile.sass import count_classes, histogram, instructions_of, sass
    from kvgen.cycles.kernel import blocks_per_multiprocessor

    with ThreadPoolExecutor() as pool:
        listings = list(pool.map(lambda image: sass(image.data, cache=default_cache()), images))
    kernels: dict[str, dict[str, Any]] = {}
    for image, listing in zip(images, listings, strict=True):
        assert image.resources is not None
        opcodes, plan = histogram(listing), plans[image.unit_name]
        cycles: dict[str, int] = {}
        if attends(plan):
            cycles = recorded(kernel_of(image, plan, sources[image.unit_name]), tile_of(plan.on(image.arch)))
        name = image.unit_name.partition("/")[2]
        kernel = kernels.setdefault(name, {"digest": digests[name]})
        shared = image.resources.static_shared + plan.shared_on(image.arch)
        kernel[image.arch] = {
            "registers": image.resources.registers,
            "spills": image.resources.spill_stores + image.resources.spill_loads,
            "shared": shared,
            "blocks": blocks_per_multiprocessor(
                image.arch, image.resources.registers, shared, plan.threads_on(image.arch)
            ),
            "instructions": sum(opcodes.values()),
            **count_classes(opcodes),
            **cycles,
            "machine_code": int(hashlib.sha256(instructions_of(listing).encode()).hexdigest()[:8], 16),
        }
    return kernels


def problem(project: Project, name: str) -> tuple[Literal["missing", "stale", "edited"], str] | None:
    """The fault of a set's resources.json, found without NVRTC. A project that pins no NVRTC need not record any."""
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
    if _is_older(content):
        return "stale", "recorded by an older kvgen, in another form"
    if pin and content.get("nvrtc") != pin:
        return "stale", f"recorded under NVRTC {shown(content.get('nvrtc'))}; [tool.kvgen] pins {pin}"
    expected = project.digests[name]
    archs = {k.name: own for s in project.sets if s.kernels.name == name for k, own in kernel_files(s)}
    for kernel in sorted(expected.keys() | kernels.keys()):
        if kernel not in expected:
            return "stale", f"{named(kernel)} is no kernel of the set any more"
        if kernel not in kernels:
            return "stale", f"{kernel} is not recorded"
        if kernels[kernel].digest != expected[kernel]:
            return "stale", f"{kernel} was recorded for other code"
    for kernel, entry in kernels.items():
        if entry.facts.keys() != set(archs[kernel]):
            got = named(", ".join(sorted(entry.facts))) or "nothing"
            return "stale", f"{kernel} is recorded for {got}; the spec has {', '.join(archs[kernel])}"
    return None

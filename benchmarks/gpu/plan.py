"""The work of a run: which sets first, what of each, how long each piece may take, and in which order under one deadline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvgen.verify.supervisor import Item, Key

SCHEMA: Final = 1
FILE: Final = "plan.json"
SECTIONS: Final = ("facts", "bandwidth", "calibrate", "probes", "correctness", "timings", "peers", "tools")
# Sets by what their answers are worth. The others follow, those with fewest cases first, so that most sets get an answer.
BY_VALUE: Final = (
    "llama3_8b",
    "qwen3_30b_fp8",
    "deepseek_v3",
    "deepseek_v3_fp8",
    "llama4_scout_nvfp4",
    "gpt_oss_20b",
    "deepseek_v4_flash_tp8",
    "deepseek_v41_flash",
    "mistral_7b_int4",
    "engine_qwen3_fp8",
    "deepseek_v32_indexer",
    "gemma2_9b",
)
# Sets whose small cases are kept bit by bit.
GOLDEN: Final = (
    *("llama3_8b", "gpt_oss_20b", "llama3_70b_tp8", "llama3_8b_fp8", "deepseek_v3_fp8", "qwen3_32b_nvfp4"),
)
# Sets whose append is timed beside separate kernels, without PDL, and beside kernels that do nothing.
COMPARED: Final = ("llama3_8b", "qwen3_30b_fp8")
STEPPED: Final = "llama3_8b"  # whose step of all layers is timed
# Kernels of which the driver says how many blocks a multiprocessor runs at once.
OCCUPANCY: Final = (
    ("llama3_8b", "append"),
    ("llama3_8b", "decode"),
    ("llama3_8b", "extend"),
    ("qwen3_30b_fp8", "decode"),
    ("mistral_7b_int4", "decode"),
    ("llama4_scout_nvfp4", "decode"),
    ("gemma2_9b", "extend"),
    ("deepseek_v3", "mla_decode"),
    ("deepseek_v3_fp8", "mla_decode"),
    ("deepseek_v32_indexer", "indexer_scores"),
)
# (set, operation, case of its correctness) under compute-sanitizer, (set, operation, timed case) under ncu.
# Extend of 128 threads: those of 384 hold all registers of a multiprocessor, and leave none to a sanitizer.
SANITIZED: Final = (
    ("llama3_8b", "decode", "small"),
    ("llama3_8b", "append", "small"),
    ("phi3_mini", "extend", "small"),
)
SANITIZERS: Final = ("memcheck", "racecheck")
PROFILED: Final = (
    ("llama3_8b", "decode", "64x8192"),
    ("deepseek_v3", "mla_decode", "128x32768"),
    ("deepseek_v3_fp8", "mla_decode", "128x32768"),
    ("llama3_8b", "extend", "1x4096"),
    ("qwen3_32b_nvfp4", "decode", "64x8192"),
)
# (set, operation) whose kernels an older NVRTC compiles too: a driver that is older than the newest NVRTC may refuse the others.
OLDER: Final = (("llama3_8b", "append"), ("llama3_8b", "decode"), ("deepseek_v3", "mla_decode"))
# The largest share of the run's time that each of the first sections takes. The rest of their work follows at the end.
SHARES: Final = {"facts": 0.08, "calibrate": 0.12, "probes": 0.1}
PEERS: Final = ("sdpa 1x4096 causal", "sdpa 64x8192 decode", "matmul 8192")


@dataclass(frozen=True)
class Patience:
    """Seconds without an answer until a piece of work counts as hung."""

    case: float = 8.0
    timing: float = 30.0
    probe: float = 5.0
    tool: float = 40.0
    host: float = 120.0  # oracles and imports, which do not hang


@dataclass(frozen=True)
class SetPlan:
    """The work on one set: its spec file, and the names of (operation, case) that are checked and that are timed."""

    spec: str
    cases: tuple[tuple[str, str], ...]
    timings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plan:
    """The contents of a prepared folder. `probes` are (unit, name), `units` their digests, `digest` is that of the kernels;
    `sanitized`, `profiled`, `occupancy` and `older` are as the constants of this module, of the sets that are there.
    `older_nvrtc` is the version that `older` was compiled with, "" where it was not."""

    sets: Mapping[str, SetPlan]
    probes: tuple[tuple[str, str], ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    sanitized: tuple[tuple[str, str, str], ...] = ()
    profiled: tuple[tuple[str, str, str], ...] = ()
    occupancy: tuple[tuple[str, str], ...] = ()
    older: tuple[tuple[str, str], ...] = ()
    older_nvrtc: str = ""
    digest: str = ""
    nvrtc: str = ""

    def names(self) -> list[str]:
        """The sets, by value."""
        known = [name for name in BY_VALUE if name in self.sets]
        rest = sorted(set(self.sets) - set(known), key=lambda name: (len(self.sets[name].cases), name))
        return known + rest

    def save(self, folder: Path) -> None:
        """Write the folder's plan."""
        content = {"schema": SCHEMA, **asdict(self)}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Plan:
    """The plan of a prepared folder. Raises ValueError where it has none, or one of another schema."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}; make it with --prepare {folder}")
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path}: is of another schema than {SCHEMA}; make it again with --prepare {folder}")
    sets = {
        name: SetPlan(s["spec"], _tuples(s["cases"]), _tuples(s["timings"])) for name, s in content.pop("sets").items()
    }
    lists = {name: _tuples(content.pop(name)) for name in ("probes", "sanitized", "profiled", "occupancy", "older")}
    return Plan(sets, **lists, **content)


def _tuples(found: Iterable[Sequence[str]]) -> Any:
    return tuple(tuple(each) for each in found)


def until(section: str, now: float, before: float | None, deadline: float | None) -> float | None:
    """The time by which a section that comes first leaves the rest of its work for the end. `before`: the latest one; `deadline`:
    the seconds of the whole run. None: there is no limit."""
    return None if before is None or deadline is None else min(before, now + SHARES[section] * deadline)


# Items ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """The part of a plan that a run does: these sections, on a GPU or on the CPU machine, without the keys in `done`."""

    sections: Sequence[str]
    patience: Patience
    done: frozenset[Key] = frozenset()

    def of(self, section: str, items: Iterable[Item]) -> list[Item]:
        """The items of a section that are wanted."""
        return [item for item in items if section in self.sections and item.key not in self.done]


def facts(plan: Plan, wanted: Wanted) -> list[Item]:
    """Versions, tensor maps, occupancy, kernels of an older NVRTC: each alone enough to end a process."""
    keys = [("", "", "versions"), ("", "tensor_map", "launchers"), ("", "tensor_map", "bindings")]
    keys += [(name, "tensor_maps", "all") for name in plan.names()]
    keys += [(name, op, "occupancy") for name, op in plan.occupancy if name in plan.sets]
    items = [Item(("facts", *key), wanted.patience.case) for key in keys]
    for name, op in plan.older if plan.older_nvrtc else ():
        if name in plan.sets:
            items.append(Item(("facts", name, op, f"nvrtc {plan.older_nvrtc}"), wanted.patience.tool))
    return wanted.of("facts", items)


def measures(wanted: Wanted) -> list[Item]:
    """Bandwidth, without which nothing is timed, then the calibration's probes, each alone on the GPU."""
    from kvgen.verify.probes import PROBES  # which needs NumPy

    patience = wanted.patience.timing
    found = [Item(("calibrate", "", "", name), patience, exclusive=True) for name in PROBES]
    bandwidth = [Item(("bandwidth", "", "", "all"), patience, exclusive=True)]
    return wanted.of("bandwidth", bandwidth) + wanted.of("calibrate", found)


def golden_probes(plan: Plan, wanted: Wanted) -> list[Item]:
    """Every probe, in the order of tests/golden_gpu: those of TMA and wgmma first."""
    items = [
        Item(("probes", "", unit, name), wanted.patience.probe, {"digest": plan.units[unit]})
        for unit, name in plan.probes
    ]
    return wanted.of("probes", items)


def correctness(plan: Plan, name: str, wanted: Wanted) -> list[Item]:
    """A set's cases."""
    items = [Item(("correctness", name, op, case), wanted.patience.case) for op, case in plan.sets[name].cases]
    return wanted.of("correctness", items)


def timings(plan: Plan, name: str, wanted: Wanted, bandwidth: Mapping[str, float]) -> list[Item]:
    """A set's timed cases, each alone on the GPU."""
    items = [
        Item(("timings", name, op, case), wanted.patience.timing, {"bandwidth": bandwidth}, exclusive=True)
        for op, case in plan.sets[name].timings
    ]
    return wanted.of("timings", items)


def by_set(plan: Plan, names: Iterable[str], wanted: Wanted, bandwidth: Mapping[str, float]) -> Iterator[Item]:
    """Each set's cases, then its timings."""
    for name in names:
        yield from correctness(plan, name, wanted)
        yield from timings(plan, name, wanted, bandwidth)


def peers(wanted: Wanted) -> list[Item]:
    """Kernels of PyTorch, one after the other in the same process, which imports it once."""
    items = [Item(("peers", "", "torch", case), wanted.patience.timing, exclusive=True) for case in PEERS]
    return wanted.of("peers", items)


def tools(plan: Plan, wanted: Wanted) -> list[Item]:
    """compute-sanitizer and ncu on single launches."""
    found = [
        Item(("tools", name, tool, f"{op} {case}"), wanted.patience.tool, {"op": op, "case": case}, exclusive=True)
        for tool in SANITIZERS
        for name, op, case in plan.sanitized
        if name in plan.sets
    ]
    found += [
        Item(("tools", name, "ncu", f"{op} {case}"), wanted.patience.tool, {"op": op, "case": case}, exclusive=True)
        for name, op, case in plan.profiled
        if name in plan.sets
    ]
    return wanted.of("tools", found)


def everything(plan: Plan, wanted: Wanted, bandwidth: Mapping[str, float]) -> list[Item]:
    """All items of a run. The timings of a GPU whose bandwidth is not known yet cannot be run."""
    found = facts(plan, wanted) + measures(wanted) + golden_probes(plan, wanted)
    return found + list(by_set(plan, plan.names(), wanted, bandwidth)) + peers(wanted) + tools(plan, wanted)

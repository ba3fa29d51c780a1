"""Which models of transformers `kvgen init` reads, and whether what it reads is right: python -m benchmarks.model_sweep.

Needs `pip install 'kvgen[build,sweep]'` and no network: configs are those that transformers' classes make by default, the
published ones of tests/models, and changes of single fields. transformers' modules are run without weights
(`benchmarks/sweep/truth.py`); every fact of every layer is compared with what kvgen reads (`benchmarks/sweep/said.py`).
docs/models.md says what is read and why the rest is refused; this says whether it is right. Exit status 1 if anything is
read wrong or ends in a traceback.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.sweep import mutations, said, truth  # noqa: E402
from benchmarks.sweep.types import FILLED, Found, every_type  # noqa: E402
from kvgen import models  # noqa: E402

FOLDERS = [ROOT / "tests" / "models" / "configs", ROOT / "tests" / "models" / "published"]
COUNTS = ROOT / "benchmarks" / "sweep" / "counts.json"
OUTCOMES = ("read", "facts only", "refused", "wrong", "traceback", "not compared", "not buildable")


@dataclass
class Row:
    """One config: what became of it. `detail` is the refusal, the differences, or transformers' error.

    "facts only": what kvgen reads is right, and `kvgen init` says why it writes no spec. "not compared": transformers cannot
    run the config, or its modules do not show what a layer reads.
    """

    section: str
    name: str
    form: str
    outcome: str
    detail: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Truths:
    """transformers' layers of a config, kept: many files have one text config."""

    def __init__(self) -> None:
        self._kept: dict[str, list[truth.LayerTruth] | truth.NotBuildable] = {}

    def of(self, values: dict[str, Any]) -> list[truth.LayerTruth]:
        """Layers of the decoder of a config; `NotBuildable` as transformers raises it."""
        key = json.dumps(values, sort_keys=True)
        if key not in self._kept:
            try:
                self._kept[key] = truth.layers(truth.text_of(truth.config_of(values)))
            except truth.NotBuildable as error:
                self._kept[key] = error.with_traceback(None)
            gc.collect()  # models are cycles of modules and their methods, and large
        found = self._kept[key]
        if isinstance(found, truth.NotBuildable):
            raise found
        return found


def judged(
    section: str, name: str, form: str, values: dict[str, Any], truths: Truths, same: dict[str, Any] | None = None
) -> Row:
    """A config read by kvgen and by transformers; `same` is the config that transformers shall read in its place."""
    start = time.perf_counter()
    answer = said.layers(values)
    outcome, detail = "read", list[str]()
    if answer.crashed:
        outcome, detail = "traceback", [answer.crashed]
    elif answer.refused:
        outcome, detail = "refused", [answer.refused]
    elif any(layer.compressed is not None for layer in answer.layers):
        outcome, detail = "not compared", ["layers with compressed entries: tests_torch/record_compressed.py runs them"]
    else:
        try:
            detail = said.differences(truths.of(same or values), answer.layers)
            outcome = "wrong" if detail else "facts only" if answer.no_spec else "read"
            detail = detail or ([answer.no_spec] if answer.no_spec else [])
        except truth.NotBuildable as error:
            outcome, detail = "not compared", [str(error)]
    return Row(section, name, form, outcome, detail, round(time.perf_counter() - start, 2))


def types(truths: Truths, only: Sequence[str]) -> Iterator[Row]:
    """Every decoder type: its own file with and without `architectures`; the text config of a multimodal one alone."""
    seen: set[str] = set()
    for found in every_type():
        if not isinstance(found, Found):
            yield Row("types", found[0], "default", "not buildable", [found[1]])
            continue
        if only and not {found.model_type, found.text_type} & set(only):
            continue
        section = "types" if found.kind == "causal" else "wrappers"
        same = {
            "model_type": found.model_type,
            **FILLED.get(found.model_type, {}),
        }  # the class's own objects: some cannot read the JSON that they write
        named = {**found.values, "architectures": [found.class_name]}
        bare = {k: v for k, v in found.values.items() if k != "architectures"}
        yield judged(section, found.model_type, "with architectures", named, truths, same)
        yield judged(section, found.model_type, "model_type alone", bare, truths, same)
        if found.kind == "multimodal" and found.text_type not in seen:
            seen.add(found.text_type)
            text = {k: v for k, v in found.text_values.items() if k != "architectures"}
            yield judged("text configs", found.text_type, "model_type alone", text, truths, same)


def published(truths: Truths, only: Sequence[str]) -> Iterator[Row]:
    """The published configs of tests/models, and those of the folder that `--configs` names."""
    for name, path in published_files(FOLDERS):
        values = models.read(path)
        if not only or name in only:
            yield judged("published", name, values.get("model_type", ""), values, truths)


def published_files(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """(name, file) of every config.json below folders, and of files called NAME.json or NAME_config.json in them."""
    found: dict[Path, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            if not path.name.endswith("hf_quant_config.json"):
                found[path] = path.parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
    return [(name, path) for path, name in found.items()]


def changes(truths: Truths, only: Sequence[str]) -> Iterator[Row]:
    """Single-field changes of every family that is read."""
    for name, values in mutations.families(only):
        for change, changed in mutations.of(values):
            yield judged("changes", name, change, changed, truths)
        truths._kept.clear()


def by_text_type(rows: Sequence[Row]) -> dict[str, int]:
    """How many distinct decoder types are read, refused, ...: a type counts by the worst of its files."""
    worst: dict[str, str] = {}
    order = ("read", "facts only", "refused", "not compared", "not buildable", "wrong", "traceback")
    for row in rows:
        if row.section in ("types", "text configs"):
            worst[row.name] = max(worst.get(row.name, "read"), row.outcome, key=order.index)
    return dict(Counter(worst.values()))


def record(rows: Sequence[Row], counts: dict[str, dict[str, int]]) -> None:
    """Write the counts of the sections that were run, with their day and versions, beside those of the others."""
    kept: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    if distinct := by_text_type(rows):
        counts = {"distinct types": distinct, **counts}
    run = {"date": date.today().isoformat(), "transformers": version("transformers"), "torch": version("torch")}
    kept.update({section: {**run, "counts": count} for section, count in counts.items()})
    COUNTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


SECTIONS = {"types": types, "published": published, "changes": changes}


def counts_of(rows: list[Row]) -> dict[str, dict[str, int]]:
    """How many rows of a section came out how."""
    return {s: dict(Counter(r.outcome for r in rows if r.section == s)) for s in dict.fromkeys(r.section for r in rows)}


def write(path: Path, rows: list[Row]) -> None:
    """The rows there are, after each of them: a run of hours may be killed."""
    made = {
        "schema": 1,
        "transformers": version("transformers"),
        "counts": counts_of(rows),
        "rows": [asdict(r) for r in rows],
    }
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run the sections; the command's exit status."""
    parser = argparse.ArgumentParser(
        prog="model_sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be given again")
    parser.add_argument("--only", default="", help="only these types, published configs or families, comma-separated")
    parser.add_argument("--json", type=Path, help="write every row and the counts here")
    parser.add_argument("--quiet", action="store_true", help="only the counts and what is wrong")
    parser.add_argument("--record", action="store_true", help=f"keep the counts in {COUNTS.name}, for docs/models.md")
    parser.add_argument("--configs", type=Path, metavar="FOLDER", help="published configs below this folder, too")
    options = parser.parse_args()
    if options.record and (options.only or options.configs):
        parser.error("--record keeps counts of whole sections of what lies here; leave out --only and --configs")
    FOLDERS.extend([options.configs] if options.configs else [])
    logging.disable(logging.ERROR)
    gc.freeze()  # what is imported stays
    only = [name for name in options.only.split(",") if name]
    rows: list[Row] = []
    for section in options.section or SECTIONS:
        for row in SECTIONS[section](truths := Truths(), only):
            rows.append(row)
            if options.json:
                write(options.json, rows)
            if not options.quiet or row.outcome in ("wrong", "traceback"):
                print(
                    f"{row.section:12} {row.name:28} {row.form:34} {row.outcome:13} {'; '.join(row.detail)[:400]}",
                    flush=True,
                )
        del truths
    counts = counts_of(rows)
    for section, count in counts.items():
        print(f"{section}: {', '.join(f'{count[o]} {o}' for o in OUTCOMES if o in count)}")
    if options.record:
        record(rows, counts)
    return 1 if any(r.outcome in ("wrong", "traceback") for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

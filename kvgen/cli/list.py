"""`kvgen list`: the sets of the project and what each is for, or the presets."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.cli.console import Json, Selectors, print_json

if TYPE_CHECKING:
    from kvgen.schema.loader import LoadedSet


def list_sets(
    selectors: Selectors = None,
    presets: Annotated[
        bool, typer.Option("--presets", help="List the presets instead: other engines' layouts, with their fields.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the sets of the project: heads, layout, architectures, operations and spec. Nothing is rendered.

    \b
    kvgen list                  every set
    kvgen list 'qwen*' --json   some, for programs
    kvgen list --presets        layouts of vLLM, SGLang, FlashInfer and others, ready for specs
    """
    from kvgen.errors import ToolError

    if presets:
        if selectors:
            raise ToolError(
                f"--presets: got it beside the selector {selectors[0]!r}; presets belong to no project; drop one"
            )
        _print_presets(as_json)
        return
    from kvgen.cli.project import end, open_sets

    config, selection = open_sets(selectors=selectors)
    rows = [_set(item.loaded, item.ops) for item in selection.chosen]
    if as_json:
        print_json(rows)
    else:
        _print_table(rows)
    end(config, selection.broken)


def _set(loaded: LoadedSet, ops: tuple[str, ...]) -> dict[str, Any]:
    kernels = loaded.kernels
    if kernels.cache.states:
        return _states(loaded, ops)
    cache = kernels.kv
    layout = cache.layout.kv or " / ".join(filter(None, (cache.layout.k, cache.layout.rope, cache.layout.v)))
    return {
        "set": kernels.name,
        "spec": loaded.source,
        "about": _summary(loaded.doc),
        "q_heads": kernels.q_heads,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "dtype": cache.dtype,
        "quant": next((q.dtype for q in cache.quants.values() if q is not None), None),
        "layout": layout,
        "page_tokens": cache.page_tokens,
        "table": cache.page_table.kind,
        "arch": list(kernels.arch),
        "ops": list(ops),
    }


def _states(loaded: LoadedSet, ops: tuple[str, ...]) -> dict[str, Any]:
    """A set over states, which has no heads and stores bytes."""
    from kvgen.lowering.state_rows import state_bytes

    kernels = loaded.kernels
    names = ("q_heads", "kv_heads", "head_dim", "quant")
    return {
        "set": kernels.name,
        "spec": loaded.source,
        "about": _summary(loaded.doc),
        **dict.fromkeys(names),
        "dtype": "u8",
        "layout": kernels.cache.storage.tensors[0].text,
        "page_tokens": None,
        "state_bytes": state_bytes(kernels.cache),
        "table": kernels.cache.page_table.kind,
        "arch": list(kernels.arch),
        "ops": list(ops),
    }


def _summary(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split())


def _print_table(rows: list[dict[str, Any]]) -> None:
    from kvgen.cli.table import Column, Table, words

    table = Table((*words("set", "heads", "stored", "layout", "architectures"), Column("operations", prose=True)))
    for row in rows:
        table.add(
            row["set"],
            "none" if row["q_heads"] is None else f"{row['q_heads']}/{row['kv_heads']} x {row['head_dim']}",
            f"{row['state_bytes']} bytes" if row.get("state_bytes") else row["quant"] or row["dtype"],
            row["layout"],
            " ".join(row["arch"]),
            " ".join(row["ops"]),
        )
    if rows:
        table.print()
    else:
        typer.echo("no sets; `kvgen init --from config.json -o specs/model.py` writes a spec")


def _print_presets(as_json: bool) -> None:
    from kvgen.schema import presets

    rows = []
    for name in presets.__all__:
        function = getattr(presets, name)
        fields = inspect.signature(function).parameters.values()
        about = _summary(inspect.getdoc(function) or "")
        needs = [p.name for p in fields if p.default is p.empty]
        takes = [p.name for p in fields if p.default is not p.empty]
        rows.append((name, about, needs, takes))
    if as_json:
        print_json([dict(zip(("preset", "about", "needs", "takes"), row, strict=True)) for row in rows])
        return
    from kvgen.cli.table import Column, Table, words

    fields_column = Column("fields, those with a default in brackets", prose=True, most=48)
    table = Table((*words("preset"), fields_column, Column("what", prose=True)))
    for name, about, needs, takes in rows:
        table.add(name, " ".join([*needs, *(f"[{field}]" for field in takes)]), about)
    table.print()

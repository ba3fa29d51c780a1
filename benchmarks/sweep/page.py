"""docs/models.md: the types that are read, and why the others are not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

HEAD = """# Models

Which models of transformers {version} `kvgen init` reads. Written by `python -m benchmarks.model_sweep --section types --page
docs/models.md` (`pip install 'kvgen[build,sweep]'`; no network): each type's config as its class makes it by default, with
`architectures` and by its `model_type` alone. For a type that is read, every layer was compared with transformers' own modules:
rows of q, k and v, head dims, scale, window or chunk, soft cap, sinks, norms, RoPE's pairs, frequencies to 1e-5 and the factor
of cos and sin. "Facts only": what is read is right, and an operation that no kernel does yet keeps a spec from being written.
"""


def transformers_version() -> str:
    """The installed version, such as 5.23.0."""
    from importlib.metadata import version

    return version("transformers")


def text(rows: Sequence[dict[str, Any]], *, excluded: Sequence[str]) -> str:
    """The page for a sweep's rows."""
    by_type: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["section"] in ("types", "wrappers", "text configs"):
            by_type[row["section"], row["name"]].append(row)
    parts = [
        HEAD.format(version=transformers_version()),
        "## Counts\n",
        "| | types | spec written | facts only | not compared | refused | wrong | not buildable |",
        "|---|---|---|---|---|---|---|---|",
    ]
    outcome = {key: _outcome(found) for key, found in by_type.items()}
    for label, sections in (
        ("decoders of text", ("types", "text configs")),
        ("multimodal, whole config", ("wrappers",)),
    ):
        names = {name: what for (section, name), what in outcome.items() if section in sections}
        counts = [
            sum(w == k for w in names.values())
            for k in ("read", "facts only", "not compared", "refused", "wrong", "not buildable")
        ]
        parts.append(f"| {label} | {len(names)} | {' | '.join(map(str, counts))} |")
    parts.append("\n## Read\n")
    read = sorted(name for (section, name), what in outcome.items() if what == "read" and section != "wrappers")
    wrapped = sorted(name for (section, name), what in outcome.items() if what == "read" and section == "wrappers")
    parts.append(", ".join(f"`{n}`" for n in read) + "\n")
    if wrapped:
        parts.append(
            "Multimodal configs, of which the text part is read: " + ", ".join(f"`{n}`" for n in wrapped) + "\n"
        )
    for what, title in (("wrong", "Read wrong"), ("not compared", "Read, not compared"), ("traceback", "Tracebacks")):
        names = sorted(name for (_, name), found in outcome.items() if found == what)
        if names:
            parts.append(f"## {title}\n\n" + ", ".join(f"`{n}`" for n in names) + "\n")
    parts.append("## Refused\n\n| what kvgen says | types |\n|---|---|")
    reasons: dict[str, set[str]] = defaultdict(set)
    for (_, name), found in by_type.items():
        if _outcome(found) == "refused":
            reasons[_reason(found[-1]["detail"][0])].add(name)
    parts += [
        f"| {reason} | {', '.join(f'`{n}`' for n in sorted(names))} |"
        for reason, names in sorted(reasons.items(), key=lambda r: -len(r[1]))
    ]
    parts.append(
        f"\nNot counted: types with a causal head that are encoders or read one: {', '.join(f'`{n}`' for n in excluded)}.\n"
    )
    return "\n".join(parts)


def _outcome(rows: Sequence[dict[str, Any]]) -> str:
    """The outcome of all forms of a type's config: the worst of them."""
    order = ("traceback", "wrong", "not compared", "refused", "not buildable", "facts only", "read")
    return min((row["outcome"] for row in rows), key=order.index)


def _reason(message: str) -> str:
    """A refusal without the value that it shows and the list of what was found."""
    short = re.sub(r"got '[^']*'", "got ...", message.split(". Fields found")[0].split("; valid: ")[0])
    return short.replace("|", "\\|")

"""docs/models.md: which models `kvgen init` reads, what it says of them, and why it refuses the others."""

from __future__ import annotations

import textwrap
from typing import Final

from kvgen.models.families import FAMILIES
from kvgen.models.features import FEATURES
from kvgen.models.missing import MISSING
from kvgen.models.wrappers import TEXT_OF_TYPE

_HEAD: Final = """# Models

<!-- Written by `python -m docpages` from the table in kvgen/models/families.py. -->

{read} types of text models are read and {refused} refused, each with its reason. `python -m benchmarks.model_sweep` compares
what is read, layer by layer, with transformers' own modules, and prints how many types, published configs and single-field
changes agree (`pip install 'kvgen[build,sweep]'`; no network). It writes no page.

`kvgen init --from config.json` reads the Hugging Face config of a model: query and KV heads, head dims of K and V, RoPE and its
scaling, norms of q and k, windows, chunks, the factor and cap of scores, sinks, latent ranks, and which layers read another
layer's cache. What a field means, and what an absent one means, is what transformers 5.23 makes of it.

A model whose layers are alike but for a window gets one set and a `Model` of a few fields. Where layers differ in more, `Model`
has `kinds`, and a repeating `pattern` of their names; `KernelSet.layers` says which operations the layers of each kind call.
Layers whose heads or precision differ have caches of different shapes, and the file then holds a list of sets, one for each
shape, with one `Model`: an engine allocates a pool and imports a package for each. `kvgen show SET --plan` prints the model's
layers. Layers of hybrids without keys and values (Mamba, linear attention, convolutions) are kinds with `cache=False`.

In Python, `kvgen.models.facts(config)` gives the same as a `Checkpoint`; its `layers()` has a `LayerFacts` for each layer.

## Where engines differ

- `partial_rotary_factor` under default RoPE: transformers' code of most families turns the whole head, whatever the field
  says, and vLLM turns that part. kvgen follows transformers, and the spec's docstring then says so. Families whose code has the
  part (GLM, Phi, GPT-NeoX, Nemotron, StableLM, Qwen 3-Next and later, MiniMax-M2, MiMo and others) turn it.
- `original_max_position_embeddings` beside the scaling wins over the one inside for Phi-3 and Phi-4-multimodal, whose config
  class has it; for other models it is not read, and the scaling's own counts, as in transformers.
- `rope_type: dynamic` is refused: its frequencies depend on the longest sequence of a batch, and engines differ in how.
- MTP layers (`num_nextn_predict_layers`) are not among the layers, and `dual_chunk_attention_config` is not read.

"""

# (models, files of specs/ with their sets, what else the sets serve); the ten by downloads of November 2026, most first.
MOST_USED: Final = (
    ("Qwen3-VL-2B", ("qwen3_vl_2b",), ""),
    ("Qwen3.6-35B-A3B", ("qwen3_6_35b_a3b",), "Qwen3.5-35B-A3B"),
    ("Qwen3.6-27B", ("qwen3_6_27b",), "Qwen3.5-27B"),
    ("Gemma 4 26B-A4B", ("gemma_4_26b_a4b",), ""),
    ("Gemma 4 31B", ("gemma_4_31b",), ""),
    ("Qwen3-0.6B", ("qwen3_vl_2b",), "Qwen3-1.7B, by `append_text`, `gather` and `decode`"),
    ("Qwen3-4B", ("qwen3_8b",), "Qwen3-8B"),
    ("gpt-oss-20b", ("gpt_oss_20b",), "gpt-oss-120b, of 36 layers"),
    ("Llama 3.1 8B, the model of `kvgen demo`", ("llama3_8b",), "Llama 3 8B's cache and decode"),
    ("DeepSeek-V3", ("deepseek_v3",), "DeepSeek-R1, V3.1"),
)
_SPECS: Final = """
## Specs of the ten most used

Models whose caches have one geometry share a set; where their RoPE differs, the set has an append for each.

| model | spec | serves too |
|---|---|---|
"""


def models_page() -> str:
    """The page's text."""
    read = [name for family in FAMILIES for name in family.types.split()]
    lines = [_HEAD.format(read=len(read), refused=len(MISSING)), f"## Read: {len(read)} types of text models\n\n"]
    lines.append(_paragraph(", ".join(f"`{name}`" for name in sorted(read))))
    holders = sorted(name for name, text in TEXT_OF_TYPE.items() if text in read)
    lines.append(f"\nAnd the text models of {len(holders)} multimodal types, by their text_config or its like:\n\n")
    lines.append(_paragraph(", ".join(f"`{name}`" for name in holders)))
    lines.append(
        "\nAny other config with an object `text_config`, `language_config` or `llm_config` is read by that object's model_type.\n"
    )
    lines.append(_SPECS)
    lines += [f"| {model} | {', '.join(f'`{f}`' for f in files)} | {too} |\n" for model, files, too in MOST_USED]
    lines.append(
        "\n## Read, but no spec is written yet\n\nSome layers of these models ask for what no operation has:\n\n"
    )
    lines += [f"- {feature.what}: {feature.lacking}\n" for feature in FEATURES]
    lines.append("\n## Refused\n\n| model_type | why |\n|---|---|\n")
    reasons: dict[str, list[str]] = {}
    for name, why in MISSING.items():
        reasons.setdefault(why, []).append(name)
    lines += [f"| {', '.join(f'`{name}`' for name in names)} | {why} |\n" for why, names in reasons.items()]
    return "".join(lines)


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False) + "\n"

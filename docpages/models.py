"""docs/models.md: which models `kvgen init` reads, what it says of them, and why it refuses the others."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, Final

from kvgen.models.families import FAMILIES
from kvgen.models.features import FEATURES
from kvgen.models.missing import MISSING
from kvgen.models.wrappers import TEXT_OF_TYPE

_HEAD: Final = """# Models

<!-- Written by `python -m docpages` from the table in kvgen/models/families.py. -->

{read} types of text models are read and {refused} refused, each with its reason. `python -m benchmarks.model_sweep` compares
what is read, layer by layer, with transformers' own modules: types, published configs and single-field changes
(`pip install 'kvgen[build,sweep]'`; no network; the changes take about 30 minutes). Its last runs found:

{sweep}
The first line counts the decoder-only text models of transformers' causal, image-text and multimodal lists, {all} types: each
once, a multimodal one by its text config, by the worst of its files. Encoders and decoders that read one are not among them,
though the table of refusals below names them. The {read} of the reader's table are those that the line counts as read or facts
only; `gemma`, which is read but for PaliGemma's text config, which looks both ways; `kimi_k2`, whose code transformers has as
DeepSeek V3's; `deepseek_v4`, read since those runs, whose layers' outputs are compared instead ([DeepSeek V4](deepseek_v4.md));
and `deepseek_v41_text`, which transformers 5.23 does not have.

"Facts only": kvgen reads the config, and says why no spec is written. "Not compared": transformers cannot build or run the
config, such as one without a hidden size. A refused change is one that kvgen says it does not read.

`kvgen init --from config.json` reads the Hugging Face config of a model: query and KV heads, head dims of K and V, RoPE and its
scaling, norms of q and k, windows, chunks, the factor and cap of scores, sinks, latent ranks, and which layers read another
layer's cache. What a field means, and what an absent one means, is what transformers 5.23 makes of it.

A model whose layers are alike but for a window gets one set and a `Model` of a few fields. Where layers differ in more, `Model`
has `kinds`, and a repeating `pattern` of their names; `KernelSet.layers` says which operations the layers of each kind call.
Layers whose heads or precision differ have caches of different shapes, and the file then holds a list of sets, one for each
shape, with one `Model`: an engine allocates a pool and imports a package for each. `kvgen show SET --plan` prints the model's
layers. Models with latent rows (MLA) have a second set, `<name>_prompts`, for [prompts over keys and values of
heads](extend.md#latent-rows), unless an [indexer](#indexers) picks the tokens that are read. Layers of hybrids without keys and values (Mamba, linear attention, convolutions) are kinds with `cache=False`.

Files are read as their makers publish them: up to 16 MiB, with or without a byte order mark, with `NaN` and `Infinity` in
fields that nothing is made of. `--from` takes the folder of a checkpoint, too. A class without a row in the table below whose name is
that of its model_type (`Qwen2ForRewardModel`, `MistralModel`, `PhiMoEForCausalLM`, `LlamaForCausalLMEagle3`) is read as that type, and the
spec's docstring says so; any other one is refused, and `--as CLASS` reads it as a class that has a row. `is_causal: false` is refused.
Fields of `rope_scaling` and `rope_parameters` that nothing is made of are named in the spec's docstring.

## Quantized KV

A checkpoint says how its KV is stored in `quantization_config` (or `compression_config`) of config.json or of its text model's object, or
in ModelOpt's `hf_quant_config.json` beside config.json. Read are `kv_cache_scheme`, as an object (compressed-tensors) or a word (`"FP8"`),
`kv_cache_quant_algo`, `kv_cache_quantized_layers`, and Quark's descriptions of the outputs of k_proj and v_proj. Where layers
are stored in several ways, each kind of layers has a cache of its own, and layers of one kind that differ are refused. Two files that
contradict each other, algorithms that kvgen does not know and any other field about a KV cache are refused; `--kv-dtype` then says
how KV is stored. In Python: `models.spec_text(config, quantization=models.read_quantization(path), ...)`.

In Python, `kvgen.models.facts(config)` gives the same as a `Checkpoint`; its `layers()` has a `LayerFacts` for each layer.

## Indexers

DeepSeek V3.2, GLM-5, A.X-K2 and HY-V4 attend to latent rows that an indexer picks. `Model.indexer` says so where every layer
has one; where layers take the picks of another (`indexer_types`, `index_topk_pattern`, `index_topk_freq`), the layers of each
source are a kind, whose `Kind.indexer.source` is that layer. The file has two sets:

- that of the latent rows, with `remap_indices`, which turns picked tokens into rows of the pool, and `mla_decode` over lists.
  Layers that take picks call `mla_decode` with the list of the layer they name, as it is: page tables are the same;
- `<name>_keys`, of the layers with an indexer: `append` stores their keys behind a layer norm and RoPE of their own, `indexer_query`
  and `indexer_scores` make `logits`; the best `topk` of these are for a library to find. Keys are e4m3 in kvgen's layout, or in
  vLLM's or SGLang's with a preset of theirs. Both roles of RoPE are kept: halves beside interleaved latent rows in V3.2.

No Hadamard transform is written: products of q and k are what they are without. DeepSeek's code transforms both before they are
quantized: `hadamard` of `ops.Append` and `ops.IndexerQuery`, for keys that are shared with such code.

## Where engines differ

- `indexer_rope_interleave` is read, as by vLLM; transformers 5.23 interleaves GLM's indexer whatever it says.
- `partial_rotary_factor` under default RoPE: transformers' code of most families rotates the whole head, whatever the field
  says, and vLLM rotates that part. kvgen follows transformers, and the spec's docstring then says so. Families whose code has the
  part (GLM, Phi, GPT-NeoX, Nemotron, StableLM, Qwen 3-Next and later, MiniMax-M2, MiMo and others) rotate it.
- `original_max_position_embeddings` beside the scaling wins over the one inside, as in the models that transformers builds
  and in vLLM. Parameters by kind of layers keep their own.
- `attn_factor` under YaRN multiplies cos and sin, as in vLLM and SGLang; transformers 5.23 warns of an unknown field. Files that have
  it (DeepSeek-R1-0528-Qwen3-8B: 1 / (0.1 ln 4 + 1)) ask for cos and sin as they are. The spec's docstring says so.
- Moshi, Kyutai: transformers' masks of a prompt show all of it, and its cache keeps `sliding_window` tokens for decode; kvgen
  writes that window, as decode sees it.
- DBRX: `attn_config.rope_theta` is read, as by vLLM; transformers 5.23 reads a base beside `attn_config` alone.
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


_WHAT: Final = {
    "distinct types": "decoder types, by the config that their class makes",
    "types": "those configs, with and without `architectures`",
    "wrappers": "configs of multimodal types",
    "text configs": "their text configs alone",
    "published": "published configs",
    "changes": "changes of one field",
}
_COUNTS: Final = Path(__file__).parents[1] / "benchmarks" / "sweep" / "counts.json"
_OUTCOMES: Final = ("read", "facts only", "refused", "not compared", "wrong", "traceback")


def _sweep(kept: dict[str, Any]) -> str:
    """The table of model_sweep's recorded counts."""
    lines = ["| | " + " | ".join(_OUTCOMES) + " | run |\n", "|---" * (len(_OUTCOMES) + 2) + "|\n"]
    for section, what in _WHAT.items():
        if (run := kept.get(section)) is None:  # a section that was not recorded since the readers changed
            continue
        counts = {**run["counts"]}
        counts["not compared"] = counts.get("not compared", 0) + counts.pop("not buildable", 0)
        cells = " | ".join(f"{counts.get(outcome, 0):,}" for outcome in _OUTCOMES)
        lines.append(f"| {what} | {cells} | {run['date']}, transformers {run['transformers']} |\n")
    return "".join(lines)


def models_page() -> str:
    """The page's text."""
    read = [name for family in FAMILIES for name in family.types.split()]
    kept = json.loads(_COUNTS.read_text(encoding="utf-8"))
    every = sum(kept["distinct types"]["counts"].values())
    lines = [
        _HEAD.format(read=len(read), refused=len(MISSING), sweep=_sweep(kept), all=every),
        f"## Read: {len(read)} types of text models\n\n",
    ]
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

"""Records what vLLM's engine hands an attention backend, for the tests of kvgen's adapter that run without vLLM.

    python -m tests_vllm.record_steps tests/integrations/vllm_steps

Tiny models with random weights run on vLLM's CPU platform, by its own attention; every step's CommonAttentionMetadata is
written as it came to the metadata builders, with the rows' tokens and positions beside it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 128
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
_GEMMA = _LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """An engine, its prompts by length, and what of the run is kept: `steps` from the first on, all where None."""

    config: dict[str, Any]
    prompts: tuple[int, ...]
    new: int
    shared: int = 0  # tokens that all prompts begin with
    engine: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None


RUNS = {
    # Prefix hits, prompts in chunks beside requests that decode, and steps that only decode.
    "chunked": Run(_LLAMA, (5, 70, 9, 1), 6, shared=32, engine={"max_num_batched_tokens": 48}),
    # Too few blocks: requests are thrown out and computed anew.
    "preempted": Run(_LLAMA, (60, 30, 31), 8, engine={"num_gpu_blocks_override": 6}),
    # Several rows a request, drafted from the prompt.
    "drafted": Run(
        _LLAMA,
        (24, 20),
        12,
        engine={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    ),
    # Groups of sliding and of full layers, with tables of their own; null blocks where tokens left the window.
    "hybrid": Run(_GEMMA, (30, 10, 20), 3, shared=96, engine={"max_num_batched_tokens": 64}),
}


class Recorder:
    """Listens to a model runner and its metadata builders."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.groups: dict[str, dict[str, Any]] = {}  # of layers, by the first layer's name

    def listen(self) -> None:
        """Take notes of every step from now on."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        build_all, build = GPUModelRunner._build_attention_metadata, CPUAttentionMetadataBuilder.build

        def noted_all(runner: Any, *arguments: Any, **named: Any) -> Any:
            self.steps.append(_rows_of(runner, named["num_tokens"], named["num_reqs"]))
            return build_all(runner, *arguments, **named)

        def noted(builder: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
            name = builder.layer_names[0]
            self.groups[name] = _group_of(builder)
            self.steps[-1]["groups"][name] = _metadata_of(common)
            return build(builder, common_prefix_len, common, fast_build)

        GPUModelRunner._build_attention_metadata = noted_all
        CPUAttentionMetadataBuilder.build = noted


def _rows_of(runner: Any, rows: int, requests: int) -> dict[str, Any]:
    batch = runner.input_batch
    return {
        "requests": list(batch.req_ids[:requests]),
        "tokens": runner.input_ids.cpu[:rows].tolist(),
        "positions": runner.positions[:rows].tolist(),
        "groups": {},
    }


def _group_of(builder: Any) -> dict[str, Any]:
    spec = builder.kv_cache_spec
    return {
        "layers": list(builder.layer_names),
        "block_size": spec.block_size,
        "sliding_window": getattr(spec, "sliding_window", None),
    }


def _metadata_of(common: Any) -> dict[str, Any]:
    """CommonAttentionMetadata, arrays as [dtype, nested list], but for the rows' positions and what is None or a cache."""
    found = {}
    for name, value in vars(common).items():
        if value is not None and name != "positions" and not name.startswith("_"):
            array = hasattr(value, "tolist")
            found[name] = [str(value.dtype).removeprefix("torch."), value.tolist()] if array else value
    return found


def record(name: str, folder: Path) -> None:
    """Run one of RUNS in this process, and write `<folder>/<name>.json`."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backend import CommonAttentionMetadata

    run, recorder = RUNS[name], Recorder()
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(run.config), encoding="utf-8")
        engine = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 160, "max_num_seqs": 4, "block_size": 32,
            "num_gpu_blocks_override": 24, "enable_prefix_caching": True, "async_scheduling": False, "seed": 0,
        } | run.engine  # fmt: skip
        llm = LLM(model=model, skip_tokenizer_init=True, load_format="dummy", **engine)
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        draw = random.Random(1)
        few = range(3, 9 if "drafted" in name else VOCABULARY)  # drafts are found where tokens come again
        shared = draw.choices(few, k=run.shared)
        prompts = [shared + draw.choices(few, k=n) for n in run.prompts]
        recorder.listen()
        sampling = SamplingParams(temperature=0, max_tokens=run.new, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    steps = recorder.steps[: run.steps]
    order = {request: i for i, request in enumerate(dict.fromkeys(r for s in recorder.steps for r in s["requests"]))}
    by_id = {i: prompts[int(request.split("-")[0])] for request, i in order.items()}
    for step in steps:
        step["requests"] = [order[request] for request in step["requests"]]
    found = {
        "vllm": vllm.__version__,
        "blocks": blocks,
        "fields": [field.name for field in fields(CommonAttentionMetadata)],
        "prompts": [by_id[i] for i in sorted(by_id)],
        "groups": recorder.groups,
        "steps": steps,
    }
    text = json.dumps(found, separators=(",", ":")).replace('{"requests"', '\n{"requests"')
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[2], Path(sys.argv[1]))

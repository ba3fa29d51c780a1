"""KvgenCache inside transformers: tiny random models generate the tokens of eager attention."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from kvgen.errors import ArgumentError, ConfigError
from kvgen.integrations.transformers import KvgenCache, versions
from kvgen.integrations.transformers.versions import ARGUMENT
from kvgen.runtime.faults import FaultError
from tests.support.engine_runs import Show

NEW: Final = 10
COMMON: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOWS: Final[dict[str, Any]] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Gemma3Text": {"head_dim": 32, "query_pre_attn_scalar": 24, **WINDOWS},
    "Phi3": {},
    "OPT": {"word_embed_proj_dim": 64, "ffn_dim": 96},  # multiplies q by the scale itself
    "GptOss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "Gemma2": {"head_dim": 32, "query_pre_attn_scalar": 24, **WINDOWS},  # soft caps
    "Glm": {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.45}},  # turns 8, of 7.2
    "Qwen2": {  # frequencies that change in the middle of an answer
        "max_position_embeddings": 40,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    },
    "Gemma3nText": {  # the last two layers read keys and values of the first two
        "head_dim": 32,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": 2 * WINDOWS["layer_types"],
        "sliding_window": 16,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
LENGTHS: Final = (37, 5, 24, 18)


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are drawn so that logits lie apart."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(COMMON | CONFIGS[name]))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if values.ndim >= 2:
                values.normal_(0, 0.1)
            elif "norm" in parameter:
                values.copy_((0 if "Gemma" in name else 1) + 0.3 * torch.randn_like(values))
            elif "sinks" in parameter:
                values.normal_(0, 1)
    return model


def prompts(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the left."""
    most = max(lengths)
    mask = torch.tensor([[0] * (most - n) + [1] * n for n in lengths])
    ids = torch.randint(3, 256, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(
    model: Any, how: str, inputs: dict[str, torch.Tensor], cache: Any = None, new: int = NEW, **more: Any
) -> Any:
    """The tokens behind the prompts, and the logits of each."""
    model.set_attn_implementation(how)
    found = model.generate(
        **inputs,
        **{ARGUMENT: cache},
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )
    return found.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(found.logits).float()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_eager_attention(name: str, shown: Show) -> None:
    model, inputs = model_of(name), prompts()
    right, logits = generated(model, "eager", inputs)
    cache = KvgenCache(model.config, max(LENGTHS) + NEW, dtype=model.dtype)
    tokens, found = generated(model, "kvgen", inputs, cache)
    assert (tokens == right).all() and (found - logits).abs().max() < 1e-3
    layers = model.config.num_hidden_layers - getattr(model.config, "num_kv_shared_layers", 0)
    assert sum(cache._counts) == layers
    assert cache.launches >= 2 * layers * NEW  # append and attention, every layer and step
    shown(
        "prompts padded on the left, beside eager attention",
        engine="transformers",
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        equal=int((tokens == right).sum()),
        of=right.numel(),
        launches={"append and attention": cache.launches},
    )


def test_in_bf16_tokens_differ_only_where_logits_do_not_tell_them_apart() -> None:
    model, inputs = model_of("Llama", torch.bfloat16), prompts()
    right, logits = generated(model, "eager", inputs)
    tokens, found = generated(model, "kvgen", inputs, KvgenCache(model.config, max(LENGTHS) + NEW))
    for b in range(len(LENGTHS)):
        for i in range(NEW):
            if tokens[b, i] != right[b, i]:
                best = logits[i, b].topk(2).values
                assert best[0] - best[1] <= (found[i, b] - logits[i, b]).abs().max()
                break


def test_codes_of_8_bits() -> None:
    model, inputs = model_of("Llama"), prompts()
    _, logits = generated(model, "eager", inputs, new=1)
    cache = KvgenCache(model.config, max(LENGTHS) + NEW, dtype=model.dtype, kv_dtype="e4m3")
    _, found = generated(model, "kvgen", inputs, cache, new=1)
    assert 0 < (found - logits).abs().max() < 0.1 * logits.abs().max()


def test_chunks_of_a_prompt_and_a_conversation() -> None:
    """A prompt in pieces, an answer, and a second prompt behind it."""
    model = model_of("Llama")
    ids = prompts((48, 48))["input_ids"]
    logits = model(ids).logits
    model.set_attn_implementation("kvgen")
    cache = KvgenCache(model.config, 48, dtype=model.dtype)
    with torch.no_grad():
        found = [model(ids[:, a:b], **{ARGUMENT: cache}).logits for a, b in ((0, 20), (20, 21), (21, 30), (30, 48))]
    assert (torch.cat(found, 1) - logits).abs().max() < 1e-3
    cache.crop(0)  # removes nothing
    cache.crop(-18)
    other = copy.deepcopy(cache)
    with torch.no_grad():
        model(ids[:, 20:30], **{ARGUMENT: other})  # writes to its own pool
    with torch.no_grad():
        again = model(ids[:, 30:], **{ARGUMENT: cache}).logits
    assert (again - logits[:, 30:]).abs().max() < 1e-3


@pytest.mark.filterwarnings("error::FutureWarning")
def test_generate_warns_of_nothing_to_come() -> None:
    """Also under a transformers that has renamed the argument."""
    model = model_of("Llama")
    generated(model, "kvgen", prompts((5, 3)), KvgenCache(model.config, 16, dtype=model.dtype), new=2)


def test_beams() -> None:
    model, inputs = model_of("Llama"), prompts()
    right, _ = generated(model, "eager", inputs, num_beams=2)
    cache = KvgenCache(model.config, max(LENGTHS) + NEW, dtype=model.dtype)
    tokens, _ = generated(model, "kvgen", inputs, cache, num_beams=2)
    assert (tokens == right).all()


def test_what_generate_does_with_a_cache() -> None:
    """Drafts taken back, samples, one cache for batches of other sizes, and padding between two prompts of a conversation."""
    model = model_of("Llama")
    cache = KvgenCache(model.config, 64, dtype=model.dtype)
    for inputs, more in (
        (prompts((23,)), {"prompt_lookup_num_tokens": 3}),  # of which some are right: nothing is taken back
        (prompts((12, 7)), {"num_return_sequences": 2, "num_beams": 2}),
        (prompts((1, 1, 1)), {}),
    ):
        if "prompt_lookup_num_tokens" in more:
            inputs["input_ids"][:, 8:] = 7
        right, _ = generated(model, "eager", inputs, **more)
        cache.reset()
        tokens, _ = generated(model, "kvgen", inputs, cache, **more)
        assert (tokens == right).all()
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 1, 1]])
    ids, position = prompts((6, 6))["input_ids"], (mask.cumsum(1) - 1).clamp(min=0)

    def logits(a: int, b: int, cache: Any = None) -> torch.Tensor:
        what = {"attention_mask": mask[:, :b], "position_ids": position[:, a:b], ARGUMENT: cache}
        return model(ids[:, a:b], **what).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        cache.reset()
        logits(0, 2, cache), logits(2, 6, cache)
        cache.crop(-1)  # five columns are left: three tokens of the second request
        found = logits(5, 6, cache)
        model.set_attn_implementation("eager")
        assert (found - logits(0, 6)[:, -1:]).abs().max() < 1e-3


def test_a_pool_is_free_when_its_cache_is_gone() -> None:
    gc.disable()
    try:
        model = model_of("Llama")
        cache = KvgenCache(model.config, 64, dtype=model.dtype)
        generated(model, "kvgen", prompts((5,)), cache, new=2)
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    finally:
        gc.enable()


def spoiled(model: Any) -> KvgenCache:
    """A cache with a request of less than no tokens, which kernels of its next step report."""
    cache = KvgenCache(model.config, 64, dtype=model.dtype)
    generated(model, "kvgen", prompts((5, 3)), cache, new=2)
    cache._next[1] = -7
    return cache


def test_faults_show() -> None:
    """In the step itself on the CPU, where launches are done; what was not told shows when asked, with reset, or in the end."""
    model = model_of("Llama")
    ids = torch.full((2, 1), 5)
    cache = spoiled(model)
    cache.raise_if_faulty()  # nothing so far
    mask = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    with torch.no_grad(), pytest.raises(FaultError, match="LENGTH"):
        model(ids, attention_mask=mask, **{ARGUMENT: cache})
    with pytest.raises(FaultError, match="LENGTH"):
        cache.raise_if_faulty()
    cache.reset()  # forgets it, as it was told
    cache.raise_if_faulty()
    right, _ = generated(model, "eager", prompts((5, 3)))
    tokens, _ = generated(model, "kvgen", prompts((5, 3)), cache)
    assert (tokens == right).all()


def test_faults_of_the_last_step_show_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step asks for them any more."""
    model = model_of("Llama")
    monkeypatch.setattr("kvgen.integrations.transformers.faults.Faults.poll", lambda faults: None)

    def last_step() -> KvgenCache:
        cache, mask = spoiled(model), torch.tensor([[1] * 7, [0, 0] + [1] * 5])
        with torch.no_grad():
            model(torch.full((2, 1), 5), attention_mask=mask, **{ARGUMENT: cache})
        return cache

    with pytest.raises(FaultError, match="LENGTH"):
        last_step().raise_if_faulty()
    with pytest.raises(FaultError, match="LENGTH"):
        last_step().reset()
    with pytest.warns(
        RuntimeWarning, match="a KvgenCache is gone whose kernels met wrong data in its last step: LENGTH"
    ):
        last_step()


def refused(call: Callable[[], object], says: str, error: type[Exception] = ArgumentError) -> None:
    with pytest.raises(error) as found:
        call()
    assert says in str(found.value), found.value


def test_what_is_refused() -> None:
    model = model_of("Llama")
    inputs = prompts((5, 3))
    make = lambda **fields: KvgenCache(model.config, **({"max_tokens": 16, "dtype": model.dtype} | fields))  # noqa: E731
    model.set_attn_implementation("kvgen")
    refused(lambda: model(inputs["input_ids"]), f"pass {ARGUMENT}=KvgenCache(model.config, max_tokens=...)")
    refused(lambda: make(max_tokens=0), "max_tokens: got 0; a request has at least 1 token")
    refused(lambda: make(dtype=torch.float64), "dtype: got torch.float64; kernels compute in")
    with torch.no_grad():
        refused(
            lambda: model(inputs["input_ids"], **{ARGUMENT: make(max_tokens=4)}),
            "max_tokens: got 4; this step makes 5 tokens",
        )
        refused(
            lambda: model(inputs["input_ids"], attention_mask=inputs["attention_mask"].flip(1), **{ARGUMENT: make()}),
            "attention_mask: got padding behind tokens; pad on the left",
        )
        cache = make()
        model(inputs["input_ids"], **{ARGUMENT: cache})
        refused(
            lambda: model(inputs["input_ids"][:1], **{ARGUMENT: cache}),
            "got a batch of 1; the cache has 2 requests; reset() it first",
        )
        ones = torch.ones(2, 6, dtype=torch.long)
        follow = lambda mask: model(inputs["input_ids"][:, :1], attention_mask=mask, **{ARGUMENT: cache})  # noqa: E731
        refused(
            lambda: follow(ones[:, :1]), "attention_mask: got the shape [2, 1]; the cache has 5 tokens of 2 requests"
        )
        ones[1, 0] = 0
        refused(lambda: follow(ones), "attention_mask: got other padding among cached tokens")
        refused(
            lambda: cache.batch_select_indices(torch.tensor([0])), "got 1 requests to go on with; the cache keeps its 2"
        )
        refused(lambda: cache.batch_repeat_interleave(2), "got 2 copies of each request")
        refused(
            lambda: cache.crop(3), "tokens_to_remove: got 3; the cache has 5 tokens; pass minus the number of tokens"
        )
        refused(lambda: cache.crop(-6), "tokens_to_remove: got -6; the cache has 5 tokens")
        refused(
            lambda: model(inputs["input_ids"], output_attentions=True, **{ARGUMENT: make()}),
            "output_attentions: got True; kernels do not write the probabilities out; leave it out, or use",
        )
        shallow = LlamaConfig(**(COMMON | {"num_hidden_layers": 1}))
        refused(
            lambda: model(inputs["input_ids"], **{ARGUMENT: KvgenCache(shallow, 16, dtype=model.dtype)}),
            f"{ARGUMENT}: got rows of layer 1; the cache was made for a config of 1 layers; pass KvgenCache(model.config",
        )
        model.model.layers[0].self_attn.is_causal = False
        refused(
            lambda: model(inputs["input_ids"], **{ARGUMENT: make()}),
            "for LlamaAttention, whose tokens see later ones",
        )
        model.model.layers[0].self_attn.is_causal = True
        model.set_attn_implementation("sdpa")
        refused(lambda: model(inputs["input_ids"], **{ARGUMENT: make()}), "but layer 0 attended without it")
        model.set_attn_implementation("kvgen")
    refused(lambda: model(inputs["input_ids"], **{ARGUMENT: make()}), "got 'kvgen' with gradients")
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    refused(lambda: KvgenCache(bloom, 8), "attend with ALiBi", ConfigError)
    hybrid = transformers.Qwen3NextConfig(**COMMON, layer_types=["linear_attention", "full_attention"])
    refused(lambda: KvgenCache(hybrid, 8), "its linear layers keep a state instead of keys and values", ConfigError)
    # From the config alone: no weights are needed.
    refused(lambda: KvgenCache(LlamaConfig(**COMMON | {"head_dim": 1032}), 8), "head_dim", Exception)
    beside = transformers.FalconH1Config(**COMMON)
    refused(lambda: KvgenCache(beside, 8), "whose layers keep a state beside keys and values", ConfigError)
    refused(lambda: make(tp=3), "tp: got 3 for 4 query heads and 2 KV heads", ConfigError)
    other = make()
    for layer in other.layers:
        assert layer.attention is not None
        object.__setattr__(layer.attention, "scale", 0.5)
    with torch.no_grad():
        refused(lambda: model(inputs["input_ids"], **{ARGUMENT: other}), "where its config was read as 0.5")


def test_what_generate_asks_for_besides() -> None:
    """Calls with caches of its own are refused with what to do; drafts of a model with another attention are not."""
    model = model_of("Llama")
    model.set_attn_implementation("kvgen")
    draft = model_of("Llama")

    def answer(**more: Any) -> Any:
        cache = KvgenCache(model.config, 24, dtype=model.dtype)
        return model.generate(**prompts((9,)), **{ARGUMENT: cache}, max_new_tokens=4, do_sample=False, **more)

    says = (
        f"{ARGUMENT}: attn_implementation='kvgen' got rows of LlamaAttention that no KvgenCache holds; pass {ARGUMENT}="
        "KvgenCache(model.config, max_tokens=...). For guidance_scale and assistant_early_exit generate() calls the model with "
        "another cache: leave them out, or use another attn_implementation. An assistant_model gets another one than 'kvgen'"
    )
    right = answer()
    assert (answer(assistant_model=draft) == right).all()
    draft.set_attn_implementation("kvgen")
    refused(lambda: answer(assistant_model=draft), says)
    refused(lambda: answer(guidance_scale=1.5), says)
    layers = model.config.num_hidden_layers
    refused(lambda: answer(assistant_early_exit=1), says)
    model.config.num_hidden_layers = layers  # which transformers leaves as the draft had it
    refused(lambda: answer(output_attentions=True, return_dict_in_generate=True), "output_attentions: got True")
    assert (answer() == right).all()


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch releases of the known ones, and no other."""
    versions.check()
    for name in ("5.22", "5.25", "6.0", "4.57"):
        monkeypatch.setattr(versions, "_NAME", name)
        monkeypatch.setattr(transformers, "__version__", f"{name}.1")
        with pytest.raises(ImportError) as error:
            versions.check()
        assert str(error.value) == (
            f"kvgen.integrations.transformers works with transformers 5.23 and 5.24; got {name}.1; pip install "
            "'transformers>=5.23,<5.25'"
        )


def test_a_config_that_is_not_read() -> None:
    class Unheard(LlamaConfig):
        model_type = "unheard_of"

    refused(lambda: KvgenCache(Unheard(**COMMON), 8), "model_type", ConfigError)

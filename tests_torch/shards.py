"""What each rank of `test_tensor_parallel.py` runs: `torchrun shards.py <folder of a model> <query heads> <kv heads>`."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from kvgen.integrations.transformers import KvgenCache
from tests_torch.test_transformers import LENGTHS, NEW, generated, prompts, refused


def main(folder: str, q_heads: int, kv_heads: int) -> None:
    """The tokens of eager attention and of kvgen, over this rank's heads."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    model.generation_config.eos_token_id = None
    right, logits = generated(model, "eager", prompts())
    cache = KvgenCache(model.config, max(LENGTHS) + NEW, dtype=model.dtype)
    tokens, found = generated(model, "kvgen", prompts(), cache)
    heads = {(layer.attention.q_heads, layer.attention.kv_heads) for layer in cache.layers if layer.attention}
    assert heads == {(q_heads, kv_heads)}, heads
    assert (tokens == right).all() and (found - logits).abs().max() < 1e-3
    assert cache.launches >= 2 * len(cache.layers) * NEW
    other = KvgenCache(model.config, max(LENGTHS) + NEW, dtype=model.dtype, tp=1 if q_heads < 4 else 2)
    refused(lambda: generated(model, "kvgen", prompts(), other), "a model in shards needs KvgenCache(..., tp=...)")
    print(f"equal {torch.distributed.get_rank()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

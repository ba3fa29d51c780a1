"""Attention of Hugging Face transformers over a cache whose pages kvgen's kernels write and read.

    from kvgen.integrations.transformers import KvgenCache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvgen")
    model.generate(**inputs, cache=KvgenCache(model.config, max_tokens=4096))

Importing it gives transformers the attention function and the mask function called "kvgen". Needs transformers 5.23 or
5.24 and PyTorch, which kvgen does not install; transformers 5.23 calls the argument `past_key_values`.
"""

from importlib.util import find_spec

if find_spec("torch") is None or find_spec("transformers") is None:
    raise ImportError(
        "kvgen.integrations.transformers needs torch and transformers, which this environment does not have; pip install "
        "'transformers>=5.23,<5.25' and the PyTorch for your GPU, or its CPU build",
        name="transformers",
    )

from kvgen.integrations.transformers.attention import kvgen_attention, kvgen_mask, register
from kvgen.integrations.transformers.cache import KvgenCache

register()

__all__ = ["KvgenCache", "kvgen_attention", "kvgen_mask"]

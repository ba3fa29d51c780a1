"""How many GPUs share a model's heads, as transformers has written it to the config of a model that it loaded in shards."""

from __future__ import annotations

from typing import Any, Final

# Projections whose columns are heads of q, in the names of transformers' plans.
_Q: Final = frozenset({"q_proj", "q_b_proj", "qkv_proj", "query_key_value"})


def gpus_that_share(config: Any) -> int:
    """GPUs that share the query heads of a model that `config` belongs to; 1 where attention is whole on each."""
    distributed: Any = getattr(config, "distributed_config", None)
    size = getattr(distributed, "tp_size", None) or 1
    if size == 1 or distributed.tp_plan == {}:  # the latter shards experts alone
        return 1
    plan = dict(config.get_text_config(decoder=True).base_model_tp_plan or {})
    if isinstance(distributed.tp_plan, dict):
        plan |= distributed.tp_plan
    return size if any(name.rsplit(".", 1)[-1] in _Q and style == "colwise" for name, style in plan.items()) else 1

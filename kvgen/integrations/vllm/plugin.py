"""What vLLM runs at start in each of its processes: the names of kvgen's attention backends enter vLLM's registry.

Every process of every vLLM that has kvgen beside it runs `register`, whether it uses kvgen or not. So nothing is imported here
but the standard library and the registry, which vLLM itself has imported by then; backends are registered as the paths of their
classes, and what is behind a path is imported, and vLLM's version checked, when a user chooses the name.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

REGISTRY: Final = "vllm.v1.attention.backends.registry"
# What users give as --attention-backend, and the class that vLLM imports then.
BACKENDS: Final = {
    "KVGEN": "kvgen.integrations.vllm.backend.KvgenBackend",
    "KVGEN_MLA": "kvgen.integrations.vllm.backend.KvgenMLABackend",
}
# The name that vLLM's registry keeps for others, in versions where it takes no new one.
SHARED: Final = "CUSTOM"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the backends. Calling it again changes nothing. Never raises: a vLLM that is used without kvgen starts as ever."""
    try:
        registry = import_module(REGISTRY)
        for name, path in BACKENDS.items():
            _register(registry, name, path)
    except Exception:
        _log.debug("kvgen's attention backends are not registered: %s is not as expected", REGISTRY, exc_info=True)


def _register(registry: ModuleType, name: str, path: str) -> None:
    """Register one backend under its name; under CUSTOM where the registry takes no new name and nobody else has that."""
    names = registry.AttentionBackendEnum
    if name in names.__members__:  # by an earlier call; or vLLM has a backend of that name by now, which stays
        return
    if hasattr(names, "register"):
        registry.register_backend(name, path)
        # Members are pickled by value, and a process that vLLM spawns unpickles its config before it runs any plugin.
        names[name].__reduce_ex__ = partial(_reduced, name)
    elif name == next(iter(BACKENDS)) and not names[SHARED].is_overridden():
        registry.register_backend(names[SHARED], path)


def _reduced(name: str, protocol: int) -> tuple[Any, tuple[str]]:
    """What a registered name is pickled as."""
    return registered, (name,)


def registered(name: str) -> Any:
    """The member of vLLM's enumeration of backends, in a process where no plugin may have run."""
    register()
    return import_module(REGISTRY).AttentionBackendEnum[name]

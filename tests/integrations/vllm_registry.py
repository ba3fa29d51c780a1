"""vLLM's registry of attention backends, as of 0.32, in the parts that the plugin uses."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    TORCH_SDPA = ""
    CUSTOM = None

    @classmethod
    def register(cls, name: str, value: str) -> AttentionBackendEnum:
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_ = name
        member._value_ = value
        setattr(cls, name, member)
        cls._member_map_[name] = member
        cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    def is_overridden(self) -> bool:
        return self in OVERRIDES


OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum | str, class_path: str | None = None) -> Callable[[Any], Any]:
    if isinstance(backend, str):
        backend = AttentionBackendEnum.register(backend, class_path or "")
    assert class_path is not None
    OVERRIDES[backend] = class_path
    return lambda found: found

"""A vLLM plugin for tests: vLLM's CPU platform takes kvgen's backends, and what ran is written down.

Platforms choose attention backends. That of GPUs takes any name of the registry, and asks its class whether it serves the
model; that of CPUs knows two classes of its own. `register` gives the latter the former's rule, for kvgen's names alone. vLLM
loads it in each of its processes, since this folder is on their PYTHONPATH.

Where KVGEN_TEST_COUNTS names a file, every launch of a kvgen kernel and every call of vLLM's own CPU attention adds a line to it:
the process, what was called. Lines are appended at once, so that a worker that is killed has written what it did.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

NAMES = ("KVGEN", "KVGEN_MLA")
OWN = "own"


def register() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    if not hasattr(CpuPlatform, "kvgen_on_cpu"):
        CpuPlatform.kvgen_on_cpu = True
        CpuPlatform.get_attn_backend_cls = classmethod(_chooser(CpuPlatform.get_attn_backend_cls.__func__))
        CpuPlatform.check_and_update_config = classmethod(_config(CpuPlatform.check_and_update_config.__func__))
        if os.environ.get("KVGEN_TEST_COUNTS"):
            _count()


def _chooser(own: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(own)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if selected_backend is None or selected_backend.name not in NAMES:
            return own(cls, selected_backend, attn_selector_config, num_heads)
        # As in vllm/platforms/cuda.py.
        try:
            backend = selected_backend.get_class()
            reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        except (ImportError, OSError) as e:
            raise ValueError(
                f"Selected backend {selected_backend} is not valid for this configuration. Reason: [{type(e).__name__}: {e}]"
            ) from e
        if reasons:
            raise ValueError(
                f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}"
            )
        return ".".join(backend.full_cls_name())

    return get_attn_backend_cls


def _config(own: Callable[..., None]) -> Callable[..., None]:
    """With KVGEN_MLA models keep what users set, which vLLM's own CPU backend of MLA cannot do: chunked prefill, prefix caching,
    any page size."""

    @functools.wraps(own)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chosen = vllm_config.attention_config.backend
        kept = [(scheduler, "enable_chunked_prefill"), (scheduler, "max_num_batched_tokens")]
        kept += [(cache, "enable_prefix_caching"), (cache, "block_size")]
        values = [getattr(config, name) for config, name in kept]
        own(cls, vllm_config)
        if chosen is not None and chosen.name == "KVGEN_MLA":
            for (config, name), value in zip(kept, values, strict=True):
                setattr(config, name, value)

    return check_and_update_config


def _count() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    out = os.open(os.environ["KVGEN_TEST_COUNTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(what: str) -> None:
        os.write(out, f"{os.getpid()} {what}\n".encode())

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            write(OWN)
            return method(self, *args, **kwargs)

        return call

    CPUAttentionBackendImpl.forward = counted(CPUAttentionBackendImpl.forward)
    CPUMLAImpl.forward_mqa = counted(CPUMLAImpl.forward_mqa)
    for name in ("run_prefill_new_tokens", "run_prefill_context_chunk"):
        setattr(CPUSDPAMLAPrefillBackend, name, counted(getattr(CPUSDPAMLAPrefillBackend, name)))
    _count_launches(write)


def _count_launches(write: Callable[[str], None]) -> None:
    """Write the name of every kernel that runs on the CPU machine, once kvgen's runtime is there: it is not imported for this."""
    import sys
    from importlib.abc import MetaPathFinder
    from importlib.machinery import ModuleSpec, PathFinder

    name = "kvgen.runtime.cpu"

    def wrap(module: Any) -> None:
        launch = module.CpuLaunch.__call__

        @functools.wraps(launch)
        def call(self: Any, stream: object) -> None:
            launch(self, stream)
            write(self._kernel.file.removesuffix(".cu"))

        module.CpuLaunch.__call__ = call

    class Finder(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(fullname, path)
            assert spec is not None and spec.loader is not None
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    if name in sys.modules:
        wrap(sys.modules[name])
    else:
        sys.meta_path.insert(0, Finder())

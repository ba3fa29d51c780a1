"""What transformers' own modules do in each layer, found by running them.

A model is built in its true size with parameters that have shapes and no memory (`Shaped`) and real buffers, and is run
on seven tokens with an attention function that records what it is given: query, key and value shapes, scale,
soft cap, sinks, and the mask as a function of query and key positions. Norms are recorded as they are called and then run
on real numbers, RoPE functions on the unit vectors of a head. So rows, head dims, scales, windows, norms and frequencies
are what the modules compute, whatever a config's fields are called.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.initialization import no_init_weights

TOKENS = 7  # odd and prime: no head count or dim of a model is 7, so the axis of tokens is known by its size
FAR = 2**30  # a query far behind any window and chunk
PROBE = "kvgen_probe"
# Attention modules that compute scores themselves; (query heads, head dim, scale) by their attributes.
OWN_SCORES: dict[str, Callable[[Any], tuple[int, int, float]]] = {
    "FalconAttention": lambda m: (m.num_heads, m.head_dim, m.inv_norm_factor),
    "BloomAttention": lambda m: (m.num_heads, m.head_dim, m.inv_norm_factor),
    "MptAttention": lambda m: (m.n_heads, m.head_dim, m.softmax_scale),
    "GPTJAttention": lambda m: (m.num_attention_heads, m.head_dim, 1.0 / float(m.scale_attn)),
    "CodeGenAttention": lambda m: (m.num_attention_heads, m.head_dim, 1.0 / float(m.scale_attn)),
    "GPTNeoSelfAttention": lambda m: (m.num_heads, m.head_dim, 1.0),
    "XGLMAttention": lambda m: (m.num_heads, m.head_dim, m.scaling),
    "Attention": lambda m: (m.n_head, m.split_size // m.n_head, (m.split_size // m.n_head) ** -0.5 if m.scale else 1.0),
    "GPTNeoXJapaneseAttention": lambda m: (m.num_attention_heads, m.head_size, m.head_size**-0.5),
}
# Attention modules that repeat the heads of K and V themselves, between the cache and attention.
REPEATED = ("JetMoeAttention",)
# Modules whose mask shows all tokens before a prompt's, and whose cache keeps a window of them for decode.
KEPT = ("MoshiAttention", "KyutaiSpeechToTextAttention")


class NotBuildable(Exception):
    """transformers cannot build or run the config; the text is its own error."""


@dataclass(frozen=True)
class NormTruth:
    """A norm that was called on q, k, v or a latent part: "rms" or "layer", the elements of its mean, eps, offset of weights."""

    name: str
    kind: str
    dim: int
    eps: float
    offset: float
    weight: bool
    after_rope: bool


@dataclass(frozen=True)
class Rotation:
    """RoPE as a map of `width` elements: element i turns with `partner[i]` by `angle[i]` radians a position; -1: it does not.

    A negative angle turns backwards: the second of the pair towards the first.
    """

    width: int
    partner: tuple[int, ...]
    angle: tuple[float, ...]
    factor: float
    interleaved: bool


@dataclass
class LayerTruth:
    """One layer as its modules compute it; `attends` False: it called no attention over keys and values."""

    index: int
    attends: bool = True
    q_heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    scale: float = 0.0
    causal: bool | None = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    latent: tuple[int, int, int, int] | None = None  # rank, rope, nope, v
    rope: Rotation | None = None
    norms: dict[str, NormTruth] = field(default_factory=dict)
    q_scale: tuple[Any, ...] | None = (
        None  # q times 1 + a * ln(1 + floor((position + c) / b)): (a, b, c); else what it is
    )
    kv_source: int | None = None
    module: str = ""
    notes: list[str] = field(default_factory=list)


# Building -------------------------------------------------------------------------------------------------------------

LARGEST = 2**16  # elements: a larger tensor has a shape and no memory


class Shaped(torch.Tensor):
    """A parameter, or what was computed of one: zeros, of which only the shape counts.

    A large one is one zero, expanded; an operation on it is run on the meta device and gives zeros of the shape that it says.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function.__name__ not in _AS_IT_IS and (_any_large(args) or _any_large(kwargs.values())):
                made = _zeros_of(function(*_on_meta(args), **_on_meta(kwargs)))
            else:
                made = function(*args, **kwargs)
            return _as_shaped(made)


_AS_IT_IS = ("__get__", "to", "get_device", "float")  # attributes, the device among them, and copies that are none here


def zeros(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; one that is expanded, where there are many."""
    shape = tuple(shape)
    if math.prod(shape) <= LARGEST:
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros((), dtype=dtype).expand(shape)


def _any_large(values: Any) -> bool:
    return any(
        v.numel() > LARGEST if isinstance(v, torch.Tensor) else isinstance(v, tuple | list) and _any_large(v)
        for v in values
    )


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return type(value)(_on_meta(v) for v in value)
    return {k: _on_meta(v) for k, v in value.items()} if isinstance(value, dict) else value


def _zeros_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return zeros(value.shape, value.dtype)
    return type(value)(map(_zeros_of, value)) if type(value) in (tuple, list) else value


def _as_shaped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, Shaped | torch.nn.Parameter) else value.as_subclass(Shaped)
    return type(value)(map(_as_shaped, value)) if type(value) in (tuple, list) else value


_register = torch.nn.Module.register_parameter


class _NoMemory(TorchFunctionMode):
    """torch.empty without memory: parameters of modules under construction."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty or (function in _FILLED and _numbers(args, kwargs) > LARGEST_BUFFER):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


_FILLED = (torch.zeros, torch.ones, torch.rand, torch.randn)
LARGEST_BUFFER = 2**22
torch.set_num_threads(1)  # the tensors that are computed are small


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    return math.prod(size) if isinstance(size, tuple | list) and all(isinstance(n, int) for n in size) else 0


def _shaped_parameter(self: torch.nn.Module, name: str, given: torch.nn.Parameter | None) -> None:
    if given is not None:
        given = torch.nn.Parameter(zeros(given.shape, given.dtype).as_subclass(Shaped), requires_grad=False)
    _register(self, name, given)


# Types that name code of their own in the repository of a checkpoint, and what transformers has that computes the same.
_CODE_OF = {"kimi_k2": "deepseek_v3"}


def config_of(values: dict[str, Any]) -> Any:
    """transformers' config object for a config.json's fields."""
    fields = {k: v for k, v in copy.deepcopy(values).items() if k not in ("model_type",)}
    model_type = values["model_type"]
    try:
        return AutoConfig.for_model(_CODE_OF.get(model_type, model_type), **fields)
    except Exception as error:
        raise NotBuildable(_short(error)) from None


def text_of(config: Any) -> Any:
    """The decoder's config inside a multimodal one, or the config itself."""
    for name in ("text_config", "llm_config", "language_config"):
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, dict):
            return text_of(found)
    with contextlib.suppress(Exception):
        found = config.get_text_config(decoder=True)
        if found is not config and hasattr(found, "num_hidden_layers"):
            return found
    return config


def build(config: Any, attention: str = PROBE) -> torch.nn.Module:
    """The text decoder of a config: shapes without memory, real buffers; with this attention, where its classes take it."""
    errors: list[BaseException] = []
    torch.nn.Module.register_parameter = _shaped_parameter  # type: ignore[method-assign,assignment]
    try:
        for auto in (AutoModelForCausalLM, AutoModel):
            for more in (
                {"experts_implementation": "batched_mm", "attn_implementation": attention},
                {"attn_implementation": attention},
                {"attn_implementation": "eager"},
            ):
                try:
                    with _NoMemory(), no_init_weights():
                        model = auto.from_config(_in_f32(config), dtype=torch.float32, **more)
                    _shorten(model)
                    return model.eval()  # type: ignore[no-any-return]
                except Exception as error:
                    errors.append(error)
        for kind in _classes_of(config):
            for more in ({"experts_implementation": "batched_mm"}, {}):
                try:
                    with _NoMemory(), no_init_weights():
                        model = kind._from_config(
                            _in_f32(config), dtype=torch.float32, attn_implementation=attention, **more
                        )
                    _shorten(model)
                    return model.eval()  # type: ignore[no-any-return]
                except Exception as error:
                    errors.append(error)
    finally:
        torch.nn.Module.register_parameter = _register  # type: ignore[method-assign]
    raise NotBuildable(_short(errors[-1]))


def _classes_of(config: Any) -> list[Any]:
    """The text models of a config class that no auto class knows: parts of a multimodal one."""
    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:  # a config of its own, of another type's model
        return []
    found = [
        c for c in vars(module).values() if isinstance(c, type) and getattr(c, "config_class", None) is type(config)
    ]
    return [
        c
        for c in found
        if c.__name__.endswith(("TextModel", "ForCausalLM", "Model")) and "PreTrained" not in c.__name__
    ]


def _in_f32(config: Any) -> Any:
    """The config with every part's type f32: cos and sin are cast to the model's type, and bf16 hides what is compared."""
    made = copy.deepcopy(config)
    for part in [made, *(getattr(made, name, None) for name in getattr(made, "sub_configs", {}))]:
        if part is not None and not isinstance(part, dict):
            part.dtype = torch.float32
    return made


# What lies beside attention in a layer; its result has the shape of its input and no part in what is compared.
_BESIDE = (
    "mlp",
    "feed_forward",
    "ffn",
    "ff",
    "moe",
    "block_sparse_moe",
    "mixer",
    "mamba",
    "linear_attn",
    "conv",
    "lm_head",
)


def _shorten(model: torch.nn.Module) -> None:
    """Run each class of module beside attention once; after that its input stands for its result where the shapes agree."""
    alike: set[Any] = set()
    for name, module in model.named_modules():
        last, kind = name.split(".")[-1], type(module)
        if last in _BESIDE and "Attention" not in kind.__name__ and not hasattr(module, "kv_lora_rank"):
            module.forward = _once(module.forward, kind, alike)  # type: ignore[method-assign,assignment]


def _once(forward: Callable[..., Any], kind: Any, alike: set[Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("hidden_states")
        if kind in alike:
            return given
        try:
            made = forward(*args, **kwargs)
        except Exception:  # DeepSeek V2's default config cannot route: nothing that is compared depends on it
            made = given
        if isinstance(made, Shaped) and isinstance(given, Shaped) and made.shape == given.shape:
            alike.add(kind)
        return made

    return run


def _short(error: BaseException) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:160]}"


# Recording ------------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """What happened since an attention module's forward began, then the call of attention itself."""

    module: torch.nn.Module
    events: list[tuple[str, Any]]
    given: dict[str, Any] | None = None
    layer: int | None = None  # number of the decoder layer that it was called in


class _Recorder:
    def __init__(self, model: torch.nn.Module) -> None:
        self.open: list[_Call] = []
        self.calls: list[_Call] = []
        numbers = ((m, re.fullmatch(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)", n)) for n, m in model.named_modules())
        self.numbers = {id(m): int(found[1]) for m, found in numbers if found}
        self.layer: int | None = None

    def before(self, module: torch.nn.Module, given: Any) -> None:
        self.layer = self.numbers.get(id(module), self.layer)
        if "Attention" in type(module).__name__ or hasattr(module, "kv_lora_rank"):
            self.open.append(_Call(module, [], layer=self.layer))

    def after(self, module: torch.nn.Module, given: Any, found: Any) -> None:
        name = type(module).__name__
        if (
            self.open
            and self.open[-1].given is None
            and "Norm" in name
            and given
            and isinstance(given[0], torch.Tensor)
        ):
            self.open[-1].events.append(("norm", (module, tuple(given[0].shape))))
        if self.open and self.open[-1].module is module:
            call = self.open.pop()
            if name in OWN_SCORES and call.given is None:
                heads, dim, scale = OWN_SCORES[name](module)
                call.given = {"own": True, "heads": heads, "dim": dim, "scaling": scale}
                self.calls.append(call)

    def rope(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.open:
            self.open[-1].events.append(("rope", (function, args, kwargs)))

    def attention(self, module: torch.nn.Module, given: dict[str, Any]) -> None:
        for call in reversed(self.open):
            if call.module is module:
                if call.given is None:
                    call.given = given
                    self.calls.append(call)
                return
        self.calls.append(_Call(module, [], given, self.layer))


_recorder: _Recorder | None = None


def _probe(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
    given = {**kwargs, "query": query, "key": key, "value": value, "mask": attention_mask}
    if _recorder is not None:
        _recorder.attention(module, given)
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return zeros(shape, query.dtype).as_subclass(Shaped), None


def _mask(batch_size: int = 1, q_length: int = 1, kv_length: int = 1, mask_function: Any = None, **kwargs: Any) -> Any:
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool).as_subclass(_Mask)
    mask.sees = mask_function  # type: ignore[attr-defined]
    return mask


class _Mask(torch.Tensor):
    """A mask that knows the function it was made of, slices of it too."""

    sees: Any = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in args if isinstance(a, _Mask)]
        with torch._C.DisableTorchFunctionSubclass():
            made = function(
                *(a.as_subclass(torch.Tensor) if isinstance(a, _Mask) else a for a in args), **(kwargs or {})
            )
        if given and type(made) is torch.Tensor and made.dtype == torch.bool and made.ndim == 4:
            made = made.as_subclass(_Mask)
            made.sees = given[0].sees
        elif any(isinstance(a, Shaped) for a in args):
            made = _as_shaped(made)
        return made


AttentionInterface.register(PROBE, _probe)
AttentionMaskInterface.register(PROBE, _mask)


@contextlib.contextmanager
def _recording(model: torch.nn.Module) -> Iterator[_Recorder]:
    global _recorder
    _recorder = recorder = _Recorder(model)
    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(recorder.before),
        torch.nn.modules.module.register_module_forward_hook(recorder.after),
    ]
    replaced: list[tuple[Any, str, Any]] = []
    for place in {sys.modules[type(m).__module__] for m in model.modules() if "modeling_" in type(m).__module__}:
        for name, function in list(vars(place).items()):
            if callable(function) and "apply" in name and "rot" in name and "vision" not in name:
                replaced.append((place, name, function))
                setattr(place, name, _reported(recorder, function))
            elif callable(function) and name == "get_llama_4_attn_scale":
                replaced.append((place, name, function))
                setattr(place, name, _scaled(recorder, function))
    import transformers.masking_utils as masks

    packed = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield recorder
    finally:
        masks.find_packed_sequence_indices = packed
        for place, name, function in replaced:
            setattr(place, name, function)
        for hook in hooks:
            hook.remove()
        _recorder = None


def _reported(recorder: _Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    def reported(*args: Any, **kwargs: Any) -> Any:
        recorder.rope(function, args, kwargs)
        return function(*args, **kwargs)

    return reported


def _scaled(recorder: _Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(positions: Any, beta: float, original: int, *rest: Any) -> Any:
        if recorder.open:
            recorder.open[-1].events.append(("scaled", (float(beta), int(original), 0)))
        return function(positions, beta, original, *rest)

    return scaled


# Reading --------------------------------------------------------------------------------------------------------------


def layers(config: Any, model: torch.nn.Module | None = None, tokens: int = TOKENS) -> list[LayerTruth]:
    """Every decoder layer of a config, as transformers computes it; `NotBuildable` where it cannot.

    `model` is what `build` made of the config, where the caller has it; `tokens` a number that no axis of a model has.
    """
    model = build(config) if model is None else model
    ids = torch.arange(1, tokens + 1)[None]
    problem: Exception | None = None
    for cached in (False, True):
        with _recording(model) as recorder, torch.no_grad():
            try:
                model(**_inputs(config, ids), use_cache=cached)
                problem = None
            except Exception as error:
                problem = error
        if problem is None:
            break
    if problem is not None and not recorder.calls:
        raise NotBuildable("forward: " + _short(problem))
    count = next(
        (n for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if (n := getattr(config, k, None))), 0
    )
    found: dict[int, LayerTruth] = {}
    seen: dict[Any, Any] = {"tokens": tokens}
    again = len({id(c.module) for c in recorder.calls}) < len(recorder.calls)  # modules that several layers share
    for order, call in enumerate(recorder.calls):
        index = call.layer if again else getattr(call.module, "layer_idx", None)
        index = call.layer if index is None or index < 0 else index  # Zamba2's modules all have -1
        index = order if index is None or (again and len(recorder.calls) == count) else index
        if index not in found:
            found[index] = _layer(index, call, seen)
    if problem is not None and len(found) < count:
        raise NotBuildable(f"forward stopped in layer {len(found)}: {_short(problem)}")
    return [found.get(i, LayerTruth(i, attends=False)) for i in range(max(count, max(found, default=-1) + 1))]


def _inputs(config: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What a forward is called with: token ids, for Kyutai of every codebook; Voxtral's layers take their delay besides."""
    if config.model_type == "kyutai_speech_to_text":
        return {"input_ids": ids[..., None].expand(-1, -1, config.num_codebooks + 1)}
    if config.model_type == "voxtral_realtime_text":
        return {"input_ids": ids, "t_cond": zeros((1, 1, config.hidden_size), torch.float32)}
    return {"input_ids": ids}


def _layer(index: int, call: _Call, seen: dict[Any, Any]) -> LayerTruth:
    module, given = call.module, call.given or {}
    layer = LayerTruth(index, module=type(module).__name__)
    if given.get("own"):
        layer.q_heads, layer.k_dim, layer.v_dim = given["heads"], given["dim"], given["dim"]
        layer.kv_heads = getattr(module, "num_kv_heads", layer.q_heads)
        layer.scale = float(given["scaling"])
        layer.alibi = layer.module in ("BloomAttention", "MptAttention") or (
            layer.module == "FalconAttention" and bool(module.config.alibi)
        )
        if layer.module == "GPTNeoSelfAttention" and getattr(module, "attention_type", "") == "local":
            layer.window = module.config.window_size
    else:
        query, key, value = given["query"], given["key"], given["value"]
        layer.q_heads, layer.kv_heads = query.shape[1], key.shape[1]
        if layer.module in REPEATED:
            layer.kv_heads = module.num_key_value_heads
        layer.k_dim, layer.v_dim = key.shape[-1], value.shape[-1]
        scaling = given.get("scaling")
        layer.scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        if layer.scale == 1.0:  # OPT multiplies q by its scale beforehand
            layer.scale = float(getattr(module, "scaling", 1.0))
        layer.softcap = given.get("softcap")
        layer.sinks = given.get("s_aux") is not None
        _read_mask(layer, given["mask"], seen)
        if layer.module in KEPT:
            layer.window = getattr(DynamicCache(config=module.config).layers[index], "sliding_window", None)
            if layer.window == 0:
                raise NotBuildable("the cache keeps no token")
    rank = getattr(module, "kv_lora_rank", None)
    if rank is not None:
        rope_dim, nope = module.qk_rope_head_dim, getattr(module, "qk_nope_head_dim", 0)
        layer.latent = (rank, rope_dim, nope, getattr(module, "v_head_dim", layer.v_dim))
    if getattr(module, "is_kv_shared_layer", False):
        layer.kv_source = next(i for i, stored in seen["stores"].items() if stored == module.layer_type)
    elif getattr(module, "store_full_length_kv", False):
        seen.setdefault("stores", {})[index] = module.layer_type
    turned = 0  # tensors that RoPE has turned: q, then k
    for kind, what in call.events:
        if kind == "rope":
            rotation = _rotation(*what, seen)
            if isinstance(rotation, Rotation) and not turned:
                layer.rope = rotation
            elif isinstance(rotation, str):
                layer.notes.append(rotation)
            _, args, kwargs = what
            turned += sum(isinstance(a, Shaped) and a.ndim >= 3 for a in [*args, *kwargs.values()])
        elif kind == "norm":
            norm = _norm(module, *what, turned, seen)
            if norm is not None and norm.name not in layer.norms:
                layer.norms[norm.name] = norm
        elif kind == "scaled" and what[0]:
            layer.q_scale = what
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        layer.q_scale = (float(module.attn_scale), int(module.floor_scale), 1)
    if layer.module == "BeamAttention" and layer.rope is None:
        layer.q_scale = ("(1 + (position + 1) / 2048) ** 0.1",)  # modeling_beam.compute_attention_scaling
    return layer


def _read_mask(layer: LayerTruth, mask: Any, seen: dict[Any, Any]) -> None:
    sees = getattr(mask, "sees", None)
    if sees is None:
        layer.causal = None
        layer.notes.append("the model makes its own mask")
        return
    if ("mask", id(sees)) not in seen:
        seen["mask", id(sees)] = (_seen(sees), sees)
    (layer.causal, layer.window, layer.chunk), _ = seen["mask", id(sees)]


def _seen(sees: Callable[[int, int, int, int], Any]) -> tuple[bool, int | None, int | None]:
    """Whether keys behind the query are hidden, and the window or chunk of a mask function, by bisection."""

    zero = torch.tensor(0)

    def at(q: int, kv: int) -> bool:
        return bool(sees(zero, zero, torch.tensor(q), torch.tensor(kv)))

    if not at(FAR, FAR):
        raise NotBuildable("the mask hides each token from itself")
    causal = not at(FAR, FAR + 1)
    if at(FAR, 0):
        return causal, None, None

    def first(q: int) -> int:
        low, high = -1, q  # low is hidden, high is seen
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(q, middle) else (middle, high)
        return high

    begin = first(FAR)
    if first(begin) == begin and (begin == FAR or first(begin + 1) == begin):
        low, high = FAR, 2 * FAR
        while high - low > 1:  # the first query of the next chunk
            middle = (low + high) // 2
            low, high = (middle, high) if first(middle) == begin else (low, middle)
        return causal, None, high - begin
    return causal, FAR - begin + 1, None


def _rotation(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: dict[Any, Any]
) -> Rotation | str | None:
    """The rotation of a call of a RoPE function, by calling it on unit vectors."""
    everything = [*args, *kwargs.values()]
    states = [a for a in everything if isinstance(a, Shaped) and a.ndim >= 3]
    tables = [a for a in everything if isinstance(a, torch.Tensor) and not isinstance(a, Shaped)]
    if not states or not tables:
        return "RoPE without real cos and sin"
    width, shape, tokens = states[0].shape[-1], states[0].shape, seen["tokens"]
    key = ("rope", function, width, tuple(id(t) for t in tables), tuple(shape[1:2]) == (tokens,))
    if key in seen:
        return seen[key][0]  # type: ignore[no-any-return]
    tokens_first = shape[-2] != tokens
    unit = torch.eye(width)
    units = unit[None, :, None, :].expand(1, width, tokens, width)
    units = units.transpose(1, 2) if tokens_first else units
    units = units[0] if len(shape) == 3 else units

    def real(a: Any) -> Any:
        return units.clone() if isinstance(a, Shaped) and a.ndim >= 3 else a

    try:
        made = function(*map(real, args), **{k: real(v) for k, v in kwargs.items()})
    except Exception as error:
        return f"RoPE on unit vectors: {_short(error)}"
    out = made[0] if isinstance(made, tuple | list) else made
    out = out[None] if len(shape) == 3 else out
    out = (out.transpose(1, 2) if tokens_first else out)[0].double()  # [unit, token, element]
    found = _turn(out[:, 1] @ out[:, 0].T)
    seen[key] = (found, tables)
    return found


def _turn(product: torch.Tensor) -> Rotation:
    """Rotation from the products of all unit vectors turned to position 1 with those at position 0."""
    width = product.shape[0]
    off = product - torch.diag(torch.diagonal(product))
    size, partner = off.abs().max(dim=1)
    diagonal = torch.diagonal(product)
    partners, angles = [], []
    turning = size > 0
    radius = torch.hypot(diagonal, size)
    for i in range(width):
        partners.append(int(partner[i]) if turning[i] else -1)
        towards = (
            1.0 if partner[i] > i else -1.0
        )  # the first of a pair turns towards its second, this towards minus the first
        sine = towards * float(off[i, partner[i]])
        angles.append(math.atan2(sine, float(diagonal[i])) if turning[i] else 0.0)
    factors = torch.sqrt(radius[turning]) if bool(turning.any()) else torch.ones(1)
    interleaved = bool(turning.any()) and all(p == (i ^ 1) for i, p in enumerate(partners) if p >= 0)
    return Rotation(width, tuple(partners), tuple(angles), float(factors.median()), interleaved)


def _norm(
    parent: torch.nn.Module, module: torch.nn.Module, shape: tuple[int, ...], turned: int, seen: dict[Any, Any]
) -> NormTruth | None:
    name = next((n for n, m in parent.named_modules() if m is module), "")
    if not name:
        return None
    role = _role(name)
    key = ("norm", id(module), shape[-1])
    if key not in seen:
        seen[key] = _norm_facts(module, shape[-1])
    return NormTruth(role, *seen[key], after_rope=turned > {"q": 0, "qk": 0, "k": 1}.get(role, 2))


def _role(name: str) -> str:
    """q, k, v, latent, latent_q or the module's own name."""
    if "index" in name:  # an indexer's own norms
        return name
    last = name.split(".")[-1]
    for role, names in {
        "latent": ("kv_a_layernorm", "kv_a_norm", "kv_norm", "kv_layernorm"),
        "latent_q": ("q_a_layernorm", "q_a_norm"),
        "q": ("q_norm", "q_layernorm", "query_layernorm", "query_norm", "norm_q", "q_ln", "query_layer_norm"),
        "k": ("k_norm", "k_layernorm", "key_layernorm", "key_norm", "norm_k", "k_ln", "key_layer_norm"),
        "v": ("v_norm", "value_norm"),
        "qk": ("qk_norm", "attn_norm"),
    }.items():
        if last in names:
            return role
    return last


def _norm_facts(module: torch.nn.Module, dim: int) -> tuple[str, int, float, float, bool]:
    """Kind, elements of the mean, eps, offset of weights, whether there are weights: by running the module on real numbers."""
    eps = next(
        (getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon", "norm_eps") if hasattr(module, n)), None
    )
    weights = dict(module.named_parameters())
    generator = torch.Generator().manual_seed(1)
    real = {n: torch.randn(tuple(p.shape), generator=generator) for n, p in weights.items()}
    weight = real.get("weight")
    parts = [t for n, t in real.items() if n.endswith(".weight")]  # a norm for each head (StableLM)
    if weight is None and parts:
        weight = torch.stack(parts)[:, None]
    flat = weight.reshape(-1) if weight is not None else None
    heads = weight.shape[0] if weight is not None and weight.ndim == 2 else None
    x = torch.randn((1, 1, TOKENS, dim), generator=generator) * 3e-3
    if parts:
        x = torch.randn((1, len(parts), TOKENS, dim), generator=generator) * 3e-3
    if heads is not None:
        x = torch.randn((1, TOKENS, heads, dim), generator=generator) * 3e-3
    try:
        y = torch.func.functional_call(module, real, (x,)).double()
    except Exception as error:
        return f"unknown ({_short(error)})", dim, float(eps or 0.0), 0.0, weight is not None
    span = flat.numel() if flat is not None and heads is None and not parts else dim
    x = x.double()
    for kind in ("rms", "layer"):
        for guess in dict.fromkeys((eps, 1e-6, 1e-5, 0.0, float(torch.finfo(torch.float32).eps), 1e-12)):
            if guess is None:
                continue
            centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
            plain = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + guess)
            for offset in (0.0, 1.0):
                made = plain if weight is None else plain * (weight.double() + offset)
                if "bias" in real:
                    made = made + real["bias"].double()
                if torch.allclose(made, y, rtol=1e-4, atol=1e-5):
                    return kind, span, float(guess), offset, weight is not None
    return "unknown", span, float(eps or 0.0), 0.0, weight is not None

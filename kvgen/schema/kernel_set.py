"""A kernel set: one cache, the operations over it, and the architectures they are for."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, Field, SerializeAsAny, field_validator, model_validator

from kvgen.architectures import DEFAULT_ARCHS, Arch
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.base import Spec
from kvgen.schema.cache import Cache
from kvgen.schema.cache_facts import check_cache
from kvgen.schema.hints import operations_with
from kvgen.schema.model import Model

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")

C_NAMES: Final = frozenset(
    re.findall(
        r"\w+",
        "static_cast dynamic_cast const_cast reinterpret_cast static_assert thread_local and_eq or_eq alignas alignof asm auto "
        "bitand bitor bool case catch char const constexpr decltype default delete do double enum explicit export extern float "
        "friend goto inline int long main mutable namespace new noexcept nullptr operator private protected public register "
        "short signed sizeof static struct switch template this throw true false typedef typeid typename union unsigned using "
        "virtual void volatile wchar_t xor compl",
    )
)


def check_name(field: str, value: str) -> str:
    """A name that is an identifier in C and in Python, 40 characters at most."""
    if not NAME.fullmatch(value) or keyword.iskeyword(value):
        raise ValueError(
            f"{field}: got {value!r}; it names files, C functions and Python functions: lower-case letters, digits and _, "
            "a letter first, at most 40 characters, no Python keyword"
        )
    return value


_TAKEN: Final = {"device": "the device library", "cubins": "kernels compiled ahead of time"}  # beside the sets


class Op(Spec):
    """An operation of a set. `name` is unique in its set and defaults to the operation's own.

    `ragged` says of a class that it works on caches without pages, `moves_states` that it works on pages that are
    states, `at_rates` that it works where an entry of the cache stands for several tokens, `scores_keys` that the cache's
    rows are an indexer's keys and q_heads its heads, `by_arch` that architectures may have kernels, and files, of their own.
    """

    kind: ClassVar[str]
    ragged: ClassVar[bool] = False
    moves_states: ClassVar[bool] = False
    at_rates: ClassVar[bool] = False
    scores_keys: ClassVar[bool] = False
    by_arch: ClassVar[bool] = False
    name: str = Field(default="", validate_default=False)
    """Name of the operation in its set: the kernel's file, the C function and the launcher. "": the operation's own, as
    "append".
    """

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if value in ("at_once", "object", "super"):
            raise ValueError(f"name: got {value!r}; the generated module needs that name itself; choose another")
        return check_name("name", value)

    def model_post_init(self, context: Any) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.kind)

    def kernel_names(self) -> tuple[str, ...]:
        """The names of the operation's kernels: one file each."""
        return (self.name,)

    def entry_names(self, set_name: str) -> tuple[str, ...]:
        """The names of those kernels in C."""
        return tuple(f"{set_name}_{kernel}" for kernel in self.kernel_names())

    @property
    def description(self) -> str:
        """The sentences about the operation with which its launcher's docstring begins."""
        return type(self).__doc__ or ""

    @property
    def columns_of_all_heads(self) -> int | None:
        """Elements of a row of all heads, where the spec states them; None: they follow from the set's heads."""
        return None

    def other_caches(self) -> dict[str, Cache]:
        """Caches that a call brings besides the set's own, by the names of their classes in the generated module."""
        return {}

    def about_other(self, class_name: str) -> str:
        """A sentence for the class of one of those caches."""
        return f"The cache that {self.name} reads, as Cache is the one that it writes."

    def other_space(self, class_name: str) -> str:
        """The namespace of one of those caches in C; its header is `<name of the operation>_<namespace>.cuh`."""
        return "source"

    def decode_rows(self, kernels: KernelSet) -> int:
        """The rows of a request up to which the set's decode costs no more than extend; 0 of all other operations."""
        return 0

    def check(self, kernels: KernelSet) -> None:
        """Raise ValueError where the operation does not fit the set's cache."""

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        """The operation's kernels."""
        raise NotImplementedError


class Uses(dict[str, tuple[str, ...]]):
    """A mapping that a frozen spec can be compared and hashed by."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class KernelSet(Spec):
    """A cache and its operations, of which `kvgen build` makes one package: `generated/<name>/`.

    `q_heads` query heads attend to the cache's `kv_heads`; `model` records facts of the checkpoint that do not change
    the cache's memory.
    """

    name: str = ""
    """Name of the package that is generated. "": the name of the spec's file."""
    q_heads: int = Field(default=0, ge=1, le=65536)
    """Query heads of a layer on this device; a multiple of the cache's `kv_heads`. Every set has them, but one over a
    State cache, which has no heads.
    """
    cache: SerializeAsAny[AnyCache]
    """The cache that all operations work on: Paged(...), Latent(...), Continuous(...), Ragged(...), State(...) or a
    preset.
    """
    ops: tuple[SerializeAsAny[Op], ...] = Field(min_length=1, strict=False)
    """Operations, a kernel or more and a launcher each; their names differ."""
    arch: tuple[Arch, ...] = Field(default=DEFAULT_ARCHS, min_length=1, strict=False)
    """Architectures to compile for: "sm_80", "sm_89", "sm_90a", "sm_100f", "sm_120f" (docs/architectures.md)."""
    model: Model | None = None
    """Facts of the checkpoint that operations refer to, as rope="model". None: operations state what they need."""
    layers: Mapping[str, Annotated[tuple[str, ...], Field(strict=False)]] = Field(default_factory=Uses)
    """Which operations the layers of each of the model's kinds call, by name: {"full": ("append", "decode")}. Kinds that
    are not here use another set. {}: not stated.
    """

    @property
    def group(self) -> int:
        """Query heads per kv head (the GQA group)."""
        return self.q_heads // self.kv.kv_heads

    @property
    def kv(self) -> Cache:
        """The cache, of operations that know tokens and heads; sets over states have none of them."""
        if not isinstance(self.cache, Cache):
            raise TypeError(f"{self.name}: {type(self.cache).__name__} has no tokens")
        return self.cache

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        return check_name("name", value) if value else value

    @field_validator("ops", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, Op):  # whose fields pydantic would take for a list
            raise ValueError(
                f"ops: got {type(value).__name__}() alone; it must be a list: [ops.{type(value).__name__}()]"
            )
        return value

    @field_validator("layers")
    @classmethod
    def _hashable(cls, value: Mapping[str, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
        return Uses(value)

    def _check_layers(self) -> None:
        """Kinds that the model has, operations that the set has."""
        if not self.layers:
            return
        known = self.model.kind_names if self.model is not None else ()
        names = [op.name for op in self.ops]
        for kind, uses in self.layers.items():
            if kind not in known:
                raise ValueError(
                    f"layers: got {kind!r}, which is no kind of the set's model; valid: "
                    f"{', '.join(known) or 'none without model'}"
                )
            absent = next((name for name in uses if name not in names), None)
            if absent is not None:
                raise ValueError(
                    f"layers: got {absent!r} for {kind!r} layers, which is no operation of the set; valid: {', '.join(names)}"
                )

    @model_validator(mode="after")
    def _consistent(self) -> KernelSet:
        self._check_layers()
        self._check_heads()
        if self.model is not None and not self.cache.states:
            check_cache(self.model, self.kv, self.q_heads, scores=any(op.scores_keys for op in self.ops))
        kernels = [kernel for op in self.ops for kernel in op.kernel_names()]
        kernels += [
            f"{kernel}_{arch}" for op in self.ops if op.by_arch for kernel in op.kernel_names() for arch in self.arch
        ]
        for label, names in (("ops", kernels), ("arch", [str(a) for a in self.arch])):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{label}: got {', '.join(twice)} twice; names in a set are unique (give name='...')")
        for op in self.ops:
            if self.cache.ragged and not op.ragged:
                raise ValueError(
                    f"ops: got {op.name} with a {type(self.cache).__name__} cache, whose requests lie one after another without "
                    f"pages; it has {operations_with('ragged')} and kernels of your own"
                )
            if self.cache.states and not op.moves_states:
                raise ValueError(
                    f"ops: got {op.name} with a {type(self.cache).__name__} cache, whose pages are records of bytes without "
                    f"tokens, heads and lengths; it has {operations_with('moves_states')} and kernels of your own"
                )
            if not op.at_rates:
                for field, cache in (("cache", self.cache), *op.other_caches().items()):
                    self._check_rate(op, field, cache)
            op.check(self)
        return self

    def _check_rate(self, op: Op, field: str, cache: AnyCache) -> None:
        """Raise ValueError where entries stand for several tokens, and the operation counts tokens one by one."""
        if cache.entry_tokens > 1:
            where = "" if field == "cache" else f" in {field}"
            raise ValueError(
                f"ops: got {op.name} with rate={cache.entry_tokens}{where}, where an entry stands for {cache.entry_tokens} "
                f"tokens; {op.kind} counts tokens one by one; use it with rate=1"
            )

    def _check_heads(self) -> None:
        """Raise ValueError unless query heads are there exactly where the cache has heads, and fit them."""
        if self.cache.states:
            if self.q_heads:
                raise ValueError(
                    f"q_heads: got {self.q_heads} with a {type(self.cache).__name__} cache, which has no heads; leave it out"
                )
            return
        if not self.q_heads:
            raise ValueError(
                "KernelSet.q_heads: missing; a cache with heads needs it. Query heads of a layer on this device; a multiple of "
                "the cache's `kv_heads`."
            )
        if self.q_heads % self.kv.kv_heads:
            raise ValueError(
                f"q_heads: got {self.q_heads} with kv_heads={self.kv.kv_heads}; every kv head serves the same number of "
                "query heads, so q_heads must be a multiple of kv_heads"
            )

    def named(self, default: str) -> KernelSet:
        """This set, called `default` where its spec gave no name."""
        return self.called(self.name or default)

    def called(self, name: str) -> KernelSet:
        """This set under the name `name`; raises ValueError where no set or no kernel can be called so."""
        # Not Spec's copy: nothing that the name changes is planned again.
        named = self if name == self.name else BaseModel.model_copy(self, update={"name": check_name("name", name)})
        if named.name in _TAKEN:
            raise ValueError(
                f"name: got {named.name!r}; generated/{named.name} holds {_TAKEN[named.name]}; choose another name"
            )
        entries = [entry for op in named.ops for entry in op.entry_names(named.name)]
        for entry in entries:
            if entry in C_NAMES or entry.endswith("_t") or entries.count(entry) > 1:
                raise ValueError(
                    f"name: {entry!r} would be a kernel's name in C, where it is taken; rename the set or the op"
                )
        return named

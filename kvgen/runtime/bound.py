"""Bound launches: arguments that were checked once, launched any number of times, with other addresses if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayLike, ArrayView, view
from kvgen.runtime.call_check import Checked
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.like_array import LikeArray
from kvgen.runtime.packing import PackedArgs
from kvgen.runtime.pool_map import layer_writer
from kvgen.runtime.repeated_call import array_arguments
from kvgen.runtime.wrong_call import worded

P = ParamSpec("P")
R = TypeVar("R", bound=tuple[object, ...])


class Bound:
    """A launch whose arguments are checked: `bound(stream)` is all that is left.

    It keeps its arrays alive and reads nothing of them. One thread at a time may call it.
    """

    __slots__ = ("_go", "_handle", "_keep", "_replace", "_swap", "given")

    def __init__(
        self,
        go: Callable[[Any], None],
        keep: object,
        given: Sequence[object] = (),
        handle: Callable[[object], Any] | None = None,
        swap: Replaceable | None = None,
    ) -> None:
        """`go` launches on the stream whose handle it takes, which `handle` finds for what a call gives."""
        self._go = go
        self._keep = keep
        self._handle: Callable[[object], Any] = _as_given if handle is None else handle
        self._swap = swap
        self._replace = _refused if swap is None else swap.replace
        self.given = given

    def __call__(self, stream: object = None, /, *, cache: LayerCache | None = None, **arrays: ArrayLike) -> None:
        """Launch on `stream`, else on the one given to `bind`, else on the legacy default stream.

        cache: another layer, or the same one in another step, of the same sizes. arrays: others in the place of those that
        `bind` took, by name (`q=`, `out=`): of the same dtype, shape, strides and device, aligned as well. What is replaced
        stays for later calls. Whether arrays overlap is not looked at again. Raises ArgumentError for others.

        Of host arrays the launch has run to its end, on the CPU machine, when the call returns.
        """
        if arrays or cache is not None:
            self._replace(cache, arrays)
        if type(stream) is not int or stream < 0:
            stream = self._handle(stream)
        self._go(stream)

    def after(self, first: Bound) -> Bound:
        """Both launches in one, `first` before this one and on the same stream."""

        def go(stream: Any) -> None:
            first._go(stream)
            self._go(stream)

        return Bound(go, (first, self), self.given, self._handle)

    def __repr__(self) -> str:
        what = self._swap.kernel.entry if self._swap is not None else "a launch"
        return f"Bound({what})"


class Replaceable:
    """The arguments of a bound launch that others may replace: its arrays by name, and its layer."""

    __slots__ = (
        "_arguments",
        "_held",
        "_kept",
        "_layer",
        "_likes",
        "_move",
        "_usual",
        "_words",
        "_write_layer",
        "kernel",
    )

    def __init__(self, checked: Checked, arguments: Sequence[object], args: PackedArgs, launch: object) -> None:
        self.kernel = checked.kernel
        self._layer = checked.cache
        # The CPU machine knows the arrays that a launch touches.
        self._move: Callable[[LayerCache, dict[str, ArrayView]], None] | None = getattr(launch, "move", None)
        self._arguments = {e.spec.name: e for e in array_arguments(checked, arguments)}
        self._likes = {name: (args.word_of(e.place), e.like) for name, e in self._arguments.items()}
        self._words, self._write_layer = args.words, layer_writer(checked.kernel.params, args)
        # Calls replace the same names again and again: what those need is looked up once.
        self._usual: tuple[tuple[str, int, LikeArray], ...] = ()
        self._held: dict[str, object] = {}  # arrays of the last call
        self._kept: dict[str, object] = {}  # arrays of earlier calls, by names that the last one left as they were

    def replace(self, cache: LayerCache | None, arrays: dict[str, Any]) -> None:
        """Write the addresses of `arrays` and the struct of `cache` over those that were bound; all of them or none."""
        if cache is not None and (type(cache) is not LayerCache or cache.step is not self._layer.step):
            self._hold_layer(cache)
        if arrays:
            words = self._words
            before = words.tobytes()
            try:
                usual = self._usual if len(arrays) == len(self._usual) else self._look_up(arrays)
                for name, place, like in usual:
                    words[place] = like(arrays[name]) or self._arguments[name].address(arrays[name])
            except BaseException as error:
                words[:] = type(words)(words.typecode, before)
                if isinstance(error, KeyError) and any(name not in arrays for name, _, _ in self._usual):
                    self._look_up(arrays)  # as many as in the last call, but others
                    self.replace(cache, arrays)
                    return
                raise
            if not self._held:
                self._kept = {name: array for name, array in self._kept.items() if name not in arrays}
            self._held = arrays
        if cache is not None:
            self._write_layer(cache)
            self._layer = cache
        if self._move is not None:
            self._move(self._layer, {name: view(array, name) for name, array in arrays.items()})

    def _look_up(self, arrays: dict[str, Any]) -> tuple[tuple[str, int, LikeArray], ...]:
        """What calls that replace these names need; ArgumentError for one that the launch was not bound with."""
        for name in arrays:
            if name not in self._likes:
                raise self._unknown(name) from None
        self._kept, self._held = {**self._kept, **self._held}, {}
        self._usual = tuple((name, *self._likes[name]) for name in arrays)
        return self._usual

    def _unknown(self, name: str) -> ArgumentError:
        """The error of an array that the launch was not bound with."""
        return ArgumentError(
            f"{name}: got an array; this launch was bound with {', '.join(self._likes) or 'none'}; replace one of those, or bind "
            "again"
        )

    def _hold_layer(self, cache: LayerCache) -> None:
        """Raise ArgumentError unless `cache` is a layer of the same set, device and sizes."""
        bound = self._layer
        if not isinstance(cache, LayerCache) or cache.module is not bound.module:
            raise ArgumentError(
                f"cache: got {cache!r}; it must be a layer of {bound.module.name}.Cache; pass cache[layer]"
            )
        if cache.device != bound.device:
            raise ArgumentError(
                f"cache: got a layer on {cache.device}; the launch was bound on {bound.device}; bind again"
            )
        if cache.step.key != bound.step.key:
            differ = next(n for n in (*cache.dims, *bound.dims) if cache.dims.get(n) != bound.dims.get(n))
            raise ArgumentError(
                f"cache: got a layer with {differ}={cache.dims.get(differ)}; the launch was bound with "
                f"{differ}={bound.dims.get(differ)}; pass a layer of the same sizes, or bind again"
            )


class AtOnce(Bound):
    """A launch that has been made."""

    __slots__ = ()

    def __init__(self, given: Sequence[object]) -> None:
        self._go, self._swap, self.given = _done, None, given

    def __call__(self, stream: object = None, /, *, cache: LayerCache | None = None, **arrays: ArrayLike) -> None:
        """Nothing is left to do."""

    def after(self, first: Bound) -> Bound:
        """`first` has been launched too, and before."""
        return self


def _done(stream: object) -> None:
    """The launch has been made."""


def _as_given(stream: object) -> object:
    """The stream of a call, where nothing is launched."""
    return stream


def _refused(cache: LayerCache | None, arrays: dict[str, Any]) -> None:
    """Raise ArgumentError: the arguments of this launch stay as bound."""
    names = ", ".join((*arrays, *(("cache",) if cache is not None else ())))
    raise ArgumentError(
        f"{names}: got another one for a launch whose arguments stay as bound: several kernels at once, all layers, "
        "or an empty batch; bind again"
    )


@overload
def at_once(bind: Callable[P, Bound]) -> Callable[P, None]: ...
@overload
def at_once(bind: Callable[P, Bound], written: str) -> Callable[P, ArrayLike]: ...
@overload
def at_once(bind: Callable[P, Bound], written: type[R]) -> Callable[P, R]: ...
def at_once(bind: Callable[P, Bound], written: Any = None) -> Callable[P, Any]:
    """The method that takes what `bind` takes, checks it and launches.

    It returns the array called `written`, or the NamedTuple `written` of the arrays that its fields name, as they were given;
    None where the kernel writes to the cache alone.
    """
    method: Any = bind

    @wraps(bind)
    def launch(*arguments: P.args, **named: P.kwargs) -> Any:
        launcher: Any = arguments[0]
        try:
            given = method(launcher.now, *arguments[1:], **named).given
        except TypeError as error:
            better = worded(error, method, type(launcher).__doc__, arguments)
            if better is None:
                raise
            raise better from None
        if written is None:
            return None
        if isinstance(written, str):
            return given[launcher.KERNEL.places[written]]
        places = launcher.KERNEL.places
        return written(*(given[places[name]] for name in written._fields))

    return launch

"""CUDA streams of any library as handles."""

from __future__ import annotations

from kvgen.errors import ArgumentError


def stream_handle(stream: object) -> int:
    """The CUstream of `stream`, as an integer.

    None is the legacy default stream (0), on which a kernel waits for every other blocking stream's work. Takes an
    integer handle, the `__cuda_stream__` protocol (cuda.core; method or property giving (version, handle)), and streams
    of torch (`.cuda_stream`), CuPy (`.ptr`) and cuda.bindings. Raises ArgumentError for anything else.
    """
    if stream is None:
        return 0
    handle: object = stream
    if not isinstance(stream, int):
        if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
            pair = protocol() if callable(protocol) else protocol
            if not isinstance(pair, tuple) or len(pair) != 2 or pair[0] != 0:
                raise ArgumentError(
                    f"stream: got {pair!r} from __cuda_stream__; it must be (0, handle), version 0 of the protocol; "
                    "pass the handle as an integer"
                )
            handle = pair[1]
        elif (number := getattr(stream, "cuda_stream", getattr(stream, "ptr", None))) is not None:
            handle = number
        elif type(stream).__module__.startswith("cuda.bindings") and hasattr(stream, "__int__"):
            handle = int(stream)
    if not isinstance(handle, int) or isinstance(handle, bool) or handle < 0:
        raise ArgumentError(
            f"stream: got {stream!r}; it must be None, a stream handle, or a stream; pass a cuda.core, torch or CuPy "
            "stream, or an object with __cuda_stream__"
        )
    return handle


def no_stream(stream: object) -> None:
    """Raise ArgumentError for a stream where the CPU machine runs."""
    if stream is not None:
        raise ArgumentError(f"stream: got {type(stream).__name__} on the CPU; its machine has no streams; pass None")

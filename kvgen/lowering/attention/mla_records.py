"""mla_decode over rows of any record, which all warps of a block round to one type on their way to shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvgen.layout.storage import Segment
from kvgen.lowering.attention.mla import MEMORY, WARPS
from kvgen.lowering.attention.mla_lists import ListContext
from kvgen.lowering.attention.mma import SIZES
from kvgen.lowering.attention.split_kv import Attended
from kvgen.schema.cache import Cache

TEMPLATE: Final = "ops/mla_decode_records.cu.j2"
TOKENS: Final = 32
# Dims that a thread has of a row, and bytes of their codes and scales that it keeps: RowUnit of device/attention/row_units.cuh.
UNIT: Final = 16
_UNIT_BYTES: Final = 48


@dataclass(frozen=True)
class RecordsShape:
    """A block's work: `cols` columns, two tiles of `tokens` rows, `pitch` bytes from row to row, `shared` bytes in all.

    Warps of K Q^T: `warps_m` along tokens, `warps_n` along columns, `warps_k` along dims. Q is held in registers if `held`,
    else read from shared memory, where it stands `apart` from the rows (else, at first, in the second tile's).
    """

    cols: int
    tokens: int
    pitch: int
    warps_m: int
    warps_n: int
    warps_k: int
    held: bool
    apart: bool
    shared: int


@dataclass(frozen=True)
class MlaRecordsContext:
    """Everything ops/mla_decode_records.cu.j2 reads; `qk_scale` turns products into scores in base 2."""

    d: Attended
    lists: tuple[ListContext, ...]
    shape: RecordsShape
    threads: int
    slack: int
    head_dim: int
    qk_scale: str


def check_row(cache: Cache, at: str) -> None:
    """Raise ValueError, which begins with `at`, where rows of this cache cannot be taken 16 dims at a time."""
    if cache.dtype == "f32":
        raise ValueError(
            f"{at}: got dtype='f32'; rows are multiplied on tensor cores, in 16 bits; use dtype='bf16' or 'f16'"
        )
    if cache.storage.own_table:
        raise ValueError(
            f"{at}: got scales with a page table of their own (own_table); a list finds rows by one index; use own_table=False"
        )
    for segment in cache.storage.roles["k"]:
        part = "the RoPE part" if segment.begin else "a row"
        if segment.begin % UNIT or segment.size % UNIT:
            raise ValueError(
                f"{at}: got {segment.size} dims in {part}, from {segment.begin} on; a thread takes {UNIT} of them; use multiples "
                f"of {UNIT}"
            )
        if segment.quant is not None and segment.quant.norm_correction:
            raise ValueError(
                f"{at}: got norm_correction=True; a thread takes {UNIT} dims, and a norm is corrected by all codes of a row; use "
                "recipe='unit', whose scales are corrected as they are stored"
            )
        if _unit_bytes(segment) > _UNIT_BYTES:
            raise ValueError(
                f"{at}: got {_unit_bytes(segment)} bytes of codes and scales for {UNIT} dims of {part}; a thread keeps "
                f"{_UNIT_BYTES}; use blocks of more dims, or a narrower scale_dtype"
            )
    if cache.latent_part % UNIT:
        raise ValueError(
            f"{at}: got latent_dim={cache.latent_part}; V is multiplied {UNIT} dims at a time; use a multiple of {UNIT}"
        )


def _unit_bytes(segment: Segment) -> int:
    """What a thread keeps of a row, scales in whole words."""
    codes, scales = UNIT * segment.region.dtype.bits // 8, segment.scales
    if scales is None:
        return codes
    count = UNIT // _common(UNIT, scales.block[2]) * (1 + scales.zero)
    return codes + -(-count * scales.dtype.bytes // 8) * 8


def _common(a: int, b: int) -> int:
    return a if b == 0 else _common(b, a % b)


def records_shape(head_dim: int, v_size: int, columns: int, lists: int, archs: Sequence[str]) -> RecordsShape:
    """The most columns of a block that fit the shared memory of every architecture; raises ValueError where none do."""
    room = min(MEMORY[SIZES[a]] for a in archs)
    cols = 64 if columns > 32 else 32 if columns > 16 else 16 if columns > 8 else 8
    while cols >= 8:
        found = _shape(head_dim, v_size, cols, lists)
        if found.shared <= room:
            return found
        cols //= 2
    raise ValueError(
        f"ops: mla_decode has no room for two tiles of rows of {head_dim} dims in the {room >> 10} KB of shared memory that "
        f"{', '.join(archs)} have in common; use smaller rows, or leave out sm_89 and sm_120f"
    )


def _shape(head_dim: int, v_size: int, cols: int, lists: int) -> RecordsShape:
    pitch = (head_dim // 8 | 1) * 16
    warps_m, warps_n = TOKENS // 16, max(1, cols // 16)
    warps_k, held = WARPS // (warps_m * warps_n), cols <= 32
    query = 2 * cols * head_dim
    apart = not held or query > TOKENS * pitch
    rows = 2 * TOKENS * pitch + query * apart + 4 * warps_k * cols * (TOKENS + 4)
    merged = -(-4 * cols * (v_size + 6) // 16) * 16
    shared = max(rows, merged) + 2 * cols * TOKENS + 4 * cols + 8 * TOKENS + 16 * lists
    return RecordsShape(cols, TOKENS, pitch, warps_m, warps_n, warps_k, held, apart, shared)

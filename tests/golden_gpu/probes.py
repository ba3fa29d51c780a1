"""All probes, and the CUDA text they are compiled from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from kvgen.compile.flatten import flatten
from tests.golden_gpu import (
    add_probes,
    angle_probes,
    attend_probes,
    channel_probes,
    column_probes,
    compact_probes,
    convert_families,
    convert_row_probes,
    copy_probes,
    copy_row_probes,
    decode_probes,
    element_probes,
    extend_probes,
    float_families,
    fp4_probes,
    fragment_probes,
    head_probes,
    head_step_probes,
    indexer_list_probes,
    indexer_probes,
    integer_families,
    key_list_probes,
    latent_pair_probes,
    latent_probes,
    latent_tile_probes,
    latent_warpgroup_probes,
    latent_wgmma_probes,
    latent_widen_probes,
    library_probes,
    listed_page_probes,
    memory_probes,
    merge_probes,
    mma_probes,
    narrow_probes,
    new_row_probes,
    page_list_probes,
    page_probes,
    paged_probes,
    plan_keys_probes,
    plan_probes,
    plan_rows_probes,
    pool_token_probes,
    power_probes,
    quantize_probes,
    row_lane_probes,
    row_probes,
    row_unit_probes,
    row_wgmma_probes,
    row_widen_probes,
    scan_probes,
    seal_probes,
    segment_probes,
    simt_probes,
    split_kv_probes,
    state_probes,
    states_probes,
    stored_probes,
    tile_probes,
    tma_probes,
    warp_families,
    wgmma_probes,
    write_row_probes,
)
from tests.golden_gpu.forms import Family
from tests.golden_gpu.probe import Probe, of_family

ROOT: Final = Path(__file__).resolve().parents[2]
KERNELS: Final = "tests/golden_gpu/kernels"


@cache
def families() -> tuple[Family, ...]:
    """Every family of opcodes."""
    modules = (float_families, convert_families, integer_families, warp_families)
    return tuple(family for module in modules for family in module.families())


@cache
def probes() -> tuple[Probe, ...]:
    """Every probe, in the order in which they run on a GPU. Those of copies by tensor maps and of products of warpgroups come
    first: no peer has their strides and descriptors, and the kernels that are worth most stand on them."""
    first = (tma_probes, copy_probes, wgmma_probes, row_wgmma_probes, latent_wgmma_probes, latent_widen_probes)
    modules = (
        memory_probes,
        library_probes,
        element_probes,
        quantize_probes,
        segment_probes,
        narrow_probes,
        paged_probes,
        stored_probes,
        copy_row_probes,
        convert_row_probes,
        angle_probes,
        head_probes,
        head_step_probes,
        key_list_probes,
        listed_page_probes,
        new_row_probes,
        add_probes,
        pool_token_probes,
        write_row_probes,
        page_probes,
        scan_probes,
        seal_probes,
        state_probes,
        states_probes,
        page_list_probes,
        compact_probes,
        tile_probes,
        mma_probes,
        fragment_probes,
        fp4_probes,
        channel_probes,
        decode_probes,
        power_probes,
        split_kv_probes,
        column_probes,
        attend_probes,
        row_probes,
        row_unit_probes,
        row_lane_probes,
        extend_probes,
        simt_probes,
        plan_probes,
        plan_keys_probes,
        plan_rows_probes,
        merge_probes,
        latent_pair_probes,
        latent_probes,
        latent_tile_probes,
        latent_warpgroup_probes,
        indexer_list_probes,
        indexer_probes,
        row_widen_probes,
    )
    of_opcodes = (of_family(family) for family in families())
    return (*(p for m in first for p in m.probes()), *of_opcodes, *(p for m in modules for p in m.probes()))


@cache
def units() -> dict[str, str]:
    """Translation unit -> text, of those that have probes."""
    found = {
        "families": "".join(family.cuda() for family in families()),
        "mma": mma_probes.cuda(),
        "wgmma": wgmma_probes.cuda(),
        "tiles": tile_probes.cuda(),
        "cp_async": copy_probes.cuda(),
    }
    for name in sorted({p.unit for p in probes()} - set(found)):
        file = "wgmma" if name == wgmma_probes.UNIT else name  # that name is the instruction's unit
        found[name] = flatten(f"{KERNELS}/{file}.cu", lambda path: (ROOT / path).read_text(encoding="utf-8"))
    return found

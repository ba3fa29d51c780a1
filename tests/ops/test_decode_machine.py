"""decode as machine code and as traffic: no spills, wide accesses, few instructions a token; every sector of K and V once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.decode_static import compiled, examine
from kvgen import Block, KernelSet, Layout, Paged, Quant, Score, ops
from kvgen.bench import Measured, measure
from kvgen.cases.scene import Scene
from kvgen.cases.touched_bytes import SECTOR
from kvgen.cases.workload import Workload
from kvgen.compile import default_cache
from kvgen.compile.sass import count, histogram, sass
from kvgen.cycles.flow import blocks, loops, main_loop
from kvgen.lowering.attention import decode_mma
from kvgen.lowering.attention.decode_mma import DecodeMma, Shape
from tests.compile.test_sass import needs_tool
from tests.support.harness import package

_CACHE: Final[dict[str, Any]] = {"dtype": "bf16", "kv_heads": 8, "head_dim": 128}
FP8: Final = Quant(dtype="e4m3")
MAIN_LOOP: Final = ("cp_async.cuh", "mma.cuh", "ring.cuh", "tile_scales.cuh")


def decode_set(name: str, group: int = 4, page: int = 16, split: Any = "balanced", **fields: Any) -> KernelSet:
    """A set with decode alone, over 8 kv heads of 128 dims unless told otherwise."""
    kv = Paged(page_size=page, **(_CACHE | fields))
    return KernelSet(name=f"machine_{name}", q_heads=group * kv.kv_heads, cache=kv, ops=(ops.Decode(split=split),))


# Quantized caches by how their scales reach products, and the most warp instructions per token and kv head.
SCALED: Final = {
    "words": (Quant(dtype="e4m3", scale_dtype="f32"), 16),
    "halves": (Quant(dtype="i8", scale_dtype="f16"), 23),
    "pairs": (Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=64)), 24),
    "blocks": (Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16)), 28),
}
# The most warp instructions per token and kv head.
BOUNDS: Final = {
    "group1": (decode_set("group1", 1), 12),
    "page64": (decode_set("page64", 4, 64), 12),
    "group16": (decode_set("group16", 16), 16),
    "fp8": (decode_set("fp8", 8, quant=FP8), 16),
}


def shape_of(kernels: KernelSet) -> Shape:
    """The block of the set's decode on its last architecture."""
    context = kernels.ops[0].plan(kernels)[0].on(kernels.arch[-1]).context
    assert isinstance(context, DecodeMma)
    return context.shape


@needs_tool
@pytest.mark.parametrize("name", BOUNDS)
def test_machine_code(name: str) -> None:
    """A usual trip round the main loop, address arithmetic, look-ups and waiting included, takes few instructions a token;
    no spills; two blocks an SM, and 64 KB on their way there."""
    kernels, most = BOUNDS[name]
    found = examine(kernels, "sm_90a", default_cache())
    assert found.a_token <= most
    # m16n8k16, 128 dims of K and of V: an instruction a token, and as many again for every 8 columns more.
    assert found.classes["products"] == (2 if name == "group16" else 1)
    assert found.spills == 0 and found.blocks >= 2 and found.kb_in_flight >= 64


@needs_tool
@pytest.mark.parametrize("name", SCALED)
def test_scales_come_by_copies(name: str) -> None:
    """A usual trip loads no scale into registers: what it loads are page ids, as many as without scales."""
    quant, most = SCALED[name]

    def trip(kind: str, quant: Quant) -> list[str]:
        images = compiled(decode_set(kind, 8, 64, quant=quant), "sm_90a", default_cache())[0]
        return [x.opcode for x in main_loop(sass(images[0].data, cache=default_cache())).usual]

    scaled, plain = trip(f"scales_{name}", quant), trip("fp8_pages", FP8)
    assert scaled.count("LDG.E") == plain.count("LDG.E") == 1
    assert len(scaled) <= most * 32  # tokens of a tile
    assert sum("LDGSTS" in x for x in scaled) > sum("LDGSTS" in x for x in plain) * (
        1 if quant.codes.bits == 8 else 0.5
    )


@needs_tool
@pytest.mark.parametrize("name", BOUNDS)
def test_warps_by_issue_slots(name: str) -> None:
    """Four warps a block where the tokens that come at full bandwidth take more than FEW_SLOTS of a sub-core's issue slots, which
    are estimated within a quarter of what machine code takes."""
    kernels, _ = BOUNDS[name]
    shape = shape_of(kernels)
    estimated = decode_mma.issue_slots(kernels.kv, shape.n_tiles)
    assert (shape.threads == 128) == (estimated > decode_mma.FEW_SLOTS)
    nbytes = 256 if name == "fp8" else 512  # of a token and head
    counted = examine(kernels, "sm_90a", default_cache()).a_token * decode_mma.REACHABLE / nbytes
    assert estimated == pytest.approx(counted, rel=0.25)


@needs_tool
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_accesses(arch: str) -> None:
    """K and V come by asynchronous copies of 16 bytes, and reach products by ldmatrix, four matrices a time."""
    kernels = decode_set("group1", 1)
    text = sass(compiled(kernels, arch, default_cache())[0][0].data, cache=default_cache())
    found = histogram("\n".join(f"/*0000*/ {x.text} ;" for x in main_loop(text).usual))
    shape = shape_of(kernels)
    copies = shape.tokens * 2 * 16 // 32 // shape.team_warps  # of 16 bytes, 32 lanes each
    assert count(found, "LDGSTS.128") == count(found, "LDGSTS") == copies
    assert count(found, "LDSM.4") == shape.tokens * 2 * 256 // 512
    assert not any(count(histogram(text), base) for base in ("LDL", "STL"))


# ---------------------------------------------------------------- traffic
# Tokens of a head side by side, and so are their scales.
_BY_HEAD: Final = Layout(k="page layer head token dim", v="page layer head token dim")
TRAFFIC: Final = {
    "page16": decode_set("page16", 4, 16, "none"),
    "page64": decode_set("page64", 4, 64),
    "fp8": decode_set("fp8", 8, quant=FP8),
    "fp8_scaled": decode_set(
        "fp8_scaled", 8, 16, "none", kv_heads=2, layout=_BY_HEAD, quant=Quant(dtype="e4m3", scale_dtype="f32")
    ),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic(name: str) -> None:
    """One request of 1024 tokens: K, V and their scales once, the workspace and the output apart from them, no bank conflicts
    in the main loop, and as much on its way as the plan says."""
    kernels = TRAFFIC[name].model_copy(update={"arch": ("sm_90a",)})
    scene = Scene(kernels, package(kernels), Workload.uniform(1, 1024, 1))
    found = measure(scene, kernels.ops[0], "sm_90a")[-1]
    for t in found.traffic:
        if t.group in ("kv", "scales"):
            assert t.ratio is not None and 1 <= t.ratio <= 1.02, (t.name, t.ratio)
    (out,) = (t for t in found.traffic if t.name == "out")
    assert out.group == "output" and out.ratio == 1
    pool = found.total("kv")[0]
    planned = isinstance(kernels.ops[0], ops.Decode) and kernels.ops[0].split != "none"
    assert bool(found.total("workspace")[0]) == planned and found.total("workspace")[0] < pool / 10
    assert found.total("tables", "input", "output")[0] < pool / 20
    _no_conflicts(found, Path(str(package(kernels).__file__)).parent / "decode.cu")
    shape = shape_of(kernels)
    values = pool * SECTOR // (1024 * kernels.cache.kv_heads)  # bytes of a token and head
    block = (shape.stages.most - 1) * shape.tile * values
    assert block <= found.counters.peak_in_flight <= block + shape.tile * values


# How often a sector of scales is asked for where a block has two of 8 kv heads: f32 and f16 of all heads share one, or half of
# one; those of groups of dims fill two.
ASKED: Final = {"words": 4, "halves": 4, "pairs": 2, "blocks": 2}


@pytest.mark.parametrize("name", ASKED)
def test_a_block_asks_for_the_scales_of_its_heads_together(name: str) -> None:
    """Half as often as blocks of a head each."""
    kernels = decode_set(f"asked_{name}", 8, 64, "none", quant=SCALED[name][0]).model_copy(update={"arch": ("sm_90a",)})
    shape = shape_of(kernels)
    assert (shape.heads, shape.teams, shape.threads) == (2, 2, 128)
    scene = Scene(kernels, package(kernels), Workload.uniform(1, 256, 1))
    found = measure(scene, kernels.ops[0], "sm_90a")[-1]
    ratios = {t.name: t.ratio for t in found.traffic if t.name in ("pool", "scales")}
    assert ratios == {"pool": 1, "scales": ASKED[name]}


def _no_conflicts(found: Measured, text: Path) -> None:
    """Copies, matrices and scales take a wavefront a phase, and so does whatever the main loop's lines touch themselves."""
    lines = text.read_text(encoding="utf-8").splitlines()
    first, last = (1 + next(i for i, x in enumerate(lines) if f"cp_async_wait<{n}>" in x) for n in ("kStages - 2", "0"))
    seen = set()
    for line in found.counters.lines:
        file, _, number = line.source.rpartition("/")[2].partition(":")
        if line.shared.requests and (file in MAIN_LOOP or (file == "decode.cu" and first <= int(number) < last)):
            seen.add(file)
            assert line.shared.worst_ways == 1, (line.source, line.shared)
    assert {"cp_async.cuh", "mma.cuh"} <= seen


# ---------------------------------------------------------------- counting itself
LOOP = """
.L_x_0:
        /*0010*/                   ISETP.GT.U32.AND P0, PT, R1, R2, PT ;
        /*0020*/               @P0 BRA P1, `(.L_x_2) ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R91], desc[UR6][R38.64], !P0 ;
        /*0040*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0050*/                   LDGSTS.E.BYPASS.128 [R91], desc[UR6][R38.64] ;
.L_x_3:
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0070*/              @!P0 BRA `(.L_x_4) ;
        /*0080*/                   SHFL.BFLY PT, R74, R87, 0x4, 0x1f ;
        /*0090*/                   FMUL R1, R1, R74 ;
        /*00a0*/                   FMUL R2, R2, R74 ;
.L_x_4:
        /*00b0*/               @P3 BRA `(.L_x_0) ;
        /*00c0*/                   EXIT ;
.L_x_9:
        /*00d0*/                   BRA `(.L_x_9) ;
"""


def test_the_usual_trip() -> None:
    """Copies that may write zeros and what a rising maximum costs are left out, whichever side of a branch they are on."""
    assert [len(x.members) for x in loops(blocks(LOOP))] == [6, 1]
    loop = main_loop(LOOP)
    assert [x.text.split()[0] for x in loop.usual] == [
        "ISETP.GT.U32.AND",
        "@P0",
        "LDGSTS.E.BYPASS.128",
        "HMMA.16816.F32.BF16",
        "@!P0",
        "@P3",
    ]
    assert not loop.holds_loops and loop.classes()["products"] == 1
    # The way past all copies is no usual one, however rare the copies' marks.
    past = LOOP.replace("@P0 BRA P1, `(.L_x_2)", "@P0 BRA P1, `(.L_x_3)").replace(".L_x_2:\n", "")
    assert "LDGSTS.E.BYPASS.128" in [x.opcode for x in main_loop(past).usual]
    # Where every copy may write zeros, and every trip reduces, both are counted.
    always = LOOP.replace("R38.64] ;", "R38.64], !P0 ;").replace("              @!P0 BRA `(.L_x_4) ;", " NOP ;")
    assert len(main_loop(always).usual) == 9 + 1


@pytest.mark.parametrize("score", [None, Score(softcap=30.0)])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_what_show_says_is_what_is_built(head_dim: int, score: Score | None) -> None:
    """Where scores are changed, sums of 512 dims leave no registers: `walk` and the plan take the same kernel."""
    cache = Paged(dtype="bf16", kv_heads=1, head_dim=head_dim, page_size=16)
    op = ops.Decode(score=score)
    kernels = KernelSet(name="shown", q_heads=4, cache=cache, ops=(op,))
    simt = op.plan(kernels)[0].template == "ops/decode_simt.cu.j2"
    assert {"decode_simt"} == {c.name for c in op.choices(kernels).values()} if simt else True
    assert simt == (head_dim == 512 and score is not None)

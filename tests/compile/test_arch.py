"""Which target runs on which GPU."""

from __future__ import annotations

import pytest

from kvgen.compile import ARCHS, select_arch
from kvgen.errors import CompileError, DeviceError


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100f"),
        ((10, 3), "sm_100f"),
        ((12, 0), "sm_120f"),
        ((12, 1), "sm_120f"),
    ],
)
def test_best_of_all(capability: tuple[int, int], arch: str) -> None:
    assert select_arch(capability, ARCHS) == arch
    assert select_arch(capability, ARCHS[::-1]) == arch, "whatever their order"


def test_sm_80_code_runs_on_ada() -> None:
    assert select_arch((8, 9), ["sm_90a", "sm_80"]) == "sm_80"


@pytest.mark.parametrize(
    ("capability", "available", "wanted"),
    [
        ((8, 0), ["sm_89", "sm_90a"], "'sm_80'"),
        ((8, 9), ["sm_90a"], "'sm_89' or 'sm_80'"),
        ((9, 0), ["sm_80", "sm_89"], "'sm_90a'"),
        ((10, 3), ["sm_90a", "sm_120f"], "'sm_100f'"),
        ((12, 0), [], "'sm_120f'"),
    ],
)
def test_none_fits(capability: tuple[int, int], available: list[str], wanted: str) -> None:
    with pytest.raises(DeviceError) as caught:
        select_arch(capability, available)
    assert f"compute capability {capability[0]}.{capability[1]}" in str(caught.value)
    assert f"add {wanted} to `arch` in the spec" in str(caught.value)
    assert (", ".join(available) or "nothing") in str(caught.value)


@pytest.mark.parametrize("capability", [(7, 5), (9, 9), (11, 0), (13, 0)])
def test_gpus_kvgen_has_no_target_for(capability: tuple[int, int]) -> None:
    with pytest.raises(DeviceError, match=r"no target of kvgen runs on this GPU; it must be 8\.x"):
        select_arch(capability, ARCHS)


def test_unknown_target() -> None:
    with pytest.raises(CompileError, match="arch: got 'sm_75'"):
        select_arch((8, 0), ["sm_75"])

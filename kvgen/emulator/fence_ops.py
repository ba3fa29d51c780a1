"""Fences of threads, of proxies, and of mbarrier.init."""

from __future__ import annotations

from kvgen.emulator.context import Context, Handler, Instruction
from kvgen.emulator.memory_ops import SCOPES

_SCOPES = {"cta": 1, "cluster": 2}  # wider ones: 0


def fence(cx: Context, ins: Instruction) -> str:
    """Fences of threads (fence, membar), of proxies (fence.proxy), and of mbarrier.init."""
    m = ins.modifiers
    if m.flag("mbarrier_init"):
        m.choice(("release",))
        m.choice(("cluster",))
        ins.count(0)
        return f"emu_proxy_fence(PROXY_INIT, {ins.site()});"
    if m.flag("proxy"):
        return _proxy_fence(cx, ins)
    ins.count(0)
    order = None
    if ins.opcode == "membar":
        scope = m.choice(("cta", "gl", "sys"))
    else:
        order = m.optional(("sc", "acq_rel", "acquire", "release"))
        restriction = {"acquire": "sync_restrict::shared::cluster", "release": "sync_restrict::shared::cta"}
        restricted = order in restriction and m.flag(restriction[order])
        scope = m.choice(("cluster",) if restricted else SCOPES)
    return _thread_fence(ins, scope, order)


def _thread_fence(ins: Instruction, scope: str, order: str | None) -> str:
    what = {"acquire": "FENCE_ACQUIRE", "release": "FENCE_RELEASE"}.get(order or "", "FENCE_ACQUIRE | FENCE_RELEASE")
    return f"emu_fence({_SCOPES.get(scope, 0)}, {what}, {ins.site()});"


def _proxy_fence(cx: Context, ins: Instruction) -> str:
    m = ins.modifiers
    kind = m.choice(
        ("alias",) if ins.opcode == "membar" else ("alias", "async", "async::generic", "tensormap::generic")
    )
    if kind == "alias":  # one address a byte here: there is nothing to order
        ins.count(0)
        return ""
    if kind == "tensormap::generic":  # a tensor map is read when it is used, so only the order of threads is left
        order = m.choice(("acquire", "release"))
        scope = m.choice(SCOPES)
        ins.count(2 if order == "acquire" else 0)
        if order == "acquire" and cx.integer(ins, ins.operands[1]) != 128:
            raise ins.fail("a tensor map has 128 bytes")
        return _thread_fence(ins, scope, order)
    if kind == "async::generic":
        order = m.choice(("acquire", "release"))
        m.choice((f"sync_restrict::shared::{'cluster' if order == 'acquire' else 'cta'}",))
        m.choice(("cluster",))
        space: str | None = "shared::cta"
    else:
        space = m.optional(("global", "shared::cta", "shared::cluster"))
    ins.count(0)
    covers = {None: "PROXY_SHARED | PROXY_GLOBAL | PROXY_INIT", "global": "PROXY_GLOBAL"}
    return f"emu_proxy_fence({covers.get(space, 'PROXY_SHARED | PROXY_INIT')}, {ins.site()});"


HANDLERS: dict[str, Handler] = {
    "fence": fence,
    "membar": fence,
}

"""The structures of runtime.h and device.h that Python fills in or reads, field by field in their order."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_uint32, c_uint64, c_void_p


class BufferInfo(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p), ("address", c_uint64), ("bytes", c_uint64), ("writable", c_uint32), ("settled", c_uint32),
    )  # fmt: skip


class SiteCount(ctypes.Structure):
    _fields_ = (
        ("where", c_char_p), ("site", c_uint32), ("buffer", c_uint32), ("kind", c_uint32), ("padding", c_uint32),
        ("requests", c_uint64), ("bytes", c_uint64), ("units", c_uint64), ("ideal", c_uint64), ("worst", c_uint64),
    )  # fmt: skip


class LaunchInfo(ctypes.Structure):
    _fields_ = (
        ("program", c_void_p), ("kernel", c_uint32), ("grid", c_uint32 * 3), ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3), ("dynamic_shared", c_uint32), ("schedule", c_uint32), ("buffer_count", c_uint32),
        ("workers", c_uint32), ("programmatic", c_uint32), ("level", c_uint32), ("probe", c_uint32),
        ("registers", c_uint32), ("seed", c_uint64),
        ("params", c_void_p), ("buffers", POINTER(BufferInfo)), ("executed", POINTER(c_uint64)),
        ("sites", POINTER(SiteCount)), ("site_count", c_uint64), ("peak_in_flight", c_uint64),
        ("warp_operations", c_uint64), ("barriers", c_uint64), ("switches", c_uint64),
    )  # fmt: skip


class KeptPage(ctypes.Structure):
    _fields_ = (("address", c_uint64), ("bytes", c_void_p))


class FaultRecord(ctypes.Structure):
    _fields_ = (
        ("set", c_uint32), ("level", c_uint32), ("has_thread", c_uint32), ("block", c_uint32 * 3), ("thread", c_uint32 * 3),
        ("kind", c_char * 48), ("where", c_char * 2048), ("op", c_char * 160), ("buffer", c_char * 256),
        ("detail", c_char * 6144),
    )  # fmt: skip

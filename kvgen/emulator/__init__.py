"""Runs the PTX that NVRTC produced on the CPU: PTX to C, compiled by TCC or the host compiler, one fiber per CUDA thread."""

from kvgen.emulator.counters import BufferCounters, Counters, LineCounters, SharedCounters
from kvgen.emulator.errors import EmulatorError, HostCompilerError, KernelFault, TranslateError
from kvgen.emulator.host import host_compiler
from kvgen.emulator.launch import Buffer, Kernel, Library, Mode, Schedule, build
from kvgen.emulator.tensor_map import TensorMap

__all__ = [
    "Buffer",
    "BufferCounters",
    "Counters",
    "EmulatorError",
    "HostCompilerError",
    "Kernel",
    "KernelFault",
    "Library",
    "LineCounters",
    "Mode",
    "Schedule",
    "SharedCounters",
    "TensorMap",
    "TranslateError",
    "build",
    "host_compiler",
]

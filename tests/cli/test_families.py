"""A set whose mla_decode has a file for each code family, through the verbs: build, check, compile, diff, show, export."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvgen.compile import read_folder
from tests.export.toolchain import ROOT

from .conftest import Folder

SPEC = '''"""Latent rows for two code families."""

from kvgen import KernelSet, Latent, ops

kernels = KernelSet(
    q_heads=64,
    cache=Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64),
    ops=[ops.MlaDecode(scale=0.1, split="balanced")],
    arch=["sm_80", "sm_90a"],
)
'''
BOTH = ["mla_decode", "mla_decode_plan", "mla_decode_sm_90a"]

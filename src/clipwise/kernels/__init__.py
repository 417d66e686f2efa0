"""Kernels of our own, in Triton. Where Triton is absent, or a device has none, the plain ways of factors/ways.py are all there is.

Each kernel is an operator of torch that graphs may hold, has a plain twin (the way `tiles`), and is used for a shape only after it agreed
with that twin on the tensors at hand and was faster.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

DEVICES = set() if os.environ.get("CLIPWISE_KERNELS") == "0" else {"cuda"}  # CLIPWISE_KERNELS=0 leaves them out
OUTER_TILES = (32, 64, 128)  # rows and columns of a matrix that a program forms
CONVOLUTION_TILES = (16, 32, 64)  # channels, each way
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def are_available(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type in DEVICES and dtype in _DTYPES and _has_triton()

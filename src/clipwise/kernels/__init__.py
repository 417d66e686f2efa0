"""Kernels of our own, in Triton. Where Triton is absent, or a device has none, the plain ways of factors/ways.py are all there is.

Each kernel is an operator of torch that graphs may hold, and has a plain twin. Those for norms of products and of convolutions are used for a
shape only after they agreed with that twin on the tensors at hand and were faster; the others are tried once on every device.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache

import torch

from ..tracing import outside_graphs

DEVICES = set() if os.environ.get("CLIPWISE_KERNELS") == "0" else {"cuda"}  # CLIPWISE_KERNELS=0 leaves them out
OUTER_TILES = (32, 64, 128)  # rows and columns of a matrix that a program forms
GRAM_TILES = {torch.bfloat16: (64, 128), torch.float32: (32, 64)}  # terms, each way
GRAM_COLUMNS = 64  # that are multiplied and added at once
CONVOLUTION_TILES = (32, 64)  # channels, each way
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def are_available(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type in DEVICES and dtype in _DTYPES and _has_triton() and _do_run(device)


_found: dict[torch.device, bool] = {}


def _do_run(device: torch.device) -> bool:
    """Whether kernels run there and find what plain operations find: tried once. (Triton needs a C compiler on the machine.)"""
    if device not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        from .trial import agrees_with_torch

        with outside_graphs():
            why = agrees_with_torch(device)
        _found[device] = why is None
        if why is not None:
            warnings.warn(f"kernels of our own are left out on {device}: {why}", stacklevel=2)
    return _found[device]

"""Kernels as operators of torch, which graphs may hold, and the functions behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PLAIN: dict[Any, Callable[..., Any]] = {}  # by the operator


def operator(name: str, run: Callable[..., Any]) -> Any:
    """`run` as torch.ops.clipwise.<name>. It writes to none of its arguments."""
    found = torch.library.custom_op(f"clipwise::{name}", run, mutates_args=())
    PLAIN[getattr(torch.ops.clipwise, name).default] = run
    return found

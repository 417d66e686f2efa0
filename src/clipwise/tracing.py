"""Whether the code at hand is being traced into a graph.

A graph has no branches: what is computed may depend on shapes, never on values, nothing is fetched to the host, and no tensor
made on the way may be kept for later. Where eager code saves work by looking at values, it asks here first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

DEVICES = {"cuda"}  # where work can be recorded as a graph and replayed


class NotTraceable(Exception):
    """Why something cannot become a graph. Eager code takes its place."""


_tracing: ContextVar[bool] = ContextVar("clipwise_tracing", default=False)


def is_tracing() -> bool:
    return _tracing.get()


def can_be_recorded(device: torch.device) -> bool:
    return device.type in DEVICES


def outside_graphs() -> AbstractContextManager[Any]:
    """What is computed inside this block is none of the graph's business: its results are constants there."""
    if not is_tracing():
        return contextlib.nullcontext()
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)

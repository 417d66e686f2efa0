"""Whether the code at hand is being traced into a graph.

A graph has no branches: what is computed may depend on shapes, never on values, nothing is fetched to the host, and no tensor
made on the way may be kept for later. Where eager code saves work by looking at values, it asks here first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec

import torch
from torch import Tensor

from .streams import current_address
from .switches import Switch

_P = ParamSpec("_P")

_KEPT_AT_MOST = 64  # results of a function …
_KEPT_FOR_GRAPHS = 4096  # … that graphs hold: a graph that is traced again with another constant counts as another graph
DEVICES = set() if os.environ.get("CLIPWISE_GRAPHS") == "0" else {"cuda"}  # where work can be recorded as a graph and replayed


class NotTraceable(Exception):
    """Why something cannot become a graph. Eager code takes its place."""


class NeverTraceable(NotTraceable):
    """Why it will not become one in later steps either."""


_NOT, _IN_ONE, _IN_STEPS = range(3)
_tracing: ContextVar[int] = ContextVar("clipwise_tracing", default=_NOT)


def is_tracing() -> bool:
    return _tracing.get() != _NOT


def is_tracing_in_one() -> bool:
    """Whether what is traced will be compiled or replayed as a whole: there a kernel costs nothing to start. Else each is started by Python."""
    return _tracing.get() == _IN_ONE


def can_be_recorded(device: torch.device) -> bool:
    return device.type in DEVICES


def made_once(make: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """A function whose last results are kept, for each stream of the devices among its arguments: constants to which nobody writes. What is made for a
    graph belongs to that graph."""
    return _made_once(make, for_graphs=False)


def made_once_for_graphs_too(make: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """As `made_once`, and a graph holds the constant, which must be declared one, instead of computing it."""
    return _made_once(make, for_graphs=True)


def _made_once(make: Callable[_P, Tensor], *, for_graphs: bool) -> Callable[_P, Tensor]:
    kept: dict[Any, Tensor] = {}

    def found(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if (is_tracing() and not for_graphs) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return make(*args, **kwargs)
        streams = () if for_graphs else tuple([current_address(value) for value in args if type(value) is torch.device])
        key = args, tuple(kwargs.items()), streams
        tensor = kept.get(key)
        if tensor is None:
            with outside_graphs():
                tensor = make(*args, **kwargs)
            if type(tensor) is Tensor and not tensor.is_inference():  # no stand-in of somebody's mode
                if for_graphs and tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()  # a graph is replayed on any stream
                if len(kept) >= (_KEPT_FOR_GRAPHS if for_graphs else _KEPT_AT_MOST):
                    kept.clear()
                kept[key] = tensor
        return tensor

    return found


def outside_graphs() -> AbstractContextManager[Any]:
    """What is computed inside this block is none of the graph's business: its results are constants there."""
    if not is_tracing():
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    outside = contextlib.ExitStack()
    outside.enter_context(disable_proxy_modes_tracing())
    outside.enter_context(unset_fake_temporarily())
    return outside


@contextlib.contextmanager
def tracing(*, in_steps: bool = False) -> Iterator[None]:
    token = _tracing.set(_IN_STEPS if in_steps else _IN_ONE)
    try:
        yield
    finally:
        _tracing.reset(token)


_telling = Switch(torch.compiler, "_is_compiling_flag")
_unchecked = Switch(torch.distributions.Distribution, "_validate_args", False)


@contextlib.contextmanager
def told_to_be_compiled() -> Iterator[None]:
    """Inside this block torch.compiler.is_compiling() says yes: models then keep from deciding by what is in their tensors. Nor do distributions look
    whether their arguments can be: what comes of those that cannot is clipped as anything else is, or not finite, and then counts for nothing.

    The steps that verify a model run so too where it is compiled later, or it would take another way than the one that is traced.
    """
    with _telling, _unchecked:
        yield


def is_inside_torch_compile() -> bool:
    """Whether this code runs in a region of torch.compile, of which a tape sees nothing."""
    return torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not _telling.inside)

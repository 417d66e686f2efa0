"""A torch function mode at the bottom of the stack, where other modes may be entered and left above it in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext


@contextlib.contextmanager
def lowest(mode: TorchFunctionMode) -> Iterator[None]:
    """`mode` is on inside this block, under every other mode. (A default device insists on the very bottom; it may stay there.)"""
    _rearrange(lambda stack: stack.insert(1 if stack and isinstance(stack[0], DeviceContext) else 0, mode))
    try:
        yield
    finally:
        _rearrange(lambda stack: stack.remove(mode) if mode in stack else None)


def stacked() -> list[Any]:
    """The modes that are on, the lowest first."""
    return [_get_function_stack_at(place) for place in range(_len_torch_function_stack())]


def _rearrange(change: Callable[[list[Any]], None]) -> None:
    stack = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
    change(stack)
    for mode in stack:
        _push_mode(mode)

"""Starting a kernel again. Triton looks at every call how each argument is special (aligned, one, a multiple of 16), to find the code that was
compiled for such arguments; for a call like one before, that code is known, and starting it takes a fraction of the time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: all that Triton asks of an address, on a GPU of NVIDIA's
_KEPT_AT_MOST = 4096

_known: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}  # how to start it, and its constants


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), on the device of the first argument."""
    device = arguments[0].device
    called: list[Any] = [id(kernel), grid, device.index, *constants.values()]  # kernels live as long as the program
    for argument in arguments:
        if isinstance(argument, Tensor):
            called += argument.dtype, argument.data_ptr() % _ALIGNMENT
        else:
            called.append(argument)
    key = tuple(called)
    found = _known.get(key)
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            _start(found, key, kernel, grid, arguments, constants)
    else:
        _start(found, key, kernel, grid, arguments, constants)


def _start(
    found: tuple[Callable[..., None], tuple[Any, ...]] | None, key: Hashable, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:  # fmt: skip
    if found is not None:
        run, fixed = found
        run(*arguments, *fixed)
        return
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None and torch.version.hip is None:  # None: Triton's interpreter
        if len(_known) >= _KEPT_AT_MOST:
            _known.clear()
        names = kernel.arg_names[len(arguments) :]
        _known[key] = compiled[(*grid, 1, 1)[:3]], tuple(constants[name] for name in names)

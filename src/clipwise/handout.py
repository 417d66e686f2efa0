"""An ordinary scalar whose backward pass hands out gradients that are already known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .taps import applied, has_saving_hooks

Listener = Callable[[Tensor, list[Tensor]], None]  # is told the gradient of the scalar, and what is about to be added to p.grad


def handed_out(value: Tensor, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor], listener: Listener | None = None) -> Tensor:
    """`value` as a scalar that depends on the parameters: `.backward()` adds sums[name] to the gradient of parameters[name]."""
    names = [name for name in sums if name in parameters]
    with torch._C.DisableTorchFunction():  # none of a tape's business
        totals = [sums[name] if sums[name].dtype == parameters[name].dtype else sums[name].to(parameters[name].dtype) for name in names]
        if has_saving_hooks():  # which may keep another name of a sum that is lent
            totals = [total.clone() for total in totals]
    return applied(_HandOut, value, listener, len(names), *totals, *(parameters[name] for name in names))


def _scaled(sums: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """grad·sum for each; a few kernels for all that share a device and a precision."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, total in enumerate(sums):
        kinds.setdefault((total.device, total.dtype), []).append(place)
    scaled = list(sums)
    for (device, dtype), places in kinds.items():
        products = torch._foreach_mul([sums[place] for place in places], grad.to(device, dtype))
        for place, product in zip(places, products):
            scaled[place] = product
    return scaled


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, listener: Listener | None, count: int, *sums_and_parameters: Tensor) -> Tensor:
        ctx.listener = listener
        ctx.save_for_backward(*sums_and_parameters[:count])
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        sums = ctx.saved_tensors
        with torch._C.DisableTorchFunction():  # a tape that is still on would hold what autograd wants to take over
            scaled = _scaled(sums, grad)
        if ctx.listener is not None:
            ctx.listener(grad, scaled)
        return None, None, None, *[None] * len(sums), *scaled

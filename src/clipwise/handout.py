"""An ordinary scalar whose backward pass hands out gradients that are already known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Listener = Callable[[Tensor, list[Tensor]], None]  # is told the gradient of the scalar, and what is about to be added to p.grad


def handed_out(value: Tensor, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor], listener: Listener | None = None) -> Tensor:
    """`value` as a scalar that depends on the parameters: `.backward()` adds sums[name] to the gradient of parameters[name]."""
    names = [name for name in sums if name in parameters]
    with torch._C.DisableTorchFunction():  # none of a tape's business
        totals = [sums[name].to(parameters[name].dtype) for name in names]
    return _HandOut.apply(value, listener, len(names), *totals, *(parameters[name] for name in names))


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, listener: Listener | None, count: int, *sums_and_parameters: Tensor) -> Tensor:
        ctx.listener = listener
        ctx.save_for_backward(*sums_and_parameters[:count])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        sums = ctx.saved_tensors
        with torch._C.DisableTorchFunction():  # a tape that is still on would hold what autograd wants to take over
            scaled = [grad.to(total.device, total.dtype) * total for total in sums]
        if ctx.listener is not None:
            ctx.listener(grad, scaled)
        return None, None, None, *[None] * len(sums), *scaled

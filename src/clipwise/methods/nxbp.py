"""The naive way, nxBP: back-propagate one example at a time, clip its gradient, add it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..clipping import Clipping
from ..collect import collect
from ..numerics import in_working_precision, squared_norms, to_accumulate
from ..tape import Tape
from .base import Clipped, from_factors, mean_weights


class _RunningSum:
    """Clips one gradient after the other and adds it up; one gradient is held at a time."""

    def __init__(self, clipping: Clipping, names: Sequence[str]):
        self.sums: dict[str, Tensor] = {}
        self.weights: list[Tensor] = []
        self.finite: list[Tensor] = []
        self._clipping = clipping
        self._names = names

    def add(self, found: Sequence[Tensor | None]) -> None:
        """One example's gradients, in the order of the names."""
        grads = {name: to_accumulate(grad) for name, grad in zip(self._names, found) if grad is not None}
        scales, finite = self._clipping.weights({name: squared_norms(grad.unsqueeze(0)) for name, grad in grads.items()}, self._names)
        self.weights.append(mean_weights(scales))
        self.finite.append(finite)
        for name, grad in grads.items():
            scaled = torch.where(finite[0], grad * in_working_precision(scales[name], grad.dtype)[0], 0.0)
            self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled


def nxbp(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """B backward passes over the graph that the batch shares.

    As in multiloss, an example that is not finite spoils the others there, so such a batch is summed by factors.
    """
    collected = collect(tape, losses, keep_graph=True)
    parameters = tape.marks.trainable()
    running = _RunningSum(clipping, list(parameters))
    for row in torch.eye(len(losses), dtype=losses.dtype, device=losses.device):
        found = tape.backward(losses, row, None, inputs=list(parameters.values()), retain_graph=True)
        with tape.pause():
            running.add(found)
    if not running.finite or not bool(torch.cat(running.finite).all()):
        return from_factors(tape, losses, collected, clipping)
    return Clipped(running.sums, torch.cat(running.weights), torch.cat(running.finite))


def nxbp_alone(model: nn.Module, losses_of: Callable[..., Tensor], batch: Sequence[Tensor], clipping: Clipping) -> Clipped:
    """The paper's baseline as it is timed: forward and backward on one example at a time, no tape, no shared graph.

    `losses_of(*rows)` maps a batch of one to its loss. batch: tensors with the examples on axis 0.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    running = _RunningSum(clipping, list(parameters))
    for i in range(len(batch[0])):
        loss = losses_of(*(rows[i : i + 1] for rows in batch)).sum()
        running.add(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))
    return Clipped(running.sums, torch.cat(running.weights), torch.cat(running.finite))

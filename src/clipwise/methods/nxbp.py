"""The naive way, nxBP: back-propagate one example at a time, clip its gradient, add it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..clipping import Clipping
from ..collect import collect
from ..numerics import in_working_precision, to_accumulate, unit_roundoff
from ..tape import Tape
from .base import Clipped, from_factors, is_coarse, mean_weights, trainable


class _RunningSum:
    """Clips one gradient after the other and adds it up; one gradient is held at a time.

    Norms, products and sums of all parameters run in a few kernels each, so that the baseline is as fast as it can be.
    """

    def __init__(self, clipping: Clipping, names: Sequence[str]):
        self.sums: dict[str, Tensor] = {}
        self.weights: list[Tensor] = []
        self.finite: list[Tensor] = []
        self._clipping = clipping
        self._names = names
        self._is_one_group = len(clipping.groups(names)) == 1

    def add(self, found: Sequence[Tensor | None], loss: Tensor) -> None:
        """One example's gradients, in the order of the names, and its loss. loss: (1,)"""
        names = [name for name, grad in zip(self._names, found) if grad is not None]
        grads = [to_accumulate(grad) for grad in found if grad is not None]
        squares = torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square()  # (P,)
        norms = {names[0]: squares.sum(0, keepdim=True)} if self._is_one_group else dict(zip(names, squares.split(1)))
        weights, finite = self._clipping.weights(norms, self._names, loss)
        self.weights.append(mean_weights(weights))
        self.finite.append(finite)
        if self._is_one_group:
            coarsest = max((grad.dtype for grad in grads), key=unit_roundoff)  # a weight of that precision is exact in the others too
            scaled = list(torch._foreach_mul(grads, in_working_precision(weights[names[0]], coarsest)[0]))
        else:
            scaled = [grad * in_working_precision(weights[name], grad.dtype)[0] for name, grad in zip(names, grads)]
        if list(self.sums) == names:
            torch._foreach_add_(list(self.sums.values()), scaled)
        else:
            self.sums |= {name: self.sums[name] + part if name in self.sums else part for name, part in zip(names, scaled)}

    def all_finite(self) -> bool:
        return bool(torch.cat(self.finite).all())

    def result(self) -> Clipped:
        return Clipped(self.sums, torch.cat(self.weights), torch.cat(self.finite))


def nxbp(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """B backward passes over the graph that the batch shares.

    As in multiloss, an example that is not finite spoils the others there, so such a batch is summed by factors; and so is every batch in bf16 and float16.
    """
    collected = collect(tape, losses, keep_graph=True)
    if len(losses) == 0 or is_coarse(tape, losses, collected):
        return from_factors(tape, losses, collected, clipping)
    parameters = tape.marks.trainable()
    running = _RunningSum(clipping, list(parameters))
    for number, row in enumerate(torch.eye(len(losses), dtype=losses.dtype, device=losses.device)):
        found = tape.backward(losses, row, None, inputs=list(parameters.values()), retain_graph=True)
        with tape.pause():
            running.add(found, losses[number : number + 1].detach())
    return running.result() if running.all_finite() else from_factors(tape, losses, collected, clipping)


def nxbp_alone(model: nn.Module, losses_of: Callable[..., Tensor], batch: Sequence[Tensor], clipping: Clipping) -> Clipped:
    """The paper's baseline as it is timed: forward and backward on one example at a time, no tape, no shared graph.

    `losses_of(*rows)` maps a batch of one to its loss. batch: tensors with the examples on axis 0. The gradients must be finite.
    """
    parameters = trainable(model)
    running = _RunningSum(clipping, list(parameters))
    for i in range(len(batch[0])):
        loss = losses_of(*(rows[i : i + 1] for rows in batch))  # (1,)
        running.add(torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True), loss.detach())
    if not running.all_finite():
        raise ValueError("nxbp_alone is for finite gradients; an example here has NaN or Inf")
    return running.result()

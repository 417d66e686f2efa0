"""The naive way, nxBP: back-propagate one example at a time, clip its gradient, add it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..clipping import Clipping
from ..collect import collect
from ..numerics import squared_norms, to_accumulate
from ..tape import Tape
from .base import Clipped, from_factors, mean_weights


def nxbp(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """B backward passes over the graph that the batch shares; one gradient is held at a time.

    As in multiloss, a batch with an example that is not finite is summed by factors.
    """
    collected = collect(tape, losses, keep_graph=True)
    parameters = tape.marks.trainable()
    names = list(parameters)
    sums: dict[str, Tensor] = {}
    weights: list[Tensor] = []
    for row in torch.eye(len(losses), dtype=losses.dtype, device=losses.device):
        found = tape.backward(losses, row, None, inputs=list(parameters.values()), retain_graph=True)
        with tape.pause():
            grads = {name: to_accumulate(grad) for name, grad in zip(names, found) if grad is not None}
            scales, finite = clipping.weights({name: squared_norms(grad.unsqueeze(0)) for name, grad in grads.items()}, names)
            if not bool(finite):
                return from_factors(tape, collected, clipping)
            weights.append(mean_weights(scales))
            for name, grad in grads.items():
                scaled = grad * scales[name].to(grad.dtype)
                sums[name] = sums[name] + scaled if name in sums else scaled
    if not weights:
        return from_factors(tape, collected, clipping)
    return Clipped(sums, torch.cat(weights), torch.ones(len(losses), dtype=torch.bool, device=losses.device))

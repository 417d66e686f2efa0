"""The paper's multiLoss: one call of autograd for a whole vector of losses, every gradient written out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..clipping import Clipping
from ..collect import collect
from ..factors import Dense
from ..gradients import ExampleGradients
from ..tape import Tape
from .base import Clipped, from_factors


def multiloss(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """autograd.grad of the vector of losses with the identity as its weights; clip, add.

    The batch shares one graph, in which an example that is not finite spoils the others' gradients (0·Inf is NaN): such a
    batch is summed by factors.
    """
    collected = collect(tape, losses, keep_graph=True)  # verifies what is new, and is there if a gradient is not finite
    if len(losses) == 0:
        return from_factors(tape, losses, collected, clipping)
    parameters = tape.marks.trainable()
    found = _each_gradient(tape, losses, list(parameters.values()))
    gradients = ExampleGradients(tape, len(losses), losses.device)
    with tape.pause():
        for parameter, grad in zip(parameters.values(), found):
            if grad is not None:
                gradients.add_factor(parameter, Dense(grad))
        gradients.finish()
    clipped = from_factors(tape, losses, gradients, clipping)
    return clipped if bool(clipped.finite.all()) else from_factors(tape, losses, collected, clipping)


def _each_gradient(tape: Tape, losses: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    """(B, *shape) for each parameter; one example after the other where some operation cannot be batched."""
    identity = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    try:
        with tape.looking_back():
            found = torch.autograd.grad(losses, parameters, identity, retain_graph=True, allow_unused=True, is_grads_batched=True)
        return list(found)
    except RuntimeError:
        each = [tape.backward(losses, row, None, inputs=parameters, retain_graph=True) for row in identity]
        return [None if column[0] is None else torch.stack(column) for column in zip(*each)]

"""The paper's multiLoss: one call of autograd for a whole vector of losses, every gradient written out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..clipping import Clipping
from ..collect import collect
from ..factors import Dense
from ..gradients import ExampleGradients
from ..machine import is_out_of_memory
from ..numerics import squared_norms
from ..tape import Tape
from .base import Clipped, from_factors, is_coarse, mean_weights, trainable


def multiloss(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """autograd.grad of the vector of losses with the identity as its weights; clip, add.

    The batch shares one graph, in which an example that is not finite spoils the others' gradients (0·Inf is NaN): such a
    batch is summed by factors; and so is every batch in bf16 and float16.
    """
    collected = collect(tape, losses, keep_graph=True)  # verifies what is new, and is there if a gradient is not finite
    if len(losses) == 0 or is_coarse(tape, losses, collected):
        return from_factors(tape, losses, collected, clipping)
    parameters = tape.marks.trainable()
    with tape.looking_back():
        found = _each_gradient(losses, list(parameters.values()))
    gradients = ExampleGradients(tape, len(losses), losses.device)
    with tape.pause():
        for parameter, grad in zip(parameters.values(), found):
            if grad is not None:
                gradients.add_factor(parameter, Dense(grad))
        gradients.finish()
    clipped = from_factors(tape, losses, gradients, clipping)
    return clipped if bool(clipped.finite.all()) else from_factors(tape, losses, collected, clipping)


def multiloss_alone(model: nn.Module, losses: Tensor, clipping: Clipping) -> Clipped:
    """The paper's multiLoss as it is timed: no tape, nothing verified. The gradients must be finite."""
    parameters = trainable(model)
    found = _each_gradient(losses, list(parameters.values()))
    factors = {name: Dense(grad) for name, grad in zip(parameters, found) if grad is not None}
    with torch.no_grad():
        squares = {name: squared_norms(factor.grad) for name, factor in factors.items()}
        weights, finite = clipping.weights(squares, list(parameters))
        if not bool(finite.all()):
            raise ValueError("multiloss_alone is for finite gradients; an example here has NaN or Inf")
        sums = {name: factor.weighted_sum(weights[name], clean=True) for name, factor in factors.items()}
    return Clipped(sums, mean_weights(weights), finite)


def _each_gradient(losses: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    """(B, *shape) for each parameter; one example after the other where some operation cannot be batched."""
    identity = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    try:
        return list(torch.autograd.grad(losses, parameters, identity, retain_graph=True, allow_unused=True, is_grads_batched=True))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        each = [torch.autograd.grad(losses, parameters, row, retain_graph=True, allow_unused=True) for row in identity]
        return [None if column[0] is None else torch.stack(column) for column in zip(*each)]

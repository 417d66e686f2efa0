"""Ordinary training, for comparison: the gradient of Σ ℓ_i, clipped by nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ..clipping import Clipping
from ..collect import check_losses
from ..tape import Tape
from .base import Clipped


def nonprivate(tape: Tape, losses: Tensor, clipping: Clipping | None = None) -> Clipped:
    """One backward pass. Protects nobody: `clipped_loss` does not offer it."""
    check_losses(tape, losses)
    parameters = tape.marks.trainable()
    ones = torch.ones_like(losses)
    found = tape.backward(losses, ones, None, inputs=list(parameters.values()), retain_graph=True)
    sums = {name: grad for name, grad in zip(parameters, found) if grad is not None}
    return Clipped(sums, ones, torch.ones_like(losses, dtype=torch.bool))

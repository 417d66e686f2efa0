"""What every method of clipping gives back, and what the slow ones share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..clipping import Clipping
from ..gradients import ExampleGradients
from ..tape import Tape


@dataclass(frozen=True)
class Clipped:
    """Σ clip(g_i) for every parameter the losses depend on, in float32 or float64, and the examples that were finite."""

    sums: dict[str, Tensor]
    weights: Tensor  # (B,), the mean over groups where there are several
    finite: Tensor  # (B,)

    def value(self, losses: Tensor) -> Tensor:
        """Σ ν_i·ℓ_i over the examples whose gradient is finite."""
        counted = torch.where(self.finite & losses.isfinite(), losses.detach(), 0.0)
        return (self.weights.to(losses.dtype) * counted).sum()


Method = Callable[[Tape, Tensor, Clipping], Clipped]


def mean_weights(weights: dict[str, Tensor]) -> Tensor:
    distinct = {id(weight): weight for weight in weights.values()}
    return torch.stack(list(distinct.values())).mean(0)


def from_factors(tape: Tape, losses: Tensor, gradients: ExampleGradients, clipping: Clipping) -> Clipped:
    """Norms, weights and weighted sums of factors that have been collected."""
    with tape.pause():
        norms = gradients.squared_norms()
        gradients.forget_terms()
        weights, finite = clipping.weights(norms, list(tape.marks.trainable()), losses)
        return Clipped(gradients.weighted_sums(weights), mean_weights(weights), finite)

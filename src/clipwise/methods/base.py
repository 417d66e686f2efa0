"""What every method of clipping gives back, and what the slow ones share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..clipping import Clipping
from ..gradients import ExampleGradients
from ..numerics import unit_roundoff
from ..tape import Tape


@dataclass(frozen=True)
class Clipped:
    """Σ clip(g_i) for every parameter the losses depend on, in float32 or float64, and the examples that were finite."""

    sums: dict[str, Tensor]
    weights: Tensor  # (B,), the mean over groups where there are several; may lie on the host
    finite: Tensor  # (B,), beside the weights
    total: Tensor | None = None  # Σ ν_i·ℓ_i, where it is known already
    is_lent: bool = False  # the sums lie where the next step may write over them, if only views of them are held

    def value(self, losses: Tensor) -> Tensor:
        """Σ ν_i·ℓ_i over the examples whose gradient is finite."""
        if self.total is not None:
            return self.total
        return value_of(self.weights.to(losses.device), self.finite.to(losses.device), losses.detach())


def value_of(weights: Tensor, finite: Tensor, losses: Tensor) -> Tensor:
    return (weights.to(losses.dtype) * torch.where(finite, losses, 0.0)).sum()


Method = Callable[[Tape, Tensor, Clipping], Clipped]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """For the ways that run without a tape."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def mean_weights(weights: dict[str, Tensor]) -> Tensor:
    distinct = list({id(weight): weight for weight in weights.values()}.values())
    return distinct[0] if len(distinct) == 1 else torch.stack(distinct).mean(0)


def is_coarse(tape: Tape, losses: Tensor, gradients: ExampleGradients) -> bool:
    """Whether gradients arrive in bf16 or float16, where two ways to the same sum may differ by a bound and more: then one way must serve whatever the
    examples are, and only that by factors takes examples that are not finite."""
    coarsest = max(gradients.precision, losses.dtype, *tape.hidden_dtypes, key=unit_roundoff)
    return unit_roundoff(coarsest) > unit_roundoff(torch.float32)


def from_factors(tape: Tape, losses: Tensor, gradients: ExampleGradients, clipping: Clipping) -> Clipped:
    """Norms, weights and weighted sums of factors that have been collected."""
    with tape.pause():
        norms = gradients.squares_on_host()
        gradients.forget_terms()
        weights, finite = clipping.weights(norms, list(tape.marks.trainable()), losses.detach().cpu())
        return Clipped(gradients.weighted_sums(weights, clean=bool(finite.all())), mean_weights(weights), finite)

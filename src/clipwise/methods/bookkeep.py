"""One pass: the factors of the norms give the clipped gradient too (the idea of Bu et al. 2023, over factors)."""

from __future__ import annotations

from torch import Tensor

from ..clipping import Clipping
from ..collect import collect
from ..tape import Tape
from .base import Clipped, from_factors


def bookkeep(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """Backward to the taps once; then Σ ν_i g_i from the same factors that gave ‖g_i‖."""
    return from_factors(tape, losses, collect(tape, losses), clipping)

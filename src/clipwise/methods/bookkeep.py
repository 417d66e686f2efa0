"""One pass: the factors of the norms give the clipped gradient too (the idea of Bu et al. 2023, over factors)."""

from __future__ import annotations

from torch import Tensor

from ..clipping import Clipping
from ..collect import check_losses, collect, route_to
from ..tape import Tape
from ..tracing import can_be_recorded
from .base import Clipped, from_factors


def bookkeep(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """Backward to the taps once; then Σ ν_i g_i from the same factors that gave ‖g_i‖. Of small models the second half is replayed."""
    check_losses(tape, losses)
    route, clipped = route_to(tape, losses), None
    if route.layouts is not None and not tape.experience.will_look_again:
        tape.forget_calls()  # only a verification asks for them, and they hold what came between the model and the losses
    if can_be_recorded(losses.device):
        from ..compiled.tails import clipped_by_tail  # which builds on this package

        clipped = clipped_by_tail(tape, losses, clipping, route)
    return from_factors(tape, losses, collect(tape, losses, route=route), clipping) if clipped is None else clipped

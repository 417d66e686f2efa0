"""The paper's ReweightGP (Algorithm 1): norms from one backward pass, then an ordinary one over Σ ν_i ℓ_i."""

from __future__ import annotations

from torch import Tensor

from ..clipping import Clipping
from ..collect import collect
from ..numerics import in_working_precision, to_accumulate, unit_roundoff
from ..tape import Tape
from .base import Clipped, from_factors, mean_weights


def reweight(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """ν_i = min(1, C/‖g_i‖), then the gradient of Σ ν_i ℓ_i, once for each group of the clipping.

    A zero weight does not stop an example that is not finite (0·Inf is NaN), so a batch with one is summed by factors.
    """
    gradients = collect(tape, losses, keep_graph=True)
    names = list(tape.marks.trainable())
    with tape.pause():
        norms = gradients.squares_on_host(second_pass=max(gradients.precision, losses.dtype, key=unit_roundoff))
        weights, finite = clipping.weights(norms, names, losses.detach().cpu())
        all_finite = bool(finite.all())
    if not all_finite:
        return from_factors(tape, losses, gradients, clipping)
    parameters = tape.marks.trainable()
    sums: dict[str, Tensor] = {}
    for group in clipping.groups(names):
        members = [name for name in group.names if name in weights]
        if members:
            scale = in_working_precision(weights[members[0]], losses.dtype).to(losses.device)
            inputs = [parameters[name] for name in members]
            found = tape.backward(losses, scale, None, inputs=inputs, retain_graph=True, known=gradients.is_known)
            sums |= {name: to_accumulate(grad) for name, grad in zip(members, found) if grad is not None}
    return Clipped(sums, mean_weights(weights), finite)

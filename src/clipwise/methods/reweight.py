"""The paper's ReweightGP (Algorithm 1): norms from one backward pass, then an ordinary one over Σ ν_i ℓ_i."""

from __future__ import annotations

from torch import Tensor

from ..clipping import Clipping
from ..collect import collect
from ..coverage import check_coverage
from ..numerics import in_working_precision, to_accumulate, unit_roundoff
from ..tape import Tape
from .base import Clipped, from_factors, is_coarse, mean_weights


def reweight(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped:
    """ν_i = min(1, C/‖g_i‖), then the gradient of Σ ν_i ℓ_i, once for each group of the clipping.

    Autograd rounds that sum to the precision of its gradients. In bf16 and float16 one example then moves a sum of a thousand by several bounds, so there
    it is made of factors. So it is where a hook changes the sum, and, with the same ν, where an example is not finite: a zero weight does not stop it
    (0·Inf is NaN). What the second pass adds beside what the taps have seen, nothing would clip: that there is none is looked at each time.
    """
    gradients = collect(tape, losses, keep_graph=True)
    parameters = tape.marks.trainable()
    if is_coarse(tape, losses, gradients) or any(parameter._backward_hooks for parameter in parameters.values()):
        return from_factors(tape, losses, gradients, clipping)
    if gradients.is_known:
        check_coverage(losses, tape.marks)
    names = list(parameters)
    with tape.pause():
        norms = gradients.squares_on_host(second_pass=max(gradients.precision, losses.dtype, key=unit_roundoff))
        weights, finite = clipping.weights(norms, names, losses.detach().cpu())
        if not bool(finite.all()):
            return Clipped(gradients.weighted_sums(weights), mean_weights(weights), finite)
    sums: dict[str, Tensor] = {}
    for group in clipping.groups(names):
        members = [name for name in group.names if name in weights]
        if members:
            scale = in_working_precision(weights[members[0]], losses.dtype).to(losses.device)
            inputs = [parameters[name] for name in members]
            found = tape.backward(losses, scale, None, inputs=inputs, retain_graph=True, known=gradients.is_known)
            sums |= {name: to_accumulate(grad) for name, grad in zip(members, found) if grad is not None}
    return Clipped(sums, mean_weights(weights), finite)

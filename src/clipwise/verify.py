"""What must hold before a gradient is believed, checked on the first step and whenever the way to the losses changes.

1. every use of a parameter lies behind a tap (coverage.py);
2. at every tap each row's gradient belongs to one example (separation.py);
3. the factors add up to autograd's own gradient, for weights that tell examples apart;
4. rows of the model's output do not change when other rows are taken away (rerun.py), nor the losses of some examples when
   other examples' outputs and targets are exchanged (replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import WrongRule
from .gradients import ExampleGradients
from .layout import Layout, Table
from .numerics import unit_roundoff
from .replay import check_losses_alone
from .rerun import check_rows_alone
from .separation import Codes, Measurement
from .tape import Tape
from .taps import Record

Heard = tuple[Record, Tensor, tuple[Tensor, ...]]  # a tap's record, the gradient that reached it, its kept tensors
Placement = Layout | Table | None  # None: the gradient is zero throughout

_SUM_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def verified_gradients(tape: Tape, losses: Tensor, heard: Sequence[Heard], head: int, nodes: set[Any]) -> ExampleGradients:
    """Place every tap's rows, check everything, and return the gradients. What holds for any batch is remembered.

    `head` names the way from the taps to the losses, `nodes` are those behind the losses (both from coverage.py). A tap whose gradient is zero has nothing to place; but the sum of the
    losses may be flat where each loss is not, so its zero is tried with other weights once.
    """
    known, zeros = tape.experience.layouts[head], tape.experience.zeros
    tape.marks.check_buffers()
    with tape.pause():
        coarsest = max((grad.dtype for _, grad, _ in heard), key=unit_roundoff, default=losses.dtype)
        measurements = [Measurement(record, grad, len(losses), coarsest) for record, grad, _ in heard]
    moving = [measurement for measurement in measurements if not measurement.is_zero]
    new_zeros = [measurement for measurement in measurements if measurement.is_zero and (head, measurement.record.key) not in zeros]
    placements: dict[int, Placement] = {}
    parameters = tape.marks.trainable()
    if moving or new_zeros:
        codes = Codes.draw(len(losses), half=any(grad.dtype == torch.float16 for _, grad, _ in heard))
        for weights in codes.weights(losses.detach()):
            own = _listen(tape, losses, weights, [*moving, *new_zeros], "compare", list(parameters.values()))
        for measurement in new_zeros:
            if not measurement.stays_zero:
                raise measurement.refusal(tape.marks)
        placements = _settle(tape, losses, moving, codes)
    with tape.pause():
        gradients = ExampleGradients(tape, len(losses), losses.device)
        for record, grad, kept in heard:
            placement = placements.get(id(record))
            if placement is not None:
                gradients.add(record, grad, kept, placement)
            else:
                gradients.add_zero(record)
        gradients.finish()
        if not moving and not new_zeros:
            return gradients
        lowest = max({coarsest} | tape.marks.derived_dtypes, key=unit_roundoff)
        conclusive = _check_sums(tape, gradients, dict(zip(parameters, own)), weights, lowest)
    check_rows_alone(tape, losses, nodes, placements.values())
    check_losses_alone(tape, losses)
    rows_may_move = tape.moves.may_reorder(len(losses), {axis for place in placements.values() if place for axis in place.axes})
    if conclusive and not rows_may_move:
        zeros.update((head, measurement.record.key) for measurement in new_zeros)
        settled = {id(m.record) for m in moving if not m.says_nothing}
        known.update({r.key: place for r, _, _ in heard if id(r) in settled and isinstance(place := placements[id(r)], Layout)})
    return gradients


def _listen(
    tape: Tape, losses: Tensor, weights: Tensor, measurements: list[Measurement], what: str, inputs: list[Tensor]
) -> list[Tensor | None]:
    """One pass with known weights on the losses; every measurement compares or reads the gradient of its tap."""
    by_record = {id(measurement.record): measurement for measurement in measurements}

    def receive(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
        measurement = by_record.get(id(record))
        if measurement is not None and what == "compare":
            measurement.compare(grad, weights)
        elif measurement is not None:
            measurement.read(grad)

    return tape.backward(losses, weights, receive, inputs=inputs, retain_graph=True)


def _settle(tape: Tape, losses: Tensor, moving: list[Measurement], codes: Codes) -> dict[int, Placement]:
    """A layout for each tap where one is certain, a table for this batch where it is not, a refusal where neither exists."""
    with tape.pause():
        placements: dict[int, Placement] = {id(m.record): m.settled() for m in moving}
    open_questions = [m for m in moving if placements[id(m.record)] is None]
    if open_questions:
        for weights in codes.weights(losses.detach()):
            _listen(tape, losses, weights, open_questions, "read", [])
        with tape.pause():
            for measurement in open_questions:
                placements[id(measurement.record)] = placement = measurement.table(codes)
                if placement is None:
                    raise measurement.refusal(tape.marks)
    return placements


def _check_sums(tape: Tape, gradients: ExampleGradients, own: dict[str, Tensor | None], weights: Tensor, lowest: torch.dtype) -> bool:
    """Compare Σ s_i g_i by factors with autograd's own. Returns whether nothing stayed open (numbers that are not finite do)."""
    names = gradients.names()
    sums = gradients.weighted_sums(dict.fromkeys(names, weights))
    masses = gradients.masses()
    conclusive = True
    for name, autograd_sum in own.items():
        if autograd_sum is None and name not in sums:
            continue
        expected = autograd_sum.to_dense().double() if autograd_sum is not None else torch.zeros_like(sums[name].double())
        found = sums[name].double() if name in sums else torch.zeros_like(expected)
        difference = float((found - expected).norm())
        allowed = float((weights.double() * masses[name]).sum()) if name in masses else 0.0
        if not torch.isfinite(torch.tensor([difference, allowed])).all():
            conclusive = False
        elif difference > _SUM_TOLERANCE[lowest] * allowed:
            parameter = tape.marks.trainable()[name]
            raise WrongRule(
                f"the factors of {name} do not add up to autograd's own gradient{tape.marks.where([parameter])}: they differ by "
                f"{difference:.3g} where {_SUM_TOLERANCE[lowest] * allowed:.3g} of rounding is allowed.",
                "A rule of a function this parameter goes through is wrong (clipwise.testing.check_rule tries one out), or the "
                "parameter was changed during the forward pass.",
            )
    return conclusive

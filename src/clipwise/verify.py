"""What must hold before a gradient is believed, checked on the first steps, whenever the way to the losses changes, and now and then.

1. every use of a parameter lies behind a tap (coverage.py, before the first backward pass);
2. at every tap each row's gradient belongs to one example (separation.py);
3. the factors add up to autograd's own gradient, for weights that tell examples apart;
4. rows of the model's output do not change when other rows change or leave (rerun.py), nor the losses of some examples when
   others are exchanged or leave (replay.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .attributes import attributes_kept
from .dormant import Dormant
from .errors import WrongRule
from .gradients import ExampleGradients
from .inventory import all_modules
from .layout import Layout, Table
from .numerics import accumulation_dtype, unit_roundoff
from .passes import Heard, evaluate
from .reading import Reading
from .replay import check_losses_alone
from .rerun import EXAMPLES_IN_A_RUN, check_rows_alone
from .separation import Codes, Measurement
from .structure import every_tensor
from .tape import Tape
from .taps import Record

# The tests for mixing without a gradient path look at a few examples; until so many have been seen, nothing is taken for granted.
_ENOUGH_EXAMPLES = 2 * EXAMPLES_IN_A_RUN
# Unit roundoffs that a sum may drift, relative to the sum of its terms' norms: a constant, and eight standard deviations of n
# roundings, since autograd adds n terms one after the other where a factor adds them in blocks.
_ACCUMULATION, _PER_ROOT = 64, 8
_ROUNDED_INPUTS = 8  # … that independently rounded terms may add up to, relative to the root of the sum of their squares
_SEVERAL = 4  # times what one of them rounds is what two computations of one number may differ by
_NEGLIGIBLE = 1e-3  # of the whole gradient: a parameter whose true gradient is zero has nothing but rounding to compare


@dataclass(frozen=True)
class _Placed:
    """Where the examples lie at each tap, which of these layouts are proven, and what else the passes have told."""

    places: dict[int, Layout | Table]  # by id of the tap's record, as everything about taps here
    keys: dict[int, int]  # by which a tap is known from step to step
    proven: set[int]
    quiet: list[int]  # keys of taps whose zero was tried with other weights
    shapes: dict[int, torch.Size]
    most_terms: int
    coarsest: torch.dtype
    weights: Tensor | None  # None: every tap's gradient is zero, as it was before
    own_sums: dict[str, Tensor | None]  # autograd's, for the weights


_HOOKED = "BackwardHookFunctionBackward"  # where torch calls what register_full_backward_hook was given


def verified_gradients(tape: Tape, losses: Tensor, heard: list[Heard], way: int, nodes: set[Any], keep_graph: bool) -> ExampleGradients:
    """Place every tap's rows, evaluate them, check everything, and return the gradients. What holds for any batch is remembered.

    `way` names the way to the losses, `nodes` are the autograd nodes behind them. `heard` is emptied: the pass that evaluates
    needs the room.
    """
    placed = _place(tape, losses, heard, way, nodes)
    tape.experience.compare(way, [(placed.keys[tap], place, placed.shapes[tap]) for tap, place in placed.places.items()], len(losses))
    heard.clear()
    gradients, _ = evaluate(tape, losses, lambda record: placed.places.get(id(record)), keep_graph=keep_graph, known=False)
    if placed.weights is not None:
        with tape.pause():
            conclusive = _check_sums(tape, gradients, placed, placed.weights)
        tried = _check_forward(tape, losses, placed, nodes)
        tape.experience.was_open = not conclusive
        if conclusive:
            _remember(tape, len(losses), way, placed, tried)
    return gradients


def _place(tape: Tape, losses: Tensor, heard: Sequence[Heard], way: int, nodes: set[Any]) -> _Placed:
    """A layout for each tap where one fits, a table for this batch where none does, a refusal where neither exists.

    A tap whose gradient is zero has nothing to place; but the sum of the losses may be flat where each loss is not, so its
    zero is tried with other weights.
    """
    with tape.pause():
        dtypes = {one.grad.dtype for one in heard} | tape.hidden_dtypes
        coarsest = max(dtypes, key=unit_roundoff, default=losses.dtype)
        measurements = [Measurement(one, len(losses), coarsest, {coarsest, one.grad.dtype} | tape.hidden_dtypes) for one in heard]
    moving = [m for m in measurements if not m.is_zero]
    quiet = [m for m in measurements if m.is_zero and (way, m.record.key) not in tape.experience.zeros]
    placed = _Placed(
        {},
        {id(one.record): one.record.key for one in heard},
        set(),
        [m.record.key for m in quiet],
        {id(one.record): one.grad.shape for one in heard},
        _most_terms(heard),
        coarsest,
        None,
        {},
    )
    if not moving and not quiet:
        return placed
    parameters = tape.marks.trainable()
    codes = Codes.draw(len(losses), half=torch.float16 in tape.hidden_dtypes or any(m.grad.dtype == torch.float16 for m in moving))
    *earlier, last = codes.weights(losses.detach())
    for weights in earlier:
        _listen(tape, losses, weights, [*moving, *quiet], "compare", [])
    if any(node.name() == _HOOKED for node in nodes):
        tape.moves.unknown.add("a backward hook of a module")
    dormant = Dormant(nodes, len(losses))
    try:
        own = _listen(tape, losses, last, [*moving, *quiet], "compare", list(parameters.values()))
    finally:
        tape.moves.dormant |= dormant.names()
    for measurement in quiet:
        if not measurement.stays_zero:
            raise measurement.refusal(tape.marks)
    with tape.pause():
        for measurement in moving:
            record, (layout, certain) = measurement.record, measurement.settled()
            if layout is not None:
                placed.places[id(record)] = layout
                if certain:
                    placed.proven.add(id(record))
    unsettled = [m for m in moving if id(m.record) not in placed.places]
    if unsettled:
        for weights in codes.weights(losses.detach()):
            _listen(tape, losses, weights, unsettled, "read", [])
        with tape.pause():
            for measurement in unsettled:
                table = measurement.table(codes)
                if table is None:
                    raise measurement.refusal(tape.marks)
                placed.places[id(measurement.record)] = table
    return replace(placed, weights=last, own_sums=dict(zip(parameters, own)))


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


def _most_terms(heard: Sequence[Heard]) -> int:
    """How many terms the longest sum behind a weight's gradient has: rows, times the places where a row uses the weight."""
    counts = [1]
    for one in heard:
        for weight in one.record.use.tracked:
            counts.append(one.grad.numel() // max((size for size in weight.shape if size and size in one.grad.shape), default=1))
    return max(counts)


def _check_sums(tape: Tape, gradients: ExampleGradients, placed: _Placed, weights: Tensor) -> bool:
    """Compare Σ s_i g_i by factors with autograd's own. Returns whether nothing stayed open (numbers that are not finite do).

    Both sides add the same terms; they differ by the order of the sum (relative to Σ s_i·mass_i), by inputs rounded to the
    precision at hand (independently, so relative to the root of Σ (s_i·mass_i)²), and by the rounding of the result.
    """
    coarsest = max({placed.coarsest} | tape.marks.derived_dtypes, key=unit_roundoff)
    sums = gradients.weighted_sums(dict.fromkeys(gradients.names(), weights))
    weighted = {name: weights.double() * mass for name, mass in gradients.masses().items()}
    rounded, added = unit_roundoff(coarsest), unit_roundoff(accumulation_dtype(coarsest))
    if weights.is_cuda and coarsest == torch.float32:
        rounded = 2.0**-11  # cuDNN computes in TF32 unless told otherwise
    # torch's kernels on a CPU add up the gradients of scales and shifts in bf16: over a thousand terms they are off by a tenth and more
    unreliable = gradients.normalisations() if not weights.is_cuda and coarsest in (torch.bfloat16, torch.float16) else ()
    floor = _NEGLIGIBLE * max((float(mass.norm()) for mass in weighted.values() if bool(mass.isfinite().all())), default=0.0)
    conclusive = True
    for name, autograd_sum in placed.own_sums.items():
        if (autograd_sum is None and name not in sums) or name in unreliable:
            continue
        expected = autograd_sum.to_dense().double() if autograd_sum is not None else torch.zeros_like(sums[name].double())
        found = sums[name].double() if name in sums else torch.zeros_like(expected)
        difference, mass = float((found - expected).norm()), weighted.get(name, torch.zeros(1))
        allowed = (
            (_ACCUMULATION + _PER_ROOT * math.sqrt(placed.most_terms)) * added * (float(mass.sum()) + floor)
            + _ROUNDED_INPUTS * rounded * (float(mass.norm()) + floor)
            + 4 * rounded * float(expected.norm())
        )
        if not torch.isfinite(torch.tensor([difference, allowed])).all():
            conclusive = False
        elif difference > allowed:
            parameter = tape.marks.trainable()[name]
            allowed += _rounded_on_the_way(gradients, parameter, weights, float(mass.norm()))
            if difference > allowed:
                raise _wrong_rule(name, parameter, tape.marks.where([parameter]), difference, allowed)
    return conclusive


def _rounded_on_the_way(gradients: ExampleGradients, parameter: Tensor, weights: Tensor, mass: float) -> float:
    """By what autograd pulls back from a derived weight: a function of a matrix (matrix_exp) may be less exact than sums are. Half of the digits at most."""
    if gradients.pulled is None or id(parameter) not in gradients.pulled.inputs:
        return 0.0
    rounding = gradients.pulled.rounding(weights)[id(parameter)]
    return _SEVERAL * min(rounding, math.sqrt(unit_roundoff(parameter.dtype)) * mass)


def _wrong_rule(name: str, parameter: Tensor, where: str, difference: float, allowed: float) -> WrongRule:
    message = f"the factors of {name} do not add up to autograd's own gradient{where}: they differ by {difference:.3g} where {allowed:.3g} of rounding is allowed."
    repair = (
        "A rule of a function this parameter goes through is wrong (clipwise.testing.check_rule tries one out), or the parameter was changed "
        "during the forward pass."
    )
    if parameter._backward_hooks:
        repair = (
            "This parameter has a hook (register_hook), which changes the sum of its gradients and no example's: remove it. What it does to the gradient "
            "belongs in the forward pass (weight * mask), or, if it only scales, in the learning rate."
        )
    return WrongRule(message, repair)


def _check_forward(tape: Tape, losses: Tensor, placed: _Placed, nodes: set[Any]) -> int:
    """Mixing without a gradient path, in the captured modules and around them. Returns how many examples were tried."""
    rows = [(place, math.prod(placed.shapes[key][axis] for axis in place.axes)) for key, place in placed.places.items()]
    calls = [*(root.call for root in tape.root_calls), *tape.program]
    inputs = [tensor for call in calls for tensor in every_tensor([call.args, call.kwargs])]
    reading = Reading.from_taps(len(losses), rows).with_declared(inputs)
    given = [(root.call.args, root.call.kwargs) for root in tape.root_calls]
    reading = replace(
        reading,
        fixed=frozenset(tape.fixed),
        not_rows=tape.experience.not_rows(inputs, len(losses)),
        shared_words=tape.experience.shared_words(given, len(losses)),
        numbers_too=not every_tensor(given),
    )
    with attributes_kept(all_modules(tape.modules)):  # of models that cannot be copied
        reading, tried = check_rows_alone(tape, losses, reading, nodes)
        check_losses_alone(tape, losses, reading)
    return tried


def _remember(tape: Tape, batch: int, way: int, placed: _Placed, tried: int) -> None:
    """What may be taken for granted from now on: proven layouts, of models that do not move rows as the data says."""
    experience = tape.experience
    experience.examples_tried += tried
    row_axes = {axis for place in placed.places.values() for axis in place.axes}
    if experience.examples_tried < _ENOUGH_EXAMPLES or tape.moves.may_move_rows(batch, row_axes):
        return
    experience.zeros.update((way, key) for key in placed.quiet)
    layouts = {placed.keys[tap]: placed.places[tap] for tap in placed.proven}
    experience.learn(way, {key: place for key, place in layouts.items() if isinstance(place, Layout)})

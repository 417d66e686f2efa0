"""Do a row of the model's output, and its gradient, stay the same when other rows change or leave?

Mixing that leaves no gradient path (detached batch statistics, routing by rank in the batch, division by a batch count)
shows in no backward pass of the whole batch. So each captured module is run again, on copies of its state, on a few
examples: as they are; several times with half of them exchanged, for copies of the others or for rows no record has; and on
two of them alone. For the examples that stayed, outputs must agree, and so must the gradient of a random combination of them:
a gate that is zero today hides mixing in the output, but not in its own gradient. Exchanged rows leave every shape, every
random draw and every kernel as it was, so the tolerance is tight; rows that leave may change the order of sums, so it is
wide, which is enough for a count. Where they do not agree, the model is run on inputs that differ by a rounding: a row whose terms
cancel moves as much then, and no record may cause a refusal by that. State that the runs leave behind must not differ either.

This is a test, not a proof: mixing that needs rare values to show may pass it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .again import Run, isolated, named_state, random_fingerprint, random_states_kept, same_draws, state_of
from .agreement import BLUR, BLURRED_RUNS, WITH_OTHER_SHAPES, allowed, blur, close
from .errors import MixedExamples, StateWrite
from .exchange import Exchange, shaken
from .machine import is_out_of_memory
from .marks import EXAMPLE
from .program import ProgramCall, RootCall
from .reading import Reading
from .still import Still
from .structure import every_tensor, map_tensors
from .tape import Tape

EXAMPLES_IN_A_RUN = 8
_FEWEST_EXAMPLES = 2  # of which one may be exchanged while the other stays
_FEWER_EXAMPLES, _LARGE_OUTPUT = 4, 2**21  # where an example's outputs hold that many numbers, memory counts
TRIALS = 3  # exchanges of either kind
_MINOR = 1e-2  # a parameter's gradient is compared on its own scale, but not below this share of the largest


@dataclass(frozen=True)
class _Kept:
    """Which rows of which outputs belong to the examples that stay."""

    exchange: Exchange
    axes: dict[int, int]  # place of the output → its axis of rows

    def rows(self, outputs: list[Tensor]) -> list[Tensor]:
        """Those rows of each output, rows first."""
        return [self._rows(outputs[place], axis) for place, axis in self.axes.items()]

    def _rows(self, output: Tensor, axis: int) -> Tensor:
        rows = self.exchange.kept_rows(output.shape[axis]).to(output.device)
        return output.index_select(axis, rows).movedim(axis, 0)


def check_rows_alone(tape: Tape, losses: Tensor, reading: Reading, nodes: set[Any]) -> tuple[Reading, int]:
    """Refuse if an output that the losses use changes in a row when other examples change or leave. Returns the reading that held, and how many examples
    were tried."""
    parameters = list(tape.marks.trainable().values())
    finite = torch.nonzero(losses.detach().isfinite())[:, 0].tolist()
    speaking = finite if len(finite) > 1 else list(range(len(losses)))
    held, tried = reading, min(len(losses), EXAMPLES_IN_A_RUN)
    for call in tape.root_calls:
        if any(node is not None and node in nodes for node in call.output_nodes):
            given = [call.call.args, call.call.kwargs]
            _check_seen(call, given, nodes, tape, reading)
            choices = reading.choices(list(every_tensor(given)), given)
            with tape.pause(), tape.eagerly(), random_states_kept(), torch.enable_grad():
                trials = [_Trial(call.call, choice, speaking, parameters, share=not tape.writes_parameters) for choice in choices]
                verdicts = [trial.verdict() for trial in trials]
            tried = min([tried, *(len(trial.few) for trial in trials)])
            if False in verdicts and True not in verdicts:
                raise _refusal(call.call)
            if True in verdicts:
                held = replace(choices[verdicts.index(True)], tables=reading.tables, reordered=reading.reordered)
    return held, tried


def _check_seen(call: RootCall, given: Any, nodes: set[Any], tape: Tape, reading: Reading) -> None:
    """Refuse a module that makes example data from inputs among which there is nothing to exchange: no test would say anything of it."""
    if every_tensor(given) or reading.has_rows(given):
        return
    outputs = [tensor for tensor in every_tensor(call.call.result) if tensor.grad_fn is not None and tensor.grad_fn in nodes]
    if any(tape.marks.kind(tensor) == EXAMPLE for tensor in outputs):
        raise MixedExamples(
            f"there is no tensor among the inputs of {type(call.call.func).__name__}, so that nobody can see whether it mixes examples.",
            "Hand the examples over as tensors (also in lists, dicts and objects), as arrays of numpy's, or as a list with one entry an example.",
        )


def _refusal(call: ProgramCall) -> MixedExamples:
    return MixedExamples(
        f"a row of {type(call.func).__name__}'s output, or its gradient, changes when other examples change or leave: examples mix "
        "in the forward pass.",
        "Remove statistics, ranks or counts over the batch from the model; declare inputs that carry no examples with "
        "clipwise.constant(x). A model that does something else every time it is called looks the same.",
    )


class _RowsDiffer(Exception):
    """An output's rows change when other examples leave."""


class _Trial:
    """Runs of one call under one reading of its inputs."""

    def __init__(self, call: ProgramCall, reading: Reading, speaking: list[int], parameters: list[Tensor], share: bool):
        assert isinstance(call.func, nn.Module)
        self.call = call
        self.module = call.func
        self.share = share
        self.reading = reading
        self.parameters = parameters
        size = sum(tensor.numel() for tensor in every_tensor(call.result)) // max(reading.batch, 1)
        most = EXAMPLES_IN_A_RUN if size < _LARGE_OUTPUT else _FEWER_EXAMPLES
        inputs = list(every_tensor([call.args, call.kwargs]))
        ragged = any(reading.is_ragged(tensor) for tensor in inputs) and any(not tensor.is_floating_point() for tensor in inputs)
        self.numbered = ragged or any(id(tensor) in reading.fixed for tensor in inputs)  # rows that leave would need other numbers
        everyone = list(range(reading.batch))
        self.needs_everyone = self.numbered
        self.few = everyone if self.numbered else sorted(random.Random().sample(speaking, min(len(speaking), most)))

    def verdict(self) -> bool | None:
        """True: the rows are alone. False: they are not. None: nothing can be read from this call. Tried on fewer examples where memory runs out."""
        if not self.reading.has_rows((self.call.args, self.call.kwargs)):
            return None
        while True:
            try:
                return self._verdict()
            except Exception as error:
                if not is_out_of_memory(error) or self.needs_everyone or len(self.few) <= _FEWEST_EXAMPLES:
                    raise
                self.few = sorted(random.Random().sample(self.few, max(_FEWEST_EXAMPLES, len(self.few) // 2)))

    def _verdict(self) -> bool | None:
        sizes = {size for tensor in every_tensor([self.call.args, self.call.kwargs]) for size in tensor.shape[:2]}
        try:
            inputs, reading = self._selected(self.few), self.reading.among(self.few, sizes).of_outputs()
            base = self._run(inputs)
        except Exception as error:  # it cannot run on fewer examples: run it on all
            if is_out_of_memory(error):
                raise
            self.needs_everyone, self.few = True, list(range(self.reading.batch))
            inputs, reading = self._selected(self.few), self.reading.of_outputs()
            base = self._run(inputs)
        try:
            axes = self._axes_without_most(base, reading) or [reading.axis(output) for output in base.outputs]
        except _RowsDiffer:
            return False
        found = {place: axis for place, axis in enumerate(axes) if axis is not None and base.outputs[place].is_floating_point()}
        found = {place: axis for place, axis in found.items() if reading.owners(base.outputs[place].shape[axis]) is not None}
        if not found:
            return None
        if self.reading.squares_shared and not self._follows_order(inputs, base, reading, found):
            return False
        held_still = False
        other: Run | None
        for strange in (False, True):
            for trial, exchange in enumerate(Exchange.draw(self.reading, strange, TRIALS, self.few, reading)):
                kept, exchanged = _Kept(exchange, found), map_tensors((self.call.args, self.call.kwargs), exchange)
                asked = kept if trial == 0 else None
                other, base = None, replace(base, gradient=[])  # of a large model they are large
                try:
                    other = self._run(exchanged, still=held_still, gradient_of=asked)
                    if other.generators != base.generators:  # how many numbers are drawn depends on the data: hold them still
                        held_still = True
                        base = self._run(inputs, still=True)
                        if base.drew_numbers:
                            break
                        other = self._run(exchanged, still=True, gradient_of=asked)
                except Exception as error:  # the model need not accept rows that no record has
                    if is_out_of_memory(error):
                        raise
                    break
                self._check_state(base, other)
                if asked is not None:
                    base = self._run(inputs, still=held_still, gradient_of=asked)
                if not self._same(kept, base, other):
                    shake = shaken(self.call.autocast_dtypes)
                    blurred = [self._run(map_tensors(inputs, shake), still=held_still, gradient_of=asked) for _ in range(BLURRED_RUNS)]
                    if not self._same(kept, base, other, blurred):
                        return False
        return True

    def _follows_order(self, inputs: Any, base: Run, reading: Reading, axes: dict[int, int]) -> bool:
        """Whether outputs come in another order where the examples do, while what is taken for shared stays. What belongs to examples would not fit."""
        order = reading.other_order()
        still = base.drew_numbers
        try:
            before = self._run(inputs, still=True) if still else base
            after = self._run(map_tensors(inputs, lambda value: reading.in_order(value, order)), still=still)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        pairs = [
            (before.outputs[place].index_select(axis, order.to(before.outputs[place].device)), after.outputs[place])
            for place, axis in axes.items()
            if before.outputs[place].shape[axis] == len(order)
        ]
        return after.drew_numbers or all(a.shape == b.shape and close(a, b, WITH_OTHER_SHAPES) for a, b in pairs)

    def _selected(self, examples: list[int]) -> Any:
        return map_tensors((self.call.args, self.call.kwargs), lambda value: self.reading.select(value, examples))

    def _run(self, inputs: Any, *, still: bool = False, gradient_of: _Kept | None = None) -> Run:
        args, kwargs = inputs
        module = isolated(self.module, share_parameters=self.share)
        same_draws()
        before = random_fingerprint([module])
        with self.call.autocast(), Still(everything=still):
            outputs = list(every_tensor(module(*args, **kwargs)))
        state = [] if module is self.module else [tensor.detach() for tensor in state_of(module)]
        after = random_fingerprint([module])
        gradient = [] if gradient_of is None else self._gradient(gradient_of.rows(outputs))
        return Run([output.detach() for output in outputs], state, after != before, after, gradient)

    def _axes_without_most(self, base: Run, reading: Reading) -> list[int | None] | None:
        """The batch axis of every output, found by running two examples alone, whose rows must be the same; None if that cannot be run."""
        if self.numbered or len(self.few) < 2 or (reading is self.reading and reading.batch > len(self.few)):
            return None
        pair = sorted(random.Random().sample(self.few, 2 if len(self.few) > 2 else 1))
        try:
            part = self._run(self._selected(pair), still=base.drew_numbers)
            whole = self._run(self._selected(self.few), still=True) if base.drew_numbers else base
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None
        axes: list[int | None] = []
        for place, (a, b) in enumerate(zip(whole.outputs, part.outputs)):
            differing = [axis for axis in range(a.dim()) if a.dim() == b.dim() and a.shape[axis] != b.shape[axis]]
            axes.append(differing[0] if len(differing) == 1 else reading.axis(a) if a.shape == b.shape else None)
            if len(differing) == 1 and a.is_floating_point() and not part.drew_numbers:
                owners = reading.owners(a.shape[differing[0]])
                if owners is None:
                    continue
                rows = torch.nonzero(torch.isin(owners, torch.tensor([self.few.index(i) for i in pair])))[:, 0].to(a.device)
                if len(rows) == b.shape[differing[0]]:
                    self._compare_parts(place, differing[0], rows, a, b, still=base.drew_numbers)
        return axes

    def _compare_parts(self, place: int, axis: int, rows: Tensor, whole: Tensor, part: Tensor, still: bool) -> None:
        """The rows of a few examples alone against theirs among all: they may differ as much as a rounding moves them."""
        expected, found = whole.index_select(axis, rows).movedim(axis, 0), part.movedim(axis, 0)
        if not close(expected, found, WITH_OTHER_SHAPES):
            runs = [
                self._run(map_tensors(self._selected(self.few), shaken(self.call.autocast_dtypes)), still=still)
                for _ in range(BLURRED_RUNS)
            ]
            rest = [run.outputs[place].index_select(axis, rows).movedim(axis, 0) for run in runs]
            if not close(expected, found, WITH_OTHER_SHAPES, blur(expected, rest)):
                raise _RowsDiffer

    def _same(self, kept: _Kept, base: Run, other: Run, blurred: Sequence[Run] = ()) -> bool:
        """Whether the kept rows agree in both runs, and the gradient of a random combination of them where both have one.

        `blurred`: runs on inputs that differ by a rounding; a row that they move says as little as they move it.
        """
        runs = [base, other, *blurred]
        if any(run.outputs[place].shape != base.outputs[place].shape for run in runs for place in kept.axes):
            return False
        rows = list(zip(*(kept.rows(run.outputs) for run in runs)))  # [output][run]
        coarsest = max(allowed(output) for outputs in rows for output in outputs[:2])
        if not all(close(a, b, coarsest, blur(a, rest)) for a, b, *rest in rows):
            return False
        sizes = [max(float(a.norm()), float(b.norm())) for a, b in zip(base.gradient, other.gradient)]
        largest = max((size for size in sizes if size == size and size != float("inf")), default=0.0)
        for place, (a, b, size) in enumerate(zip(base.gradient, other.gradient, sizes)):
            tolerance = max(coarsest, allowed(a))
            noise = max((float((a - run.gradient[place]).norm()) for run in blurred), default=0.0)
            if float((a - b).norm()) > tolerance * max(size, _MINOR * largest) + BLUR * noise:
                return False
        return True

    def _gradient(self, outputs: list[Tensor]) -> list[Tensor]:
        wanted = [output for output in outputs if output.requires_grad]
        if not wanted:
            return []
        dice = torch.Generator().manual_seed(0)
        probes = [torch.randn(output.shape, generator=dice).to(output) for output in wanted]
        same_draws()
        found = torch.autograd.grad(wanted, self.parameters, probes, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g, p in zip(found, self.parameters)]

    def _check_state(self, base: Run, other: Run) -> None:
        for (name, _), a, b in zip(named_state(self.module), base.state, other.state):
            if a.shape == b.shape and not torch.equal(a.nan_to_num(), b.nan_to_num()):
                raise StateWrite(
                    f"{type(self.module).__name__}.forward leaves another {name} behind when the examples are others; it is released "
                    "with the model.",
                    "Switch that statistic off (track_running_stats=False, eval()), or compute it without the training records.",
                )

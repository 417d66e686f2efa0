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

from .again import isolated, random_fingerprint, random_states_kept, same_draws
from .errors import MixedExamples, StateWrite
from .marks import is_declared_constant
from .numerics import flat_rows
from .program import ProgramCall
from .reading import Exchange, Reading, shaken
from .still import Still
from .structure import every_tensor, map_tensors
from .tape import Tape

# Relative differences that rounding may cause: with the same shapes, and with others.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
TOLERANCE_ON_GPU = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # atomic sums
WITH_OTHER_SHAPES = 0.2
EXAMPLES_IN_A_RUN = 8
TRIALS = 3  # exchanges of either kind
BLURRED_RUNS = 2
BLUR = 64.0  # one random rounding of the inputs stands for the many that a long sum makes on its way
_MINOR = 1e-2  # a parameter's gradient is compared on its own scale, but not below this share of the largest


@dataclass(frozen=True)
class _Run:
    """Outputs of a call on some examples, the state it left behind, and what it did to the random generators."""

    outputs: list[Tensor]
    state: list[Tensor]
    drew_numbers: bool
    generators: int


def check_rows_alone(tape: Tape, losses: Tensor, reading: Reading, nodes: set[Any]) -> Reading:
    """Refuse if an output that the losses use changes in a row when other examples change or leave. Returns the reading that held."""
    parameters = list(tape.marks.trainable().values())
    finite = torch.nonzero(losses.detach().isfinite())[:, 0].tolist()
    speaking = finite if len(finite) > 1 else list(range(len(losses)))
    held = reading
    for call in tape.root_calls:
        if any(node is not None and node in nodes for node in call.output_nodes):
            inputs = [tensor for tensor in every_tensor([call.call.args, call.call.kwargs]) if not is_declared_constant(tensor)]
            choices = reading.choices(inputs)
            with tape.pause(), tape.eagerly(), random_states_kept(), torch.enable_grad():
                verdicts = [
                    _Trial(call.call, choice, speaking, parameters, share=not tape.writes_parameters).verdict() for choice in choices
                ]
            if False in verdicts and True not in verdicts:
                raise _refusal(call.call)
            if True in verdicts:
                held = replace(choices[verdicts.index(True)], tables=reading.tables, reordered=reading.reordered)
    return held


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
        self.few = sorted(random.Random().sample(speaking, min(len(speaking), EXAMPLES_IN_A_RUN)))

    def verdict(self) -> bool | None:
        """True: the rows are alone. False: they are not. None: nothing can be read from this call."""
        sizes = {size for tensor in every_tensor([self.call.args, self.call.kwargs]) for size in tensor.shape[:2]}
        try:
            inputs, reading = self._selected(self.few), self.reading.among(self.few, sizes)
            base = self._run(inputs)
        except Exception:  # it cannot run on fewer examples: run it on all
            inputs, reading = self._selected(list(range(self.reading.batch))), self.reading
            base = self._run(inputs)
        try:
            axes = self._axes_without_most(base, reading) or [reading.axis(output) for output in base.outputs]
        except _RowsDiffer:
            return False
        places = [place for place, axis in enumerate(axes) if axis is not None and base.outputs[place].is_floating_point()]
        places = [place for place in places if reading.owners(base.outputs[place].shape[axes[place]]) is not None]  # type: ignore[index]
        if not places:
            return None
        still: _Run | None = None
        for strange in (False, True):
            for trial, exchange in enumerate(Exchange.draw(reading, strange, TRIALS)):
                exchanged = map_tensors(inputs, exchange)
                try:
                    other = self._run(exchanged)
                    if other.generators != base.generators:  # how many numbers are drawn depends on the data: hold them still
                        still = still or self._run(inputs, still=True)
                        other = self._run(exchanged, still=True)
                        if still.drew_numbers:
                            break
                except Exception:
                    break  # the model need not accept rows that no record has
                base = still or base
                self._check_state(base, other)
                if not self._same(base, other, exchange, places, axes, with_gradient=trial == 0):
                    blurred = [
                        self._run(map_tensors(inputs, shaken(self.call.autocast_dtypes)), still=base is still) for _ in range(BLURRED_RUNS)
                    ]
                    if not self._same(base, other, exchange, places, axes, with_gradient=trial == 0, blurred=blurred):
                        return False
        return True

    def _selected(self, examples: list[int]) -> Any:
        return map_tensors((self.call.args, self.call.kwargs), lambda value: self.reading.select(value, examples))

    def _run(self, inputs: Any, still: bool = False) -> _Run:
        args, kwargs = inputs
        module = isolated(self.module, share_parameters=self.share)
        same_draws()
        before = random_fingerprint()
        with self.call.autocast(), Still(everything=still):
            outputs = list(every_tensor(module(*args, **kwargs)))
        state = [] if module is self.module else [tensor.detach() for tensor in _state(module)]
        after = random_fingerprint()
        return _Run(outputs, state, after != before, after)

    def _axes_without_most(self, base: _Run, reading: Reading) -> list[int | None] | None:
        """The batch axis of every output, found by running two examples alone, whose rows must be the same; None if that cannot be run."""
        if len(self.few) < 2 or (reading is self.reading and reading.batch > len(self.few)):
            return None
        pair = sorted(random.Random().sample(self.few, 2 if len(self.few) > 2 else 1))
        try:
            part = self._run(self._selected(pair), still=base.drew_numbers)
            whole = self._run(self._selected(self.few), still=True) if base.drew_numbers else base
        except Exception:
            return None
        axes: list[int | None] = []
        for place, (a, b) in enumerate(zip(whole.outputs, part.outputs)):
            differing = [axis for axis in range(a.dim()) if a.dim() == b.dim() and a.shape[axis] != b.shape[axis]]
            axes.append(differing[0] if len(differing) == 1 else None)
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

    def _same(
        self,
        base: _Run,
        other: _Run,
        exchange: Exchange,
        places: list[int],
        axes: list[int | None],
        with_gradient: bool,
        blurred: Sequence[_Run] = (),
    ) -> bool:
        """Whether the kept rows agree in both runs, and the gradient of a random combination of them.

        `blurred`: runs on inputs that differ by a rounding; a row that they move says as little as they move it.
        """
        runs = [base, other, *blurred]
        kept: list[list[Tensor]] = []  # [output][run]
        for place in places:
            outputs, axis = [run.outputs[place] for run in runs], axes[place]
            if axis is None or any(output.shape != outputs[0].shape for output in outputs):
                return False
            rows = exchange.kept_rows(outputs[0].shape[axis]).to(outputs[0].device)
            kept.append([output.index_select(axis, rows).movedim(axis, 0) for output in outputs])
        coarsest = max((allowed(output) for outputs in kept for output in outputs[:2]), default=0.0)
        if not all(close(a, b, coarsest, blur(a, rest)) for a, b, *rest in kept):
            return False
        if not with_gradient:
            return True
        first, second, *others = ([g.double() for g in self._gradient([outputs[run] for outputs in kept])] for run in range(len(runs)))
        sizes = [max(float(a.norm()), float(b.norm())) for a, b in zip(first, second)]
        largest = max((size for size in sizes if size == size and size != float("inf")), default=0.0)
        for place, (a, b, size) in enumerate(zip(first, second, sizes)):
            tolerance = max(coarsest, allowed(self.parameters[place]))
            noise = max((float((a - rest[place]).norm()) for rest in others), default=0.0)
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

    def _check_state(self, base: _Run, other: _Run) -> None:
        for (name, _), a, b in zip(_named_state(self.module), base.state, other.state):
            if a.shape == b.shape and not torch.equal(a.nan_to_num(), b.nan_to_num()):
                raise StateWrite(
                    f"{type(self.module).__name__}.forward leaves another {name} behind when the examples are others; it is released "
                    "with the model.",
                    "Switch that statistic off (track_running_stats=False, eval()), or compute it without the training records.",
                )


def _named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module.named_buffers() if buffer is not None]


def _state(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for _, buffer in _named_state(module)]


def allowed(tensor: Tensor) -> float:
    """The relative difference that the order of sums may cause where shapes are the same."""
    return (TOLERANCE_ON_GPU if tensor.is_cuda else TOLERANCE)[tensor.dtype]


def close(a: Tensor, b: Tensor, tolerance: float, noise: Tensor | float = 0.0) -> bool:
    """Whether two tensors agree, relative to the largest entry, and up to the noise of each row. What is not finite says nothing."""
    error, size = (a.detach().double() - b.detach().double()).abs(), a.detach().double().abs()
    finite = error.isfinite() & size.isfinite()
    if not bool(finite.any()):
        return True
    permitted = (tolerance * size[finite].max() + BLUR * torch.as_tensor(noise)).expand_as(error)
    return not bool((error > permitted)[finite].any())


def blur(rows: Tensor, runs: Sequence[Tensor]) -> Tensor | float:
    """(R, 1 …): how far each row moves when the inputs move by a rounding. Terms that cancel make that much of a little."""
    if not runs:
        return 0.0
    moved = torch.stack([flat_rows((rows.detach().double() - run.detach().double()).abs().nan_to_num(0, 0, 0)).amax(1) for run in runs])
    return moved.amax(0).view(-1, *[1] * (rows.dim() - 1))

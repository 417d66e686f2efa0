"""Do a row of the model's output, and its gradient, stay the same when other rows change or leave?

Mixing that leaves no gradient path (detached batch statistics, routing by rank in the batch, division by a batch count)
shows in no backward pass of the whole batch. So each captured module is run again, on copies of its state, on a few
examples: as they are; several times with half of them exchanged, for copies of the others or for rows no record has; and on
two of them alone. For the examples that stayed, outputs must agree, and so must the gradient of a random combination of them:
a gate that is zero today hides mixing in the output, but not in its own gradient. Exchanged rows leave every shape, every
random draw and every kernel as it was, so the tolerance is tight; rows that leave may change the order of sums, so it is
wide, which is enough for a count. State that the runs leave behind must not differ either.

This is a test, not a proof: mixing that needs rare values to show may pass it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .again import isolated, random_fingerprint, random_states_kept, same_draws
from .errors import MixedExamples, StateWrite
from .marks import is_declared_constant
from .program import ProgramCall
from .reading import Exchange, Reading
from .still import Still
from .structure import every_tensor, map_tensors
from .tape import Tape

# Relative differences that rounding may cause: with the same shapes, and with others.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
TOLERANCE_ON_GPU = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # atomic sums
WITH_OTHER_SHAPES = 0.2
EXAMPLES_IN_A_RUN = 8
TRIALS = 3  # exchanges of either kind
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
        for a, b in zip(whole.outputs, part.outputs):
            differing = [axis for axis in range(a.dim()) if a.dim() == b.dim() and a.shape[axis] != b.shape[axis]]
            axes.append(differing[0] if len(differing) == 1 else None)
            if len(differing) == 1 and a.is_floating_point() and not part.drew_numbers:
                owners = reading.owners(a.shape[differing[0]])
                if owners is None:
                    continue
                rows = torch.nonzero(torch.isin(owners, torch.tensor([self.few.index(i) for i in pair])))[:, 0].to(a.device)
                if len(rows) == b.shape[differing[0]] and not _close(a.index_select(differing[0], rows), b, WITH_OTHER_SHAPES):
                    raise _RowsDiffer
        return axes

    def _same(self, base: _Run, other: _Run, exchange: Exchange, places: list[int], axes: list[int | None], with_gradient: bool) -> bool:
        """Whether the kept rows agree in both runs, and the gradient of a random combination of them."""
        kept: list[tuple[Tensor, Tensor]] = []
        for place in places:
            a, b, axis = base.outputs[place], other.outputs[place], axes[place]
            if axis is None or a.shape != b.shape:
                return False
            rows = exchange.kept_rows(a.shape[axis]).to(a.device)
            kept.append((a.index_select(axis, rows), b.index_select(axis, rows)))
        coarsest = max((allowed(tensor) for pair in kept for tensor in pair), default=0.0)
        if not all(_close(a.detach(), b.detach(), coarsest) for a, b in kept):
            return False
        if not with_gradient:
            return True
        gradients = [self._gradient([pair[side] for pair in kept]) for side in (0, 1)]
        sizes = [max(float(a.norm()), float(b.norm())) for a, b in zip(*gradients)]
        largest = max((size for size in sizes if size == size and size != float("inf")), default=0.0)
        coarsest = max([coarsest, *(allowed(gradient) for gradient in gradients[0])])
        differences = [float((a.double() - b.double()).norm()) for a, b in zip(*gradients)]
        return not any(d > coarsest * max(size, _MINOR * largest) for d, size in zip(differences, sizes) if d == d)

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


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors agree, relative to the largest entry. What is not finite says nothing."""
    error, size = (a.detach().double() - b.detach().double()).abs(), a.detach().double().abs()
    finite = error.isfinite() & size.isfinite()
    return not bool(finite.any()) or not bool((error[finite] > tolerance * size[finite].max()).any())

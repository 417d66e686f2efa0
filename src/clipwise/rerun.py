"""Do a row of the model's output, and its gradient, stay the same when other rows change or leave?

Mixing that leaves no gradient path (detached batch statistics, routing by rank in the batch, division by a batch count)
shows in no backward pass of the whole batch. So the captured module is run again on a few examples, with every random draw
held still and its buffers copied: once as they are, once with half of them exchanged for copies of the others, once without
that half. For the examples that stayed, outputs must agree, and so must the gradient of a random combination of them: a gate
that is zero today hides mixing in the output, but not in its own gradient. Exchanged rows leave every shape and so every
kernel as it was, so the tolerance is tight; rows that leave may change the order of sums, so it is wide, which is enough for
a count.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import MixedExamples
from .layout import Layout, Table
from .rows_of_inputs import Axes, Numbering, call_again, ways_to_read
from .tape import RootCall, Tape

# Relative differences that rounding may cause: with the same shapes, and with others.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_WITH_OTHER_SHAPES = 0.2
_FEW = 8  # examples in a run
_MINOR = 1e-2  # a parameter's gradient is compared on its own scale, but not below this share of the largest


@dataclass(frozen=True)
class _Trial:
    """Which examples are run, and which of them stay throughout."""

    numbering: Numbering
    few: list[int]
    stays: list[bool]

    @classmethod
    def draw(cls, numbering: Numbering, finite: Tensor) -> _Trial:
        """A few examples, of those with a finite loss if there are two: others show nothing."""
        dice = random.Random()
        speaking = torch.nonzero(finite)[:, 0].tolist()
        candidates = speaking if len(speaking) > 1 else range(numbering.batch)
        few = sorted(dice.sample(candidates, min(len(candidates), _FEW)))
        staying = set(dice.sample(few, (len(few) + 1) // 2))
        return cls(numbering, few, [example in staying for example in few])

    @property
    def staying(self) -> list[int]:
        return [example for example, stays in zip(self.few, self.stays) if stays]

    @property
    def exchanged(self) -> list[int]:
        """The same number of examples, those that do not stay replaced by copies of those that do."""
        return [example if stays else random.Random().choice(self.staying) for example, stays in zip(self.few, self.stays)]

    def rows_that_stay(self, size: int) -> Tensor:
        """In an output of the few."""
        places = [place for place, stays in enumerate(self.stays) if stays]
        return Numbering(len(self.few), self.numbering.order).rows(size, places)


@dataclass(frozen=True)
class _Run:
    """Of the rows that stay: outputs, and the gradients of a random combination of them."""

    outputs: list[Tensor]
    gradients: list[Tensor]


class _Differs(Exception):
    """Two runs differ in shape beyond one batch axis."""


def check_rows_alone(tape: Tape, losses: Tensor, nodes: set[Any], placements: Iterable[Layout | Table | None]) -> None:
    """Refuse if an output that the losses use changes in a row when other examples change or leave."""
    layouts = [placement for placement in placements if isinstance(placement, Layout) and placement.axes]
    axes = [layout.axes[0] for layout in layouts]
    usual = max(axes, key=axes.count, default=0)
    numbering = Numbering(len(losses), next((layout.order for layout in layouts), "block"))
    trial = _Trial.draw(numbering, losses.detach().isfinite())
    parameters = list(tape.marks.trainable().values())
    for call in tape.root_calls[-2:]:
        used = [place for place, node in enumerate(call.output_nodes) if node is not None and node in nodes]
        if used:
            with tape.pause(), tape.eagerly(), undisturbed(tape.modules), torch.enable_grad():
                _check_call(call, used, trial, usual, parameters)


def _check_call(call: RootCall, used: list[int], trial: _Trial, usual: int, parameters: list[Tensor]) -> None:
    """One way to read the inputs must pass; where none reads them as rows, nothing can be said."""
    failures: list[Exception] = []
    for axes in ways_to_read(call, trial.numbering.batch, usual):
        try:
            if _passes(call, axes, used, trial, parameters):
                return
            failures.append(_Differs())
        except Exception as error:  # the model cannot run on these rows
            failures.append(error)
    if not failures:
        return
    name, last = type(call.module).__name__, failures[-1]
    if all(not isinstance(failure, _Differs) for failure in failures):
        raise MixedExamples(
            f"{name} cannot be run on {len(trial.staying)} of {trial.numbering.batch} examples, so it cannot be shown that examples do "
            f"not mix ({type(last).__name__}: {last}).",
            "Let the model accept batches of any size; declare inputs that carry no examples with clipwise.constant(x).",
        ) from last
    raise MixedExamples(
        f"a row of {name}'s output, or its gradient, changes when other examples change or leave: examples mix in the forward pass.",
        "Remove statistics, ranks or counts over the batch from the model; declare inputs that carry no examples with clipwise.constant(x).",
    )


def _passes(call: RootCall, axes: Axes, used: list[int], trial: _Trial, parameters: list[Tensor]) -> bool:
    part, whole, exchanged = (call_again(call, axes, trial.numbering, run) for run in (trial.staying, trial.few, trial.exchanged))
    places, batch_axes, probes = [], [], []
    for place in used:
        a, b = whole[place], part[place]
        if a.shape == b.shape or not a.is_floating_point():
            continue  # no rows in it
        differing = [axis for axis in range(a.dim()) if a.dim() == b.dim() and a.shape[axis] != b.shape[axis]]
        if len(differing) != 1 or a.shape[differing[0]] % len(trial.few):
            return False
        places.append(place)
        batch_axes.append(differing[0])
        probes.append(torch.randn(b.narrow(differing[0], 0, 1).shape, device=b.device).to(b.dtype).expand_as(b))

    def rows_that_stay(outputs: list[Tensor]) -> list[Tensor]:
        chosen = [(outputs[place], axis) for place, axis in zip(places, batch_axes)]
        return [output.index_select(axis, trial.rows_that_stay(output.shape[axis]).to(output.device)) for output, axis in chosen]

    few_rows, part_rows = rows_that_stay(whole), [part[place] for place in places]
    if any(a.shape != b.shape for a, b in zip(few_rows, part_rows)):
        return False
    reference = _run(few_rows, probes, parameters)
    return _same(reference, _run(rows_that_stay(exchanged), probes, parameters), None) and _same(
        reference, _run(part_rows, probes, parameters), _WITH_OTHER_SHAPES
    )


def _run(outputs: list[Tensor], probes: list[Tensor], parameters: list[Tensor]) -> _Run:
    wanted = [(output, probe) for output, probe in zip(outputs, probes) if output.requires_grad]
    gradients: list[Tensor] = []
    if wanted:
        found = torch.autograd.grad([o for o, _ in wanted], parameters, [p for _, p in wanted], allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g, p in zip(found, parameters)]
    return _Run([output.detach() for output in outputs], gradients)


def _same(a: _Run, b: _Run, tolerance: float | None) -> bool:
    """Whether outputs and gradients agree, to `tolerance` or to rounding. What is not finite says nothing."""
    coarsest = max((TOLERANCE[tensor.dtype] for tensor in [*a.outputs, *a.gradients]), default=0.0)
    allowed = coarsest if tolerance is None else tolerance
    for x, y in zip(a.outputs, b.outputs):
        error, size = (x.double() - y.double()).abs(), x.double().abs()
        finite = error.isfinite() & size.isfinite()
        if bool(finite.any()) and bool((error[finite] > allowed * size[finite].max()).any()):
            return False
    sizes = [max(float(x.norm()), float(y.norm())) for x, y in zip(a.gradients, b.gradients)]
    largest = max((size for size in sizes if size == size and size != float("inf")), default=0.0)
    differences = [float((x.double() - y.double()).norm()) for x, y in zip(a.gradients, b.gradients)]
    return not any(d > allowed * max(size, _MINOR * largest) for d, size in zip(differences, sizes) if d == d)


@contextlib.contextmanager
def undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The block works on copies of the buffers, and random states are afterwards what they were before."""
    buffers = [(module, dict(module._buffers)) for root in modules for module in root.modules()]
    copies: dict[int, Tensor] = {}
    for module, held in buffers:
        for name, buffer in held.items():
            module._buffers[name] = None if buffer is None else copies.setdefault(id(buffer), buffer.clone())
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)

"""Do a row of the model's output, and its gradient, stay the same when other rows are taken away?

Mixing that leaves no gradient path (detached batch statistics, routing by rank in the batch, division by a batch count)
shows in no backward pass of the whole batch. So the captured module is run twice more, on a few examples and on half of
those, with every random draw held still and its buffers copied. For the examples that stayed, outputs must agree, and so
must the gradient of a random combination of them: a gate that is zero today hides mixing in the output, but not in its own
gradient.
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
from .layout import EvenGrouping, Layout, Table
from .marks import is_declared_constant
from .still import Still
from .tape import RootCall, Tape, outputs_in

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_FEW = 8  # examples in the larger of the two runs
_MINOR = 1e-2  # a parameter's gradient is compared on its own scale, but not below this share of the largest


@dataclass(frozen=True)
class _Selection:
    """Some examples of a batch, and how its rows are numbered."""

    batch: int
    order: str
    examples: list[int]

    @classmethod
    def draw(cls, batch: int, order: str, count: int) -> _Selection:
        return cls(batch, order, sorted(random.Random().sample(range(batch), count)))

    def of(self, larger: _Selection) -> _Selection:
        """The same examples as places in the larger selection."""
        return _Selection(len(larger.examples), self.order, [larger.examples.index(example) for example in self.examples])

    def rows(self, size: int) -> Tensor:
        """The rows of the examples that stay, along an axis of this length."""
        owners = EvenGrouping(size, self.batch, self.order if size > self.batch else "block").owners()
        return torch.nonzero(torch.isin(owners, torch.tensor(self.examples)))[:, 0]


@dataclass(frozen=True)
class _Run:
    outputs: list[Tensor]
    gradients: list[Tensor]


def check_rows_alone(tape: Tape, batch: int, nodes: set[Any], placements: Iterable[Layout | Table | None]) -> None:
    """Refuse if some output the losses use changes in a row when other examples leave."""
    layouts = [placement for placement in placements if isinstance(placement, Layout) and placement.axes]
    axes = [layout.axes[0] for layout in layouts]
    usual = max(axes, key=axes.count, default=0)
    order = next((layout.order for layout in layouts), "block")
    few = _Selection.draw(batch, order, min(batch, _FEW))
    fewer = _Selection(batch, order, sorted(random.Random().sample(few.examples, (len(few.examples) + 1) // 2)))
    parameters = list(tape.marks.trainable().values())
    for call in tape.root_calls[-2:]:
        used = [place for place, node in enumerate(call.output_nodes) if node is not None and node in nodes]
        if used:
            with tape.pause(), tape.eagerly(), undisturbed(tape.modules), torch.enable_grad():
                _check_call(call, used, few, fewer, usual, parameters)


def _check_call(call: RootCall, used: list[int], few: _Selection, fewer: _Selection, usual: int, parameters: list[Tensor]) -> None:
    error: Exception | None = None
    ways = list(_ways(call, few.batch, usual))
    for way in ways:
        runs = [{key: (axis, chosen.rows(size)) for key, (axis, size) in way.items()} for chosen in (few, fewer)]
        try:
            whole, part = _compared(call, used, fewer.of(few), parameters, runs)
        except _Differs:
            error = None
            continue
        except Exception as raised:  # the model cannot run on fewer rows
            error = raised
            continue
        if _same_outputs(whole, part) and _same_gradients(whole, part):
            return
        error = None
    if not ways:
        return
    name = type(call.module).__name__
    if error is not None:
        raise MixedExamples(
            f"{name} cannot be run on {len(fewer.examples)} of {fewer.batch} examples, so it cannot be shown that examples do "
            f"not mix ({type(error).__name__}: {error}).",
            "Let the model accept batches of any size; declare inputs that carry no examples with clipwise.constant(x).",
        ) from error
    raise MixedExamples(
        f"a row of {name}'s output, or its gradient, changes when other examples are taken out of the batch: examples mix in the forward pass.",
        "Remove statistics, ranks or counts over the batch from the model; declare inputs that carry no examples with clipwise.constant(x).",
    )


def _ways(call: RootCall, batch: int, usual: int) -> Iterator[dict[int, tuple[int, int]]]:
    """Ways to read the inputs, {id: (batch axis, its length)}, the likeliest first.

    Exactly one row an example if any input has that, else a multiple. Axis 0 before the axis the taps have. If that fails,
    the first input alone: others may share the batch's length by chance.
    """
    tensors = [tensor for tensor in outputs_in([call.args, call.kwargs]) if tensor.dim() and not is_declared_constant(tensor)]
    for multiple in (False, True):
        found = []
        for first in dict.fromkeys((0, usual, 1)):
            axes = {}
            for tensor in tensors:
                fits = [a for a in (first, 0, 1) if a < tensor.dim() and tensor.shape[a] and _fits(tensor.shape[a], batch, multiple)]
                if fits:
                    axes[id(tensor)] = (fits[0], tensor.shape[fits[0]])
            if axes and axes not in found:
                found.append(axes)
        if found:
            yield from found
            yield from [dict([next(iter(axes.items()))]) for axes in found if len(axes) > 1]
            return


def _fits(size: int, batch: int, multiple: bool) -> bool:
    return size % batch == 0 if multiple else size == batch


class _Differs(Exception):
    """The two runs differ in shape beyond a batch axis."""


def _compared(
    call: RootCall, used: list[int], staying: _Selection, parameters: list[Tensor], runs: list[dict[int, tuple[int, Tensor]]]
) -> tuple[_Run, _Run]:
    """Both runs, of the larger one only the rows that stay."""
    whole, part = (_outputs(call, chosen) for chosen in runs)
    kept, left, probes = [], [], []
    for place in used:
        a, b = whole[place], part[place]
        if a.shape == b.shape or not a.is_floating_point():
            continue  # no rows in it
        differing = [axis for axis in range(a.dim()) if a.dim() == b.dim() and a.shape[axis] != b.shape[axis]]
        if len(differing) != 1 or a.shape[differing[0]] % staying.batch:
            raise _Differs
        rows = staying.rows(a.shape[differing[0]]).to(a.device)
        kept.append(a.index_select(differing[0], rows))
        left.append(b)
        if kept[-1].shape != b.shape:
            raise _Differs
        row = torch.randn(b.narrow(differing[0], 0, 1).shape, device=b.device)
        probes.append(row.to(b.dtype).expand_as(b))
    return tuple(_Run([t.detach() for t in side], _gradients(side, probes, parameters)) for side in (kept, left))  # type: ignore[return-value]


def _gradients(outputs: list[Tensor], probes: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    wanted = [(output, probe) for output, probe in zip(outputs, probes) if output.requires_grad]
    if not wanted:
        return []
    found = torch.autograd.grad([o for o, _ in wanted], parameters, [p for _, p in wanted], allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g, p in zip(found, parameters)]


def _same_outputs(whole: _Run, part: _Run) -> bool:
    for a, b in zip(whole.outputs, part.outputs):
        error, size = (a.double() - b.double()).abs(), a.double().abs()
        finite = error.isfinite() & size.isfinite()
        if bool(finite.any()) and bool((error[finite] > TOLERANCE[a.dtype] * size[finite].max()).any()):
            return False
    return True


def _same_gradients(whole: _Run, part: _Run) -> bool:
    pairs = [(a.double(), b.double()) for a, b in zip(whole.gradients, part.gradients)]
    sizes = [max(float(a.norm()), float(b.norm())) for a, b in pairs]
    coarsest = max((TOLERANCE[output.dtype] for output in whole.outputs), default=0.0)
    largest = max((size for size in sizes if size == size and size != float("inf")), default=0.0)
    for (a, b), size, parameter in zip(pairs, sizes, whole.gradients):
        difference = float((a - b).norm())
        allowed = max(coarsest, TOLERANCE[parameter.dtype]) * max(size, _MINOR * largest)
        if difference == difference and difference > allowed:
            return False
    return True


def _outputs(call: RootCall, selection: dict[int, tuple[int, Tensor]]) -> list[Tensor]:
    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in selection:
                axis, rows = selection[id(value)]
                return value.detach().index_select(axis, rows.to(value.device))
            return value.detach().clone()
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(pick, value))
        if isinstance(value, list | tuple):
            return type(value)(map(pick, value))
        return {k: pick(v) for k, v in value.items()} if isinstance(value, dict) else value

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    with call.autocast(), Still():
        return outputs_in(call.module(*pick(tuple(call.args)), **pick(dict(call.kwargs))))


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

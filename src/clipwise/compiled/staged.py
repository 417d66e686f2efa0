"""The tail of an eager step as a program: what follows the backward pass of a large model, without the Python that works it out.

    sums, value, weights, finite = program(gradient and kept tensors of each tap, as they come; losses, 1/C²)

A recording (tail.py) copies what reached the taps to where its graph reads it; of a large model that is too much. Here the same
function is traced, from stand-ins that hold no numbers, and cut into stages (stages.py): a tap's norms are measured when it is heard,
and what nobody needs any more is let go while the backward pass goes on, as in every eager step. It fits batches of one size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..clipping import Clipping
from ..errors import ConsumedTape
from ..layout import Layout
from ..marks import Marks
from ..methods.base import Clipped
from ..numerics import number_on, without_autocast
from ..passes import Arrival
from ..tape import Tape
from ..taps import Record
from ..tracing import NotTraceable
from .agreement import coarsest
from .arrivals import Eagerly, Measured, are_same, clipped_sums, essence, example_slots, weight_shapes, with_row_numbers
from .in_place import Room
from .rows import mask, nobodys
from .stages import Running, Stages
from .sums_room import SumsRoom, place_for
from .trace import graph_of


@dataclass(frozen=True)
class Like:
    """A tensor without its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """What shows numbers several times, or leaves gaps between them, is written out."""
        is_plain = _is_dense(tensor)
        strides = tensor.stride() if is_plain else torch.empty(tensor.shape, device="meta").stride()
        return cls(tensor.shape, strides, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """With these strides, on which views that were traced rely."""
        return tensor if tensor.stride() == self.stride and not tensor.is_neg() else self.empty().copy_(tensor)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Noted:
    """What reached a tap, without the numbers of examples: its gradient, what it kept, the numbers of rows its weights were looked up by."""

    record: Record
    like: list[Like]
    fixed: dict[int, Tensor]  # those of them that hold no example data

    @classmethod
    def of(cls, arrival: Arrival, marks: Marks) -> Noted:
        record, grad, kept = with_row_numbers(arrival, marks)
        examples = example_slots(record)
        return cls(
            record,
            [Like.of(tensor) for tensor in (grad, *kept)],
            {1 + place: tensor for place, tensor in enumerate(kept) if place not in examples},
        )

    @property
    def nbytes(self) -> int:
        return sum(like.nbytes for like in self.like)

    def made_up(self, dice: torch.Generator) -> Arrival:
        """With numbers that are nobody's in place of those of examples; zeros for integers."""
        grad, *kept = (
            self.fixed[place] if place in self.fixed else nobodys(like.empty().zero_(), dice) for place, like in enumerate(self.like)
        )
        return self.record, grad, tuple(kept)


class Staged:
    """One program. `clipping` with norms in units of a bound that each call brings along. `replays`: its stages may become graphs."""

    def __init__(
        self, tape: Tape, noted: Sequence[Noted], layouts: Sequence[Layout], losses: Tensor, clipping: Clipping, *, replays: bool
    ):  # fmt: skip
        if any(like.device != losses.device for tap in noted for like in tap.like):
            raise NotTraceable("it lies on several devices.")
        if any(tap.record.hands_over is None for tap in noted):
            raise NotTraceable("what a recurrent kernel keeps is known only when it has run.")
        self._layouts = list(layouts)
        self._like = [tap.like for tap in noted]
        self._essences = {tap.record.key: essence(tap.record, tape.marks) for tap in noted}
        self._calls = {tap.record.key: weakref.ref(tap.record.use) for tap in noted}  # those that recipes hold come again
        self._weights = weight_shapes(tape.marks)
        self._hands_over = {tap.record.key: tap.record.hands_over for tap in noted}
        self._place = {tap.record.key: number for number, tap in enumerate(noted)}
        self._losses = Like.of(losses)
        self._mask = mask(len(losses), len(losses), losses.device)
        self._names: list[str] = []
        with FakeTensorMode(allow_non_fake_inputs=True):
            likes = [*(like for tap in noted for like in tap.like), self._losses, Like.of(self._mask)]
            inputs = [*(like.empty() for like in likes), torch.empty((), dtype=torch.float64, device=losses.device)]
        sizes = [len(tap.like) for tap in noted]
        with without_autocast():
            function = clipped_sums(tape, [tap.record for tap in noted], sizes, layouts, clipping, self._names)
            graph = graph_of(function, inputs, in_steps=True)
        self._precision = coarsest(graph, losses.device)
        parameters = tape.marks.trainable()
        summed = [weakref.ref(parameters[name]) for name in self._names]

        def place(number: int, total: Tensor) -> tuple[SumsRoom, Tensor] | None:
            return place_for(summed[number](), total) if number < len(summed) else None

        self._stages = Stages(graph, [*sizes, 3], Room(losses.device, self._precision) if replays else None, place)

    def fits(self, tape: Tape, losses: Tensor, layouts: dict[int, Layout]) -> bool:
        """Whether the taps behind these losses are those that were traced, with the examples where they were. Asked before the backward pass."""
        records = [record for tap in tape.taps if (record := tap()) is not None and record.key in self._place]
        if len(records) != len(self._place) or Like.of(losses) != self._losses or weight_shapes(tape.marks) != self._weights:
            return False
        try:
            return all(
                record.hands_over == self._hands_over[record.key]
                and layouts[record.key] == self._layouts[self._place[record.key]]
                and (record.use is self._calls[record.key]() or essence(record, tape.marks) == self._essences[record.key])
                for record in records
            )
        except NotTraceable:
            return False

    def __call__(self, tape: Tape, losses: Tensor, bound: float) -> tuple[Clipped, list[Record]]:
        """Clipped sums by a backward pass from losses that `fits`, and the taps that were heard. Norms are measured in units of `bound`."""
        heard: list[Record] = []
        running = self._stages.begin()

        def receive(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            heard.append(record)
            self._give(running, with_row_numbers((record, grad, kept), tape.marks))

        tape.backward(losses, torch.ones_like(losses), receive, retain_graph=False, known=True)
        return self._finished(running, losses.detach(), bound).clipped, heard

    def _give(self, running: Running, arrival: Arrival) -> None:
        record, grad, kept = arrival
        place = self._place.get(record.key)
        if place is None:
            raise _other_taps()
        running.give(place, [like.laid_out(tensor) for like, tensor in zip(self._like[place], (grad, *kept))])

    def _finished(self, running: Running, losses: Tensor, bound: float) -> Measured:
        running.give(len(self._like), [self._losses.laid_out(losses), self._mask, number_on(losses.device, bound**-2)])
        outputs = running.outputs()
        if outputs is None:
            raise _other_taps()
        *sums, value, squares, weights, finite = outputs
        return Measured(Clipped(dict(zip(self._names, sums)), weights, finite, value.to(losses.dtype), is_lent=True), squares)

    def is_right(self, noted: Sequence[Noted], losses: Tensor, bound: float, eagerly: Eagerly) -> bool:
        """Hold the program against the eager computation on numbers that are nobody's: what is decided here must not depend on a record.

        Its stages are held against themselves when they become graphs; they will be once more.
        """
        dice = torch.Generator(losses.device).manual_seed(0)
        others = [tap.made_up(dice) for tap in noted]
        other_losses = nobodys(losses, dice)
        self._stages.forget_recordings()
        running = self._stages.begin(in_place=False)
        for arrival in others:
            self._give(running, arrival)
        found, expected = self._finished(running, other_losses, bound), eagerly(others, other_losses)
        return are_same(found, expected, self._precision)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it shows every number of a stretch of memory once."""
    length = 1
    for step, size in sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if step != length:
            return False
        length *= size
    return True


def _other_taps() -> ConsumedTape:
    return ConsumedTape(
        "the backward pass reached other calls than in all steps before, though the forward pass made the same ones: nothing was made of it.",
        "Run the model again on this batch: that step, and those after it, take nothing for granted.",
    )

"""Backward passes to the taps: one that evaluates every tap as it is heard, and one that only holds on to what reached it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .gradients import ExampleGradients
from .layout import Layout, Table
from .planner import room_beside_a_pass
from .streams import Receive
from .tape import Tape
from .taps import Record

Arrival = tuple[Record, Tensor, tuple[Tensor, ...]]  # a tap, the gradient that reached it, what it kept
Placement = Callable[[Record], Layout | Table | None]  # where the examples lie at a tap; None: its gradient is zero


@dataclass(frozen=True)
class Heard:
    """A tap and the gradient that reached it, on the host where the device has little room."""

    record: Record
    grad: Tensor
    home: torch.device


def evaluate(
    tape: Tape, losses: Tensor, placement: Placement, *, keep_graph: bool, known: bool, noting: Receive | None = None
) -> tuple[ExampleGradients, list[Record]]:  # fmt: skip
    """The gradients of every example by one backward pass, and the taps that were heard. `noting` is told what each of them heard.

    Unless `keep_graph`, the pass frees what the forward pass kept as it goes: what one tap's factor holds on to takes its place.
    """
    gradients = ExampleGradients(tape, len(losses), losses.device, is_known=known, is_last=known and not keep_graph)
    waiting: list[Arrival] = []
    heard: list[Record] = []

    def add(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
        place = placement(record)
        if place is None:
            gradients.add_zero(record)
        else:
            gradients.add(record, grad, kept, place)

    def receive(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
        heard.append(record)
        if noting is not None:
            noting(record, grad, kept)
        if record.output is None:
            add(record, grad, kept)
        else:  # differentiated through a graph of its own, not within this pass
            waiting.append((record, grad, kept))

    tape.backward(losses, torch.ones_like(losses), receive, retain_graph=keep_graph or tape.needs_graph, known=known)
    with tape.pause():
        for one in waiting:
            add(*one)
        gradients.finish()
    return gradients, heard


def listen(tape: Tape, losses: Tensor) -> list[Heard]:
    """What reaches every tap. The graph stays."""
    heard: list[Heard] = []
    largest = max((shape.numel() for shape in tape.created.values()), default=0) * losses.element_size()
    room = room_beside_a_pass(losses.device, largest)

    def receive(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
        on_device = grad.device.type == "cpu" or room.take(grad.numel() * grad.element_size())
        heard.append(Heard(record, grad if on_device else grad.cpu(), grad.device))

    tape.backward(losses, torch.ones_like(losses), receive, retain_graph=True)
    return heard


def arrivals_at(tape: Tape, losses: Tensor) -> list[Arrival]:
    """What reaches every tap, in a pass that frees the graph as it goes. The way to the losses is known."""
    found: list[Arrival] = []
    tape.backward(losses, torch.ones_like(losses), lambda *arrival: found.append(arrival), retain_graph=False, known=True)
    return found


def gradients_from(tape: Tape, arrivals: Sequence[Arrival], layouts: Sequence[Layout], losses: Tensor) -> ExampleGradients:
    """The gradients of every example from what has reached the taps, of which nothing else will be asked."""
    gradients = ExampleGradients(tape, len(losses), losses.device, is_known=True, is_last=True)
    for (record, grad, kept), layout in zip(arrivals, layouts):
        gradients.add(record, grad, kept, layout)
    gradients.finish()
    return gradients

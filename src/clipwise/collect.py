"""From a vector of losses to the gradients of its examples: one backward pass to the taps, verified where it is new."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .again import repeatable_kernels
from .coverage import check_coverage, fingerprint, refuse_reentrant_checkpoints, taps_behind
from .errors import LossIndependent, LossShape
from .factors import Dense
from .gradients import ExampleGradients
from .layout import Layout
from .passes import evaluate, listen
from .tape import Tape
from .taps import Record
from .tracing import NotTraceable
from .verify import verified_gradients


def check_losses(tape: Tape, losses: Tensor) -> None:
    """One floating-point entry an example, made from the model, not used before."""
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point():
        got = f"a {losses.dtype} tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"{type(losses).__name__}"
        raise LossShape(f"losses must be a vector with one floating-point entry an example, got {got}.", _shape_repair(losses))
    tape.check_unused(losses)
    if tape.depth:  # calls inside it are not looked at one by one
        raise LossIndependent(
            "a forward pass of the model was broken off before these losses were computed, or is still going on.",
            "Run the model on this batch again, to its end, and use the new losses.",
        )
    if losses.grad_fn is None:
        raise LossIndependent("losses carry no gradient: they do not depend on the model.", _INDEPENDENT_REPAIR)


def _shape_repair(losses: object) -> str:
    if isinstance(losses, Tensor) and losses.dim() == 0:
        return (
            'Keep the examples apart: reduction="none", e.g. F.cross_entropy(output, target, reduction="none"); for the `.loss` of a '
            "Hugging Face language model: clipwise.token_losses(output.logits, labels). If a batch of one lost its axis: squeeze(-1), not squeeze()."
        )
    if isinstance(losses, Tensor) and losses.dim() == 2 and losses.shape[1] == 1:
        return "Drop the last axis: losses.squeeze(1); and compare the model's output with targets of the same shape."
    if isinstance(losses, Tensor) and losses.dim() > 1:
        return "Add up or average over everything but the examples: losses.flatten(1).mean(1)."
    return "Pass the tensor of losses, one entry an example."


_INDEPENDENT_REPAIR = "Compute them inside capture() with gradients enabled, from a model with trainable parameters (not under torch.no_grad(), not detached)."


@dataclass(frozen=True)
class Route:
    """How the losses were computed, as a number, and where the examples lie at each tap, if that was verified for all of them."""

    way: int
    layouts: dict[int, Layout] | None


def route_to(tape: Tape, losses: Tensor) -> Route:
    way = hash((fingerprint(losses), tape.trail, tuple(tape.marks.trainable())))
    experience, batch = tape.experience, len(losses)
    known = experience.layouts.get(way, {})
    if known and experience.has_fitted(way, batch, tape.created):
        return Route(way, known)
    odd = [key for key, shape in tape.created.items() if key not in known or not known[key].fits(shape, batch)]
    if odd and known:  # an output that the losses do not use has no gradient to be placed
        behind = taps_behind(losses)
        odd = [key for key in odd if key in behind]
    elif known:
        experience.fit(way, batch, tape.created)
    return Route(way, known if known and not odd else None)


def collect(tape: Tape, losses: Tensor, *, keep_graph: bool = False, route: Route | None = None) -> ExampleGradients:
    """The gradients of every example. `keep_graph` leaves the graph usable for another backward pass. `route`: where it was looked for already."""
    check_losses(tape, losses)
    tape.marks.check_buffers()
    found = tape.recall(losses)
    if found is None:
        found = (
            _collect_few(tape, losses, keep_graph)
            if len(losses) < 2
            else _collect(tape, losses, keep_graph, route or route_to(tape, losses))
        )
        if keep_graph:
            tape.remember(losses, found)
    return found


def _collect(tape: Tape, losses: Tensor, keep_graph: bool, route: Route) -> ExampleGradients:
    """One backward pass to the taps. Where the way to the losses is not known, others come before it."""
    known = route.layouts
    if tape.experience.is_time_to_look_again() or known is None:
        nodes = check_coverage(losses, tape.marks)
        with repeatable_kernels():
            first = listen(tape, losses)
            check_heard(tape, losses, [heard.record for heard in first])
            return verified_gradients(tape, losses, first, route.way, nodes, keep_graph)
    gradients, heard = evaluate(tape, losses, lambda record: known[record.key], keep_graph=keep_graph, known=True)
    check_heard(tape, losses, heard)
    return gradients


def collect_for_graph(tape: Tape, losses: Tensor, known: dict[int, Layout] | None = None) -> tuple[ExampleGradients, dict[int, Layout]]:
    """The gradients of every example while they are traced, and the layouts they are read by: those that eager steps have verified, or that are `known`."""
    check_losses(tape, losses)
    known = route_to(tape, losses).layouts if known is None else known
    if known is None or not tape.created:
        raise NotTraceable(_why_unknown(tape, len(losses)))
    if not taps_behind(losses) <= known.keys():
        raise NotTraceable(
            "what it does to a weight depends on random numbers (weights that are dropped), so that it cannot be tried out with these held still."
        )
    gradients, _ = evaluate(tape, losses, lambda record: known[record.key], keep_graph=False, known=True)
    return gradients, known


def _why_unknown(tape: Tape, batch: int) -> str:
    """Why nothing is known of where the examples lie."""
    if tape.moves.unknown:
        return f"it calls {', '.join(sorted(tape.moves.unknown))}, of which nobody knows whether it moves rows: each batch is measured."
    if tape.moves.dormant:
        return f"no gradient came to {', '.join(sorted(tape.moves.dormant))}, which may bring the examples together when one does: each batch is measured."
    if tape.moves.may_move_rows(batch, range(max((len(shape) for shape in tape.created.values()), default=0))):
        return "it sorts, picks or joins rows as the data says, so that where the examples lie is measured on every batch."
    return (
        "eager steps have not verified the calls that it makes when it is traced: its forward pass depends on how many rows there are, on a number "
        "that changes, or on whether it is traced."
    )


def check_heard(tape: Tape, losses: Tensor, heard: list[Record]) -> None:
    tape.check_unspent(losses, heard)
    if not heard:
        check_coverage(losses, tape.marks)  # names a use that the tape did not see, if there is one
        raise LossIndependent("no trainable parameter of the captured model lies behind these losses.", _INDEPENDENT_REPAIR)


def _collect_few(tape: Tape, losses: Tensor, keep_graph: bool) -> ExampleGradients:
    """No example: zeros. One example: its gradient is the gradient, there is nothing to keep apart."""
    parameters = tape.marks.trainable()
    gradients = ExampleGradients(tape, len(losses), losses.device)
    if len(losses) == 0:
        found: list[Tensor | None] = [torch.zeros_like(parameter) for parameter in parameters.values()]
    else:
        refuse_reentrant_checkpoints(losses)
        found = tape.backward(losses, torch.ones_like(losses), None, inputs=list(parameters.values()), retain_graph=keep_graph)
        if all(grad is None for grad in found):
            raise LossIndependent("no trainable parameter of the captured model lies behind these losses.", _INDEPENDENT_REPAIR)
    with tape.pause():
        for parameter, grad in zip(parameters.values(), found):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                gradients.add_factor(parameter, Dense(dense.expand(len(losses), *dense.shape)))
        gradients.finish()
    return gradients

"""Does the loss of one example change when other examples' outputs and targets are exchanged?

Between the model's output and the losses lies the user's own arithmetic. Mixing there may leave no gradient path: targets
of shape (B,) against outputs of shape (B, 1), weights from batch statistics, a detached mean. The tape has seen the torch
calls; they are run again with other examples' rows exchanged, and the remaining losses must not move.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import MixedExamples
from .functions import full_name
from .head import HeadCall
from .marks import EXAMPLE, Marks, tensors_in
from .rerun import TOLERANCE, undisturbed
from .still import Still
from .tape import Tape

_WEIGHTED_BY_CLASS = {F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.binary_cross_entropy_with_logits}


def check_losses_alone(tape: Tape, losses: Tensor) -> None:
    """Refuse if exchanging some examples' rows changes the losses of the others."""
    calls, batch = _needed(tape.head_calls, losses), len(losses)
    if not calls:
        return
    kept = torch.tensor(sorted(random.Random().sample(range(batch), (batch + 1) // 2)))
    source = torch.arange(batch)
    others = torch.ones(batch, dtype=torch.bool).index_fill_(0, kept, False)
    source[others] = kept[torch.randint(len(kept), (int(others.sum()),), generator=torch.Generator().manual_seed(random.getrandbits(32)))]
    with tape.pause(), undisturbed(tape.modules):
        try:
            plain = _run(calls, losses, None, tape.marks)
            exchanged = _run(calls, losses, source, tape.marks)
        except Exception:  # a call that cannot be run twice says nothing
            return
        before, after = plain[kept].double(), exchanged[kept].double()
        error, size = (after - before).abs(), before.abs()
        finite = error.isfinite() & size.isfinite()
        scale = size[finite].max() if bool(finite.any()) else size.new_zeros(())
        if bool((error[finite] > TOLERANCE[losses.dtype] * scale).any()):
            raise MixedExamples(
                "the loss of one example changes with the outputs or targets of other examples "
                f"(between the model's output and the losses: {', '.join(dict.fromkeys(full_name(call.func) for call in calls))}).",
                "Compare shapes: targets of shape (B,) against outputs of shape (B, 1) give a (B, B) matrix. Statistics over the batch "
                "(means, counts, ranks) do not belong into a loss per example; declare shared tensors with clipwise.constant(x).",
            )


def _needed(calls: list[HeadCall], losses: Tensor) -> list[HeadCall]:
    """The calls that lead to the losses, in order."""
    wanted = {id(losses)}
    needed = []
    for call in reversed(calls):
        if any(id(tensor) in wanted for tensor in tensors_in(call.result)):
            needed.append(call)
            wanted.update(id(tensor) for tensor in tensors_in((call.args, call.kwargs)))
    return needed[::-1]


def _class_weights(calls: list[HeadCall]) -> set[int]:
    """Arguments that have an entry a class, not an example, even where these are equally many."""
    found = [call.kwargs.get(name) for call in calls if call.func in _WEIGHTED_BY_CLASS for name in ("weight", "pos_weight")]
    found += [call.args[2] for call in calls if call.func in _WEIGHTED_BY_CLASS and len(call.args) > 2]
    return {id(tensor) for tensor in found if isinstance(tensor, Tensor)}


def _run(calls: list[HeadCall], losses: Tensor, source: Tensor | None, marks: Marks) -> Tensor:
    """The calls once more; every tensor from outside them that has a row an example takes row source[i] for row i."""
    made: dict[int, Any] = {}
    shared = _class_weights(calls)

    def fill(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in made:
                is_shared = id(value) in shared or marks.kind(value) != EXAMPLE
                made[id(value)] = _exchanged(value, None if is_shared else source, len(losses))
            return made[id(value)]
        if isinstance(value, list | tuple):
            return type(value)(map(fill, value))
        return value

    torch.manual_seed(0)
    with Still():
        for call in calls:
            result = call.func(*fill(tuple(call.args)), **{name: fill(value) for name, value in call.kwargs.items()})
            for old, new in zip(tensors_in(call.result), tensors_in(result)):
                made[id(old)] = new
    return made[id(losses)]


def _exchanged(tensor: Tensor, source: Tensor | None, batch: int) -> Tensor:
    axis = next((axis for axis in (0, 1) if axis < tensor.dim() and tensor.shape[axis] == batch), None)
    if source is None or axis is None:
        return tensor.detach().clone()
    return tensor.detach().index_select(axis, source.to(tensor.device))

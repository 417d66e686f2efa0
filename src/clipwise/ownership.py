"""A module belongs to one training at a time, and so do the gradients that lie on its parameters until they are noised."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from .block import Block
    from .intake import Intake
    from .ledger import Ledger
    from .training import PrivateTraining

_open: list[weakref.ref[Intake]] = []  # of open trainings
_handles: list[RemovableHandle] = []  # of the hook of all optimizers, while there are open trainings
_trainings: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PrivateTraining]] = weakref.WeakKeyDictionary()


def supersede(modules: Sequence[nn.Module]) -> None:
    """Close the training that these modules belonged to: a notebook's cell that is run again makes a new one."""
    for module in (m for root in modules for m in root.modules()):
        earlier = _trainings[module]() if module in _trainings else None
        if earlier is not None and not earlier.is_closed:
            earlier.close()
            if earlier.ledger.spent:
                warnings.warn(
                    f"an earlier PrivateTraining of this model was closed; the {earlier.ledger.spent} steps it took are not counted in the new one "
                    "(clipwise.compose adds them up)",
                    stacklevel=3,
                )


def take_over(modules: Sequence[nn.Module], training: PrivateTraining, intake: Intake) -> None:
    """From now on they belong to this training; and what it takes in, to no other optimizer."""
    _trainings.update(dict.fromkeys((m for root in modules for m in root.modules()), weakref.ref(training)))
    _open[:] = [*(ref for ref in _open if ref() is not None), weakref.ref(intake)]
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_any_step))


def let_go(intake: Intake) -> None:
    """Its training is closed."""
    _open[:] = [ref for ref in _open if ref() not in (None, intake)]
    if not _open:
        while _handles:
            _handles.pop().remove()


def left_behind(block: Block, unreleased: Sequence[Tensor], ledger: Ledger) -> None:
    """A training that is gone leaves no mode on, no sums without noise in p.grad, and its ledger to others."""
    block.remove()
    for parameter in unreleased:
        parameter.grad = None
    ledger.close()


def is_ours_alone(hooks: Collection[int]) -> bool:
    """Whether nobody else listens to every optimizer's steps."""
    return {handle.id for handle in _handles}.issuperset(hooks)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for ref in _open:
        intake = ref()
        if intake is not None and intake.pending.sums:
            intake.check_stranger(optimizer)

"""A module belongs to one training at a time."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .training import PrivateTraining

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


def take_over(modules: Sequence[nn.Module], training: PrivateTraining) -> None:
    _trainings.update(dict.fromkeys((m for root in modules for m in root.modules()), weakref.ref(training)))

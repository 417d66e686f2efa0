"""What was clipped since the last step. These sums, not p.grad, are what gets noise and is released."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .footprints import Footprint
from .methods import Clipped


@dataclass
class Handed:
    """What one call of private.loss came to."""

    entries: int
    parameters: list[Tensor]
    clipped: Clipped
    rows: list[Footprint]
    counts: bool  # not the placeholder of an empty draw
    position: int  # the step it was clipped for
    done: bool = False  # back-propagated

    def centred_count(self) -> float:
        """Σ (b_i − ½), b_i whether the gradient of example i lay within the bound. One example moves it by a half."""
        weights = self.clipped.weights
        return float((weights >= 1).sum()) - 0.5 * len(weights)


@dataclass
class Pending:
    """A step in the making."""

    sums: dict[int, Tensor] = field(default_factory=dict)  # by id of the parameter, in float32 or wider
    entries: int = 0
    handed: list[Handed] = field(default_factory=list)
    rows: list[Footprint] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)  # optimizers that have taken their part

    def add(self, handed: Handed) -> None:
        handed.done = True
        for parameter, total in zip(handed.parameters, handed.clipped.sums.values()):
            key = id(parameter)
            self.sums[key] = self.sums[key] + total if key in self.sums else total
        handed.clipped.sums.clear()
        self.entries += handed.entries
        self.handed.append(handed)
        self.rows += handed.rows

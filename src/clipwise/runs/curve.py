"""Accuracy, loss and ε over steps: as CSV, and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from ..budget import rounded_up
from ..files import write_whole
from ..plan import PrivacyPlan
from ..plots import new_figure, save_figure


class Point(NamedTuple):
    """What is known of a training at the end of an epoch."""

    step: int
    epsilon: float
    accuracy: float  # on examples that were declared public, as the loss
    loss: float = math.nan  # checkpoints of the first version have none


class Curve:
    """One point an epoch."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.points: list[Point] = []

    def save(self, plan: PrivacyPlan) -> list[Path]:
        """curve.csv and, where matplotlib is installed, curve.png. Returns what was written."""
        lines = [
            "step,epsilon,public_accuracy,public_loss",
            *(f"{p.step},{rounded_up(p.epsilon, 7)},{p.accuracy:.6f},{p.loss:.6f}" for p in self.points),
        ]
        write_whole(self.folder / "curve.csv", "\n".join(lines) + "\n")
        try:
            self._plot(plan)
        except ImportError:
            return [self.folder / "curve.csv"]
        return [self.folder / "curve.csv", self.folder / "curve.png"]

    def _plot(self, plan: PrivacyPlan) -> None:
        """Accuracy and ε above, loss below, over the same steps."""
        figure = new_figure()
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        right = upper.twinx()
        steps = [point.step for point in self.points]
        [accuracy] = upper.plot(steps, [100 * point.accuracy for point in self.points], "o-", color="#2b6cb0", label="accuracy (left)")
        [epsilon] = right.plot(
            steps, [point.epsilon for point in self.points], "s--", color="#c05621", markersize=4, label=f"ε at δ = {plan.delta:g} (right)"
        )
        lower.plot(steps, [point.loss for point in self.points], "o-", color="#2b6cb0")
        upper.set(ylabel="accuracy [%]", xlim=(0, None))
        right.set(ylim=(0, None))
        right.set_ylabel("ε", rotation=0, labelpad=8)
        lower.set(xlabel="optimizer steps", ylabel="loss")
        upper.set_title(
            f"On public examples; {plan.sampler.replace('_', ' ')} sampling, {plan.batch_size} of {plan.dataset_size} a step", fontsize=11
        )
        upper.legend(handles=[accuracy, epsilon], loc="lower right")
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
        save_figure(figure, self.folder / "curve.png")

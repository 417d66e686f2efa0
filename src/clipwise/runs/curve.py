"""Accuracy and ε over steps: as CSV, and as a picture."""

from __future__ import annotations

from pathlib import Path

from ..files import write_whole
from ..plan import PrivacyPlan
from ..plots import new_figure, save_figure


class Curve:
    """Rows of (step, ε, accuracy on public examples)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: list[tuple[int, float, float]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, step: int, epsilon: float, accuracy: float) -> None:
        self.rows.append((step, epsilon, accuracy))

    @property
    def last_accuracy(self) -> float:
        return self.rows[-1][2] if self.rows else 0.0

    def save(self, plan: PrivacyPlan) -> list[Path]:
        """curve.csv and, where matplotlib is installed, curve.png. Returns what was written."""
        lines = ["step,epsilon,public_accuracy", *(f"{step},{epsilon:.6f},{accuracy:.6f}" for step, epsilon, accuracy in self.rows)]
        write_whole(self.folder / "curve.csv", "\n".join(lines) + "\n")
        try:
            self._plot(plan)
        except ImportError:
            return [self.folder / "curve.csv"]
        return [self.folder / "curve.csv", self.folder / "curve.png"]

    def _plot(self, plan: PrivacyPlan) -> None:
        figure = new_figure()
        left = figure.add_subplot()
        right = left.twinx()
        steps = [row[0] for row in self.rows]
        [accuracy] = left.plot(
            steps, [100 * row[2] for row in self.rows], "o-", color="#2b6cb0", label="accuracy on public examples (left)"
        )
        [epsilon] = right.plot(
            steps, [row[1] for row in self.rows], "s--", color="#c05621", markersize=4, label=f"ε at δ = {plan.delta:g} (right)"
        )
        left.set(xlabel="optimizer steps", ylabel="accuracy [%]", xlim=(0, None))
        right.set(ylabel="ε", ylim=(0, None))
        left.set_title(f"{plan.sampler.replace('_', ' ')} sampling, {plan.batch_size} of {plan.dataset_size} a step", fontsize=11)
        left.grid(alpha=0.3)
        left.legend(handles=[accuracy, epsilon], loc="lower right")
        save_figure(figure, self.folder / "curve.png")

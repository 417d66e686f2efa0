"""Pictures for reports, by matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .budget import Budget
from .files import write_whole
from .plan import PrivacyPlan


def new_figure() -> Any:
    """A figure of the size that all pictures have, drawn without a screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need the package matplotlib: pip install "clipwise[plot]"') from error
    figure = Figure(figsize=(7, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """As a PNG that is whole or not there."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(path, buffer.getvalue())


def plot_epsilon(path: str | Path, points: list[tuple[int, float]], spent: int, budget: Budget, plan: PrivacyPlan) -> None:
    """ε over steps, with the point that the training has reached."""
    figure = new_figure()
    axes = figure.add_subplot()
    steps, values = zip(*points)
    axes.plot(steps, values, color="#2b6cb0", linewidth=2, label=f"the plan, {plan.steps} steps")
    axes.plot([spent], [budget.epsilon], "o", color="#c05621", markersize=8, label=f"spent: ε = {budget.rounded_up()} after {spent} steps")
    axes.set(xlabel="optimizer steps", ylabel=f"ε at δ = {plan.delta:g}", xlim=(0, None), ylim=(0, None))
    axes.set_title(
        f"Privacy spent: {plan.sampler.replace('_', ' ')} sampling, {plan.relation.replace('_', ' ')}, {budget.accountant}", fontsize=11
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)

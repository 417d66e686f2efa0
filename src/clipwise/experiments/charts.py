"""The figures as pictures, in the paper's form: seconds an epoch on a log scale, groups of bars; lines where the groups are numbers."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from ..plots import new_figure, save_figure
from .case import Case
from .contenders import NXBP
from .figure import Figure, Measured
from .largest_batch import MOST
from .timing import OUT_OF_MEMORY

# Okabe & Ito's colours, which people who see fewer colours can tell apart
_COLOURS = {
    "non-private": "#999999", "nxBP": "#D55E00", "multiLoss": "#E69F00", "ReweightGP": "#56B4E9", "bookkeep": "#0072B2",
    "compiled": "#009E73", "Opacus hooks": "#CC79A7", "Opacus ghost": "#8B5A83",
}  # fmt: skip
_MARKERS = "osD^vP*X"
_LEGEND_ENTRY = 1.25  # inches


def save_chart(figure: Figure, measured: Measured, path: Path, note: str) -> None:
    """One panel beside the other, each as wide as it has bars. `note` stands below: machine and data."""
    panels, methods = measured.panels(), measured.methods()
    widths = [max(1.6, len(measured.cases(panel)) * (0.3 + 0.17 * len(methods))) for panel in panels]
    canvas = new_figure()
    canvas.set_size_inches(min(15.0, max(7.0, sum(widths) + 1.2)), 4.4)
    axes = canvas.subplots(1, len(panels), width_ratios=widths, sharey=True, squeeze=False)[0]
    values = [value for case in measured.cases() for method in methods if (value := _value(figure, measured, case, method))]
    floor = min(values, default=1.0) / 1.6
    for place, panel in zip(axes, panels):
        draw = _lines if figure.lines else _bars
        draw(place, figure, measured, measured.cases(panel), methods, floor)
        place.set_yscale("log")
        place.set_ylim(floor, max(values, default=1.0) * 1.6)
        place.set_title(panel, fontsize=11)
        place.set_xlabel(figure.axis)
        place.grid(axis="y", which="major", alpha=0.3)
        place.set_axisbelow(True)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("largest batch (log scale)" if figure.largest_batch else "seconds an epoch (log scale)")
    handles, labels = axes[0].get_legend_handles_labels()
    lines = math.ceil(len(labels) * _LEGEND_ENTRY / canvas.get_size_inches()[0])
    canvas.legend(handles, labels, loc="outside upper center", ncols=math.ceil(len(labels) / lines), frameon=False, fontsize=9)
    canvas.supxlabel("\n".join(textwrap.wrap(note, int(canvas.get_size_inches()[0] * 15))), fontsize=7.5, color="#555555")
    save_figure(canvas, path)


def _value(figure: Figure, measured: Measured, case: Case, method: str) -> float | None:
    if figure.largest_batch:
        found = measured.of(case, method)
        return None if found is None else found.largest_batch
    return measured.epoch(case, method)


def _bars(place: Any, figure: Figure, measured: Measured, cases: list[Case], methods: list[str], floor: float) -> None:
    """Above a bar: how many times faster than nxBP it is, where it is one of ours; or the batch itself."""
    width = 0.84 / len(methods)
    for number, method in enumerate(methods):
        at = [group - 0.42 + (number + 0.5) * width for group in range(len(cases))]
        heights = [_value(figure, measured, case, method) for case in cases]
        bars = [(x, height, case) for x, height, case in zip(at, heights, cases) if height]
        place.bar([x for x, _, _ in bars], [height for _, height, _ in bars], width * 0.92, label=method, color=_COLOURS[method])
        for x, case in zip(at, cases):
            found = measured.of(case, method)
            if found is not None and found.why_not == OUT_OF_MEMORY:
                place.text(x, floor * 1.1, "out of memory", rotation=90, ha="center", va="bottom", fontsize=7, color=_COLOURS[method])
        for x, height, case in bars:
            if figure.largest_batch:
                place.text(
                    x, height * 1.04, f"{'≥ ' if height >= MOST else ''}{height:g}", ha="center", va="bottom", fontsize=8, color="#333333"
                )
            else:
                place.text(
                    x, height * 1.08, _faster(measured, case, method), rotation=90, ha="center", va="bottom", fontsize=7, color="#333333"
                )
    place.set_xticks(range(len(cases)), [case.label for case in cases])


def _faster(measured: Measured, case: Case, method: str) -> str:
    faster = measured.ratio(case, NXBP, method)
    return (
        ""
        if faster is None or method not in ("ReweightGP", "bookkeep", "compiled")
        else f"{faster:.2g}×"
        if faster < 9.95
        else f"{faster:.0f}×"
    )


def _lines(place: Any, figure: Figure, measured: Measured, cases: list[Case], methods: list[str], floor: float) -> None:
    for number, method in enumerate(methods):
        points = [(int(case.label), value) for case in cases if (value := _value(figure, measured, case, method))]
        place.plot(
            [x for x, _ in points], [y for _, y in points], marker=_MARKERS[number % len(_MARKERS)], label=method, color=_COLOURS[method], linewidth=2
        )  # fmt: skip
    place.set_xticks([int(case.label) for case in cases])

"""What a run of figures leaves behind: JSON and CSV with every number, tables on the screen."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import write_whole
from .case import Case
from .contenders import NONPRIVATE, NXBP
from .figure import Figure, Measured
from .largest_batch import largest_batch, memory_of
from .timing import Measurement, Settings, measure

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """Figures that were measured in one go, and under which circumstances."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    figures: list[tuple[Figure, Measured]]


def measure_figure(
    figure: Figure, methods: Sequence[str], settings: Settings, *, quick: bool, memory_gigabytes: float | None, say: Say
) -> Measured:
    """Every case of a figure by every way; each line is said when it is known."""
    chosen = [method for method in methods if figure.methods is None or method in figure.methods]
    rows: list[tuple[Case, Measurement]] = []
    for case in figure.cases(quick):
        with memory_of(memory_gigabytes):
            if figure.largest_batch:
                found = [Measurement(method, largest_batch=largest_batch(case, method, settings)) for method in chosen]
            else:
                found = measure(case, chosen, settings)
        rows += [(case, measurement) for measurement in found]
        for line in table_lines(case, Measured(rows)):
            say(line)
    return Measured(rows)


TABLE_HEAD = f"  {'case':26s} {'method':13s} {'s/epoch':>10s} {'x ordinary':>11s} {'speed-up':>9s} {'peak GB':>8s}"


def table_lines(case: Case, measured: Measured) -> Iterator[str]:
    """One line a way: seconds an epoch, times an ordinary epoch, times faster than nxBP."""
    name = f"{case.panel}, {case.label}"[:26]
    for at, found in measured.rows:
        if at != case or not found.is_shown:
            continue
        if found.largest_batch is not None:
            yield f"  {name:26s} {found.method:13s} largest batch {found.largest_batch}"
        elif found.why_not is not None:
            yield f"  {name:26s} {found.method:13s} {found.why_not:>10s}"
        else:
            columns = (measured.ratio(case, found.method, NONPRIVATE), measured.ratio(case, NXBP, found.method), found.peak_gigabytes)
            ordinary, faster, memory = ("" if value is None else f"{value:.2f}" for value in columns)
            yield f"  {name:26s} {found.method:13s} {measured.epoch(case, found.method):10.2f} {ordinary:>11s} {faster:>9s} {memory:>8s}"
        name = ""


def as_json(run: Run) -> dict[str, Any]:
    return {
        "machine": run.machine,
        "settings": run.settings,
        "figures": {
            figure.name: {
                "rows": list(_flat_rows(figure, measured)),
                "statements": [{"paper": s.paper, "measured": s.measured(measured)} for s in figure.statements],
            }
            for figure, measured in run.figures
        },
    }


def _flat_rows(figure: Figure, measured: Measured) -> Iterator[dict[str, Any]]:
    for case, found in measured.rows:
        yield {
            "figure": figure.name, **asdict(case), **asdict(found), "seconds_an_epoch": measured.epoch(case, found.method),
            "times_ordinary": measured.ratio(case, found.method, NONPRIVATE), "times_faster_than_nxbp": measured.ratio(case, NXBP, found.method),
        }  # fmt: skip


def from_json(runs: Sequence[dict[str, Any]], figures: dict[str, Figure]) -> Run:
    """Runs that were written before, to draw their figures again on one page; all on the machine of the first."""
    read: list[tuple[Figure, Measured]] = []
    alike = [{**run["machine"], **run["settings"], "methods": "", "memory_gigabytes": None} for run in runs]
    if any(other != alike[0] for other in alike):
        raise ValueError("these runs were measured on different machines, days or settings: draw each on a page of its own")
    for name, content in (item for run in runs for item in run["figures"].items()):
        rows = [
            (Case(**{key: row[key] for key in Case.__dataclass_fields__}), Measurement(**{key: row[key] for key in Measurement.__dataclass_fields__}))
            for row in content["rows"]
        ]  # fmt: skip
        read.append((figures[name], Measured(rows)))
    return Run(runs[0]["machine"], runs[0]["settings"], read)


def save_numbers(run: Run, folder: Path) -> list[Path]:
    """results.json and results.csv."""
    rows = [row for figure, measured in run.figures for row in _flat_rows(figure, measured)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) + list(run.machine) + list(run.settings) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **run.machine, **run.settings} for row in rows)
    write_whole(folder / "results.json", json.dumps(as_json(run), indent=1) + "\n")
    write_whole(folder / "results.csv", text.getvalue())
    return [folder / "results.json", folder / "results.csv"]

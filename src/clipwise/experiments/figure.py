"""What a figure of the paper is made of, and what was measured for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .case import Case
from .contenders import NONPRIVATE, NXBP
from .timing import Measurement


@dataclass(frozen=True)
class Statement:
    """Something the paper says, and how to tell from measurements what they say about it."""

    paper: str
    measured: Callable[[Measured], str]


@dataclass(frozen=True)
class Figure:
    """Seconds an epoch over cases, one bar for each way to clip; or the largest batch, for the figure of memory."""

    name: str
    title: str
    about: str
    axis: str  # what the groups of bars are
    cases: Callable[[bool], list[Case]]  # quick or not
    statements: tuple[Statement, ...]
    lines: bool = False  # drawn as lines, where the groups are numbers
    largest_batch: bool = False
    methods: tuple[str, ...] | None = None  # if not all


class Measured:
    """The measurements of one figure, by case and way."""

    def __init__(self, rows: Sequence[tuple[Case, Measurement]]):
        self.rows = list(rows)

    def cases(self, panel: str | None = None) -> list[Case]:
        found = dict.fromkeys(case for case, _ in self.rows)
        return [case for case in found if panel is None or case.panel == panel]

    def panels(self) -> list[str]:
        return list(dict.fromkeys(case.panel for case, _ in self.rows))

    def methods(self) -> list[str]:
        """Ways that were tried somewhere; one that could be tried nowhere is left out."""
        return list(dict.fromkeys(found.method for _, found in self.rows if found.is_shown))

    def of(self, case: Case, method: str) -> Measurement | None:
        return next((found for at, found in self.rows if at == case and found.method == method), None)

    def epoch(self, case: Case, method: str) -> float | None:
        """Seconds an epoch: the median step times the steps."""
        found = self.of(case, method)
        return None if found is None or found.seconds is None else found.seconds * case.steps_an_epoch

    def ratio(self, case: Case, slow: str, fast: str) -> float | None:
        """How many times faster one way is than another."""
        a, b = self.epoch(case, slow), self.epoch(case, fast)
        return None if a is None or b is None else a / b

    def speedups(self, method: str, panel: str | None = None) -> list[tuple[str, float]]:
        """[(label, times faster than nxBP)]"""
        found = [(f"{case.label}, {case.panel}", self.ratio(case, NXBP, method)) for case in self.cases(panel)]
        return [(label, ratio) for label, ratio in found if ratio is not None]


def spell(values: Sequence[tuple[str, float]], unit: str = "×") -> str:
    """MLP 3.1×, CNN 2.0×"""
    return ", ".join(f"{label} {value:.3g}{unit}" for label, value in values) or "not measured"


def range_of(values: Sequence[tuple[str, float]], unit: str = "×") -> str:
    """2.0× to 3.1×"""
    if not values:
        return "not measured"
    low, high = min(value for _, value in values), max(value for _, value in values)
    return f"{low:.3g}{unit}" if len(values) == 1 else f"{low:.3g}{unit} to {high:.3g}{unit}"


def speedups(measured: Measured, panel: str | None = None) -> str:
    """Over nxBP, as the paper prints them."""
    parts = [f"{method} {range_of(measured.speedups(method, panel))}" for method in measured.methods() if method not in (NONPRIVATE, NXBP)]
    return "; ".join(parts)


def over_nxbp(measured: Measured, panel: str | None = None) -> str:
    return "over nxBP: " + speedups(measured, panel)


def overhead(measured: Measured) -> str:
    """Over ordinary training."""
    parts = []
    for method in measured.methods():
        ratios = [(case.label, measured.ratio(case, method, NONPRIVATE)) for case in measured.cases()]
        found = [(label, ratio) for label, ratio in ratios if ratio is not None]
        if method != NONPRIVATE:
            parts.append(f"{method} {range_of(found)}")
    return "; ".join(parts)

"""Seconds an epoch by depth of an MLP, B = 128 (paper, Figure "Comparison of performance by varying number of hidden layers")."""

from __future__ import annotations

from .case import Case, title_of
from .contenders import COMPILED
from .figure import Figure, Measured, Statement, over_nxbp, spell


def cases(quick: bool) -> list[Case]:
    return [
        Case(title_of(data), f"{depth}", f"mlp-{depth}", data, 128)
        for data in ("mnist", "fashion-mnist", "cifar10")
        for depth in (2, 4, 6, 8)
    ]


def _fmnist_two_layers(measured: Measured) -> str:
    found = []
    for case in measured.cases("FMNIST"):
        if case.label == "2":
            ratios = ((method, measured.ratio(case, "nxBP", method)) for method in ("ReweightGP", "bookkeep", COMPILED))
            found += [(method, ratio) for method, ratio in ratios if ratio is not None]
    return f"over nxBP there: {spell(found)}"


FIGURE = Figure(
    name="depth",
    title="By depth of an MLP, B = 128",
    about="Seconds an epoch for 2, 4, 6 and 8 hidden layers.",
    axis="hidden layers",
    cases=cases,
    statements=(
        Statement("ReweightGP is much faster than nxBP on all three data sets.", over_nxbp),
        Statement("94 times faster than nxBP on FMNIST with two hidden layers, the paper's best.", _fmnist_two_layers),
    ),
)

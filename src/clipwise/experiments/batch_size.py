"""Seconds an epoch by batch size on MNIST (paper, Figure "Execution time by varying batch size")."""

from __future__ import annotations

from .case import Case
from .contenders import NONPRIVATE, NXBP
from .figure import Figure, Measured, Statement, over_nxbp

_MODELS = {"mlp": "MLP", "cnn": "CNN", "rnn": "RNN"}


def cases(quick: bool) -> list[Case]:
    return [Case(title, f"{size}", model, "mnist", size) for model, title in _MODELS.items() for size in (16, 32, 64, 128)]


def _from_smallest_to_largest(measured: Measured) -> str:
    parts = []
    for method in (NONPRIVATE, NXBP, "ReweightGP", "bookkeep"):
        changes = []
        for panel in measured.panels():
            small, *_, large = measured.cases(panel)
            before, after = measured.epoch(small, method), measured.epoch(large, method)
            if before is not None and after is not None:
                changes.append(f"{after / before:.2f}")
        parts.append(f"{method} ×{'/'.join(changes)}")
    return f"an epoch at the largest batch over one at the smallest ({'/'.join(measured.panels())}): " + ", ".join(parts)


FIGURE = Figure(
    name="batch-size",
    title="By batch size, MNIST",
    about="Seconds an epoch for batches of 16, 32, 64 and 128.",
    axis="batch size",
    cases=cases,
    statements=(
        Statement("Non-private and ReweightGP get faster with larger batches; nxBP takes the same time whatever the batch.", _from_smallest_to_largest),
        Statement("At B = 128 ReweightGP is 54 to 94 times faster than nxBP (all models, GTX 1080 Ti).", lambda m: "at B = 128 " + over_nxbp(_at_128(m))),
    ),
)  # fmt: skip


def _at_128(measured: Measured) -> Measured:
    return Measured([(case, found) for case, found in measured.rows if case.batch_size == 128])

"""Seconds an epoch by architecture, B = 32 (paper, Figure "Comparison of performance by varying architectures")."""

from __future__ import annotations

from .case import Case, title_of
from .contenders import NONPRIVATE
from .figure import Figure, Measured, Statement, over_nxbp, spell

_MODELS = {"mlp": "MLP", "cnn": "CNN", "rnn": "RNN", "lstm": "LSTM"}


def cases(quick: bool) -> list[Case]:
    images = [
        Case(title_of(data), label, model, data, 32) for data in ("mnist", "fashion-mnist", "cifar10") for model, label in _MODELS.items()
    ]
    return [*images, Case(title_of("imdb"), "Transformer", "transformer", "imdb", 32)]


def _lstm(measured: Measured) -> str:
    """The LSTM's epoch over the MLP's, by both of our ways and without privacy."""
    first = measured.panels()[0]
    by_label = {case.label: case for case in measured.cases(first)}
    found = []
    for method in (NONPRIVATE, "ReweightGP", "bookkeep"):
        lstm, mlp = (measured.epoch(by_label[label], method) for label in ("LSTM", "MLP"))
        if lstm is not None and mlp is not None:
            found.append((method, lstm / mlp))
    return f"the LSTM's epoch over the MLP's on {first}: {spell(found)}. Here recurrent layers run through the stock kernels."


FIGURE = Figure(
    name="architecture",
    title="By architecture, B = 32",
    about="Seconds an epoch of the paper's five networks; the Transformer is trained on IMDB.",
    axis="network",
    cases=cases,
    statements=(
        Statement("ReweightGP reduces the time of an epoch on all five architectures.", over_nxbp),
        Statement("The LSTM takes much longer than the other networks: per-example gradients rule out cuDNN's implementation.", _lstm),
    ),
)

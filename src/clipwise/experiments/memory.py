"""The largest batch before memory runs out, ResNet-101 at 256² (paper, Section "Memory"). On a GPU only."""

from __future__ import annotations

from .case import Case
from .contenders import NONPRIVATE
from .figure import Figure, Measured, Statement
from .largest_batch import MOST

PAPERS_GIGABYTES = 11.0  # of its GeForce GTX 1080 Ti
_LARGE, _SMALL = "ResNet-101, 256 × 256", "ResNet-18, 32 × 32"


def cases(quick: bool) -> list[Case]:
    return [
        Case("largest batch", _LARGE, "resnet101", "lsun", 32, 256),
        Case("largest batch", _SMALL, "resnet18", "lsun", 512, 32),
    ]


def _batches(measured: Measured, label: str) -> dict[str, int]:
    return {m.method: m.largest_batch for case, m in measured.rows if case.label == label and m.largest_batch is not None}


def _large(measured: Measured) -> str:
    found = _batches(measured, _LARGE)
    text = "first failed at " + ", ".join(f"{method} {size + 1}" for method, size in found.items())
    ordinary = found.get(NONPRIVATE)
    if ordinary:
        shares = ", ".join(f"{method} {size / ordinary:.2f}" for method, size in found.items() if method != NONPRIVATE)
        text += f". Largest batch over the ordinary one: {shares} (ReweightGP in the paper: 0.75)"
    return text


def _small(measured: Measured) -> str:
    found = _batches(measured, _SMALL)
    return "largest batch: " + ", ".join(f"{method} {size}{' or more' if size >= MOST else ''}" for method, size in found.items())


FIGURE = Figure(
    name="memory",
    title="Largest batch before memory runs out",
    about="As many examples as fit into one step.",
    axis="network",
    cases=cases,
    statements=(
        Statement("ResNet-101 at 256 × 256 in 11 GB first fails at: non-private 48, ReweightGP 36, multiLoss 18.", _large),
        Statement("ReweightGP trains ResNet-18 on 32 × 32 pictures at B = 500.", _small),
    ),
    largest_batch=True,
    methods=(NONPRIVATE, "multiLoss", "ReweightGP", "bookkeep"),
)

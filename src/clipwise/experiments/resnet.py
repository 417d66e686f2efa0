"""ResNets on LSUN at 64² and 256², B = 20, BatchNorm frozen (paper, Figure "Performance evaluation on ResNet and VGG networks")."""

from __future__ import annotations

from .case import Case
from .figure import Figure, Measured, Statement, over_nxbp
from .timing import OUT_OF_MEMORY


def cases(quick: bool) -> list[Case]:
    sizes, batch = ((64,), 4) if quick else ((64, 256), 20)
    return [
        Case(f"ResNet, {size} × {size}", f"{depth}", f"resnet{depth}", "lsun", batch, size) for size in sizes for depth in (18, 34, 50, 101)
    ]


def by_panel(measured: Measured) -> str:
    return ". ".join(f"{panel}: {over_nxbp(measured, panel)}" for panel in measured.panels())


def multiloss_memory(measured: Measured) -> str:
    found = [f"{case.panel}: {case.label}" for case, m in measured.rows if m.method == "multiLoss" and m.why_not == OUT_OF_MEMORY]
    return (
        f"multiLoss ran out of memory on {', '.join(found)}"
        if found
        else "multiLoss had enough memory (--memory 11 shows the paper's card)"
    )


FIGURE = Figure(
    name="resnet",
    title="ResNets on LSUN's shapes",
    about="Seconds an epoch of 10 000 pictures, BatchNorm frozen.",
    axis="ResNet",
    cases=cases,
    statements=(
        Statement("ReweightGP beats nxBP and multiLoss; much at 64 × 64, less at 256 × 256.", by_panel),
        Statement("multiLoss ran out of memory (11 GB) on ResNet-101 at 256 × 256.", multiloss_memory),
    ),
)

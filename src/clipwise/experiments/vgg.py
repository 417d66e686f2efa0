"""VGGs on LSUN at 64², B = 20 (paper, Figure "Performance evaluation on ResNet and VGG networks")."""

from __future__ import annotations

from .case import Case
from .figure import Figure, Statement, over_nxbp
from .resnet import multiloss_memory


def cases(quick: bool) -> list[Case]:
    depths, batch = ((11,), 2) if quick else ((11, 13, 16, 19), 20)
    return [Case("VGG, 64 × 64", f"{depth}", f"vgg{depth}", "lsun", batch, 64) for depth in depths]


FIGURE = Figure(
    name="vgg",
    title="VGGs on LSUN's shapes",
    about="Seconds an epoch of 10 000 pictures.",
    axis="VGG",
    cases=cases,
    statements=(
        Statement("ReweightGP beats nxBP.", over_nxbp),
        Statement("multiLoss ran out of memory (11 GB) on all VGGs.", multiloss_memory),
    ),
)

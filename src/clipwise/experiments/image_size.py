"""ResNet-18 by the size of its pictures, B = 32 (paper, Figure "Processing time by image resolution")."""

from __future__ import annotations

from .case import Case
from .contenders import COMPILED
from .figure import Figure, Measured, Statement, spell


def cases(quick: bool) -> list[Case]:
    sizes = (32, 48, 64) if quick else (32, 64, 128, 192, 256)
    return [Case("ResNet-18", f"{size}", "resnet18", "lsun", 8 if quick else 32, size) for size in sizes]


def _by_size(measured: Measured) -> str:
    parts = []
    for method in ("ReweightGP", "bookkeep", COMPILED):
        found = [(f"{case.label}²", measured.ratio(case, "nxBP", method)) for case in measured.cases()]
        parts.append(f"{method} {spell([(label, ratio) for label, ratio in found if ratio is not None])}")
    return "over nxBP: " + "; ".join(parts)


FIGURE = Figure(
    name="image-size",
    title="By image size, ResNet-18",
    about="Seconds an epoch of 10 000 pictures as they grow.",
    axis="side of a picture [pixels]",
    cases=cases,
    statements=(Statement("The advantage over nxBP shrinks as pictures grow from 32 × 32 to 256 × 256.", _by_size),),
    lines=True,
)

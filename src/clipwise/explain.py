"""What a step does for each parameter, and why it takes its time: private.explain()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING_YET = "No step has been taken yet: the ways are chosen on the first ones."
_NOTHING_TO_CHOOSE = "nxbp takes one example after the other: there is nothing to choose."
WAYS = {
    "written": "the gradients lie there as they are: sums over an example's places (biases, scales)",
    "rows": "a table of which an example touches a few rows: these are added up and measured",
    "product": "one term an example, g ⊗ x, whose norm is ‖g‖·‖x‖; nothing is written out",
    "keep": "all gradients are written out once; their weighted sum takes the place of the ordinary weight gradient",
    "tiles": "gradients are written out a few examples at a time, measured, forgotten; one more weight gradient later",
    "gram": "products of an example's terms with each other; one more weight gradient later",
    "kernel": "gradients are formed inside the chip, measured, forgotten; one more weight gradient later",
    "gram kernel": "products of an example's terms, inside the chip; one more weight gradient later",
    "pulled back": "through the computation of the weights that are made of it",
}


@dataclass(frozen=True)
class Explained:
    """How the norms of one parameter's gradients were evaluated, when the model was last verified."""

    parameter: str
    calls: tuple[str, ...]  # functions that use it
    shape: str  # what an example's gradient is made of
    way: str  # of factors/ways.py
    seconds: float | None  # norms and weighted sum where ways were timed, else the norms; None: measured together with others
    kept_bytes: int  # of an example's gradient, if it stays written out


def table(rows: Sequence[Explained], batch_size: int, method: str = "auto") -> str:
    """As text, one line a parameter, and what the ways among them mean. `batch_size`: as the plan expects it; how many were drawn is private."""
    if not rows:
        return _NOTHING_TO_CHOOSE if method == "nxbp" else _NOTHING_YET
    head = ("parameter", "used by", "an example's gradient", "way", "ms", "kept MB")
    lines = [head, *(_cells(row, batch_size) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["  ".join(_aligned(cell, width, column) for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines]
    kept = batch_size * sum(row.kept_bytes for row in rows)
    timed = [row.seconds for row in rows if row.seconds is not None]
    times = f"{1e3 * sum(timed):.3g} ms for the {len(timed)} of {len(rows)} that were timed" if timed else "not timed one by one"
    legend = [f"{way}: {meaning}" for way, meaning in WAYS.items() if any(_kind(row.way) == way for row in rows)]
    return "\n".join([f"batches of about {batch_size} examples", *text, f"together: {times}, {kept / 2**20:.3g} MB kept", *legend])


def _kind(way: str) -> str:
    """`keep` for `keep by kernel of 64`"""
    return next((kind for kind in sorted(WAYS, key=len, reverse=True) if way.startswith(kind)), way)


def _cells(row: Explained, batch_size: int) -> tuple[str, ...]:
    time = "" if row.seconds is None else f"{1e3 * row.seconds:.3g}"
    kept = f"{batch_size * row.kept_bytes / 2**20:.3g}" if row.kept_bytes else ""
    return row.parameter, ", ".join(row.calls), row.shape, row.way, time, kept


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column >= 4 else cell.ljust(width)

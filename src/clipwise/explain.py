"""What a step does for each parameter, and why it takes its time: private.explain()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING_YET = "No step has been taken yet: the ways are chosen on the first ones."


@dataclass(frozen=True)
class Explained:
    """How the norms of one parameter's gradients were evaluated, when the model was last verified."""

    parameter: str
    calls: tuple[str, ...]  # functions that use it
    shape: str  # what an example's gradient is made of
    way: str  # of factors/ways.py
    seconds: float | None  # norms and weighted sum where ways were timed, else the norms; None: measured together with others
    kept_bytes: int  # of an example's gradient, if it stays written out


def table(rows: Sequence[Explained], batch_size: int) -> str:
    """As text, one line a parameter. `batch_size`: as the plan expects it; how many were drawn is private."""
    if not rows:
        return _NOTHING_YET
    head = ("parameter", "used by", "an example's gradient", "way", "ms", "kept MB")
    lines = [head, *(_cells(row, batch_size) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["  ".join(_aligned(cell, width, column) for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines]
    kept = batch_size * sum(row.kept_bytes for row in rows)
    seconds = sum(row.seconds or 0.0 for row in rows)
    return "\n".join([f"batches of about {batch_size} examples", *text, f"together: {1e3 * seconds:.3g} ms, {kept / 2**20:.3g} MB kept"])


def _cells(row: Explained, batch_size: int) -> tuple[str, ...]:
    time = "" if row.seconds is None else f"{1e3 * row.seconds:.3g}"
    kept = f"{batch_size * row.kept_bytes / 2**20:.3g}" if row.kept_bytes else ""
    return row.parameter, ", ".join(row.calls), row.shape, row.way, time, kept


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column >= 4 else cell.ljust(width)

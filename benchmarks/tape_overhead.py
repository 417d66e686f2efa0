"""What the tape costs in Python: microseconds a torch call, a tapped call, and a whole step of fixed work.

    python benchmarks/tape_overhead.py

Small tensors, so that arithmetic vanishes; the median of many repetitions with and without the tape in the same run.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.machine import machine
from report import write_results

CALLS = 200
REPEATS = 60


layer = nn.Linear(8, 8)


class Timed(nn.Module):
    """Makes the calls inside a captured module, as a model does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer
        self.times: list[float] = []

    def forward(self, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        self.times.append((time.perf_counter() - start) / CALLS * 1e6)


def median_microseconds(work: Callable[[], object], *, watched: bool = False) -> float:
    """Median time of one of the CALLS calls that `work` makes."""
    timed = Timed()
    for _ in range(REPEATS):
        with cw.capture(timed) if watched else contextlib.nullcontext():
            timed(work)
    return statistics.median(timed.times)


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(4, 8, requires_grad=True)
    cases: dict[str, Callable[[], object]] = {
        "relu (no parameter)": lambda: [torch.relu(x) for _ in range(CALLS)],
        "add (no parameter)": lambda: [x + x for _ in range(CALLS)],
        "x.shape": lambda: [x.shape for _ in range(CALLS)],
        "linear (tapped)": lambda: [F.linear(x, layer.weight, layer.bias) for _ in range(CALLS)],
        "x * weight[0] (derived, tapped)": lambda: [x * layer.weight[0] for _ in range(CALLS)],
    }
    rows = []
    for name, work in cases.items():
        plain = median_microseconds(work)
        watched = median_microseconds(work, watched=True)
        rows.append({"call": name, "plain_us": round(plain, 2), "watched_us": round(watched, 2), "tape_us": round(watched - plain, 2)})
        print(f"{name:34s} {plain:8.2f} us plain {watched:8.2f} us watched {watched - plain:8.2f} us for the tape")
    write_results("tape_overhead", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()

"""Which of several ways is fastest: tried once for each shape, on the tensors at hand, and remembered.

Only on a GPU, where no rule tells. The choice depends on shapes, never on values, and changes results by rounding alone. Under
torch.use_deterministic_algorithms, and where nothing can be timed (in a graph that is traced or recorded), rules decide; a graph takes what
eager steps have found for batches of about its size, and stays with it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .tracing import is_tracing

DEVICES = {"cuda"}
_RUNS = 3  # after one that chooses kernels and finds memory


@dataclass
class Trials:
    """What was found, by what was computed and about how many examples at once."""

    outcomes: dict[Hashable, dict[int, dict[str, float]]] = field(default_factory=dict)  # seconds of each way
    for_graphs: dict[Hashable, str] = field(default_factory=dict)

    def times(self, device: torch.device) -> bool:
        return device.type in DEVICES and not torch.are_deterministic_algorithms_enabled()

    def fastest(
        self, what: Hashable, batch: int, ways: Mapping[str, Callable[[], Any]], rule: str, device: torch.device
    ) -> tuple[str, float | None]:  # fmt: skip
        """One of `ways`, and the seconds it took if it was timed. `rule` is what a rule says."""
        if len(ways) < 2 or not self.times(device):
            return rule, None
        about = 2 ** max(0, math.ceil(math.log2(max(batch, 1))))
        key = (what, tuple(sorted(ways)), device)
        found = self.outcomes.setdefault(key, {})
        if is_tracing():
            if (key, batch) not in self.for_graphs:
                nearest = min(found, key=lambda size: abs(math.log2(size / about)), default=None)
                self.for_graphs[key, batch] = rule if nearest is None else _least(found[nearest])
            return self.for_graphs[key, batch], None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return rule, None
        if about not in found:
            found[about] = {way: seconds for way, run in ways.items() if (seconds := _seconds(run, device)) is not None}
        if not found[about]:
            return rule, None
        way = _least(found[about])
        return way, found[about][way]


TRIALS = Trials()


def _least(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=lambda way: seconds[way])


def _seconds(run: Callable[[], Any], device: torch.device) -> float | None:
    """The median of a few runs, of which the device has finished each; None where memory does not suffice."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    times = []
    try:
        for _ in range(1 + _RUNS):
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return None
    return statistics.median(times[1:])

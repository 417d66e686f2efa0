"""Which of several ways is fastest: tried once for each shape, on the tensors at hand, and remembered.

Only on a GPU, where no rule tells. The choice depends on shapes, never on values, and changes results by rounding alone. Under
torch.use_deterministic_algorithms, and where nothing can be timed (in a graph that is traced or recorded), rules decide; a graph takes what
eager steps have found for batches of about its size, and stays with it.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .machine import is_out_of_memory
from .tracing import is_tracing

DEVICES = {"cuda"}


def roughly(count: int, bits: int) -> int:
    """The next number that has at most so many leading bits: 64, 96, 128, 192 … for two."""
    shift = max(count.bit_length() - bits, 0)
    return -(-count >> shift) << shift


class Unusable(Exception):
    """A way that cannot be taken here, and why."""


_RUNS = 3
_CYCLES_A_SECOND = 2e9  # of a GPU, about
_PROCESSOR_SHARE = 8  # of what the processor takes, one part in so many is counted


@dataclass
class Trials:
    """What was found, by what was computed and about how many examples at once."""

    outcomes: dict[Hashable, dict[int, dict[str, float]]] = field(default_factory=dict)  # seconds of each way; ∞: unusable
    for_graphs: dict[Hashable, str] = field(default_factory=dict)

    def times(self, device: torch.device) -> bool:
        return device.type in DEVICES and not torch.are_deterministic_algorithms_enabled()

    def fastest(
        self, what: Hashable, batch: int, ways: Mapping[str, Callable[[], Any]], rule: str, device: torch.device
    ) -> tuple[str, float | None]:  # fmt: skip
        """One of `ways`, and the seconds it took if it was timed. `rule` is what a rule says, where none can be tried or used."""
        if list(ways) == [rule] or not self.times(device):
            return rule, None
        about = roughly(max(batch, 1), bits=1)
        found = self.outcomes.setdefault((what, device), {})
        if is_tracing():
            key = (what, device, batch, tuple(ways))
            if key not in self.for_graphs:
                nearest = min(found, key=lambda size: abs(math.log2(size / about)), default=about)
                self.for_graphs[key] = _least(found.get(nearest, {}), ways, rule)
            return self.for_graphs[key], None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return rule, None
        seconds = found.setdefault(about, {})
        for way, run in ways.items():
            if way not in seconds:
                seconds[way] = _seconds(run, device)
        way = _least(seconds, ways, rule)
        return way, seconds[way] if seconds.get(way, math.inf) < math.inf else None


TRIALS = Trials()


def _least(seconds: Mapping[str, float], ways: Iterable[str], rule: str) -> str:
    """The fastest of those that may be taken, if one was usable."""
    usable = [way for way in ways if seconds.get(way, math.inf) < math.inf]
    return min(usable, key=lambda way: seconds[way]) if usable else rule


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """What one run takes; ∞ where memory does not suffice, or it cannot be run. The first chooses kernels and finds memory."""
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):
                run()
                return _seconds_on_gpu(run)
        run()
        return _median_seconds(run)
    except Unusable as why:
        warnings.warn(f"a faster way is left out: {why}", stacklevel=2)
        return math.inf
    except Exception as error:
        if is_out_of_memory(error):
            return math.inf
        raise


def _median_seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _seconds_on_gpu(run: Callable[[], Any]) -> float:
    """What the device takes, and a share of what the processor takes to start it: in a step the one mostly waits for the other.

    The device is kept waiting until all runs are started, so that between the two events there is nothing but work.
    """
    torch.cuda.synchronize()
    before = time.perf_counter()
    run()
    to_start = time.perf_counter() - before
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(_CYCLES_A_SECOND * 2 * _RUNS * to_start))
    begin.record()
    for _ in range(_RUNS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / _RUNS + to_start / _PROCESSOR_SHARE

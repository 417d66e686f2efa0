"""Times several ways to make a step, in turns on one machine: warm-up, synchronised clocks, the median and its spread, peak memory.

A way that runs out of memory is shown as such and leaves the others alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..experience import experience_of
from ..machine import free_memory, is_out_of_memory
from .case import Case
from .contenders import OPACUS, TAPED, Step, available, for_opacus, make_step

OUT_OF_MEMORY = "out of memory"
STILL = 1e-6  # learning rate: every way is to meet the same network, not one that the others have trained on noise
_VERIFYING = 3  # more steps to warm up where clipwise verifies the model: on its first steps; later such steps are not timed
_WRITTEN_OUT = ("multiLoss", "Opacus hooks")  # ways that hold every example's gradient
_COPIES = 3  # … and as many copies of it while they add up


@dataclass(frozen=True)
class Settings:
    """How long and how precisely to measure."""

    device: torch.device
    real_data: bool = False
    precision: str = "fp32"
    warm_up: int = 2
    least: int = 5  # steps that are timed at least
    most: int = 60
    seconds: float = 4.0  # for each way, after which it stops

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


@dataclass(frozen=True)
class Measurement:
    """One bar. Either seconds, or the reason why there are none."""

    method: str
    seconds: float | None = None  # a step, median
    spread: float | None = None  # between the quartiles
    steps: int = 0
    peak_bytes: int | None = None
    largest_batch: int | None = None  # for the figure of memory, in place of seconds
    why_not: str | None = None

    @property
    def is_shown(self) -> bool:
        """Running out of memory is a result; a way that cannot be tried here is none."""
        return self.why_not in (None, OUT_OF_MEMORY)

    @property
    def peak_gigabytes(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / 2**30


@dataclass
class _Runner:
    """One way, and what it has been measured to take."""

    method: str
    step: Step
    times: list[float] = field(default_factory=list)
    peak: int | None = None
    why_not: str | None = None

    def run(self, x: Tensor, y: Tensor, settings: Settings, *, warm: bool) -> None:
        cuda = settings.device.type == "cuda"
        try:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            with settings.autocast():
                self.step(x, y)
            if cuda:
                torch.cuda.synchronize()
                self.peak = torch.cuda.max_memory_allocated()
            if warm:
                self.times.append(time.perf_counter() - start)
        except Exception as error:
            if is_out_of_memory(error):
                self.why_not = OUT_OF_MEMORY
            elif self.method in OPACUS:
                self.why_not = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            else:
                raise
        if self.why_not is not None:
            self.step = _nothing
            tidy_up()

    def wants_more(self, settings: Settings) -> bool:
        """A step on which clipwise verifies the model may take a second by itself, so the median counts."""
        count = len(self.times)
        enough = count >= settings.least and count * statistics.median(self.times) >= settings.seconds
        return self.why_not is None and not enough and count < settings.most

    def measurement(self) -> Measurement:
        if self.why_not is not None:
            return Measurement(self.method, why_not=self.why_not)
        quartiles = statistics.quantiles(self.times, n=4)
        return Measurement(self.method, statistics.median(self.times), quartiles[2] - quartiles[0], len(self.times), self.peak)


def measure(case: Case, methods: Sequence[str], settings: Settings) -> list[Measurement]:
    """All ways on one network, step by step in turns: whatever else the machine does slows all of them."""
    tidy_up()
    model, batches = case.prepare(settings.real_data, settings.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=STILL)
    runners = [_runner(method, model, optimizer, case, settings) for method in methods]
    for number in range(settings.warm_up + _VERIFYING):
        for runner in runners:
            if runner.why_not is None and (number < settings.warm_up or runner.method in TAPED):
                runner.run(*next(batches), settings, warm=False)
    while any(runner.wants_more(settings) for runner in runners):
        x, y = next(batches)
        for runner in runners:
            if runner.wants_more(settings):
                verifies = runner.method in TAPED and experience_of([model]).will_look_again
                runner.run(x, y, settings, warm=not verifies)
    return [runner.measurement() for runner in runners]


def _runner(method: str, model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, settings: Settings) -> _Runner:
    reason = available(method) or _too_large(method, model, case, settings)
    if reason is None and method in OPACUS:
        try:
            own = for_opacus(model)
            return _Runner(method, make_step(method, own, torch.optim.Adam(own.parameters(), lr=STILL), case.batch_size))
        except Exception as error:  # it refuses a layer
            reason = f"refused: {type(error).__name__}"
    if reason is not None:
        return _Runner(method, _nothing, why_not=reason)
    return _Runner(method, make_step(method, model, optimizer, case.batch_size))


def _too_large(method: str, model: nn.Module, case: Case, settings: Settings) -> str | None:
    """A computer that runs out of memory does not raise an error, it kills the process: so it is foreseen there."""
    if settings.device.type == "cpu" and method in _WRITTEN_OUT:
        needed = _COPIES * 4 * case.batch_size * sum(p.numel() for p in model.parameters() if p.requires_grad)
        if needed > free_memory():
            return OUT_OF_MEMORY
    return None


def _nothing(x: Tensor, y: Tensor) -> None:
    """In place of a step that cannot be made: holds on to nothing."""


def tidy_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

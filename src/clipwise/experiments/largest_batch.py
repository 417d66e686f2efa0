"""The largest batch that a way can train on before memory runs out, found by doubling and halving."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ..machine import is_out_of_memory
from .case import Case
from .contenders import make_step
from .timing import STILL, Settings, tidy_up

MOST = 2048  # no larger batch is tried


def largest(fits: Callable[[int], bool], *, start: int = 4, most: int = MOST, precision: float = 0.05) -> int:
    """The largest n ≤ most with fits(n), or at most 5 % less, for a property that once lost stays lost. 0 if not even 1 fits."""
    low, high = 0, start
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, precision * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(case: Case, method: str, settings: Settings) -> int:
    """By making two steps at each size that is tried, from case.batch_size on, with a new network that clipwise has yet to verify."""
    untrained, _ = case.prepare(settings.real_data, torch.device("cpu"), count=1)

    def fits(batch_size: int) -> bool:
        tidy_up()
        try:
            _two_steps(replace(case, batch_size=batch_size), copy.deepcopy(untrained).to(settings.device), method, settings)
        except Exception as error:
            if is_out_of_memory(error):
                return False
            raise
        return True

    found = largest(fits, start=case.batch_size)
    tidy_up()
    return found


def _two_steps(case: Case, model: nn.Module, method: str, settings: Settings) -> None:
    batches = case.batches(settings.real_data, settings.device, count=1)
    step = make_step(method, model, torch.optim.Adam(model.parameters(), lr=STILL), case.batch_size)
    for _ in range(2):
        with settings.autocast():
            step(*next(batches))


@contextmanager
def memory_of(gigabytes: float | None) -> Iterator[None]:
    """As if the GPU had no more memory than this; None leaves it as it is."""
    if gigabytes is None or not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.mem_get_info()[1]
    tidy_up()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 2**30 / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

"""Noise and the optimizer's step as one CUDA graph: what is left of a step once its clipped sums are there and were counted.

    p ← step(p, (sums + N(0, σ²)) / B̄)

The sums are read where the first graph leaves them. Between the two graphs everything is checked and the ledger counts, as before an
eager step; the noise comes from seeds or generators of this graph alone, new before every replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from ..errors import in_one_line
from ..randomness import Fast, Reproducible, gaussians_from
from ..tracing import NotTraceable, can_be_recorded
from ..updates import Updates, updated_by
from .optimizers import (
    KNOWN,
    Numbers,
    everyone_in,
    for_a_graph,
    has_state,
    room_for_rate,
    state_kept,
    steps_beside_parameters,
    steps_to_host,
    takes_rates,
    tensors_of,
)  # fmt: skip
from .recording import captured

_MOST_RECORDINGS = 16  # then it is made eagerly: something moves with every step
_ON_DEVICE = (Fast, Reproducible)  # noise that a generator on the device draws


class _Registered:
    """Gaussians that a graph draws: by kernels from seeds it reads, or from generators it knows."""

    name = "registered"

    def __init__(self, draws: list[tuple[str, bool]], device: torch.device):
        self._seeds = {purpose: torch.zeros((), dtype=torch.int64, device=device) for purpose, by_kernel in draws if by_kernel}
        self.generators = {purpose: torch.Generator(device) for purpose, by_kernel in draws if not by_kernel}

    def begin(self, randomness: Fast | Reproducible, step: int) -> None:
        """Start where nobody can know, before every replay. (Copied from the host, seeds would wait for what the device is doing.)"""
        for purpose, seed in self._seeds.items():
            seed.fill_(randomness.seed(purpose, step))
        for purpose, generator in self.generators.items():
            generator.manual_seed(randomness.seed(purpose, step))

    def seed(self, purpose: str, step: int) -> Tensor:
        return self._seeds[purpose]

    def generator(self, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        return self.generators[purpose]

    def gaussians(self, count: int, purpose: str, step: int, device: torch.device) -> Tensor:
        return gaussians_from(self.generators[purpose], count, device)


@dataclass(frozen=True)
class _Recorded:
    replay: Callable[[], None]
    source: _Registered
    deviation: Tensor  # of the noise, (), float64
    rates: list[Tensor] | None  # learning rates, one a group, where the graph reads them
    held: list[Tensor]  # all that the graph reads and writes besides
    gradients: list[Tensor]  # what a replay releases, of each parameter
    written: dict[Tensor, float] = field(default_factory=dict)  # what deviation and rates hold: few change from step to step

    def tell(self, place: Tensor, number: float) -> None:
        if self.written.get(place) != number:
            place.fill_(number)
            self.written[place] = number


class RecordedUpdate:
    """The noise and the step of one optimizer.

    `in_loop`: for a loop that asked for no graph. Where there can be none, nothing is said; the sums lie in `room_for_sums`, and what is released is
    written over them.
    """

    def __init__(self, number: int, updates: Updates, *, in_loop: bool = False):
        self._number = number
        self._updates = updates
        self._in_loop = in_loop
        self._optimizer = optimizer = updates.optimizers[number]
        self._numbers_of = Numbers(optimizer)
        self._left = _MOST_RECORDINGS
        self._found: dict[Any, _Recorded] = {}
        self._now: _Recorded | None = None

    def is_ready(self, sums: Mapping[int, Tensor]) -> bool:
        """Whether `release` may be called for these sums; else the step is to be made eagerly."""
        numbers = self._numbers() if self._left else None
        if numbers is None:
            return False
        self._now = self._found.get((numbers, _places(self._held(sums))))
        if self._now is None:
            if not has_state(self._optimizer):
                return False
            steps_beside_parameters(self._optimizer)
            self._left -= 1
            try:
                self._now = self._record(sums)
            except Exception as error:
                self._left = 0
                if not self._in_loop:
                    what = f"noise and {type(self._optimizer).__name__}.step()"
                    warnings.warn(f"{what} are not part of the graph: {in_one_line(error)}", stacklevel=4)
            else:
                self._found = {other: found for other, found in self._found.items() if other[0] == numbers}
                self._found[numbers, _places(self._held(sums))] = self._now
            if not self._left:
                steps_to_host(self._optimizer)
        return self._now is not None and self._left > 0

    def release(
        self, number: int, optimizer: Optimizer, sums: Mapping[int, Tensor], penalties: Mapping[int, Tensor], sensitivity: float, step: int
    ) -> None:  # fmt: skip
        """Draw new noise and replay."""
        now = self._now
        randomness = self._updates.randomness
        assert now is not None and not penalties and isinstance(randomness, _ON_DEVICE), "is_ready comes first"
        now.source.begin(randomness, step)
        now.tell(now.deviation, self._updates.deviation(sensitivity))
        for rate, group in zip(now.rates or (), optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"].reshape(()))
                now.written.pop(rate, None)
            else:
                now.tell(rate, group["lr"])
        now.replay()
        torch.autograd.graph.increment_version(self._parameters)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers ask for

    @property
    def released(self) -> list[Tensor]:
        """What the last replay has released, of each parameter, until the next one."""
        assert self._now is not None
        return self._now.gradients

    @property
    def _parameters(self) -> list[Tensor]:
        return updated_by(self._optimizer)

    def _numbers(self) -> tuple[Any, ...] | None:
        """Those of the optimizer, if nobody else listens to its step and all that it does happens on one device; else None."""
        optimizer = self._optimizer
        hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        everywhere = torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
        is_wrapped = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if type(optimizer) not in KNOWN or is_wrapped or everywhere or hooks != self._updates.hooks_on_each:
            return None
        devices = {parameter.device for parameter in self._parameters}
        if len(devices) != 1 or not can_be_recorded(next(iter(devices))) or not isinstance(self._updates.randomness, _ON_DEVICE):
            return None
        return self._numbers_of.now()

    def _held(self, sums: Mapping[int, Tensor]) -> list[Tensor]:
        """Parameters, the optimizer's state, sums."""
        return [*self._parameters, *tensors_of(self._optimizer), *sums.values()]

    def _record(self, sums: Mapping[int, Tensor]) -> _Recorded:
        optimizer, parameters = self._optimizer, self._parameters
        device = parameters[0].device
        held = self._held(sums)
        source = _Registered(self._updates.draws(self._number), device)
        deviation = torch.zeros((), dtype=torch.float64, device=device)
        rates = [room_for_rate(optimizer, group, device) for group in optimizer.param_groups] if takes_rates(optimizer) else None
        gradients: list[Tensor] = []

        def run() -> None:
            gradients[:] = self._updates.noised_sums(self._number, sums, deviation, source, 0, apart=False, in_place=self._in_loop)
            everyone = everyone_in(optimizer)
            there = [parameter.grad for parameter in everyone]  # what is foreign is refused later, and must not vanish here
            try:
                for parameter in everyone:
                    parameter.grad = None  # of frozen ones too
                for parameter, gradient in zip(parameters, gradients):
                    parameter.grad = gradient
                with self._updates.unwatched(), for_a_graph(optimizer, rates):
                    optimizer.step()
            finally:
                for parameter, before in zip(everyone, there):
                    parameter.grad = before

        with state_kept(optimizer):
            replay = captured(run, device, list(source.generators.values()))
            now = self._held(sums)
            if len(now) != len(held) or any(a is not b for a, b in zip(now, held)):
                raise NotTraceable("its step makes new state, which would begin anew with every replay.")
        return _Recorded(replay, source, deviation, rates, held, gradients)


def _places(held: list[Tensor]) -> tuple[int, ...]:
    """Who they are and where they lie: a graph takes that for granted."""
    return (*map(id, held), *[tensor.data_ptr() for tensor in held])

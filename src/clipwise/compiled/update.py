"""Noise and the optimizer's step as one CUDA graph: what is left of a step once its clipped sums are there and were counted.

    p ← step(p, (sums + N(0, σ²)) / B̄)

The sums are read where the first graph leaves them. Between the two graphs everything is checked and the ledger counts, as before an
eager step; the noise comes from seeds or generators of this graph alone, new before every replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import in_one_line
from ..randomness import Fast, Reproducible, gaussians_from
from ..tracing import NotTraceable, can_be_recorded
from ..updates import Updates, held_by, updated_by
from .agreement import repeats
from .optimizers import (
    KNOWN,
    Numbers,
    for_a_graph,
    has_state,
    room_for_rate,
    state_kept,
    steps_beside_parameters,
    steps_to_host,
    tensors_of,
)  # fmt: skip
from .recording import captured, captured_in_passing

_MOST_RECORDINGS = 16  # then it is made eagerly: something moves with every step
_ON_DEVICE = (Fast, Reproducible)  # noise that a generator on the device draws


class _Registered:
    """Gaussians that a graph draws: by kernels from seeds it reads, or from generators it knows."""

    name = "registered"

    def __init__(self, draws: list[tuple[str, bool]], device: torch.device):
        self._seeds = {purpose: torch.zeros((), dtype=torch.int64, device=device) for purpose, by_kernel in draws if by_kernel}
        self.generators = {purpose: torch.Generator(device) for purpose, by_kernel in draws if not by_kernel}
        self.begin(Fast(), 0)  # torch gives every generator the same seed

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
class Recorded:
    """An update that is replayed for sums that lie where they lay."""

    updates: Updates
    optimizer: Optimizer
    replay: Callable[[], None]
    source: _Registered
    deviation: Tensor  # of the noise, (), float64
    rates: list[Tensor] | None  # learning rates, one a group, where the graph reads them
    held: list[Tensor]  # all that the graph reads and writes besides
    gradients: list[Tensor]  # what a replay releases, of each parameter
    written: dict[Tensor, float] = field(default_factory=dict)  # what deviation and rates hold: few change from step to step

    def release(self, sensitivity: float, step: int) -> None:
        """Draw new noise and make the step. Whatever is raised here, the weights may have moved."""
        randomness = self.updates.randomness
        if not isinstance(randomness, _ON_DEVICE):
            raise TypeError(f"{randomness.name} noise is not drawn by a graph")
        self.prepare(randomness, sensitivity, step)
        self.replay()
        torch.autograd.graph.increment_version(updated_by(self.optimizer))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers ask for

    def prepare(self, randomness: Fast | Reproducible, sensitivity: float, step: int) -> None:
        """Put in place what the next replay reads besides the sums."""
        self.source.begin(randomness, step)
        self._tell(self.deviation, self.updates.deviation(sensitivity))
        for rate, group in zip(self.rates or (), self.optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"].reshape(()))
                self.written.pop(rate, None)
            else:
                self._tell(rate, group["lr"])

    def repeats(self, run: Callable[[], Any], sums: Sequence[Tensor]) -> bool:
        """Whether a replay does what `run` does, on sums that nobody's record had a part in, with the same noise. All is put back."""
        before = [tensor.detach().clone() for tensor in self.held]
        found: list[list[Tensor]] = []
        with torch.no_grad():
            try:
                for step in (run, self.replay):
                    for total in sums:
                        total.copy_(torch.linspace(-1, 1, total.numel(), dtype=total.dtype, device=total.device).view_as(total))
                    self.prepare(Reproducible(0), 1.0, 0)
                    step()
                    found.append([tensor.detach().clone() for tensor in self.held])
                    torch._foreach_copy_(self.held, before)
            finally:
                torch._foreach_copy_(self.held, before)
        return all(repeats(replayed, mine, mine.dtype) for mine, replayed in zip(*found))

    def _tell(self, place: Tensor, number: float) -> None:
        if self.written.get(place) != number:
            place.fill_(number)
            self.written[place] = number


class RecordedUpdate:
    """The noise and the step of one optimizer.

    `in_loop`: for a loop that asked for no graph. Where there can be none, nothing is said; the sums lie in `room_for_sums`, and what is released is
    written over them; of several recordings the last is kept.
    """

    def __init__(self, number: int, updates: Updates, *, in_loop: bool = False):
        self._number = number
        self._updates = updates
        self._in_loop = in_loop
        self._optimizer = optimizer = updates.optimizers[number]
        self._numbers = Numbers(optimizer)
        self._left = _MOST_RECORDINGS
        self._found: dict[Any, Recorded] = {}

    def numbers(self) -> tuple[Any, ...] | None:
        """Those of the optimizer; None where its step cannot be recorded: others listen to it, say, or all was tried."""
        optimizer, updates = self._optimizer, self._updates
        own: dict[str, Any] = optimizer.__dict__
        step = own.get("step")  # a scheduler's, around torch's own, or somebody's
        is_torchs = step is None or (hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step)
        is_scaled = own.get("grad_scale") is not None or own.get("found_inf") is not None  # by a scaler, for one step
        if not self._left or type(optimizer) not in KNOWN or not is_torchs or is_scaled or updates.is_heard_by_others(optimizer):
            return None
        return self._numbers.now() if isinstance(updates.randomness, _ON_DEVICE) else None

    def ready(self, sums: Mapping[int, Tensor], numbers: tuple[Any, ...] | None) -> Recorded | None:
        """The update for these sums and numbers, recorded now or before; None: the step is to be made eagerly."""
        if numbers is None:
            return None
        found = self._found.get((numbers, _places(self._held(sums))))
        if found is None:
            devices = {parameter.device for parameter in updated_by(self._optimizer)}
            if len(devices) != 1 or not all(map(can_be_recorded, devices)) or not has_state(self._optimizer):
                return None
            steps_beside_parameters(self._optimizer)
            self._left -= 1
            try:
                found = self._record(sums)
            except Exception as error:
                self._left = 0
                if not self._in_loop:
                    what = f"noise and {type(self._optimizer).__name__}.step()"
                    warnings.warn(f"{what} are not part of the graph: {in_one_line(error)}", stacklevel=4)
            else:
                alike = {} if self._in_loop else {other: recorded for other, recorded in self._found.items() if other[0] == numbers}
                self._found = alike | {(numbers, _places(self._held(sums))): found}
        if not self._left:
            self._found.clear()
            steps_to_host(self._optimizer)
            return None
        return found

    @property
    def is_given_up(self) -> bool:
        """Nothing will be recorded any more."""
        return not self._left

    def _held(self, sums: Mapping[int, Tensor]) -> list[Tensor]:
        """Parameters, the optimizer's state, sums."""
        return [*updated_by(self._optimizer), *tensors_of(self._optimizer), *sums.values()]

    def _record(self, sums: Mapping[int, Tensor]) -> Recorded:
        optimizer, parameters = self._optimizer, updated_by(self._optimizer)
        device = parameters[0].device
        held = self._held(sums)
        source = _Registered(self._updates.draws(self._number), device)
        deviation = torch.zeros((), dtype=torch.float64, device=device)
        rates = [room_for_rate(optimizer, group, device) for group in optimizer.param_groups] if self._numbers.rates_may_move else None
        gradients: list[Tensor] = []

        def run() -> list[Tensor]:
            noised = self._updates.noised_sums(self._number, sums, deviation, source, 0, apart=False, in_place=self._in_loop)
            everyone = held_by(optimizer)
            there = [parameter.grad for parameter in everyone]  # what is foreign is refused later, and must not vanish here
            try:
                for parameter in everyone:
                    parameter.grad = None  # of frozen ones too
                for parameter, gradient in zip(parameters, noised):
                    parameter.grad = gradient
                with self._updates.unwatched(), for_a_graph(optimizer, rates):
                    optimizer.step()
            finally:
                for parameter, before in zip(everyone, there):
                    parameter.grad = before
            return noised

        with state_kept(optimizer):
            capture = captured_in_passing if self._in_loop else captured
            replay = capture(lambda: gradients.extend(run()), device, list(source.generators.values()))
            now = self._held(sums)
            if len(now) != len(held) or any(a is not b for a, b in zip(now, held)):
                raise NotTraceable("its step makes new state, which would begin anew with every replay.")
            recorded = Recorded(self._updates, optimizer, replay, source, deviation, rates, held, gradients)
            if self._in_loop and not recorded.repeats(run, list(sums.values())):
                raise ArithmeticError("a replay finds something else than the step that was recorded.")
        return recorded


def _places(held: list[Tensor]) -> tuple[int, ...]:
    """Who they are and where they lie: a graph takes that for granted."""
    return (*map(id, held), *map(Tensor.data_ptr, held))

"""Noise and the optimizer's step as one CUDA graph: what is left of a step once its clipped sums are there and were counted.

    p ← step(p, (sums + N(0, σ²)) / B̄)

The sums are read where the first graph leaves them. Between the two graphs everything is checked and the ledger counts, as before an
eager step; the noise comes from seeds or generators of this graph alone, new before every replay.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop, Rprop
from torch.optim import optimizer as torch_optimizer

from ..errors import in_one_line
from ..randomness import Fast, Reproducible, gaussians_from
from ..tracing import NotTraceable, can_be_recorded
from ..updates import Updates, updated_by
from .recording import captured

_KNOWN = (SGD, Adam, AdamW, RAdam, Adamax, RMSprop, ASGD, Adadelta, Rprop)  # whose state lies in tensors alone
_RATE_AS_TENSOR = (Adam, AdamW)  # the learning rate may move without another recording
_FUSED = (Adam, AdamW)  # torch has one kernel for all that a step does
_NUMBERS = {int, float, bool, type(None)}
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
    written: dict[Tensor, float] = field(default_factory=dict)  # what deviation and rates hold: few change from step to step

    def tell(self, place: Tensor, number: float) -> None:
        if self.written.get(place) != number:
            place.fill_(number)
            self.written[place] = number


class RecordedUpdate:
    """The noise and the step of one optimizer."""

    def __init__(self, number: int, updates: Updates):
        self._number = number
        self._updates = updates
        self._optimizer = updates.optimizers[number]
        self._left = _MOST_RECORDINGS
        self._found: dict[Any, _Recorded] = {}
        self._now: _Recorded | None = None

    def is_ready(self, sums: Mapping[int, Tensor]) -> bool:
        """Whether `release` may be called for these sums; else the step is to be made eagerly."""
        if not self._left or not self._can_be_recorded():
            return False
        self._now = self._found.get(self._key(self._held(sums)))
        if self._now is None:
            if not self._has_state():
                return False
            self._steps_beside_parameters()
            key = self._key(self._held(sums))
            self._left -= 1
            self._now = self._record(sums)
            if self._now is not None:
                self._found = {other: found for other, found in self._found.items() if other[0] == key[0]}
                self._found[key] = self._now
            if not self._left:
                self._steps_to_host()
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
    def _parameters(self) -> list[Tensor]:
        return updated_by(self._optimizer)

    def _can_be_recorded(self) -> bool:
        """Nobody else listens to the step, and all that it does happens on one device."""
        optimizer = self._optimizer
        hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
        everywhere = [*torch_optimizer._global_optimizer_pre_hooks, *torch_optimizer._global_optimizer_post_hooks]
        devices = {parameter.device for parameter in self._parameters}
        wrapped = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        return (
            type(optimizer) in _KNOWN
            and not wrapped
            and all(
                _is_on_host(value)
                for group in optimizer.param_groups
                for name, value in group.items()
                if type(value) not in _NUMBERS and name not in self._moving
            )
            and len(hooks) == 1
            and not everywhere
            and len(devices) == 1
            and can_be_recorded(next(iter(devices)))
            and isinstance(self._updates.randomness, _ON_DEVICE)
        )

    def _has_state(self) -> bool:
        """Whether the optimizer has begun: state that is made inside a graph would begin anew with every replay."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                needed = "step" if "capturable" in group else "momentum_buffer" if group.get("momentum") else None
                if parameter.requires_grad and needed is not None and state.get(needed) is None:
                    return False
        return True

    @property
    def _moving(self) -> tuple[str, ...]:
        """What may change without another recording, besides the parameters' values."""
        return ("params", "lr") if type(self._optimizer) in _RATE_AS_TENSOR else ("params",)

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Whether a graph updates these parameters by one kernel: as asked for, or where torch has the choice (eagerly it takes several).

        That kernel reads the learning rate in float32, and rounds once where several round to bf16 each.
        """
        chosen = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        numbers = all(isinstance(beta, float) for beta in group.get("betas", ()))
        alike = all(parameter.dtype == torch.float32 and parameter.is_contiguous() for parameter in group["params"])
        return bool(group.get("fused")) or (type(self._optimizer) in _FUSED and chosen and numbers and alike)

    def _steps_to_host(self) -> None:
        """No graph will count them any more."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"] if not (group.get("capturable") or group.get("fused")) else ():
                state = self._optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to("cpu", torch.float32)

    def _steps_beside_parameters(self) -> None:
        """Optimizers count steps on the host unless they are told that a graph will: then where the parameter is.

        In float64, as on the host: 1 − β₂ᵗ in float32 is off by a ten-thousandth in the first steps. Fused kernels want float32.
        """
        if "capturable" not in self._optimizer.defaults:
            return
        for group in self._optimizer.param_groups:
            dtype = torch.float32 if self._is_fused(group) else torch.float64
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                step = state.get("step")
                if isinstance(step, Tensor) and (step.device != parameter.device or step.dtype != dtype):
                    state["step"] = step.to(parameter.device, dtype)

    def _held(self, sums: Mapping[int, Tensor]) -> list[Tensor]:
        """Parameters, the optimizer's state, sums."""
        state = [value for state in self._optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return [*self._parameters, *state, *sums.values()]

    def _key(self, held: list[Tensor]) -> tuple[Any, ...]:
        """What the graph took for granted: numbers of the optimizer, and where its tensors lie."""
        groups, moving = self._optimizer.param_groups, self._moving
        numbers = [
            (name, value if type(value) in _NUMBERS else _number(value))
            for group in groups
            for name, value in group.items()
            if name not in moving
        ]
        sizes = [len(group["params"]) for group in groups]
        return (*numbers, None, *sizes), (*map(id, held), *[tensor.data_ptr() for tensor in held])

    def _record(self, sums: Mapping[int, Tensor]) -> _Recorded | None:
        optimizer, parameters = self._optimizer, self._parameters
        device = parameters[0].device
        held, before = self._held(sums), {parameter: dict(state) for parameter, state in optimizer.state.items()}
        source = _Registered(self._updates.draws(self._number), device)
        deviation = torch.zeros((), dtype=torch.float64, device=device)
        fused = [self._is_fused(group) for group in optimizer.param_groups]
        rates = (
            [_rate(group, one, device) for group, one in zip(optimizer.param_groups, fused)] if type(optimizer) in _RATE_AS_TENSOR else None
        )

        def run() -> None:
            gradients = self._updates.noised_sums(self._number, sums, deviation, source, 0, apart=False)
            everyone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            there = [parameter.grad for parameter in everyone]  # what is foreign is refused later, and must not vanish here
            try:
                for parameter in everyone:
                    parameter.grad = None  # of frozen ones too
                for parameter, gradient in zip(parameters, gradients):
                    parameter.grad = gradient
                with self._updates.unwatched(), _for_a_graph(optimizer, rates, fused):
                    optimizer.step()
            finally:
                for parameter, gradient in zip(everyone, there):
                    parameter.grad = gradient

        try:
            replay = captured(run, device, list(source.generators.values()))
            now = self._held(sums)
            if len(now) != len(held) or any(a is not b for a, b in zip(now, held)):
                raise NotTraceable("its step makes new state, which would begin anew with every replay.")
        except Exception as error:
            for parameter in [parameter for parameter in optimizer.state if parameter not in before]:
                del optimizer.state[parameter]
            for parameter, state in before.items():
                optimizer.state[parameter] = state
            self._left = 0
            warnings.warn(
                f"noise and {type(optimizer).__name__}.step() are not part of the graph: {in_one_line(error)}",
                stacklevel=5,
            )
            return None
        return _Recorded(replay, source, deviation, rates, held)


def _is_on_host(value: Any) -> bool:
    """Whether reading it waits for nobody."""
    values = value if isinstance(value, list | tuple) else [value]
    return not any(isinstance(one, Tensor) and one.device.type not in ("cpu",) for one in values)


def _number(value: Any) -> Any:
    """As it reads now, told from others by its type, too."""
    if isinstance(value, list | tuple):
        return tuple([_number(one) for one in value])
    return str(value.tolist() if isinstance(value, Tensor) else value)


def _rate(group: dict[str, Any], is_fused: bool, device: torch.device) -> Tensor:
    """Room for a learning rate. Fused kernels read it as float32."""
    wide = not is_fused and any(parameter.dtype == torch.float64 for parameter in group["params"])
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


@contextlib.contextmanager
def _for_a_graph(optimizer: Optimizer, rates: list[Tensor] | None, fused: list[bool]) -> Iterator[None]:
    """Inside this block the optimizer reads its learning rates from tensors, fetches nothing to the host, and takes one kernel where it can."""
    before: list[dict[str, Any]] = [
        {name: group[name] for name in ("capturable", "lr", "fused") if name in group} for group in optimizer.param_groups
    ]
    try:
        for number, group in enumerate(optimizer.param_groups):
            if "capturable" in group:
                group["capturable"] = True
            if rates is not None:
                group["lr"] = rates[number]
            if fused[number]:
                group["fused"] = True
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before):
            group.update(values)

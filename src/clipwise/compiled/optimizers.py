"""What a graph must know of torch's optimizers: whose step can be recorded, what it depends on, and how it is told to compute where its tensors lie."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop, Rprop

from ..structure import holds_numbers_only

KNOWN = (SGD, Adam, AdamW, RAdam, Adamax, RMSprop, ASGD, Adadelta, Rprop)  # whose state lies in tensors alone
_RATE_AS_TENSOR = (Adam, AdamW)  # all of torch's kernels read the learning rate from a tensor
_FUSED = (Adam, AdamW, SGD)  # torch has one kernel for all that a step does
_NUMBERS = {int, float, bool, type(None)}


class Numbers:
    """What the step of an optimizer depends on besides the tensors it is given."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self.rates_may_move = _takes_rates(optimizer)
        self._moving = ("params", "lr") if self.rates_may_move else ("params",)  # what may change without another recording
        self._given: list[Any] = []  # when they were last read, with their names, …
        self._found: tuple[Any, ...] | None = None  # … as this
        self._are_steady = False  # they are no objects that may change

    def now(self) -> tuple[Any, ...] | None:
        """None: some of that lies on a device, where reading it would mean to wait."""
        groups, moving = self._optimizer.param_groups, self._moving
        given = [one for group in groups for item in group.items() if item[0] not in moving for one in item]
        given += [len(group["params"]) for group in groups]
        if not (self._are_steady and len(given) == len(self._given) and all(map(operator.is_, given, self._given))):
            self._given, self._found = given, self._read()
            self._are_steady = all(map(_is_steady, given))
        return self._found

    def _read(self) -> tuple[Any, ...] | None:
        found: list[Any] = []
        for group in self._optimizer.param_groups:
            for name, value in group.items():
                if name not in self._moving:
                    if type(value) not in _NUMBERS:
                        if not _is_on_host(value):
                            return None
                        value = _number(value)
                    found.append((name, value))
            found.append(len(group["params"]))
        return tuple(found)


def _is_steady(value: Any) -> bool:
    return type(value) in _NUMBERS or type(value) is str or (type(value) is tuple and holds_numbers_only(value))


def _is_on_host(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return not any(isinstance(one, Tensor) and one.device.type != "cpu" for one in values)


def _number(value: Any) -> Any:
    """As it reads now, told from others by its type, too."""
    if isinstance(value, list | tuple):
        return tuple([_number(one) for one in value])
    return str(value.tolist() if isinstance(value, Tensor) else value)


def has_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer has begun: state that is made inside a graph would begin anew with every replay."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            needed = "step" if "capturable" in group else "momentum_buffer" if group.get("momentum") else None
            if parameter.requires_grad and needed is not None and state.get(needed) is None:
                return False
    return True


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Its state."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@contextlib.contextmanager
def state_kept(optimizer: Optimizer) -> Iterator[None]:
    """Whatever fails inside this block leaves the state as it was."""
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for parameter in [parameter for parameter in optimizer.state if parameter not in before]:
            del optimizer.state[parameter]
        for parameter, state in before.items():
            optimizer.state[parameter] = state
        raise


def _takes_rates(optimizer: Optimizer) -> bool:
    """Whether its learning rates may be tensors that a graph reads. (Kernels that are not fused fetch that of SGD to the host, which
    cannot be recorded.)"""
    return type(optimizer) in _RATE_AS_TENSOR or all(is_fused(optimizer, group) for group in optimizer.param_groups)


def is_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a graph updates these parameters by one kernel: as asked for, or where torch has the choice (eagerly it takes several).

    That kernel reads the learning rate in float32, and rounds once where several round to bf16 each.
    """
    chosen = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
    numbers = all(isinstance(beta, float) for beta in group.get("betas", ()))
    alike = all(parameter.dtype == torch.float32 and parameter.is_contiguous() for parameter in group["params"])
    return bool(group.get("fused")) or (type(optimizer) in _FUSED and chosen and numbers and alike)


def room_for_rate(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> Tensor:
    """Where a graph reads a learning rate. Fused kernels read it as float32."""
    wide = not is_fused(optimizer, group) and any(parameter.dtype == torch.float64 for parameter in group["params"])
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)


def steps_beside_parameters(optimizer: Optimizer) -> None:
    """Optimizers count steps on the host unless they are told that a graph will: then where the parameter is.

    In float64, as on the host: 1 − β₂ᵗ in float32 is off by a ten-thousandth in the first steps. Fused kernels want float32.
    """
    if "capturable" not in optimizer.defaults:
        return
    for group in optimizer.param_groups:
        dtype = torch.float32 if is_fused(optimizer, group) else torch.float64
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            step = state.get("step")
            if isinstance(step, Tensor) and (step.device != parameter.device or step.dtype != dtype):
                state["step"] = step.to(parameter.device, dtype)


def steps_to_host(optimizer: Optimizer) -> None:
    """No graph will count them any more: as torch's optimizers make them."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    for group in optimizer.param_groups:
        for parameter in group["params"] if not (group.get("capturable") or group.get("fused")) else ():
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to("cpu", dtype)


@contextlib.contextmanager
def for_a_graph(optimizer: Optimizer, rates: list[Tensor] | None) -> Iterator[None]:
    """Inside this block the optimizer reads its learning rates from tensors, fetches nothing to the host, and takes one kernel where it can."""
    groups = optimizer.param_groups
    before: list[dict[str, Any]] = [{name: group[name] for name in ("capturable", "lr", "fused") if name in group} for group in groups]
    fused = [is_fused(optimizer, group) for group in groups]
    try:
        for number, group in enumerate(groups):
            if "capturable" in group:
                group["capturable"] = True
            if rates is not None:
                group["lr"] = rates[number]
            if fused[number]:
                group["fused"] = True
        yield
    finally:
        for group, values in zip(groups, before):
            group.update(values)

"""Running a model or a torch call once more: on a copy of its state, with the same random draws and kernels, leaving nothing changed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .duplicate import duplicate
from .switches import Switch


def isolated(module: nn.Module, *, share_parameters: bool = True) -> nn.Module:
    """A copy with buffers, counters and caches of its own, and with the same parameters; the module itself where it cannot be copied."""
    shared = {id(parameter): parameter for parameter in module.parameters()} if share_parameters else {}
    try:
        found: nn.Module = duplicate(module, dict(shared))
        return found
    except Exception:
        return module


@dataclass(frozen=True)
class Run:
    """Outputs of a call on some examples, the state it left behind, and what it did to the random generators.

    `gradient`, where it was asked for, is that of a random combination of the kept rows. The graph is gone.
    """

    outputs: list[Tensor]
    state: list[Tensor]
    drew_numbers: bool
    generators: int
    gradient: list[Tensor]


def named_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module.named_buffers() if buffer is not None]


def state_of(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for _, buffer in named_state(module)]


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Random states are afterwards what they were before."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(_cuda_devices()):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


_MOST_TYPES = 4096
_repeatable = Switch(torch.backends.cudnn, "deterministic")


def repeatable_kernels() -> AbstractContextManager[None]:
    """Inside this block runs of the same shapes add in the same order: cuDNN leaves out what adds in the order in which threads arrive.

    Differences in the last bit become differences in the eleventh where the next layer rounds to TF32, and a hundred layers make
    per cents of them.
    """
    return _repeatable


def same_draws() -> None:
    """From here on every run draws the same random numbers."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    for device in _cuda_devices():
        torch.cuda.default_generators[device].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def random_fingerprint(modules: Iterable[nn.Module] = ()) -> int:
    """Tells whether random numbers were drawn since `same_draws`, or by generators that these modules hold."""
    states: list[Any] = [bytes(torch.get_rng_state().tolist()), *randomness_besides_torch()]
    states += [bytes(torch.cuda.get_rng_state(device).tolist()) for device in _cuda_devices()]
    states += _states_of_generators(modules)
    return hash(tuple(states))


def randomness_besides_torch() -> list[Any]:
    """The state of Python's and numpy's random numbers."""
    states: list[Any] = [random.getstate()]
    if "numpy" in sys.modules:
        _, numbers, place, *_ = sys.modules["numpy"].random.get_state()
        states += [numbers.tobytes(), place]
    return states


_SILENT: set[type] = set()  # of what holds no generator: a matter of its type


def _states_of_generators(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in (module for root in modules for module in root.modules()):
        for value in vars(module).values():
            if type(value) not in _SILENT:
                state = _generator_state(value)
                if state is not None:
                    yield state
                elif len(_SILENT) < _MOST_TYPES:
                    _SILENT.add(type(value))


def _generator_state(value: Any) -> Any:
    """Of a generator; None of anything else."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    return repr(value.bit_generator.state) if hasattr(type(value), "bit_generator") else None

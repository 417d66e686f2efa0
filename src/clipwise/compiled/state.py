"""Parameters, buffers and attributes of a model's modules: what a graph takes as its first inputs, and what tracing must leave as it was."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..again import random_states_kept
from ..attributes import Attributes, Same, names_of
from ..inventory import all_modules
from ..marks import STOOD_FOR
from ..tracing import NeverTraceable, NotTraceable
from ..weak import serial_of


@dataclass(frozen=True)
class State:
    """Parameters and buffers of some modules: what a graph takes as its first inputs."""

    modules: Sequence[nn.Module]
    places: list[tuple[dict[str, Any], str]]  # (a module's _parameters or _buffers, name there)
    tensors: list[Tensor]  # at each of them
    names: list[tuple[str | None, ...]]  # of each module's parameters and, behind None, buffers

    @classmethod
    def of(cls, modules: Sequence[nn.Module], everyone: Sequence[nn.Module] | None = None) -> State:
        """`everyone`: these and the modules below them, where they are known."""
        places, tensors, names = [], [], []
        for module in all_modules(modules) if everyone is None else everyone:
            there: list[str | None] = []
            for members in (module._parameters, module._buffers):
                for name, tensor in members.items():
                    if tensor is not None:
                        places.append((members, name))
                        tensors.append(tensor)
                        there.append(name)
                there.append(None)
            names.append(tuple(there))
        return cls(modules, places, tensors, names)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (*self.names, self._ties, *[(t.requires_grad, t.dtype, t.device, t.shape, t.stride()) for t in self.distinct])

    @property
    def _ties(self) -> tuple[int, ...]:
        """Which of the distinct tensors is where, if one of them is in several places."""
        if len(self.distinct) == len(self.tensors):
            return ()
        numbers = {id(tensor): number for number, tensor in enumerate(self.distinct)}
        return tuple([numbers[id(tensor)] for tensor in self.tensors])

    @cached_property
    def distinct(self) -> list[Tensor]:
        """Every tensor once: tied weights are one input."""
        return list({id(tensor): tensor for tensor in self.tensors}.values())

    @property
    def trainable(self) -> list[Tensor]:
        """Parameters of the modules that are trained, once."""
        parameters = dict.fromkeys(p for module in all_modules(self.modules) for p in module._parameters.values() if p is not None)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _put(self, tensors: Iterable[Tensor]) -> None:
        """Let the modules hold these, one for each place."""
        for (members, name), tensor in zip(self.places, tensors):
            members[name] = tensor

    @contextlib.contextmanager
    def kept(self, overwritten: dict[tuple[int, str], Any]) -> Iterator[None]:
        """Whatever a forward pass inside this block writes to buffers and attributes, or puts in their place, is undone. Raises NeverTraceable where it leaves
        numbers behind, which a replay would not. Tensors that it leaves are `overwritten` in every step: (number of the module, name) → what was there.
        """
        attributes = Attributes(all_modules(self.modules))
        values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in self.distinct if not tensor.requires_grad]
        failed: Exception | None = None
        try:
            with random_states_kept():
                yield
        except Exception as error:
            failed = error
        finally:
            self._put(self.tensors)
            changed, tensors = attributes.put_back()
            overwritten |= {(serial_of(module), name): Same(before) for module, name, before in tensors}
            with torch.no_grad():
                for tensor, version, value in values:
                    if tensor._version != version:
                        tensor.copy_(value)
        if changed:
            raise NeverTraceable(f"its forward pass changes {names_of(changed)}, which a graph does not follow.") from failed
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def replaced_by(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Inside this block the modules hold these tensors in place of `distinct()`."""
        by_id = dict(zip(map(id, self.distinct), stand_ins))
        for stand_in, tensor in zip(stand_ins, self.distinct):
            if not tensor.dim() or not tensor.is_floating_point():
                STOOD_FOR.put(stand_in, tensor._version)
        in_place = [by_id[id(tensor)] for tensor in self.tensors]
        recurrent = [module for root in self.modules for module in root.modules() if isinstance(module, nn.RNNBase)]
        lists = [(module, module._flat_weights, module._flat_weight_refs) for module in recurrent]
        try:
            self._put(in_place)
            for module, weights, _ in lists:  # they keep lists of their weights, and would copy all of them if one were another
                module._flat_weights = [by_id.get(id(weight), weight) for weight in weights]
                module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in module._flat_weights]
            yield
            if any(members.get(name) is not tensor for (members, name), tensor in zip(self.places, in_place)):
                raise NotTraceable("its forward pass replaces parameters or buffers.")
        finally:
            self._put(self.tensors)
            for module, weights, references in lists:
                module._flat_weights, module._flat_weight_refs = weights, references

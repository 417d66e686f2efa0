"""Parameters and buffers of modules, by name: gathered once, and again only where one was added, replaced or taken away."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .inventory import Walk, walked
from .weak import serial_of


class Members:
    """What a tape must know of the tensors that modules hold. It holds no module: a module may hold the root, which then would live forever."""

    def __init__(self, roots: Sequence[list[tuple[str, nn.Module]]]):
        self.parameters: dict[int, Tensor] = {}  # by id, as everything here
        self.names: dict[int, str] = {}
        self.owners: dict[int, tuple[str, str]] = {}  # path and class of the module that holds a parameter
        self.labels: dict[int, tuple[str, int]] = {}  # name and module: what a tap is known by from step to step
        self.state: dict[int, Tensor] = {}  # parameters and buffers: what is released with the model
        self.buffers: list[tuple[str, str, dict[str, Tensor | None], str, Tensor | None]] = []  # name, class, where, name there, the buffer
        for number, modules in enumerate(roots):
            for prefix, module in modules:
                path = ".".join(filter(None, [str(number) if len(roots) > 1 else "", prefix]))
                dot = f"{path}." if path else ""
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in self.parameters:
                        key = id(parameter)
                        self.parameters[key] = self.state[key] = parameter
                        self.names[key] = dot + name
                        self.owners[key] = path, type(module).__name__
                        self.labels[key] = dot + name, serial_of(module)
                for name, buffer in module._buffers.items():
                    self.buffers.append((dot + name, type(module).__name__, module._buffers, name, buffer))
                    if buffer is not None:
                        self.state[id(buffer)] = buffer

    def storages(self) -> dict[int, str]:
        """{where a tensor's memory begins: its name}"""
        named = [(self.names[key], parameter) for key, parameter in self.parameters.items()]
        named += [(name, buffer) for name, _, _, _, buffer in self.buffers if buffer is not None]
        return {tensor.untyped_storage().data_ptr(): name for name, tensor in named if not nn.parameter.is_lazy(tensor) and tensor.numel()}


_found: weakref.WeakKeyDictionary[nn.Module, tuple[list[Walk], list[Any], Members]] = weakref.WeakKeyDictionary()


def members_of(modules: Sequence[nn.Module]) -> Members:
    """Of these modules and those below them, as they are now."""
    walks, roots = map(list, zip(*map(walked, modules)))
    held: list[Any] = []  # by whom is told by the walks
    for root in roots:
        for _, module in root:
            parameters, buffers = module._parameters, module._buffers
            held += [*parameters.keys(), len(buffers), *map(id, parameters.values())]
            if buffers:
                held += [*buffers.keys(), *map(id, buffers.values())]
    found = _found.get(modules[0])
    if found is not None and len(found[0]) == len(walks) and all(map(operator.is_, found[0], walks)) and found[1] == held:
        return found[2]
    members = Members(roots)
    _found[modules[0]] = walks, held, members  # which keeps the tensors, so that no id is another's
    return members

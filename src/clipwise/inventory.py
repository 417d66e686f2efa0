"""The modules below a root, with their paths: walked once, and again only where one was added, replaced or taken away."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import nn

from .errors import UncoveredUse
from .weak import serial_of


class Walk:
    """What was found below a root. It holds no module: a module below may hold the root, which then would live forever.

    `serials`: the numbers of all modules, the root's first, each with its children's names and numbers: those that take the place of others, or another
    place, are told by them.
    """

    def __init__(self, root: nn.Module):
        _, *below = root.named_modules()
        self._below = [(path, weakref.ref(module), _children(module)) for path, module in below]
        self._children = _children(root)
        self.serials = tuple([(serial_of(module), *_named(module)) for module in (root, *(module for _, module in below))])

    def below(self, root: nn.Module) -> list[tuple[str, nn.Module]] | None:
        """(dotted path, module); None where it is not what it was."""
        if _children(root) != self._children:
            return None
        found = []
        for path, reference, children in self._below:
            module = reference()
            if module is None or ((children or module._modules) and _children(module) != children):
                return None
            found.append((path, module))
        return found


def _named(module: nn.Module) -> list[tuple[str, int | None]]:
    return [(name, None if child is None else serial_of(child)) for name, child in module._modules.items()]


def _children(module: nn.Module) -> list[tuple[str, int]]:
    """Their names and who they are. (Those that were walked are alive, or the walk is over: no id is another's.)"""
    return [(name, id(child)) for name, child in module._modules.items()]


_walks: weakref.WeakKeyDictionary[nn.Module, Walk] = weakref.WeakKeyDictionary()


def walked(root: nn.Module) -> tuple[Walk, list[tuple[str, nn.Module]]]:
    """The walk, which is another one where modules are, and as root.named_modules(): (dotted path, module), each module once, the root first."""
    walk = _walks.get(root)
    below = walk.below(root) if walk is not None else None
    if walk is None or below is None:
        walk = _walks[root] = Walk(root)
        below = walk.below(root)
        assert below is not None
    return walk, [("", root), *below]


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """As root.named_modules()."""
    return walked(root)[1]


def all_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module of these, once."""
    return numbered_modules(roots)[1]


def numbered_modules(roots: Sequence[nn.Module]) -> tuple[Hashable, list[nn.Module]]:
    """Numbers that tell whether modules have taken the place of others, root by root, and every module of these, once."""
    walks = [walked(root) for root in roots]
    modules = [module for _, found in walks for _, module in found]
    return tuple([walk.serials for walk, _ in walks]), modules if len(roots) == 1 else list(dict.fromkeys(modules))


def as_modules(model: nn.Module | Sequence[nn.Module], caller: str) -> list[nn.Module]:
    """One module or several, all of them Python."""
    modules = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(f"{caller}() takes a module or a list of modules, got {model!r}")
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise UncoveredUse(
                f"{type(module).__name__} is a TorchScript module: its torch calls run where no tape can see them.",
                "Capture the Python module it was made from.",
            )
    return modules

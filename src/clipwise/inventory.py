"""The modules below a root, with their paths: walked once, and again only where one was added, replaced or taken away."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class _Walk:
    """It must not hold the root itself, which it hangs on."""

    below: list[tuple[str, nn.Module]]
    own_children: dict[str, Any]  # of the root, as they were
    children: list[dict[str, Any]]  # of each module below it

    def is_current(self, root: nn.Module) -> bool:
        return root._modules == self.own_children and all(
            module._modules == before for (_, module), before in zip(self.below, self.children)
        )


_walks: weakref.WeakKeyDictionary[nn.Module, _Walk] = weakref.WeakKeyDictionary()


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """As root.named_modules(): (dotted path, module), each module once, the root first."""
    walk = _walks.get(root)
    if walk is None or not walk.is_current(root):
        _, *below = root.named_modules()
        walk = _walks[root] = _Walk(below, dict(root._modules), [dict(module._modules) for _, module in below])
    return [("", root), *walk.below]


def all_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module of these, once."""
    return list({id(module): module for root in roots for _, module in named_modules(root)}.values())

"""Settings of the whole process that are on while somebody is inside a block, on whatever thread; what they were before is back when the last one leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch


class Switch:
    """`with switch:` sets owner.name to `value`."""

    def __init__(self, owner: ModuleType | Any, name: str, value: bool = True):
        self._owner, self._name, self._value = owner, name, value
        self._lock = threading.Lock()
        self._before: Any = None
        self.inside = 0  # blocks that are under way

    def __enter__(self) -> None:
        with self._lock:
            if not self.inside:
                self._before = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._value)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if not self.inside:
                setattr(self._owner, self._name, self._before)


class Shared:
    """A block of torch's, entered with the first who comes and left with the last: blocks that overlap would put back each other's settings."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make = make
        self._lock = threading.Lock()
        self._block: AbstractContextManager[Any] | None = None
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._block = self._make()
                self._block.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._block is not None:
                self._block.__exit__(None, None, None)
                self._block = None


without_compiler = Shared(lambda: torch.compiler.set_stance("force_eager"))  # regions wrapped in torch.compile run eagerly

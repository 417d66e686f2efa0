"""Settings of the whole process that are on while somebody is inside a block, on whatever thread; what they were before is back when the last one leaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch


class Shared:
    """A block that is entered with the first who comes and left with the last: blocks that overlap would put back each other's settings."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make = make
        self._lock = threading.Lock()
        self._block: AbstractContextManager[Any] | None = None
        self.inside = 0  # how many are

    def __enter__(self) -> None:
        with self._lock:
            if not self.inside:
                self._block = self._make()
                self._block.__enter__()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if not self.inside and self._block is not None:
                self._block.__exit__(None, None, None)
                self._block = None


class Switch(Shared):
    """`with switch:` sets owner.name to `value`."""

    def __init__(self, owner: ModuleType | Any, name: str, value: bool = True):
        super().__init__(lambda: _set(owner, name, value))


@contextlib.contextmanager
def _set(owner: ModuleType | Any, name: str, value: bool) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


without_compiler = Shared(lambda: torch.compiler.set_stance("force_eager"))  # regions wrapped in torch.compile run eagerly

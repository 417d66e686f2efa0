"""Settings of the whole process that are on while somebody is inside a block, on whatever thread; what they were before is back when the last one leaves."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any


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

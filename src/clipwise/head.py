"""What the tape notes outside the captured modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadCall:
    """A torch call outside the captured modules, on example data: part of the way from the model's output to the losses."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

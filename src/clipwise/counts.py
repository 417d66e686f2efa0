"""Numbers that count something."""

from __future__ import annotations

from typing import Any


def check_count(value: Any, what: str) -> int:
    """`value`, if it is a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}")
    return value

"""The letters of torch.einsum's equations."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def operands_of(args: Sequence[Any]) -> list[Tensor]:
    """Of einsum(equation, a, b) and einsum(equation, [a, b])."""
    _, *operands = args
    return list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands


def letters_of(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """The letters of every operand and of the output, an ellipsis spelt out. dims: the number of axes of each operand."""
    given, arrow, output = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    hidden = [dim - len(term) + 3 if "..." in term else 0 for term, dim in zip(terms, dims)]  # axes behind each ellipsis
    ellipsis = "".join([letter for letter in string.ascii_letters if letter not in equation][: max(hidden)])
    terms = [term.replace("...", ellipsis[len(ellipsis) - count :]) for term, count in zip(terms, hidden)]
    if arrow:
        return terms, output.replace("...", ellipsis)
    every = "".join(terms)
    return terms, ellipsis + "".join(sorted(letter for letter in set(every) - set(ellipsis) if every.count(letter) == 1))

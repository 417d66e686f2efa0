"""torch.einsum with a weight: its gradient is an einsum again."""

from __future__ import annotations

import string
from dataclasses import dataclass

import torch
from torch import Tensor

from ..equations import letters_of, operands_of
from ..errors import UncoveredUse
from ..factors import Dense, Diagonal, Factor, Outer
from ..layout import from_rows, to_rows
from ..numerics import to_accumulate
from ..registry import Call, Factors, Use, own_rule


@dataclass(frozen=True)
class Term:
    """A tensor and a letter for each of its axes."""

    letters: str
    tensor: Tensor


def _letters(use: Use, dims: list[int]) -> tuple[list[str], str]:
    equation = use.args[0]
    if not isinstance(equation, str):
        raise UncoveredUse("torch.einsum is called with lists of axes.", 'Write the equation as a string: torch.einsum("bi,oi->bo", x, w).')
    return letters_of(equation, dims)


def _row_axes(use: Use, dims: int) -> tuple[int, ...]:
    """Axes of the output that are not a weight's alone. Refuses what no einsum gradient can express."""
    operands = operands_of(use.args)
    terms, output = _letters(use, [operand.dim() for operand in operands])
    of_weights: set[str] = set()
    for place, (term, operand) in enumerate(zip(terms, operands)):
        if use.tracks(operand):
            of_others = set().union(*(other for i, other in enumerate(terms) if i != place))
            of_weights |= set(term) - of_others
            elsewhere = set(output).union(*(other for i, other in enumerate(terms) if i != place))
            if len(set(term)) != len(term) or not set(term) <= elsewhere:
                raise UncoveredUse(
                    f"torch.einsum({use.args[0]!r}) takes a diagonal of a weight, or adds over an axis that only the weight has.",
                    "Do that to the weight before (weight.diagonal(), weight.sum(axis)), then call einsum.",
                )
    return tuple(axis for axis, letter in enumerate(output) if letter not in of_weights)


@own_rule(torch.einsum, row_axes=_row_axes)
def einsum(call: Call) -> Factors:
    """dL/dW = einsum over dL/dy and the other operands, with a row axis kept; an outer product where W is a matrix between them.

    Which axes of an operand number rows is told by its letters, not by their lengths.
    """
    operands = operands_of(call.original.args)
    letters, output = _letters(call, [operand.dim() for operand in operands])
    rows = "".join(output[axis] for axis in call.axes)
    spare = next(letter for letter in string.ascii_letters if letter not in "".join(letters) + output)
    row = rows if len(rows) == 1 else spare  # one letter for all rows

    def rows_first(names: str, operand: Tensor) -> Term:
        if rows and not call.tracks(operand) and all(letter in names for letter in rows):
            return Term(row + _without(names, rows), to_rows(operand, tuple(names.index(letter) for letter in rows)))
        return Term(names, operand)

    terms = [rows_first(names, operand) for names, operand in zip(letters, operands)]
    if not rows:  # a single example: every operand that is not a weight gets the row
        terms = [term if call.tracks(term.tensor) else Term(row + term.letters, term.tensor.unsqueeze(0)) for term in terms]
    grad = Term(row + _without(output, rows), call.output_grad)
    factors: Factors = {}
    for place, weight in enumerate(terms):
        if call.tracks(weight.tensor):
            others = [term for i, term in enumerate(terms) if i != place]
            factor = (
                _own_rows(call, output, weight, operands, letters) or _outer(grad, others, weight, row) or _dense(grad, others, weight, row)
            )
            before = factors.get(weight.tensor)
            factors[weight.tensor] = factor if before is None else Dense(before.dense() + factor.dense())
    return factors


def _own_rows(call: Call, output: str, weight: Term, operands: list[Tensor], letters: list[str]) -> Factor | None:
    """A weight made as long as the batch (from constants expanded to it) has a part for each row; otherwise None."""
    rows = [output[axis] for axis in call.axes]
    (place,) = [i for i, operand in enumerate(operands) if operand is weight.tensor][:1]
    own = [letter for letter in rows if letter in letters[place]]
    if not own:
        return None
    if len(own) != len(rows):
        raise UncoveredUse(
            f"torch.einsum({call.original.args[0]!r}): a weight has some of the axes along which the examples lie, and not all.",
            "Flatten these axes into one before the call.",
        )
    whole = from_rows(call.output_grad.unsqueeze(0), call.axes, call.output_shape)[0]
    others = [(names, operand) for i, (names, operand) in enumerate(zip(letters, operands)) if i != place]
    equation = ",".join([output, *(names for names, _ in others)]) + "->" + letters[place]
    grad = torch.einsum(equation, to_accumulate(whole), *(to_accumulate(operand) for _, operand in others))
    return Diagonal(grad, tuple(letters[place].index(letter) for letter in own))


def _without(letters: str, removed: str) -> str:
    return "".join(letter for letter in letters if letter not in removed)


def _dense(grad: Term, others: list[Term], weight: Term, row: str) -> Factor:
    equation = ",".join(term.letters for term in [grad, *others]) + "->" + row + weight.letters
    return Dense(torch.einsum(equation, *(to_accumulate(term.tensor) for term in [grad, *others])))


def _outer(grad: Term, others: list[Term], weight: Term, row: str) -> Factor | None:
    """W stands between one operand and the output, shares axes with each and none with both."""
    if len(others) != 1 or row not in others[0].letters:
        return None
    (x,) = others
    if any(len(set(term.letters)) < len(term.letters) for term in (grad, x, weight)):  # a diagonal
        return None
    of_x = [letter for letter in weight.letters if letter in x.letters]
    of_grad = [letter for letter in weight.letters if letter in grad.letters]
    summed = [letter for letter in grad.letters if letter not in weight.letters and letter != row]
    if set(of_x) & set(of_grad) or set(x.letters) != {row, *of_x, *summed} or not of_x or not of_grad:
        return None
    sides = [(grad, of_grad), (x, of_x)]
    if weight.letters == "".join(of_x + of_grad):
        sides.reverse()
    elif weight.letters != "".join(of_grad + of_x):
        return None
    left, right = (
        term.tensor.permute([term.letters.index(letter) for letter in [row, *summed, *own]]).flatten(1 + len(summed)) for term, own in sides
    )
    return Outer(left, right, weight.tensor.shape)

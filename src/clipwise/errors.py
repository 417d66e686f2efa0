"""Refusals: every way clipwise says no, each with what, where and the repair.

A refusal is decided by structure (shapes, graph, configuration), never by the value of a record: an exception that one
record can trigger would tell the world about that record.
"""

from __future__ import annotations

from typing import NoReturn


def in_one_line(error: BaseException) -> str:
    """Its kind, and the first line of what it says, if it says anything."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def not_copied(self: object, memo: object) -> NoReturn:
    """The `__deepcopy__` of trainings."""
    raise TypeError(
        "a training is not copied: the copy of its optimizer would step without noise. Copy the model, and train the copy by itself."
    )


class Refusal(RuntimeError):
    """Something that cannot be shown to be clipped per example. Nothing was changed; the step may be repaired and repeated."""

    def __init__(self, what: str, repair: str):
        super().__init__(f"{what}\n  {repair}")
        self.what = what
        self.repair = repair


class LossShape(Refusal):
    """`losses` is not a vector with one floating-point entry an example."""


class LossIndependent(Refusal):
    """`losses` does not depend on any trainable parameter that the tape watches."""


class UncoveredUse(Refusal):
    """A trainable parameter is used by a function that has no rule, in a way no rule covers, or outside the tape's sight."""


class UnseenUse(UncoveredUse):
    """A trainable parameter reaches the losses through autograd nodes that the tape never saw."""


class MixedExamples(Refusal):
    """The loss of one example depends on another example."""


class StateWrite(Refusal):
    """Example data is written into a buffer or a parameter, which would be released with the model."""


class WrongRule(Refusal):
    """The factors of a parameter do not add up to autograd's own gradient: some rule is wrong."""


class ConsumedTape(Refusal):
    """These losses were already turned into a gradient; their graph is gone."""


class BadClipping(Refusal, ValueError):
    """A clipping that cannot be: a bound that is not positive, a pattern that matches no parameter."""


class BadPlan(Refusal, ValueError):
    """A plan that contradicts itself, or that no accountant covers."""


class BudgetSpent(Refusal):
    """The plan's steps are used up: one more would cost more than was promised."""


class ForeignGradient(Refusal):
    """A gradient that did not come through `private.loss`, or was changed after it did."""


class NothingClipped(Refusal):
    """`step()` without new losses that went through `private.loss` and `backward()`."""


class WrongDraw(Refusal):
    """Losses that are not those of one new draw of the private loader: too many, too few, twice, or from elsewhere."""


class WrongScale(Refusal):
    """The private loss was multiplied before its backward pass."""


class UnhookedParameter(Refusal):
    """A trainable parameter that no optimizer of the training updates, or one that an optimizer updates and no module holds."""


class BadLedger(Refusal):
    """A ledger or checkpoint that belongs to another plan, is in use, or cannot be read."""


class BadData(Refusal):
    """A data file that is missing, damaged or not what it should be."""


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, Refusal):
        _class.__module__ = "clipwise"

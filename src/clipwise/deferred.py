"""What a block without an end leaves until the losses are there.

Such a block may still be open while quite different code runs: another model is trained, a data set is prepared. Between the
calls of its modules it therefore refuses nothing by itself; what would have been refused inside `capture` is looked for among
the calls that lead to the losses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .coverage import graph_nodes
from .guards import GUARDS
from .marks import foreign_parameter
from .program import ProgramCall
from .registry import Use
from .tape import Tape


def check_deferred(tape: Tape, losses: Tensor, calls: list[ProgramCall]) -> None:
    """Refuse losses that depend on a parameter of no captured module, or on a function that mixes examples. `calls`: those that lead to them."""
    if tape.marks.foreign:
        for node in graph_nodes(losses):
            variable: Any = getattr(node, "variable", None)
            if variable is not None and id(variable) in tape.marks.foreign:
                raise foreign_parameter(variable)
    for call in calls:
        guard = GUARDS.get(call.func)
        if guard is not None:
            guard(Use(call.func, call.args, call.kwargs, []), tape.marks)

"""Putting taps behind watched calls: the first time, and in the steps after it by the recipe that was worked out then."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .derived import needs_autograd
from .errors import UncoveredUse
from .functions import full_name, trait_of
from .kept import carried
from .marks import Marks
from .precision import as_autocast_rounds, rounded_by_autocast
from .program import is_autocast_on
from .recipes import each_weight_once, recorded_call
from .registry import Rule, Use
from .rules.spread import spread_rule
from .taps import Deposit, Record, has_saving_hooks, tap

if TYPE_CHECKING:
    from .tape import Tape


def tapped_again(tape: Tape, func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output of a call like one in a step before, behind a tap, by its recipe; None where there is none, or where something may be refused."""
    marks = tape.marks
    if tape.refusals is not None or marks.has_stale or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return None
    values = (*args, *kwargs.values()) if kwargs else args
    recipe = tape.recipes.find(func, rule, values, tuple(kwargs) if kwargs else (), marks)
    if recipe is None:
        return None
    tape.trail = hash((tape.trail, recipe.said))
    upstream: list[Any] = []
    for place in recipe.others:
        node = values[place].grad_fn
        if node is not None:
            upstream.append(node)
        elif marks.made is not None and marks.made.is_old(values[place]):
            raise carried(f"in {full_name(func)}")
    if rule.is_product and is_autocast_on():
        values = rounded_by_autocast(values, recipe.others, marks)
        output = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))
    else:
        output = func(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise no_rule(recipe.recorded, marks, one_tensor=False)
    if not output.requires_grad:
        return output
    if output.is_complex():
        raise _complex(recipe.recorded, marks)
    if tape.uses is not None:
        _note_use(tape, recipe.recorded, rule)
    read = recipe.read
    kept = (values[read[0]],) if len(read) == 1 else tuple([values[place] for place in read])
    return _behind_tap(tape, output, recipe.recorded, rule, recipe.row_axes, recipe.leads_to, recipe.parameters, kept, upstream)


def tapped(tape: Tape, use: Use, rule: Rule, said: list[Any]) -> Tensor:
    """The output of the call behind a tap, and a recipe for calls like it. `said`: what the trail took in of it."""
    marks = tape.marks
    if len(set(map(id, use.tracked))) < len(use.tracked):
        use = each_weight_once(use, marks)
    upstream = use.upstream()
    called = as_autocast_rounds(use, marks) if rule.is_product else use
    output = use.func(*called.args, **called.kwargs)
    if not isinstance(output, Tensor):
        raise no_rule(use, marks, one_tensor=False)
    if not output.requires_grad:
        return output
    if output.is_nested:
        raise UncoveredUse(
            f"{marks.describe(use.tracked)} meets a nested tensor, at {full_name(use.func)}{marks.where(use.tracked)}.",
            "Pad the examples to one length (nn.utils.rnn.pad_sequence) and mask what was added, or hand all rows over as one tensor with clipwise.owners.",
        )
    tape.recipes.add(called, rule, said, output.dim(), marks)
    return insert_tap(tape, output, called, rule, upstream)


def insert_tap(
    tape: Tape, output: Tensor, use: Use, rule: Rule, upstream: list[Any], *, local: Tensor | None = None, deposit: Deposit | None = None
) -> Tensor:  # fmt: skip
    """`output` behind a tap that remembers the call.

    `local` is the output to differentiate, where no rule does. With a `deposit`, that is where the rule's tensors come from.
    """
    marks = tape.marks
    if output.is_complex() or any(weight.is_complex() for weight in use.tracked):
        raise _complex(use, marks)
    recorded, kept = recorded_call(use, rule, marks)
    leads_to = hash((output.dim(), *(marks.labels.get(id(weight)) for weight in use.tracked)))
    parameters = marks.keys_of(use.tracked)
    needs_graph = local is not None or any(needs_autograd(weight, marks) for weight in use.tracked)
    tape.needs_graph = tape.needs_graph or needs_graph
    if tape.uses is not None:
        _note_use(tape, use, rule)
    row_axes = rule.row_axes(use, output.dim())
    return _behind_tap(tape, output, recorded, rule, row_axes, leads_to, parameters, kept if deposit is None else deposit, upstream, local)


def _behind_tap(
    tape: Tape, output: Tensor, recorded: Use, rule: Rule, row_axes: tuple[int, ...], leads_to: int, parameters: list[int],
    kept: tuple[Tensor, ...] | Deposit, upstream: list[Any], local: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`leads_to`: hash of the axes of the output and of the labels of the weights. `parameters`: behind these weights."""
    key = tape.trail = hash((tape.trail, leads_to))
    if has_saving_hooks():
        tape.computes_again = True
    shape = output.shape
    hands_over = None
    if type(kept) is tuple:
        like: list[Any] = [shape, output.dtype]
        for tensor in kept:
            like += tensor.shape, tensor.dtype
        hands_over = hash(tuple(like))
    record = Record(recorded, rule, row_axes, key, tape.switch, upstream, local, hands_over)
    tape.created[key] = shape
    tape.taps.append(weakref.ref(record))
    tape.tapped.append(parameters)
    tape.reaching += output.nbytes
    behind: Tensor = tap(output, tape.anchor, record, kept)
    return behind


def _note_use(tape: Tape, use: Use, rule: Rule) -> None:
    """For `check`: which function uses a parameter."""
    assert tape.uses is not None
    for name in tape.marks.names_of(use.tracked):
        tape.uses.setdefault(name, []).append("entry by entry" if rule is spread_rule else trait_of(use.func).name)


def no_rule(use: Use, marks: Marks, *, one_tensor: bool) -> UncoveredUse:
    """Refuses this call. Rules, and the fallback, speak of functions that return one tensor."""
    function, names = full_name(use.func), marks.describe(use.tracked)
    what = f"{names} {'are' if ', ' in names else 'is'} used by {function}, which has no rule{marks.where(use.tracked)}."
    if not one_tensor:
        return UncoveredUse(what, f"It returns several tensors: write it with simpler calls, @clipwise.rewrite({function}), or freeze it.")
    return UncoveredUse(
        what,
        f"Register one with @clipwise.rule({function}), freeze the parameter, or pass fallback=True to differentiate that call "
        "example by example (slower).",
    )


def not_covered(use: Use, marks: Marks, how: str) -> UncoveredUse:
    return UncoveredUse(
        f"{marks.describe(use.tracked)} {how}, at {full_name(use.func)}{marks.where(use.tracked)}.",
        "That is not covered: write it with real numbers and whole batches, or freeze the parameter.",
    )


def _complex(use: Use, marks: Marks) -> UncoveredUse:
    return not_covered(use, marks, "takes part in complex arithmetic")

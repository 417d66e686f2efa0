"""Is every use of every parameter seen? Decided from the autograd graph alone, whatever the numbers are.

From the losses downwards, the only way to a trainable parameter must lead through a tap. A custom autograd function, a
scripted or compiled region, a parameter changed behind the tape's back: each leaves a path that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .errors import UncoveredUse, UnseenUse
from .marks import Marks
from .taps import Keep, Tap

_HEAD = 256  # nodes between the losses and the first taps that go into the fingerprint
_TAP: Any = Tap._backward_cls  # of the nodes of taps
_TAP_NAMES = {f"{function.__name__}Backward" for function in (Tap, Keep)}
# Names of one operation: by one where a graph is traced, by another where it is not.
_ALIKE = dict.fromkeys(("ReshapeAliasBackward0", "UnsafeViewBackward0"), "ViewBackward0")


def fingerprint(losses: Tensor) -> int:
    """A hash of the operations between the losses and the taps nearest to them: the part of the path the tape may not have seen."""
    names: list[str] = []
    queue, seen = [losses.grad_fn], {losses.grad_fn}
    while queue and len(names) < _HEAD:
        node: Any = queue.pop()
        name = node.name()
        names.append(_ALIKE.get(name, name))
        if name not in _TAP_NAMES:
            for parent, _ in node.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    queue.append(parent)
    return hash(tuple(names))


def taps_behind(losses: Tensor) -> frozenset[int]:
    """Keys of the taps that a backward pass from these losses may reach. From each it goes on with the examples that went into the call."""
    found: set[int] = set()
    queue, seen = [losses.grad_fn], {losses.grad_fn}
    while queue:
        node: Any = queue.pop()
        if type(node) is _TAP:
            found.add(node.record.key)
            parents = node.record.upstream
        else:
            parents = [parent for parent, _ in node.next_functions]
        for parent in parents:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return frozenset(found)


def graph_nodes(losses: Tensor) -> Iterator[Any]:
    """Every autograd node behind the losses."""
    queue, seen = [losses.grad_fn], {losses.grad_fn}
    while queue:
        node: Any = queue.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)


def refuse_reentrant_checkpoints(losses: Tensor) -> None:
    """They run the forward pass inside the backward pass, where neither a tape nor autograd.grad can follow."""
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_nodes(losses)):
        raise reentrant_checkpoint()


def check_coverage(losses: Tensor, marks: Marks) -> set[Any]:
    """Refuse if a trainable parameter is reached past the taps. Returns the nodes between the losses and the parameters."""
    reached_from: dict[Any, Any] = {losses.grad_fn: None}
    queue = [losses.grad_fn]
    while queue:
        node: Any = queue.pop()
        record = getattr(node, "record", None) if node.name() in _TAP_NAMES else None
        if record is not None:
            parents = record.upstream
        else:
            if node.name() == "CheckpointFunctionBackward":
                raise reentrant_checkpoint()
            parents = [parent for parent, _ in node.next_functions]
        for parent in parents:
            if parent is not None and parent not in reached_from:
                reached_from[parent] = node
                queue.append(parent)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in marks.parameters and variable.requires_grad:
            raise _unseen(variable, node, reached_from, marks)
    return set(reached_from)


def reentrant_checkpoint() -> UncoveredUse:
    return UncoveredUse(
        "torch.utils.checkpoint is used with use_reentrant=True, which runs the forward pass where no tape can follow.",
        "Pass use_reentrant=False: checkpoint(function, x, use_reentrant=False).",
    )


def _unseen(parameter: Tensor, node: Any, reached_from: dict[Any, Any], marks: Marks) -> UnseenUse:
    path: list[str] = []
    while (node := reached_from[node]) is not None and len(path) < 4:
        path.append(node.name())
    names = " <- ".join(path) or "the losses themselves"
    outside = "before the model is called" if marks.lenient else "outside capture()"
    cause = f"a custom autograd.Function, torch.jit.script, or a computation {outside} does that"
    repair = f"Write that computation with torch functions inside {'forward()' if marks.lenient else 'capture()'}, or freeze the parameter."
    if any("CompiledFunction" in name for name in path):
        repair = "That region was compiled before the tape could see it: call the uncompiled module, or freeze the parameter."
    elif marks.differentiates:
        cause = "a gradient that is part of the losses (autograd.grad with create_graph=True: a penalty on gradients, a differential equation) does that"
        repair = "Such losses are not covered: take differences of outputs in place of the gradient, or freeze the parameter."
    return UnseenUse(
        f"{marks.describe([parameter])} is used where the tape cannot see it, by the autograd node {names}{marks.where([parameter])}; {cause}.",
        repair,
    )

"""Calls that bring the examples of a batch together, and to which no gradient came: a choice that fell the other way.

`torch.where(x.isnan(), h.mean(0), h)` mixes examples only where a number is missing. On a batch without one, the gradient that reaches `h.mean(0)` is zero
throughout, and no test by gradients sees what it does. Another batch may wake it: from such a pass nothing is remembered. So it is with calls that keep
the axis of the examples (a softmax along it, a product from the left): of those that sleep, only such as are known to keep rows apart are let pass. And so
it is where something does come to a call that joins, and does not get further, because what it joins was put to zero before; or as good as nothing does,
beside what comes to the same place by another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .kinds import ENTRYWISE
from .moving import holds
from .taps import Keep, Tap

_OWN = {f"{function.__name__}Backward" for function in (Tap, Keep)}
_APART = {  # functions, as autograd names them, that let no two places of an axis meet which they keep
    word.replace("_", "")
    for word in f"""{" ".join(ENTRYWISE - {"linalg_cross"})} abs acos acosh alias amax amin angle as_strided asin asinh atan atanh cat ceil celu chunk clone conj
    constant_pad_nd cos cosh deg2rad detach diagonal digamma dropout elu embedding erf erfc erfinv exp exp2 expand expm1 fill flip floor frac gelu
    hardshrink hardsigmoid hardswish hardtanh i0 imag leaky_relu lgamma lift linalg_vector_norm log log10 log1p log2 log_sigmoid logit logsumexp
    masked_fill mean median mish mode mvlgamma nan_to_num nansum native_dropout neg nll_loss nll_loss2d norm permute polygamma prelu_kernel prod rad2deg
    real reciprocal relu repeat reshape_alias roll round rrelu_with_noise rsqrt select sgn sigmoid sign silu sin sinc sinh slice softplus softshrink split
    split_with_sizes sqrt square squeeze stack std sum t tan tanh threshold to_copy transpose trunc unbind unsafe_split unsafe_view unsqueeze var view
    view_as_complex view_as_real""".split()
}
_FIRST_AXIS_APART = (
    "convolution",
    "mkldnnconvolution",
    "cudnnconvolution",
    "nativegroupnorm",
    "pixelshuffle",
    "pixelunshuffle",
    "im2col",
    "col2im",
    "gridsampler2d",
)
_UNSEEN = 1e-9  # times what else comes to the same place: less is lost in the rounding of measurements (and layers are scaled by 1e-6)
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # where the first of their two matrices stands


class Dormant:
    """Listens to one backward pass over these nodes of autograd's."""

    def __init__(self, nodes: Iterable[Any], batch: int):
        nodes = set(nodes)
        joins = {node for node in nodes if _joins(node, batch)}
        examples = _from_which(nodes, {node for node in nodes if node.name() in _OWN}) if joins else set()
        self._came = dict.fromkeys(joins, 0.0)  # node: the largest number of the gradient that came to it …
        self._went: list[tuple[Any, Any, float]] = []  # … and what goes on from one node to another, to what was joined later
        self._joins = joins
        self._hooks = []
        for node in _behind(joins):
            places = [place for place, edge in enumerate(node.next_functions) if edge[0] in examples and _held(_shape(*edge), batch)]
            if places:
                self._hooks.append(node.register_hook(self._looker(node, places)))
            if places or node in joins or node in examples:
                self._hooks.append(node.register_prehook(self._listener(node)))

    def _listener(self, node: Any) -> Any:
        def listen(grads: tuple[Tensor | None, ...]) -> None:
            self._came[node] = max(map(_largest, grads), default=0.0)

        return listen

    def _looker(self, node: Any, places: list[int]) -> Any:
        def look(grads: tuple[Tensor | None, ...], _: Any) -> None:
            self._went += [(node, node.next_functions[place][0], _largest(grads[place])) for place in places]

        return look

    def names(self) -> set[str]:
        """What has slept, after the pass; it is not listened to any longer."""
        for hook in self._hooks:
            hook.remove()
        asleep = [node for node in self._joins if not self._came[node]]
        asleep += [node for node, to, largest in self._went if largest <= _UNSEEN * self._came.get(to, 0.0)]
        return set(map(_name, asleep))


def _largest(grad: Tensor | None) -> float:
    """Of its numbers; those that are not finite say nothing. Nothing so large is made beside it, if all are: a step that is verified has no room to spare."""
    if grad is None or not grad.numel():
        return 0.0
    with torch._C.DisableTorchFunction(), torch.no_grad():  # none of a tape's business
        found = float(torch.linalg.vector_norm(grad, math.inf))
        return found if math.isfinite(found) else float(torch.linalg.vector_norm(grad.nan_to_num(0.0, 0.0, 0.0), math.inf))


def _behind(joins: Iterable[Any]) -> set[Any]:
    """These nodes, and those whose results go into them."""
    return _reached(joins, lambda node: [following for following, _ in node.next_functions if following is not None])


def _from_which(nodes: Iterable[Any], ends: Iterable[Any]) -> set[Any]:
    """Those of the nodes from which autograd comes to one of the ends."""
    before: dict[Any, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            before.setdefault(following, []).append(node)
    return _reached(ends, lambda node: before.get(node, ()))


def _reached(starts: Iterable[Any], next_to: Callable[[Any], Iterable[Any]]) -> set[Any]:
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = set(next_to(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _joins(node: Any, batch: int) -> bool:
    """Whether an axis that may hold the examples goes in, and does not come out, or not known to be kept apart."""
    if node.name() in _OWN:
        return False
    came_out = min((_held(of.shape, batch) for of in getattr(node, "_input_metadata", ())), default=0)
    went_in = max((_held(_shape(*edge), batch) for edge in node.next_functions), default=0)
    if not went_in or went_in > came_out:
        return went_in > 0
    return _name(node).lower() not in _APART and any(holds(length, batch) for length in _joined(node))


def _joined(node: Any) -> Iterable[int]:
    """Lengths of the axes along which it brings places together; those of all axes, where nobody knows."""
    function, shapes = _name(node).lower(), [_shape(*edge) for edge in node.next_functions]
    along = getattr(node, "_saved_dim", None)
    if along is not None and function != "renorm":
        axes = list(map(_signed, [along] if isinstance(along, int) else along))
        if shapes[0] and all(-len(shapes[0]) <= axis < len(shapes[0]) for axis in axes):
            return [shapes[0][axis] for axis in axes]
    if function == "nativelayernorm":
        return tuple(node._saved_normalized_shape)
    if function in _PRODUCTS:
        left, right = shapes[_PRODUCTS[function] :][:2]
        return (*left[-1:], *right[-2:-1])
    if shapes[0] and (function in _FIRST_AXIS_APART or "pool" in function or function.startswith("upsample")):
        return shapes[0][1:]
    if "attention" in function:
        return [length for shape in shapes for length in shape[-2:]]
    return [length for shape in shapes for length in shape]


def _name(node: Any) -> str:
    return str(node.name().rstrip("0123456789").removesuffix("Backward"))


def _signed(number: int) -> int:
    """Autograd keeps axes as numbers without a sign."""
    return number - 2**64 if number >= 2**63 else number


def _held(shape: Iterable[int], batch: int) -> int:
    return sum(holds(length, batch) for length in shape)


def _shape(node: Any, place: int) -> tuple[int, ...]:
    metadata = getattr(node, "_input_metadata", ()) if node is not None else ()
    return tuple(metadata[place].shape) if place < len(metadata) else ()

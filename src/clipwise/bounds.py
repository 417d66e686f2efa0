"""Indices and probabilities are looked at before a kernel of a GPU is handed them.

A model that is tried with rows no record has may compute an index from them that lies beyond its table. On a CPU that is an exception, and such rows are
not tried any further. On a GPU a kernel that meets one stops, and from then on every call of the process fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .functions import is_mask, without_underscore
from .tracing import is_tracing

STOPPED_BY_THEM = {"cuda"}  # devices whose kernels do not raise an exception

# What these functions call their arguments, in their order.
_ALONG_AN_AXIS = "index_select gather scatter scatter_add scatter_reduce index_add index_copy index_reduce index_fill".split()
_WITH_CLASSES = "cross_entropy cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss".split()
_OF_PROBABILITIES = {"bernoulli": 1.0, "binary_cross_entropy": 1.0, "multinomial": None}  # the first argument, and the largest there may be
_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALONG_AN_AXIS, ("input", "dim", "index")),
    **dict.fromkeys(_WITH_CLASSES, ("input", "target", "weight", "size_average", "ignore_index")),
    **dict.fromkeys(_OF_PROBABILITIES, ("input",)),
    "take": ("input", "index"),
    "put": ("input", "index"),
    "one_hot": ("input", "num_classes"),
}
_LOOK_UPS = {"embedding", "embedding_bag"}  # torch wants the table first, torch.nn.functional the indices
_BY_INDEX = {"__getitem__", "__setitem__", "index_put"}


class WithinBounds(TorchFunctionMode):
    """Calls with an index or a probability out of bounds raise an IndexError, on a GPU too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_bounds(func, args, kwargs)
        return func(*args, **kwargs)


def check_bounds(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an IndexError where this call would stop the device. A call that is traced has no numbers yet."""
    if is_tracing():
        return
    name = getattr(func, "__name__", "")
    if name in ("bernoulli", "bernoulli_") and (len(args) > 1 or "p" in kwargs or name.endswith("_")):
        args, kwargs = [value for value in (*args[1:2], kwargs.get("p")) if isinstance(value, Tensor)], {}  # the first is only written to
    name = without_underscore(name)
    if name in _BY_INDEX:
        _check_places((*args, *[kwargs[key] for key in ("input", "indices") if key in kwargs]))
    elif name in _LOOK_UPS:
        _check_lookup([value for value in (*args[:2], kwargs.get("input"), kwargs.get("weight")) if isinstance(value, Tensor)])
    elif name in _NAMES:
        given = {**dict(zip(_NAMES[name], args)), **kwargs}
        if isinstance(given.get("input"), Tensor):
            _check_named(name, given, given["input"])


def _check_named(name: str, given: Mapping[str, Any], source: Tensor) -> None:
    if name in _OF_PROBABILITIES:
        _check_probabilities(source, _OF_PROBABILITIES[name])
    elif name in _WITH_CLASSES:
        ignored = given.get("ignore_index", -100)
        _check(given.get("target"), 0, source.shape[min(1, source.dim() - 1)], ignored if isinstance(ignored, int) else None)
    elif name == "one_hot":
        classes = given.get("num_classes", -1)
        _check(source, 0, classes if classes > 0 else None)
    elif name in ("take", "put"):
        _check(given.get("index"), -source.numel(), source.numel())
    elif isinstance(dim := given.get("dim"), int) and source.dim():
        _check(given.get("index"), -source.shape[dim] if name == "index_fill" else 0, source.shape[dim])


def _check_lookup(tensors: Sequence[Tensor]) -> None:
    tables, indices = ([tensor for tensor in tensors if tensor.is_floating_point() is is_table] for is_table in (True, False))
    for index in indices:
        for table in tables:
            _check(index, 0, len(table))


def _check_places(args: Sequence[Any]) -> None:
    """x[…, index, …]: one axis after the other. A mask takes up as many axes as it has, and raises by itself where it does not fit."""
    source, places = args[0], args[1] if len(args) > 1 else None
    if not isinstance(source, Tensor):
        return
    items = tuple(places) if isinstance(places, list | tuple) else (places,)  # a list of numbers is no tensor, and not looked at
    widths = [0 if item is None or item is Ellipsis or isinstance(item, bool) else item.dim() if is_mask(item) else 1 for item in items]
    axis = 0
    for item, width in zip(items, widths):
        if item is Ellipsis:
            axis += source.dim() - sum(widths)
        elif isinstance(item, Tensor) and not is_mask(item) and axis < source.dim():
            _check(item, -source.shape[axis], source.shape[axis])
        axis += width


def _check(index: Any, least: int, beyond: int | None, but: int | None = None) -> None:
    """Whether every integer is one of least … beyond - 1, or `but`."""
    if not isinstance(index, Tensor) or index.is_floating_point() or not index.numel() or index.device.type not in STOPPED_BY_THEM:
        return
    is_out = index < least
    if beyond is not None:
        is_out |= index >= beyond
    if but is not None:
        is_out &= index != but
    if bool(is_out.any()):
        raise IndexError(f"an index lies beyond {least} … {'' if beyond is None else beyond - 1}")


def _check_probabilities(probabilities: Tensor, most: float | None) -> None:
    """Whether every number is zero or larger, and finite, and at `most` so large."""
    if probabilities.device.type in STOPPED_BY_THEM and probabilities.is_floating_point() and probabilities.numel():
        is_good = (probabilities >= 0) & probabilities.isfinite()
        if most is not None:
            is_good &= probabilities <= most
        if not bool(is_good.all()):
            raise IndexError("a probability is none")

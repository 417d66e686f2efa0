"""A mode that holds random functions still, so that two runs can be compared row by row, and looks at indices, since rows that no record has may go astray."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .bounds import check_bounds
from .functions import is_open, opened, trait_of

_FILLS = {"rand": 0.5, "uniform_": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "normal": 0.0, "normal_": 0.0}
_FILLS |= {"exponential_": 1.0, "bernoulli_": 1.0, "log_normal_": 1.0, "cauchy_": 0.0, "geometric_": 1.0, "random_": 0.0}
_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
}

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class Still(TorchFunctionMode):
    """Functions that draw as many numbers as the data asks for are always held still: what follows would draw others.

    With `everything`, all known random functions give the same for every row (dropout keeps everything, a draw is a
    constant): runs of different sizes can then be compared. Without, runs of one size draw the same numbers anyway.
    """

    def __init__(self, *, everything: bool):
        super().__init__()
        self.everything = everything

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if trait_of(func).runs_backward:  # a checkpointed region is computed again inside
            with self:
                return opened(func)(*args, **kwargs)
        check_bounds(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if func is F.rrelu:
            given = {**dict(zip(("input", "lower", "upper"), args)), **kwargs}
            return F.leaky_relu(given["input"], (given.get("lower", 1 / 8) + given.get("upper", 1 / 3)) / 2)
        if name in ("poisson", "_standard_gamma"):
            return args[0].clone()
        if self.everything:
            found = self._still(func, name, args, kwargs)
            if found is not NotImplemented:
                return found
        if is_open(func):
            with self:
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _still(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            return func(*args[:4], **{**dict(zip(("dropout_p", "is_causal"), args[4:])), **kwargs, "dropout_p": 0.0})
        if func is F.multi_head_attention_forward:
            return func(*args, **{**kwargs, "training": False})
        if func in _RECURRENT:
            place = 6 if isinstance(args[3], list | tuple) else 5  # packed sequences bring their lengths along
            return func(*args[:place], 0.0, *args[place + 1 :])
        if name == "multinomial":
            return args[0].topk(args[1] if len(args) > 1 else kwargs["num_samples"], -1).indices
        if name == "bernoulli":
            return (args[0] >= 0.5).to(args[0].dtype)
        if name in _FILLS:
            return _blank(name, args, {key: value for key, value in kwargs.items() if key != "generator"}).fill_(_FILLS[name])
        if name in ("randint", "randint_like"):
            kept = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "layout")}
            if name == "randint_like":
                return torch.zeros_like(args[0], **kept)
            return torch.zeros(kwargs["size"] if "size" in kwargs else args[-1], **{"dtype": torch.int64, **kept})
        if name == "randperm":
            return torch.arange(args[0], device=kwargs.get("device")).flip(0)  # not the identity: it must still move rows
        return NotImplemented


def _blank(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor like the one that this function would draw, without drawing anything: what is traced must not be random either."""
    if name.endswith("_"):
        return args[0]
    if name.endswith("_like"):
        return torch.zeros_like(*args, **kwargs)
    if name != "normal":
        return torch.zeros(*args, **kwargs)
    mean, deviation, *size = (*args, *[kwargs[key] for key in ("mean", "std", "size") if key in kwargs])
    if size:
        return torch.zeros(size[0], **{key: value for key, value in kwargs.items() if key in ("dtype", "device", "layout")})
    return torch.zeros_like(torch.as_tensor(mean + deviation * 0))

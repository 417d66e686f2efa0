"""Functions that are refused whether or not they hold a parameter: they mix examples, or write them into the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .errors import MixedExamples, StateWrite
from .functions import full_name
from .marks import EXAMPLE, Marks
from .registry import Use

Guard = Callable[[Use, Marks], None]
_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training")  # the order of F.batch_norm
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training")  # … and of torch.batch_norm
_REPAIR = (
    "Put the layer into evaluation mode (model.eval() or bn.eval(): the paper's frozen BatchNorm), or replace it by "
    "GroupNorm: clipwise.replace_batchnorm(model); statistics of a batch make every example's gradient depend on the others."
)


def _batch_norm(use: Use, marks: Marks) -> None:
    if not (use.args[5] if len(use.args) > 5 else use.kwargs.get("training")):  # the sixth in both orders
        return
    arguments = _FUNCTIONAL if use.func is F.batch_norm else _NATIVE
    bound = dict(zip(arguments, use.bind(*arguments)))
    of_a_weight = isinstance(bound["input"], torch.Tensor) and marks.kind(bound["input"]) != EXAMPLE  # weight standardisation
    if bound["running_mean"] is not None or (torch.is_grad_enabled() and not of_a_weight):
        raise MixedExamples(f"{full_name(use.func)} normalises with the statistics of the whole batch{_near(use, bound, marks)}.", _REPAIR)


def _batch_statistics(use: Use, marks: Marks) -> None:
    raise MixedExamples(f"{full_name(use.func)} computes statistics of the whole batch.", _REPAIR)


def _instance_norm(use: Use, marks: Marks) -> None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")
    bound = dict(zip(names, use.bind(*names, use_input_stats=True)))
    if bound["use_input_stats"] and bound["running_mean"] is not None:
        raise StateWrite(
            f"{full_name(use.func)} writes statistics of the examples into its running buffers{_near(use, bound, marks)}.",
            "Build the layer with track_running_stats=False, or put it into evaluation mode.",
        )


def _embedding(use: Use, marks: Marks) -> None:
    names = ("input", "weight", "padding_idx", "max_norm")
    _, weight, _, max_norm = use.bind(*names)
    if max_norm is not None and marks.name_of(weight) is not None and not use.tracks(weight):
        raise StateWrite(
            f"F.embedding(max_norm=…) rescales the rows of {marks.name_of(weight)} that this batch looks up, in place.",
            "Leave max_norm out, or renormalise the whole table once, before training.",
        )


def _near(use: Use, bound: dict[str, Any], marks: Marks) -> str:
    """Which layer, if anything it was handed has a name."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        path = marks.name_of(bound[name])
        if path is not None:
            return f" (in {path.rpartition('.')[0] or 'the model itself'})"
    return ""


GUARDS: dict[Callable[..., Any], Guard] = {F.batch_norm: _batch_norm, F.instance_norm: _instance_norm, F.embedding: _embedding}
for _name in ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"):
    if hasattr(torch, _name):
        GUARDS[getattr(torch, _name)] = _batch_norm
for _name in ("batch_norm_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats"):
    if hasattr(torch, _name):
        GUARDS[getattr(torch, _name)] = _batch_statistics
GUARDS[torch.instance_norm] = lambda use, marks: _instance_norm(
    Use(use.func, (*use.args[:1], *use.args[3:5], *use.args[1:3], *use.args[5:]), use.kwargs, use.tracked), marks
)

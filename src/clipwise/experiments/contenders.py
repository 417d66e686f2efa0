"""The ways to make one training step that are compared: the paper's, ours, and Opacus's where it is installed.

Every step goes from a batch to updated weights by Adam. The private ones clip each example's gradient to norm 1 and add the same noise
(the paper's: σ = 0.05 on the mean gradient); they differ in how the clipped sum is found, and in nothing else.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..clipping import flat
from ..compiled.sums import GraphSums
from ..methods import multiloss_alone, nxbp_alone, trainable
from ..noise import noised
from ..randomness import Fast
from ..release import clipped_gradients
from ..tape import capture

Step = Callable[[Tensor, Tensor], None]
Sums = Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]

CLIPPING = flat(1.0)
SIGMA = 0.05  # on the mean gradient, as in the paper
NONPRIVATE, NXBP = "non-private", "nxBP"


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y, reduction="none")


def _nxbp(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return nxbp_alone(model, lambda x, y: losses_of(model, x, y), [x, y], CLIPPING).sums


def _multiloss(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return multiloss_alone(model, losses_of(model, x, y), CLIPPING).sums


def _taped(method: str) -> Sums:
    def sums(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with capture(model) as tape:
            losses = losses_of(model, x, y)
        return clipped_gradients(tape, losses, CLIPPING, method=method)

    return sums


def _graphed() -> Sums:
    """The graph that private.compile replays, as it was traced: Inductor would take minutes for the larger networks."""
    graphs: list[GraphSums] = []
    eagerly = _taped("bookkeep")

    def sums(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if not graphs:
            graphs.append(GraphSums(model, losses_of, CLIPPING, rows=len(x), backend="eager"))
        batch = graphs[0].batch((x, y), len(x))
        variant = graphs[0].due(batch)
        return graphs[0].clipped(variant, batch, 1.0).sums if variant is not None else eagerly(model, x, y)

    return sums


COMPILED = "compiled"
TAPED = {"ReweightGP": lambda: _taped("reweight"), "bookkeep": lambda: _taped("bookkeep"), COMPILED: _graphed}
CLIPPED_SUMS: dict[str, Callable[[], Sums]] = {NXBP: lambda: _nxbp, "multiLoss": lambda: _multiloss, **TAPED}
OPACUS = {"Opacus hooks": "hooks", "Opacus ghost": "ghost"}
NAMES = (NONPRIVATE, *CLIPPED_SUMS, *OPACUS)
ABOUT = {
    NONPRIVATE: "an ordinary step, which protects nobody",
    NXBP: "forward and backward on one example at a time",
    "multiLoss": "autograd on the vector of losses, every gradient written out",
    "ReweightGP": "the paper's: norms by one backward pass, then another over reweighted losses",
    "bookkeep": "clipwise's default: norms and the clipped sum from one backward pass",
    COMPILED: "bookkeep as one graph, on a GPU replayed as a CUDA graph",
    "Opacus hooks": "Opacus with per-example gradients written out",
    "Opacus ghost": "Opacus with ghost clipping",
}


def available(name: str) -> str | None:
    """Why a way cannot be tried here; None if it can."""
    if name in OPACUS and importlib.util.find_spec("opacus") is None:
        return "Opacus is not installed"
    return None


def make_step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> Step:
    """A function that takes a batch and updates the model. Opacus rewires the model it is given: hand it one of its own."""
    if name == NONPRIVATE:
        return _ordinary(model, optimizer)
    if name in OPACUS:
        return _opacus(OPACUS[name], model, optimizer, batch_size)
    parameters, clipped_sums, randomness = trainable(model), CLIPPED_SUMS[name](), Fast()

    def step(x: Tensor, y: Tensor) -> None:
        sums = clipped_sums(model, x, y)
        found = noised(
            [sums.get(name) for name in parameters], list(parameters.values()), deviation=SIGMA * batch_size, divisor=batch_size,
            randomness=randomness, purpose="noise", step=0,
        )  # fmt: skip
        for parameter, grad in zip(parameters.values(), found):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        losses_of(model, x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def for_opacus(model: nn.Module) -> nn.Module:
    """A copy of the network that Opacus accepts: with its own LSTM or attention in place of torch's."""
    from opacus.validators import ModuleValidator

    own = copy.deepcopy(model)
    return own if ModuleValidator.is_valid(own) else ModuleValidator.fix(own).to(next(model.parameters()).device)


def _opacus(mode: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> Step:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    criterion: Any = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(torch.zeros(4 * batch_size)), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=SIGMA * batch_size, max_grad_norm=CLIPPING.sensitivity,
            poisson_sampling=False, grad_sample_mode=mode, criterion=criterion,
        )  # fmt: skip
    wrapped, private_optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else criterion

    def step(x: Tensor, y: Tensor) -> None:
        criterion(wrapped(x), y).backward()
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step

"""Small trainings whose released gradients are known."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.randomness import Reproducible
from clipwise.testing import clip_and_add, loop_gradients

SIZE, FEATURES, CLASSES = 60, 5, 3


def data(size: int = SIZE, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, FEATURES, generator=generator, dtype=dtype) * torch.linspace(0.2, 3.0, size, dtype=dtype)[:, None]
    return TensorDataset(x, torch.randint(0, CLASSES, (size,), generator=generator))


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def small_plan(**changes: Any) -> cw.PrivacyPlan:
    fields = dict(dataset_size=SIZE, batch_size=10, epochs=3, delta=1e-3, clipping=cw.flat(0.7), noise_multiplier=1.3)
    return cw.PrivacyPlan(**(fields | changes))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def training(
    model: nn.Module | None = None, optimizer: Any = None, plan: cw.PrivacyPlan | None = None, *, seed: int | None = 7, **options: Any
):
    """A private training with reproducible noise, unless `seed` is None."""
    model = model or small()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noise = Reproducible(seed) if seed is not None else options.pop("noise", "fast")
        private = cw.PrivateTraining(model, optimizer, plan or small_plan(), noise=noise, **options)
    _made.append(weakref.ref(private))
    return private, model, optimizer


_made: list[weakref.ref[cw.PrivateTraining]] = []


def close_all() -> None:
    for ref in _made:
        private = ref()
        if private is not None:
            private.close()
    _made.clear()


def released(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def steps(
    private: cw.PrivateTraining, model: nn.Module, optimizer: Any, dataset: Any = None, limit: int | None = None
) -> Iterator[list[Tensor]]:
    """Trains one epoch, and yields what each step released."""
    for number, (x, y) in enumerate(private.loader(dataset or data()), 1):
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        yield released(optimizer)
        optimizer.zero_grad()
        if number == limit:
            return


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> list[Tensor]:
    """By a loop over examples, in the order of the parameters."""
    if len(x) == 0:
        return [torch.zeros_like(p) for p in model.parameters()]

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, y_of[0], reduction="none")

    grads: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        y_of = [y[i : i + 1]]
        found = torch.autograd.grad(loss(model(x[i : i + 1])).sum(), list(model.parameters()))
        for name, grad in zip(grads, found):
            grads[name].append(grad.double())
    stacked = {name: torch.stack(rows) for name, rows in grads.items()}
    return list(clip_and_add(stacked, bound)[0].values())


__all__ = ["clipped_sum", "data", "loop_gradients", "losses_of", "released", "small", "small_plan", "steps", "training"]

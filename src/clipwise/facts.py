"""How a training was set up, as its ledger and report state it."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .plan import PrivacyPlan


def of_training(
    plan: PrivacyPlan, noise: str, own_batches: bool, method: str, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor]
) -> dict[str, Any]:
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "noise": noise,
        "batches": "caller" if own_batches else "clipwise",
        "method": method,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "versions": versions(),
    }


_WEAKEST = {"noise": ("reproducible", "fast", "secure"), "batches": ("caller", "clipwise")}  # the weakest first


def weakest(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The facts of a training that goes on: as good as the weaker of its parts."""
    merged = {**now, "started": before.get("started", now.get("started"))}
    for name, order in _WEAKEST.items():
        found = [facts[name] for facts in (before, now) if facts.get(name) in order]
        if found:
            merged[name] = min(found, key=order.index)
    return merged


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("clipwise", "dp-accounting"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

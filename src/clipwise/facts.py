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


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("clipwise", "dp-accounting"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

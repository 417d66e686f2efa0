"""Adam for noised gradients. The paper's DP-Adam is stock torch.optim.Adam on what a step releases; this corrects its bias.

The noise adds its variance φ = (z·S/B̄)² to the second moment, so that Adam divides small gradients by the noise. DP-AdamBC
(Tang et al. 2023) takes it out again: θ ← θ − η·m̂ / √max(v̂ − φ, γ). φ is public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class DPAdamBC(torch.optim.Optimizer):
    """Adam with the noise's share of the second moment removed; decoupled weight decay. PrivateTraining tells it the variance at each step.

    floor   γ, the least that v̂ − φ may be: it bounds a step where the gradient drowns in noise
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        if lr < 0 or floor <= 0 or weight_decay < 0 or not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(
                f"DPAdamBC needs lr ≥ 0, betas in [0, 1), floor > 0 and weight_decay ≥ 0, got {lr}, {betas}, {floor}, {weight_decay}"
            )
        super().__init__(params, dict(lr=lr, betas=betas, floor=floor, weight_decay=weight_decay, noise_variance=None))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on p.grad as it stands."""
        for group in self.param_groups:
            if group["noise_variance"] is None:
                raise RuntimeError("DPAdamBC does not know the variance of the noise: PrivateTraining sets it before each step")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter), noise=0.0)
        first, second = group["betas"]
        state["step"] += 1
        state["mean"].lerp_(grad, 1 - first)
        state["square"].lerp_(grad.square(), 1 - second)
        state["noise"] = second * state["noise"] + (1 - second) * group["noise_variance"]
        mean = state["mean"] / (1 - first ** state["step"])
        correction = 1 - second ** state["step"]
        without_noise = ((state["square"] - state["noise"]) / correction).clamp_min(group["floor"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, without_noise.sqrt(), value=-group["lr"])

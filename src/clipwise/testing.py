"""Check a rule, or a whole model, against the definition: a float64 loop over examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .clipping import flat
from .numerics import flat_rows
from .release import clipped_gradients, per_example_norms
from .tape import capture

Loss = Callable[..., Tensor]


def squared_output(output: Any) -> Tensor:
    """A loss that reaches every output entry: half the squared norm of each example's output, no two entries weighted alike."""
    flattened = flat_rows(output)
    return 0.5 * (flattened.square() * torch.linspace(0.5, 1.5, flattened.shape[1], dtype=output.dtype, device=output.device)).sum(1)


def loop_gradients(model: nn.Module, inputs: Sequence[Any], loss: Loss = squared_output) -> dict[str, Tensor]:
    """The reference: {name: (B, *shape)} by one forward and backward pass an example, in float64."""
    model = copy.deepcopy(model).double()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    batch = next(x.shape[0] for x in inputs if isinstance(x, Tensor))
    rows = []
    for i in range(batch):
        alone = [_row(x, i) for x in inputs]
        losses = loss(model(*alone))
        found = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(found, parameters.values())])
    return {name: torch.stack(column).detach() for name, column in zip(parameters, zip(*rows))}


def _row(x: Any, i: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1]


def clip_and_add(gradients: dict[str, Tensor], bound: float) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i g_i·min(1, bound/‖g_i‖), and the norms."""
    norms = torch.stack([flat_rows(grad).square().sum(1) for grad in gradients.values()]).sum(0).sqrt()
    weights = (bound / norms).clamp(max=1.0).nan_to_num(1.0)
    return {name: torch.einsum("b,b...->...", weights, grad) for name, grad in gradients.items()}, norms


def check_rule(
    model: nn.Module, *inputs: Any, loss: Loss = squared_output, methods: Sequence[str] = ("bookkeep", "reweight"), tolerance: float = 1e-8
) -> None:
    """Compare norms and clipped sums of `model` on a batch with a float64 loop; raises AssertionError where they differ.

    Inputs are batch-first tensors; `loss` maps the output to one loss an example. Run in float64, so that only a wrong
    rule, not rounding, can make a difference.

        clipwise.testing.check_rule(MyModule(4, 3), torch.randn(5, 7, 4))
    """
    model = copy.deepcopy(model).double()
    inputs = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    reference = loop_gradients(model, inputs, loss)
    norms = clip_and_add(reference, 1.0)[1]
    bound = float(norms.median()) or 1.0
    expected, _ = clip_and_add(reference, bound)
    for method in methods:
        with capture(model) as tape:
            losses = loss(model(*inputs))
        _compare(f"norms ({method})", per_example_norms(tape, losses), norms, tolerance)
        found = clipped_gradients(tape, losses, flat(bound), method=method)
        scale = max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            _compare(f"clipped sum of {name} ({method})", found.get(name, torch.zeros_like(value)), value, tolerance, scale)


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float, scale: float | None = None) -> None:
    scale = scale or float(expected.abs().max()) or 1.0
    error = float((found.double() - expected).abs().max()) / scale
    if not error <= tolerance:
        raise AssertionError(f"{what} is off by {error:.2e} (relative), more than {tolerance:.0e}")

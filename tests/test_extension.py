"""The extension points: rules, rewrites, the fallback, and the check that tries them out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

import clipwise as cw
from helpers import ALL_METHODS, Net, assert_exact, examples

P = nn.Parameter


def scaled_linear(x, weight, scale):
    """A torch function of the user's own: anything that hands over to torch-function modes."""
    if has_torch_function_variadic(x, weight):
        return handle_torch_function(scaled_linear, (x, weight), x, weight, scale)
    return F.linear(x, weight) * scale


class ScaledLinear(nn.Module):
    def __init__(self, inputs, outputs, scale=2.0):
        super().__init__()
        self.weight = P(torch.randn(outputs, inputs))
        self.scale = scale

    def forward(self, x):
        return torch.tanh(scaled_linear(x, self.weight, self.scale))


def test_a_rule_of_ones_own(registry):
    model = ScaledLinear(4, 3)
    with pytest.raises(cw.UncoveredUse, match=r"scaled_linear"), cw.capture(model):
        model(torch.randn(5, 7, 4))

    @cw.rule(scaled_linear)
    def rule(call):
        x, weight, scale = call.bind("x", "weight", "scale")
        return {weight: cw.Outer(call.output_grad * scale, x)}

    cw.testing.check_rule(model, torch.randn(5, 7, 4))
    assert_exact(model, examples(5, 7, 4), methods=ALL_METHODS)
    time_first = Net(lambda s, x: s.m(x.transpose(0, 1)).transpose(0, 1), m=model)
    assert_exact(time_first, examples(5, 7, 4))
    windows = Net(lambda s, x: s.m(x.reshape(-1, 3, 4)).reshape(len(x), -1), m=model)
    assert_exact(windows, examples(5, 6, 4))


def test_check_rule_finds_a_wrong_rule(registry):
    @cw.rule(scaled_linear)
    def forgets_the_scale(call):
        return {call.args[1]: cw.Outer(call.output_grad, call.args[0])}

    with pytest.raises(cw.WrongRule):
        cw.testing.check_rule(ScaledLinear(4, 3), torch.randn(5, 7, 4))


WRONG = {  # how wrong a rule may be, in which precision, and still be found in a long sum
    "a tenth, float32": (1.1, torch.float32, None),
    "a hundredth, float64": (1.01, torch.float64, None),
    "a half, bf16 autocast": (1.5, torch.float32, torch.bfloat16),
    "a half, pure bf16": (1.5, torch.bfloat16, None),
    "a half, fp16 autocast": (1.5, torch.float32, torch.float16),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize(("batch", "time", "width"), [(64, 256, 32), (4, 2, 300), (200, 1, 8)])
def test_a_wrong_rule_is_found_at_real_sizes(registry, case, batch, time, width):
    factor, dtype, autocast = WRONG[case]

    @cw.rule(scaled_linear)
    def too_long(call):
        return {call.args[1]: cw.Outer(call.output_grad * call.args[2] * factor, call.args[0])}

    model = nn.Sequential(nn.Linear(width, width), ScaledLinear(width, 16)).to(dtype)
    x = torch.randn(batch, time, width, dtype=dtype)
    with cw.capture(model) as tape, torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        losses = model(x).float().square().mean((1, 2))
    with pytest.raises(cw.WrongRule, match=r"1\.weight"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_a_rewrite_of_ones_own(registry):
    @cw.rewrite(scaled_linear)
    def rewritten(x, weight, scale):
        return F.linear(x, weight) * scale

    cw.testing.check_rule(ScaledLinear(4, 3), torch.randn(5, 7, 4))


def test_a_rewrite_may_decline(registry):
    @cw.rewrite(torch.kron)
    def only_flat(a, b):
        return NotImplemented if a.dim() > 2 else (a.unsqueeze(-1) * b[0]).flatten(1)

    model = Net(lambda s, x: torch.kron(x, s.w[:1]), w=P(torch.randn(3, 4)))
    cw.testing.check_rule(model, torch.randn(5, 4))
    with pytest.raises(cw.UncoveredUse), cw.capture(model):
        model(torch.randn(5, 2, 4))


def test_ones_own_rule_goes_before_a_spread(registry):
    seen = []

    @cw.rule(torch.mul, torch.Tensor.mul, features=1, replace=True)
    def multiply(call):
        seen.append(call.func)
        x, weight = call.args
        return {weight: cw.Dense((call.output_grad * x).flatten(1, -2).sum(1))}

    cw.testing.check_rule(Net(lambda s, x: torch.tanh(x * s.w), w=P(torch.randn(4))), torch.randn(5, 3, 4))
    assert seen


def test_a_rule_needs_a_function_that_is_not_covered():
    with pytest.raises(TypeError, match="name the torch function"):
        cw.rule()
    for function in (F.linear, torch.mul, F.embedding):
        with pytest.raises(ValueError, match="replace=True"):
            cw.rule(function)


def cumulated(x, w):
    """Something that is nobody's business but the user's."""
    if has_torch_function_variadic(x, w):
        return handle_torch_function(cumulated, (x, w), x, w)
    return torch.logcumsumexp(x @ w.t(), -1) * w.sum(1)


FALLBACKS = {
    "a function of one's own": lambda s, x: cumulated(x, s.w),
    "kron": lambda s, x: torch.kron(x, s.w[:1]),
    "derived weight": lambda s, x: cumulated(x, F.normalize(s.w, dim=1)),
    "used twice": lambda s, x: cumulated(x, s.w) * cumulated(x.tanh(), s.w),
    "behind another use": lambda s, x: cumulated(F.linear(x, s.w) @ s.w, s.w),
    "time first": lambda s, x: cumulated(x.unsqueeze(0).expand(2, -1, -1), s.w).transpose(0, 1),
    "addbmm": lambda s, x: torch.addbmm(s.w[:, :1] * 0, s.w.expand(1, -1, -1), x.t().unsqueeze(0)).t(),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback_is_exact(name):
    model = Net(lambda s, x: torch.tanh(FALLBACKS[name](s, x)), w=P(torch.randn(3, 4)))
    assert_exact(model, examples(5, 4), fallback=True, methods=ALL_METHODS)


def test_fallback_refuses_functions_that_return_several_tensors():
    model = Net(lambda s, x: torch.linalg.lstsq(s.w, x.t())[0], w=P(torch.randn(4, 4)))
    with pytest.raises(cw.UncoveredUse, match="several tensors"), cw.capture(model, fallback=True):
        model(torch.randn(5, 4))

"""Lower precisions: no worse than ordinary autograd's own error; sums in float32."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import numerics
from clipwise.factors import FactorSum, Outer, sum_of
from clipwise.numerics import product_roundoff
from clipwise.planner import MemoryBudget
from clipwise.testing import loop_gradients, squared_output
from helpers import ALL_METHODS, Net, examples


def network():
    return Net(
        lambda s, x: s.out(torch.tanh(s.norm(s.conv(torch.tanh(s.a(x)).transpose(1, 2)).transpose(1, 2)) * s.scale).mean(1)),
        a=nn.Linear(16, 32),
        conv=nn.Conv1d(32, 32, 3),
        norm=nn.LayerNorm(32),
        scale=nn.Parameter(torch.rand(32) + 0.5),
        out=nn.Linear(32, 4),
    )


def cross_entropy(output):
    return F.cross_entropy(output.float(), torch.arange(len(output)) % 4, reduction="none")


def relative_error(found, expected):
    total = sum(float(value.double().square().sum()) for value in expected.values()) ** 0.5
    return sum(float((found[name].double() - value.double()).square().sum()) for name, value in expected.items()) ** 0.5 / total


def own_error(model, x, context, reference):
    """How far ordinary autograd is off for the plain sum of the losses."""
    with context():
        losses = cross_entropy(model(x))
    grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return relative_error(dict(zip(names, grads)), {name: grad.sum(0) for name, grad in reference.items()})


def by_the_loop(model, x):
    """Each example with its own target, in float64."""
    rows = [
        loop_gradients(model, (x[i : i + 1],), loss=lambda out, i=i: F.cross_entropy(out, torch.tensor([i % 4]), reduction="none"))
        for i in range(len(x))
    ]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(autouse=True, params=["wide", "bf16 kept"])
def storage(request, monkeypatch):
    """How matrices in bf16 are held: in float32, or as they are, where a device multiplies them into float32 (here that is emulated)."""
    if request.param == "bf16 kept":
        monkeypatch.setattr(numerics, "_MIXED_PRODUCTS", {"cpu", "cuda"})
    return request.param


CONTEXTS = {
    "bf16 autocast": (torch.float32, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "fp16 autocast": (torch.float32, lambda: torch.autocast("cpu", dtype=torch.float16)),
    "pure bf16": (torch.bfloat16, lambda: torch.autocast("cpu", enabled=False)),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_no_worse_than_autograd(name, method):
    dtype, context = CONTEXTS[name]
    model, x = network().to(dtype), torch.randn(6, 9, 16).to(dtype)
    reference = by_the_loop(model, x)
    bound = 1e9  # nothing is clipped: the sum is the ordinary gradient
    with cw.capture(model) as tape, context():
        losses = cross_entropy(model(x))
    found = cw.clipped_gradients(tape, losses, cw.flat(bound), method=method)
    expected = {name: grad.sum(0) for name, grad in reference.items()}
    assert relative_error(found, expected) <= 1.5 * own_error(model, x, context, reference) + 1e-6


@pytest.mark.parametrize("name", CONTEXTS)
def test_norms_under_low_precision(name):
    dtype, context = CONTEXTS[name]
    model, x = network().to(dtype), torch.randn(6, 9, 16).to(dtype)
    reference = by_the_loop(model, x)
    with cw.capture(model) as tape, context():
        losses = cross_entropy(model(x))
    norms = cw.per_example_norms(tape, losses)
    expected = torch.stack([grad.flatten(1).square().sum(1) for grad in reference.values()]).sum(0).sqrt()
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), expected, rtol=3 * own_error(model, x, context, reference), atol=0)


def test_sums_are_float32_for_bf16_parameters_and_grad_keeps_their_type():
    model, x = nn.Linear(8, 4).bfloat16(), torch.randn(6, 8).bfloat16()
    with cw.capture(model) as tape:
        losses = cross_entropy(model(x))
    assert {grad.dtype for grad in cw.clipped_gradients(tape, losses, cw.flat(1.0)).values()} == {torch.float32}
    with cw.capture(model) as tape:
        losses = cross_entropy(model(x))
    cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_gradient_scaler_sees_an_ordinary_loss():
    model, x = nn.Linear(8, 4), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, twin)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for net, optimizer, scale in ((model, optimizers[0], True), (twin, optimizers[1], False)):
        with cw.capture(net) as tape:
            losses = cross_entropy(net(x))
        loss = cw.clipped_loss(tape, losses, cw.flat(1.0))
        if scale:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_autocast_around_the_release_changes_nothing(method):
    """The products of norms and sums are ours: under the user's autocast they would be rounded to bf16."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = examples(7, 6, dtype=torch.float32)
    found = []
    for around in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16), cw.capture(model) as tape:
            losses = squared_output(model(x))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
            found.append((cw.per_example_norms(tape, losses), cw.clipped_gradients(tape, losses, cw.flat(0.5), method=method)))
    (norms, sums), (norms_inside, sums_inside) = found
    assert torch.equal(norms, norms_inside)
    assert all(torch.equal(sums[name], sums_inside[name]) for name in sums)


@pytest.mark.parametrize("matmul, conv, for_products, for_convolutions", [
    ("ieee", "tf32", 2**-24, 2**-11), ("ieee", "ieee", 2**-24, 2**-24), ("tf32", "ieee", 2**-11, 2**-11),
])  # fmt: skip
def test_tf32_may_be_switched_for_each_kind_of_operation(matmul, conv, for_products, for_convolutions):
    """`allow_tf32` raises where convolutions and recurrent layers were set apart."""
    backends = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend, precision in zip(backends, (matmul, conv)):
            backend.fp32_precision = precision
        torch.backends.cudnn.rnn.fp32_precision, rnn = "ieee", torch.backends.cudnn.rnn.fp32_precision
        gpu = torch.device("cuda")
        assert product_roundoff(torch.float32, gpu) == for_products
        assert product_roundoff(torch.float32, gpu, convolution=True) == for_convolutions
        assert product_roundoff(torch.float32, torch.device("cpu"), convolution=True) == 2**-24
    finally:
        torch.backends.cudnn.rnn.fp32_precision = rnn
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision


def factor_sums(left, right):
    return sum_of([Outer(left, right)])


@pytest.mark.parametrize("way", ["keep", "gram", "tiles"])
@pytest.mark.parametrize("terms", [1, 7, 64])
def test_no_way_lets_more_through_than_the_bound(way, terms, monkeypatch):
    """Each example alone, scaled to its bound by its measured norm: what is added never exceeds it, also where terms cancel."""
    monkeypatch.setattr("clipwise.factors.ways.choose_way", lambda **_: way)
    torch.manual_seed(terms)
    left, right = torch.randn(40, terms, 24), torch.randn(40, terms, 16)
    signs = torch.ones(terms)
    signs[1::2] = -1
    left[:20], right[:20] = left[:20, :1] * signs[:, None], right[:20, :1] * (1 + 1e-3 * torch.randn(20, terms, 1))  # they cancel
    left[5:10] *= 1e6
    right[10:15] *= 1e-6
    total = factor_sums(left.bfloat16(), right.bfloat16())
    norms = total.squared_norms(MemoryBudget(2**30)).sqrt()
    for i in range(40):
        weights = torch.zeros(40, dtype=torch.float64)
        weights[i] = 0.3 / norms[i]
        added = total.weighted_sum(weights)
        assert added.dtype == torch.float32
        assert float(added.double().norm()) <= 0.3 * (1 + 1e-6)
        true = torch.einsum("tp,td->pd", left[i].bfloat16().double(), right[i].bfloat16().double()).norm()
        assert float(norms[i]) >= float(true) * (1 - 1e-6)


def test_matrices_in_bf16_are_not_copied(storage):
    left, right = torch.randn(4, 5, 6).bfloat16(), torch.randn(4, 5, 3).bfloat16()
    factor = Outer(left, right)
    kept = storage == "bf16 kept"
    assert (factor.left.dtype == torch.bfloat16) == kept and factor.dtype == torch.float32
    assert (factor.left.data_ptr() == left.data_ptr()) == kept
    assert Outer(left.half(), right.half()).left.dtype == torch.float32  # scaled down, float16 would underflow
    assert Outer(left, right.float()).left.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_weight_zero_adds_nothing_in_bf16(bad):
    left, right = torch.randn(4, 5, 6).bfloat16(), torch.randn(4, 5, 3).bfloat16()
    left[1, 2, 3], right[2, 0, 0] = bad, bad
    weights = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    found = Outer(left, right).weighted_sum(weights)
    expected = torch.einsum("b,btp,btd->pd", weights[[0, 3]], left[[0, 3]].double(), right[[0, 3]].double())
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def test_several_factors_of_one_weight_in_two_precisions():
    torch.manual_seed(0)
    parts = [(torch.randn(5, 3, 4).to(a), torch.randn(5, 3, 6).to(b)) for a, b in [(torch.bfloat16,) * 2, (torch.float32,) * 2]]
    total = sum_of([Outer(left, right) for left, right in parts])
    expected = sum(torch.einsum("btp,btd->bpd", left.double(), right.double()) for left, right in parts)
    norms = total.squared_norms(MemoryBudget(0)).sqrt()
    true = expected.flatten(1).norm(dim=1)
    assert bool((norms >= true * (1 - 1e-6)).all()) and bool((norms <= true * 1.05).all())


@pytest.mark.parametrize("way", ["tiles", "gram"])
def test_errors_that_add_up_in_the_direction_of_the_gradient_are_covered(way):
    """Terms that cancel, and that rounding moves all the same way: the error is parallel to what is left, and as large."""
    values = (1 + torch.arange(128) / 128).bfloat16()
    found = []
    for weight in torch.linspace(0.3, 0.99, 60).tolist():
        scaled = values.float() * weight
        error = (scaled.bfloat16().float() - scaled) / scaled
        up, down = float(values[error.argmax()]), float(values[error.argmin()])
        for number in (40, 100, 200, 300):
            for extra in range(-2, 3):
                others = round(number * up / down) + extra
                left = torch.tensor([up] * number + [down] * others).bfloat16().view(1, -1, 1)
                right = torch.tensor([1.0] * number + [-1.0] * others).bfloat16().view(1, -1, 1)
                total = FactorSum([Outer(left, right)])
                norm = float(total.measured_by(way).now().sqrt())
                found.append(float(total.weighted_sum(torch.tensor([weight], dtype=torch.float64)).abs()) / (weight * norm))
    assert max(found) <= 1 + 1e-6


@pytest.mark.parametrize("kind", ["linear", "addmm", "conv"])
def test_under_autocast_the_tape_keeps_what_autograd_keeps(kind):
    """Rounded once, before the product: no second copy in float32, and the gradient is that of ordinary training."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(*{"linear": (5, 6), "addmm": (6, 5), "conv": (5, 6, 3)}[kind]))
    bias = nn.Parameter(torch.randn(5))
    x = torch.randn(4, 6, 7) if kind == "conv" else torch.randn(4, 6)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(x.shape[-1])
            self.weight, self.bias = weight, bias

        def forward(self, x):
            h = self.norm(x)  # in float32
            if kind == "linear":
                return F.linear(h, self.weight, self.bias)
            return torch.addmm(self.bias, h, self.weight) if kind == "addmm" else F.conv1d(h, self.weight, self.bias)

    model, saved = Model(), []

    def losses_of():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().flatten(1).sum(1)

    def keep(tensor):
        saved.append((tensor.dtype, tensor.shape))
        return tensor

    ordinary = torch.autograd.grad(losses_of().sum(), list(model.parameters()))
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = losses_of()
        found = cw.clipped_gradients(tape, losses, cw.flat(1e6))
    for (name, _), expected in zip(model.named_parameters(), ordinary):
        torch.testing.assert_close(found[name], expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses_of()
        of_ordinary = sum(dtype == torch.float32 and shape == x.shape for dtype, shape in saved)
        saved.clear()
        with cw.capture(model):
            losses_of()
    of_tape = sum(dtype == torch.float32 and shape == x.shape for dtype, shape in saved)
    assert of_tape == of_ordinary + 1  # what LayerNorm's rule reads, which is what LayerNorm keeps


def normalized(x, y, model, clipping=None):
    with cw.capture(model) as tape:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        losses = F.cross_entropy(output.float().mean(1), y, reduction="none")
    return cw.clipped_gradients(tape, losses, clipping or cw.flat(0.3))


def test_a_normalisation_whose_own_gradient_is_added_up_in_bf16(monkeypatch):
    """torch's kernel on a CPU does so: over many terms autograd's own gradient is off by per cents, ours is not. A wrong rule of the user's is still refused."""
    from dataclasses import replace

    from clipwise.registry import RULES

    def model():
        return nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))

    torch.manual_seed(0)
    for _ in range(4):
        net, x, y = model(), torch.randn(9, 200, 12), torch.randint(0, 3, (9,))
        found = normalized(x, y, net, cw.flat(1e6))["1.bias"]
        F.cross_entropy(net(x).mean(1), y, reduction="sum").backward()  # in float32
        assert float((found - net[1].bias.grad).norm()) <= 0.05 * float(net[1].bias.grad.norm())
    rule = RULES[F.layer_norm]

    def wrong(call):
        factors = rule.factors(call)
        bias = call.tracked[-1]
        return factors | {bias: cw.Dense(2 * factors[bias].grad)}

    monkeypatch.setitem(RULES, F.layer_norm, replace(rule, factors=wrong, trusted=False))
    with pytest.raises(cw.WrongRule, match=r"1\.bias"):
        normalized(torch.randn(9, 4, 12), torch.randint(0, 3, (9,)), model())

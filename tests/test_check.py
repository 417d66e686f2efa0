"""check(model) before training, and replace_batchnorm."""

import copy

import pytest
import torch
from torch import nn

import clipwise as cw
from helpers import Net, assert_exact, examples

P = nn.Parameter


def rows(report):
    return {row.name: row for row in report.parameters}


def test_every_parameter_with_rule_and_way():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    report = cw.check(model, torch.randn(4, 3, 8, 8))
    assert report.ok and list(rows(report)) == [name for name, _ in model.named_parameters()]
    assert [row.rule for row in report.parameters] == ["conv2d", "conv2d", "group_norm", "group_norm", "linear", "linear"]
    assert all(row.status == "exact" and row.way for row in report.parameters)
    assert "4.weight" in str(report) and "288" in str(report)


def test_refusals_are_listed_not_raised():
    model = Net(
        lambda s, x: s.a(torch.kron(x, s.w)) * s.scale,
        w=P(torch.randn(1, 2)),
        a=nn.Linear(8, 3),
        scale=P(torch.ones(3)),
        idle=P(torch.ones(2)),
    )
    report = cw.check(model, torch.randn(5, 4))
    found = rows(report)
    assert not report.ok
    assert found["w"].status == "refused" and "torch.kron" in found["w"].reason
    assert found["a.weight"].status == "exact" and found["scale"].rule == "entry by entry"
    assert found["idle"].status == "unused"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_mixing_is_found_before_training():
    report = cw.check(Net(lambda s, x: s.a(x - x.mean(0)), a=nn.Linear(4, 3)), torch.randn(5, 4))
    assert not report.ok and isinstance(report.refusals[0], cw.MixedExamples)
    assert "refused:" in str(report)


def test_nothing_is_changed():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    x = torch.randn(5, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = cw.check(model, x)
    assert "replace_batchnorm" in str(report)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_inputs_the_modules_are_looked_at():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = P(torch.ones(3))

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), Mine(), nn.Embedding(4, 3, max_norm=1.0), nn.LSTM(3, 2))
    found = {name: row.status for name, row in rows(cw.check(model)).items()}
    assert found["0.weight"] == "exact" and found["1.weight"] == "refused" and found["2.gate"] == "unknown"
    assert found["3.weight"] == "refused" and found["4.weight_hh_l0"] == "exact"
    assert rows(cw.check(model.eval()))["1.weight"].status == "exact"


def test_a_loss_and_keyword_inputs():
    model = Net(lambda s, a, b: {"logits": s.l(a) + b, "other": 1}, l=nn.Linear(4, 3))
    model.forward = lambda a, b: model._forward(model, a, b)
    assert cw.check(model, a=torch.randn(5, 4), b=torch.randn(5, 3)).ok
    assert cw.check(model, torch.randn(5, 4), torch.randn(5, 3), loss=lambda out: out["logits"].sum(1)).ok


def test_frozen_parameters_are_not_listed():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    assert list(rows(cw.check(model, torch.randn(5, 4)))) == ["weight"]


# --- replace_batchnorm


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.again = self.bn  # shared
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.BatchNorm1d(6, affine=False))

    def forward(self, x):
        return self.head(self.again(self.bn(self.conv(x))))


def test_batchnorm_becomes_groupnorm_with_its_weights():
    model = Residual().double()
    with torch.no_grad():
        model.bn.weight.normal_()
        model.bn.bias.normal_()
    weight = model.bn.weight
    model.bn.bias.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    assert cw.replace_batchnorm(model) is model
    assert isinstance(model.bn, nn.GroupNorm) and model.again is model.bn and model.bn.num_groups == 2
    assert model.bn.weight is weight and not model.bn.bias.requires_grad and not model.head[2].affine
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert_exact(model, examples(4, 3, 4, 4))


def test_a_batchnorm_by_itself():
    assert isinstance(cw.replace_batchnorm(nn.BatchNorm2d(64)), nn.GroupNorm)
    assert cw.replace_batchnorm(nn.BatchNorm2d(64)).num_groups == 16
    assert cw.replace_batchnorm(nn.BatchNorm2d(7)).num_groups == 1
    assert cw.replace_batchnorm(nn.BatchNorm2d(64), groups=4).num_groups == 4


class Own(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("layer", "groups", "message"),
    [
        (nn.LazyBatchNorm2d(), None, "lazy"),
        (Own(8), None, "class of its own"),
        (nn.BatchNorm2d(10), 4, "10 channels"),
        (nn.BatchNorm1d(1), None, "1 channels"),
    ],
)
def test_what_cannot_be_replaced_is_refused_before_anything_changes(layer, groups, message):
    model = nn.Sequential(nn.BatchNorm2d(8), layer)
    with pytest.raises(cw.CannotReplace, match=message) as refused:
        cw.replace_batchnorm(model, groups)
    assert "1, a " in str(refused.value) and isinstance(model[0], nn.BatchNorm2d)

"""Criteria with parameters of their own: capture([model, criterion])."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from helpers import ALL_METHODS, row_norms

P = nn.Parameter


class ArcFace(nn.Module):
    """An angular margin between the feature and the weight of its class."""

    def __init__(self, width, classes, margin=0.3, scale=8.0):
        super().__init__()
        self.weight, self.margin, self.scale = P(torch.randn(classes, width)), margin, scale

    def forward(self, features, target):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        angle = torch.acos(cosine.clamp(-0.999, 0.999))
        shifted = torch.cos(angle + self.margin * F.one_hot(target, len(self.weight)))
        return F.cross_entropy(self.scale * shifted, target, reduction="none")


class LinearChainCRF(nn.Module):
    """−log p(tags | emissions) with learned transitions, by the forward algorithm."""

    def __init__(self, tags):
        super().__init__()
        self.start, self.end, self.transitions = P(torch.randn(tags)), P(torch.randn(tags)), P(torch.randn(tags, tags))

    def forward(self, emissions, tags):
        score = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1])[:, 0]
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            score = score + self.transitions[tags[:, t - 1], tags[:, t]] + emissions[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, 1) + emissions[:, t]
        return torch.logsumexp(alpha + self.end, 1) - score - self.end[tags[:, -1]]


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = P(torch.tensor(0.3))

    def forward(self, logits, target):
        return F.cross_entropy(logits * self.log_scale.exp(), target, reduction="none")


CRITERIA = {
    "ArcFace": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh()), lambda: ArcFace(6, 3), (4,), ()),
    "CRF": (lambda: nn.Linear(4, 3), lambda: LinearChainCRF(3), (5, 4), (5,)),
    "temperature": (lambda: nn.Linear(4, 3), Temperature, (4,), ()),
    "uncertainty weights": (lambda: nn.Linear(4, 3), lambda: Uncertainty(), (4,), ()),
}


class Uncertainty(nn.Module):
    """Two tasks weighed by learned variances."""

    def __init__(self):
        super().__init__()
        self.log_variance = P(torch.randn(2))

    def forward(self, output, target):
        tasks = torch.stack([F.cross_entropy(output, target, reduction="none"), output.square().sum(1)], 1)
        return (tasks * torch.exp(-self.log_variance) + self.log_variance).sum(1)


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_criteria(name, method):
    build, criterion, shape, target_shape = CRITERIA[name]
    model, criterion = build().double(), criterion().double()
    for _ in range(3):
        x, y = torch.randn(6, *shape, dtype=torch.float64), torch.randint(0, 3, (6, *target_shape))
        parameters = [*model.parameters(), *criterion.parameters()]
        rows = [torch.autograd.grad(criterion(model(x[i : i + 1]), y[i : i + 1]).sum(), parameters) for i in range(6)]
        norms = row_norms(rows)
        bound = float(norms.median())
        with cw.capture([model, criterion]) as tape:
            losses = criterion(model(x), y)
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
        found = cw.clipped_gradients(tape, losses, cw.flat(bound), method=method)
        for value, column in zip(found.values(), zip(*rows)):
            torch.testing.assert_close(value, torch.einsum("b,b...->...", (bound / norms).clamp(max=1), torch.stack(column)))


def test_a_criterion_that_was_not_captured_is_refused():
    model, criterion = nn.Linear(4, 3), ArcFace(3, 5)
    with pytest.raises(cw.UncoveredUse, match="none of the captured modules"), cw.capture(model):
        criterion(model(torch.randn(6, 4)), torch.randint(0, 5, (6,)))

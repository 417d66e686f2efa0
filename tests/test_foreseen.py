"""Models that ask tensors for numbers, or make tensors of numbers, and become graphs all the same; and those that must not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, Normal, kl_divergence

from helpers import Net
from test_compiled import RECORDS, assert_same_training, built, mean_loss, train
from test_compiled_models import trained_on_batches

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining")
X = torch.randn(RECORDS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _written(h):
    h = h.clone()
    h[:, 0] = 0.25
    h[h < -0.5] = -0.5
    return h


MADE_OF_NUMBERS = {
    "a number": lambda s, x: s.b(s.a(x) * torch.tensor(0.5)),
    "of another type": lambda s, x: s.b(s.a(x) * torch.tensor(2, dtype=torch.float64)),
    "a row for all": lambda s, x: s.b(s.a(x) + torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])),
    "a list as index": lambda s, x: s.b(s.a(x) + s.a(x)[:, [-1]]),
    "not a number": lambda s, x: s.b(torch.where(s.a(x) > 1e9, torch.tensor(float("nan")).double(), s.a(x))),
    "written into an activation": lambda s, x: s.b(_written(s.a(x))),
    "nobody uses it": lambda s, x: (torch.tensor([1.0, 2.0, 3.0]), s.b(s.a(x)))[1],
}


@pytest.mark.parametrize("name", MADE_OF_NUMBERS)
def test_tensors_made_of_numbers(name):
    assert_same_training(lambda: Net(MADE_OF_NUMBERS[name], a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X)


def test_numbers_are_held_where_they_are_used():
    """A graph that is recorded on a GPU cannot copy them from the host."""
    forward = lambda s, x: s.b(s.a(x) * torch.tensor(0.5).double() + torch.tensor([[2]]).double())
    step, _ = assert_same_training(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X)
    (variant,) = step.graphs.variants.values()
    graph = variant.traced.graph
    held = [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
    assert {(tensor.dtype, tensor.item()) for tensor in held} == {(torch.float64, 0.5), (torch.float64, 2.0)}


def test_a_number_that_is_written_to_is_anew_in_every_step():
    def forward(s, x):
        total = torch.tensor(0.0).double()
        total += 1
        return s.b(s.a(x) * total)

    assert_same_training(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X)


def test_a_tensor_made_of_a_number_that_changes_is_noticed_when_the_model_is_looked_at_again():
    calls = []

    def losses_of(model, x, y):
        calls.append(1)
        return mean_loss(model, x, y) * torch.tensor(1.0 if len(calls) < 9 else 0.25)

    with pytest.warns(UserWarning, match="something besides the model and its arguments"):
        _, step, _ = train(built(lambda: nn.Linear(4, 3)), X, losses_of=losses_of, steps=20)
    assert not step.graphs.variants


def test_a_tensor_with_a_row_for_each_example_is_not_baked_in():
    weights = torch.rand(RECORDS).tolist()
    with pytest.warns(UserWarning, match="comes from outside the arguments|have not verified the calls"):
        _, step, _ = train(
            built(lambda: nn.Linear(4, 3)), X, losses_of=lambda m, x, y: mean_loss(m, x, y) * torch.tensor(weights[: len(x)]), steps=20
        )
    assert not step.graphs.variants


def test_numbers_that_leave_torch_are_not_baked_in():
    """Of labels, which are those of the batch when a graph is tried out: the number they add up to would stay the same."""
    for fetch in (lambda y: float(y.numpy().sum()), lambda y: float(sum(y.tolist()))):
        with pytest.warns(UserWarning, match="takes the numbers of a tensor out of torch"):
            _, step, _ = train(built(lambda: nn.Linear(4, 3)), X, losses_of=lambda m, x, y: mean_loss(m, x, y) * fetch(y), steps=6)
        assert not step.graphs.variants


COINS = {
    "never below zero": lambda s, x: s.b(s.a(x)) if torch.rand([]) < 0.0 else s.b(torch.tanh(s.a(x))),
    "never below nothing": lambda s, x: s.b(s.a(x)) if not (torch.rand(()) >= 0) else s.b(torch.tanh(s.a(x))),
    "always below one": lambda s, x: s.b(torch.tanh(s.a(x))) if torch.rand(1) < 1 else s.a(x),
    "one is not above": lambda s, x: s.b(torch.tanh(s.a(x))) if not torch.rand(1) > 1.0 else s.a(x),
    "the other way round": lambda s, x: s.b(torch.tanh(s.a(x))) if torch.rand([]) <= 1.5 and torch.rand([]) > -1 else s.a(x),
}


@pytest.mark.parametrize("name", COINS)
def test_coins_that_can_fall_one_way_only(name):
    """As layers are dropped with probability zero."""
    assert_same_training(lambda: Net(COINS[name], a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X)


@pytest.mark.parametrize("bound", [0.5, 1e-9])
def test_coins_that_can_fall_both_ways_are_not_foreseen(bound):
    with pytest.warns(UserWarning, match="fetches a number"):
        _, step, _ = train(
            built(lambda: Net(lambda s, x: s.a(x) if torch.rand([]) < bound else 2 * s.a(x), a=nn.Linear(4, 3))), X, steps=20
        )
    assert not step.graphs.variants


CHANGED_COINS = {
    "shifted": lambda s, x: s.a(x) if torch.rand(1).sub_(0.5) < 0 else 2 * s.a(x),
    "written over": lambda s, x: s.a(x) if torch.rand(1).fill_(0.5) >= 1 else 2 * s.a(x),
}


@pytest.mark.parametrize("name", CHANGED_COINS)
def test_coins_that_were_written_to_are_coins_no_more(name):
    with pytest.warns(UserWarning, match="fetches a number"):
        _, step, _ = train(built(lambda: Net(CHANGED_COINS[name], a=nn.Linear(4, 3))), X, steps=12)
    assert not step.graphs.variants


def test_sizes_that_depend_on_the_data_are_not_baked_in_where_nothing_else_is_used():
    with pytest.warns(UserWarning, match="depends on the data|fetches a number|nobody knows"):
        losses_of = lambda model, x, y: mean_loss(model, x, y) * len(torch.bincount(y))
        _, step, _ = train(built(lambda: nn.Linear(4, 3)), X, losses_of=losses_of, steps=12)
    assert not step.graphs.variants


def test_a_number_that_is_no_coin_is_fetched():
    forward = lambda s, x: s.a(x) if torch.randn([]).abs() + 1 < 0.0 else 2 * s.a(x)
    with pytest.warns(UserWarning, match="fetches a number"):
        train(built(lambda: Net(forward, a=nn.Linear(4, 3))), X, steps=9)


def soft_targets(model, x, y):
    targets = F.one_hot(y, 3).to(x.dtype) * 0.9 + 0.1 / 3
    return -(targets * model(x).log_softmax(1)).sum(1)


def test_one_hot_labels():
    assert_same_training(lambda: nn.Linear(4, 3), X, losses_of=soft_targets)
    with pytest.warns(UserWarning, match="fetches a number"):  # how many classes there are is a question to the data
        train(built(lambda: nn.Linear(4, 3)), X, losses_of=lambda m, x, y: (m(x)[:, :1] * F.one_hot(y)[:, :1]).sum(1), steps=9)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, 1)
        found = Normal(mean, F.softplus(spread) + 0.1)
        z = found.mean + 0.0 * found.scale if self.still else found.rsample()
        return self.decode(z), kl_divergence(found, Normal(0.0, 1.0)).sum(1)


def evidence(model, x, _):
    logits, divergence = model(x)
    return divergence - Bernoulli(logits=logits).log_prob((x > 0).double()).sum(1)


@pytest.mark.parametrize("still", [True, False])
def test_distributions(still, monkeypatch):
    """Their checks of arguments look at every number."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile turns them off for good

    def build():
        model = Autoencoder()
        model.still = still
        return model

    if still:
        assert_same_training(build, X, losses_of=evidence)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="this step is not compiled")
            _, step, _ = train(built(build), X, losses_of=evidence)
        assert len(step.graphs.variants) == 1
    with pytest.raises(ValueError, match="constraint"):  # they are checked as ever outside
        Normal(torch.zeros(1), -torch.ones(1))


# --- Hugging Face

LAYER_DROP = ["bart", "opt", "whisper", "wav2vec2"]
NUMBERS = ["mistral", "beit", "falcon"]
PRODUCTS = ["xlnet"]
QUICK = ("bart", "mistral", "falcon", "xlnet")


def _train(case, *, compiled):
    torch.manual_seed(0)
    model = case.build(0.0).double().train()
    torch.manual_seed(1)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in case.batch(60).items()}
    data = torch.utils.data.TensorDataset(*inputs.values())
    return trained_on_batches(model, data, lambda model, *batch: case.loss(model, dict(zip(inputs, batch))), compiled=compiled)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYER_DROP + NUMBERS + PRODUCTS]
)
def test_architectures_that_ask_for_numbers(name):
    pytest.importorskip("transformers")
    from huggingface import CASES

    expected, _ = _train(CASES[name], compiled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        found, step = _train(CASES[name], compiled=True)
    assert len(step.graphs.variants) == 1
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)

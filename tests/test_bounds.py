"""No index beyond its table reaches a kernel while a model is tried with made-up rows: on a GPU that would be the end of the process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import clipwise as cw
from clipwise import bounds
from clipwise.bounds import WithinBounds, check_bounds
from clipwise.exchange import made_up
from clipwise.tracing import is_tracing
from test_compiled import RECORDS, built, train

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise")
I = torch.tensor  # noqa: E741
X = torch.arange(12.0).view(3, 4)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """A CPU whose kernels would not raise."""
    monkeypatch.setattr(bounds, "STOPPED_BY_THEM", {"cpu"})


class Beyond(TorchDispatchMode):
    """Notes look-ups beyond the table."""

    def __init__(self):
        super().__init__()
        self.found, self.lookups = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding.default and not is_tracing():
            table, index = args[:2]
            self.lookups += 1
            if not bool(((index >= 0) & (index < len(table))).all()):
                self.found.append((len(table), index.tolist()))
        return func(*args, **(kwargs or {}))


class Table(nn.Module):
    """Two categories, of a thousand and of three kinds, numbered in the columns of one tensor."""

    def __init__(self):
        super().__init__()
        self.large, self.small, self.head = nn.Embedding(1000, 4), nn.Embedding(3, 4), nn.Linear(8, 2)

    def forward(self, x):
        x = x.long()
        return self.head(torch.cat([self.large(x[:, 0]), self.small(x[:, 1])], 1))


def categories(count):
    return torch.stack([torch.randint(0, 1000, (count,)), torch.randint(0, 3, (count,))], 1), torch.randint(0, 2, (count,))


@pytest.mark.parametrize("numbers", [torch.int64, torch.int32, torch.float32])
def test_made_up_rows_stay_within_tables(numbers, like_a_gpu):
    model, (x, y) = Table(), categories(16)
    with Beyond() as beyond:
        with cw.capture(model) as tape:
            losses = F.cross_entropy(model(x.to(numbers)), y, reduction="none")
        cw.per_example_norms(tape, losses)
    assert not beyond.found
    assert beyond.lookups > 20  # it was run again and again


def test_columns_of_categories_are_exchanged_without_an_exception():
    """Rows that no record has are made of categories that their columns know: others would raise, and be tried no further."""

    class Mixing(Table):
        def forward(self, x):
            strange = (x[:, 0] % 3 != x[:, 1]).sum()  # no record is, no copy of one, and there is no gradient
            return super().forward(x) * (1 + 0.1 * strange)

    x, y = categories(16)
    x[:, 1] = x[:, 0] % 3
    model = Mixing()
    with cw.capture(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(cw.MixedExamples):
        cw.per_example_norms(tape, losses)


@pytest.mark.parametrize("axis", [0, 1])
def test_made_up_integers_keep_their_places_in_rows(axis):
    rows = torch.arange(30).view(5, 6)
    made = made_up(rows, axis)
    assert not torch.equal(made, rows) and torch.equal(made.sort(axis).values, rows)


def test_a_graph_is_not_tried_out_on_indices_made_of_real_numbers(like_a_gpu):
    torch.manual_seed(0)
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = cw.PrivacyPlan(
        dataset_size=64, batch_size=16, steps=8, delta=1e-3, clipping=cw.flat(1.0), noise_multiplier=1.0, sampler="shuffle"
    )
    x, y = categories(64)
    with cw.PrivateTraining(model, optimizer, plan) as private, Beyond() as beyond:
        step = private.compile(lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"), backend="eager")
        with pytest.warns(UserWarning, match="pass what numbers something as integers"):
            for _ in range(2):
                for batch in private.loader(torch.utils.data.TensorDataset(x.float(), y)):
                    step(*batch)
        assert private.spent().steps == 8
    assert not beyond.found


GOOD_AND_BAD = {
    "embedding": lambda i: F.embedding(I([0, 4 + i]), torch.zeros(5, 2)),
    "torch.embedding": lambda i: torch.embedding(torch.zeros(5, 2), I([0, 4 + i])),
    "embedding by name": lambda i: F.embedding(weight=torch.zeros(5, 2), input=I([-i])),
    "embedding_bag": lambda i: F.embedding_bag(I([[0, 4 + i]]), torch.zeros(5, 2)),
    "index_select": lambda i: X.index_select(1, I([3 + i])),
    "index_select by name": lambda i: torch.index_select(X, dim=-1, index=I([3 + i])),
    "gather": lambda i: torch.gather(X, 0, I([[2 + i]])),
    "gather below": lambda i: X.gather(1, I([[-i]])),
    "take": lambda i: X.take(I([11 + i, -12])),
    "scatter": lambda i: X.scatter(1, I([[3 + i]]), 1.0),
    "scatter_add": lambda i: X.clone().scatter_add_(0, I([[2 + i]]), torch.ones(1, 1)),
    "index_add": lambda i: X.index_add(0, I([2 + i]), torch.ones(1, 4)),
    "index_fill": lambda i: X.index_fill(1, I([3 + i]), 1.0),
    "x[index]": lambda i: X[I([2 + i])],
    "x[-index]": lambda i: X[I([-3 - i])],
    "x[:, index]": lambda i: X[:, I([3 + i])],
    "x[..., index]": lambda i: X[..., I([3 + i])],
    "x[None, :, index]": lambda i: X[None, :, I([3 + i])],
    "x[a, b]": lambda i: X[I([2]), I([3 + i])],
    "x[mask, index]": lambda i: X.expand(2, 3, 4)[torch.ones(2, 3, dtype=torch.bool), I([3 + i] * 6)],
    "x[index] = 1": lambda i: X.clone().__setitem__(I([2 + i]), 1.0),
    "index_put": lambda i: X.index_put((I([2 + i]),), I([1.0])),
    "index_put by name": lambda i: X.clone().index_put_(indices=(I([2 + i]),), values=I([1.0])),
    "put": lambda i: X.clone().put_(I([11 + i]), I([1.0])),
    "one_hot": lambda i: F.one_hot(I([4 + i]), 5),
    "one_hot below": lambda i: F.one_hot(I([-i])),
    "cross_entropy": lambda i: F.cross_entropy(X, I([0, 3 + i, -100])),
    "cross_entropy with another number to ignore": lambda i: F.cross_entropy(X, I([0, 3, 9 if i else 7]), ignore_index=7),
    "cross_entropy over pixels": lambda i: F.cross_entropy(X[..., None], I([[0], [3 + i], [1]])),
    "cross_entropy of one": lambda i: F.cross_entropy(X[0], I(3 + i)),
    "nll_loss": lambda i: F.nll_loss(X, I([0, -i, 2])),
    "multi_margin_loss": lambda i: F.multi_margin_loss(X, I([0, 3 + i, 2])),
    "binary_cross_entropy": lambda i: F.binary_cross_entropy(I([0.5, 1.0 + i]), I([0.0, 1.0])),
    "bernoulli": lambda i: torch.bernoulli(I([0.0, 1.0 + i])),
    "multinomial": lambda i: torch.multinomial(I([0.5, 1.0 - 2 * i]), 1),
}


GOOD = {
    "a tensor that is filled": lambda: torch.full((4,), -3.0).bernoulli_(0.9),
    "a tensor whose shape is taken": lambda: torch.bernoulli(torch.full((4,), -3.0), p=0.5),
    "a tensor whose shape is taken, as a method": lambda: torch.full((4,), -3.0).bernoulli(0.5),
    "counted from the end": lambda: X.index_fill(1, I([-1]), 0.0),
    "int32": lambda: F.embedding(I([0, 4], dtype=torch.int32), torch.zeros(5, 2)),
    "nothing": lambda: F.embedding(I([], dtype=torch.long), torch.zeros(5, 2)),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_kernels_take_is_let_through(name, like_a_gpu):
    GOOD[name]()
    with WithinBounds():
        GOOD[name]()


def test_probabilities_in_a_tensor_are_looked_at(like_a_gpu):
    with WithinBounds(), pytest.raises(IndexError, match="a probability is none"):
        torch.zeros(2).bernoulli_(I([0.5, 1.5]))


def test_graphs_that_draw_numbers_are_made_on_a_gpu_too(like_a_gpu):
    """While a call is traced there is nothing to look at."""
    _, step, _ = train(built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))), torch.randn(RECORDS, 4).double())
    assert len(step.graphs.variants) == 1


@pytest.mark.parametrize("name", GOOD_AND_BAD)
def test_what_a_kernel_of_a_cpu_refuses_is_refused(name, like_a_gpu):
    """The reference is torch's own kernel, which raises where a GPU's does not."""
    call = GOOD_AND_BAD[name]
    call(0)
    with pytest.raises((IndexError, RuntimeError)):
        call(1)
    with WithinBounds():
        call(0)
        with pytest.raises(IndexError, match=r"an index lies beyond|a probability is none"):
            call(1)


@pytest.mark.parametrize("name", GOOD_AND_BAD)
def test_kernels_that_raise_by_themselves_are_not_asked_beforehand(name):
    with WithinBounds(), pytest.raises((IndexError, RuntimeError)) as error:
        GOOD_AND_BAD[name](1)
    assert "an index lies beyond" not in str(error.value) and "a probability is none" not in str(error.value)


@pytest.mark.parametrize(
    "call", [(F.embedding, ()), (torch.gather, (X,)), (torch.Tensor.__getitem__, (X,)), (F.cross_entropy, (X,)), (torch.take, (X, None))]
)
def test_calls_that_are_wrong_otherwise_are_left_to_torch(call, like_a_gpu):
    check_bounds(*call, {})

"""Compiled steps of trainings that do something unusual: the same numbers, or a reason that is true."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.compiled.rows import Batch
from helpers import Net
from test_compiled import RECORDS, assert_same_training, built, mean_loss, train

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining")
X = torch.randn(RECORDS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_batch_that_the_losses_write_to_is_the_users_own():
    """Tracing runs them once more: what they write must not be seen by the step."""

    def losses_of(model, x, y):
        x.mul_(0.5)
        return mean_loss(model, x, y.add_(1).sub_(1))

    plan = cw.PrivacyPlan(
        dataset_size=RECORDS, batch_size=12, steps=9, delta=1e-3, clipping=cw.flat(0.5), noise_multiplier=1.0, sampler="fixed_size"
    )
    found = []
    for compiled in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(train(built(lambda: nn.Linear(4, 3)), X.clone(), losses_of=losses_of, compiled=compiled, steps=9, plan=plan)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("spoiled", [False, True])
def test_whether_there_is_a_graph_does_not_depend_on_a_record(spoiled):
    x = X.clone()
    if spoiled:
        x[3] = float("nan")
    plan = cw.PrivacyPlan(
        dataset_size=RECORDS, batch_size=RECORDS * 4 // 5, steps=60, delta=1e-2, clipping=cw.flat(0.3), noise_multiplier=1.0
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        _, step, _ = train(built(lambda: nn.Linear(4, 3)), x, steps=60, plan=plan)
    assert len(step.graphs.variants) == 1


@pytest.mark.parametrize("number", range(1, 10))
def test_a_batch_that_no_step_can_be_made_of_says_nothing_of_the_others(number):
    """A label that is none, in whichever step a graph is about to be made."""
    model = built(lambda: nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = cw.PrivacyPlan(dataset_size=RECORDS, batch_size=12, steps=12, delta=1e-3, clipping=cw.flat(0.5), noise_multiplier=1.0)
    private = cw.PrivateTraining(model, optimizer, plan, own_batches=True)
    step = private.compile(mean_loss, backend="eager")
    x, y = X[:9], torch.arange(9) % 3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        for now in range(1, 13):
            if now == number:
                with pytest.raises(IndexError):
                    step(x, y + 7)
                private.discard()
            step(x, y)
    assert len(step.graphs.variants) == 1


SEQUENCES = {
    "time first": (lambda m, x: m(x).square().sum((0, 2)), lambda b: (20, b, 4), lambda x, i: torch.cat([x[:, :i], x[:, i + 1 :]], 1)),
    "time first, as many examples as rows": (
        lambda m, x: m(x).square().sum((0, 2)),
        lambda b: (8 * b, b, 4),
        lambda x, i: torch.cat([x[:, :i], x[:, i + 1 :]], 1),
    ),
    "pairs": (
        lambda m, x: (m(x).chunk(2)[0] - m(x).chunk(2)[1]).square().sum(1),
        lambda b: (2 * b, 4),
        lambda x, i: torch.cat([half[torch.arange(len(half)) != i] for half in x.chunk(2)]),
    ),
}


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("name", SEQUENCES)
def test_batches_of_ones_own_are_cut_between_examples_only(name, rows):
    """Cut along another axis, an example would count once for every part."""
    of_model, shape, without = SEQUENCES[name]
    model = built(lambda: nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = cw.PrivacyPlan(dataset_size=RECORDS, batch_size=8, steps=90, delta=1e-3, clipping=cw.flat(0.1), noise_multiplier=1.0)
    private = cw.PrivateTraining(model, optimizer, plan, own_batches=True)
    seen = []
    real = private._updates.release
    private._updates.release = lambda number, optimizer, sums, *rest: (
        seen.append({k: s.clone() for k, s in sums.items()}),
        real(number, optimizer, sums, *rest),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = private.compile(of_model, rows=rows, backend="eager")
        for batch in (8, 8, 7, 8, 8, 8, 9, 8):
            x = torch.randn(shape(batch), dtype=torch.float64)
            for records in (x, *(without(x, i) for i in range(3))):
                try:
                    step(records)
                except cw.WrongDraw:  # said, and computed whole from now on
                    private.discard()
                    step(records)
            whole, *others = (torch.cat([s.flatten() for s in sums.values()]) for sums in seen[-4:])
            assert all(float((whole - other).norm()) <= 0.1 * (1 + 1e-9) for other in others)


def test_parts_of_a_batch_are_of_two_sizes():
    """If both have a loss a row, no other axis was cut: of it there would be as many losses in every part."""
    for rows in range(1, 14):
        for count in range(max(rows, 2) + 1, 60):
            batch = Batch([torch.arange(count)], None, (True,), count, rows, [], [], ())
            parts = list(batch.cut())
            assert torch.equal(torch.cat([part.leaves[0] for part in parts]), torch.arange(count))
            sizes = [part.count for part in parts]
            assert len(set(sizes)) > 1 and max(sizes) <= max(rows, 2) and sizes == [len(part.leaves[0]) for part in parts]


def test_a_training_is_not_copied():
    model = built(lambda: nn.Linear(4, 3))
    plan = cw.PrivacyPlan(dataset_size=RECORDS, batch_size=8, steps=9, delta=1e-3, clipping=cw.flat(0.1), noise_multiplier=1.0)
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    for one in (private, private.compile(mean_loss, backend="eager")):
        with pytest.raises(TypeError, match="is not copied: the copy of its optimizer would step without noise"):
            copy.deepcopy(one)


@pytest.mark.parametrize("draw", [lambda: random.random() < 0.02, lambda: np.random.random() < 0.02])
def test_coins_of_python_s_and_numpy_s_are_not_baked_in(draw):
    losses_of = lambda model, x, y: mean_loss(model, x, y) * (2 if draw() else 1)
    with pytest.warns(UserWarning, match=r"this step is not compiled.*random numbers of Python's or numpy's"):
        _, step, _ = train(built(lambda: nn.Linear(4, 3)), X, losses_of=losses_of, steps=9)
    assert not step.graphs.variants


def moved(model, how):
    if how == "module":
        model.pre, model.post = None, model.pre
    elif how == "parameter":
        model.shift, model.scale = model.scale, None
    elif how == "buffer":
        model.off, model.mask = model.mask, None
    else:
        type(model).forward = lambda self, x: self.b(self.a(x)) * 3


@pytest.mark.parametrize("how", ["module", "parameter", "buffer", "class"])
def test_what_moves_to_another_place_is_followed(how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pre, self.post, self.a, self.b = nn.LayerNorm(4), None, nn.Linear(4, 4), nn.Linear(4, 3)
            self.scale, self.shift = nn.Parameter(torch.full((3,), 2.0)), None
            self.register_buffer("mask", torch.tensor([1.0, 0.5, 0.2]))
            self.register_buffer("off", None)

        def forward(self, x):
            x = self.a(x if self.pre is None else self.pre(x))
            x = self.b(x if self.post is None else self.post(x))
            x = x if self.scale is None else x * self.scale
            x = x if self.shift is None else x + self.shift
            x = x if self.mask is None else x * self.mask
            return x if self.off is None else x + self.off

    forward = Model.forward
    found = []
    for compiled in (False, True):
        Model.forward = forward
        model = built(Model)
        taken = []

        def after(_, model=model, taken=taken):
            taken.append(1)
            if len(taken) == 12:
                moved(model, how)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(train(model, X, compiled=compiled, steps=15, after=after, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [3, 5, 7])
@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_few_rows(kind, rows):
    """Sizes that follow the batch are no part of the way through a model, also where they are small."""
    layers = {
        "attention": lambda: Net(
            lambda s, x: s.b(s.a(x, x, x)[0]).mean(1), a=nn.MultiheadAttention(8, 2, batch_first=True), b=nn.Linear(8, 3)
        ),
        "lstm": lambda: Net(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.LSTM(8, 8, batch_first=True), b=nn.Linear(8, 3)),
    }
    x = X.repeat(1, 10).view(-1, 5, 8) * torch.linspace(0.5, 1.5, 5, dtype=X.dtype).view(
        5, 1
    )  # of equal tokens, queries and keys get rounding for gradients
    assert_same_training(layers[kind], x, rows=rows)


def test_a_buffer_that_is_replaced_now_and_then():
    def forward(net, x):
        return net.a(x) * net.scale

    def build():
        net = Net(forward, a=nn.Linear(4, 3))
        net.register_buffer("scale", torch.ones(()))
        return net

    model, made, calls = built(build), [], []

    def after(optimizer):
        calls.append(1)
        made.append(len(step_of[0].graphs.variants) and step_of[0].graphs._patience.replaced == 0)
        if len(calls) % 10 == 0:
            model.scale = torch.tensor(1.0 + len(calls) / 100).double()

    step_of = []
    real = cw.PrivateTraining.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cw.PrivateTraining, "compile", lambda *a, **k: step_of.append(real(*a, **k)) or step_of[-1])
        train(model, X, steps=70, after=after)
    assert sum(map(bool, made[-15:])) >= 8  # the last replacements are followed too


def test_targets_between_zero_and_one():
    losses_of = lambda model, x, y: F.binary_cross_entropy(torch.sigmoid(model(x)), x.sigmoid(), reduction="none").mean(1)
    assert_same_training(lambda: nn.Linear(4, 4), X, losses_of=losses_of)


def test_a_constant_that_is_declared_where_it_is_made():
    losses_of = lambda model, x, y: F.cross_entropy(
        model(x), y, weight=cw.constant(torch.tensor([0.5, 1.0, 2.0]).double()), reduction="none"
    )
    assert_same_training(lambda: nn.Linear(4, 3), X, losses_of=losses_of)


def test_an_attribute_that_is_not_a_number():
    def build():
        net = nn.Linear(4, 3)
        net.best = float("nan")
        return net

    assert_same_training(build, X)


def test_true_is_not_one():
    def forward(net, x):
        return net.a(x) * (2.0 if net.flag is True else 1.0)

    models = []
    for compiled in (False, True):
        model = built(lambda: Net(forward, a=nn.Linear(4, 3)))
        model.flag, calls = 1, []

        def after(optimizer, model=model, calls=calls):
            calls.append(1)
            model.flag = True if len(calls) > 5 else 1

        models.append(train(model, X, steps=7, compiled=compiled, after=after)[0])
    torch.testing.assert_close(*models)


def test_weights_that_are_dropped_say_why():
    model = lambda: Net(lambda s, x: F.linear(x, F.dropout(s.a.weight, 0.3), s.a.bias), a=nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="weights that are dropped"):
        train(built(model), X, steps=12)


def test_batches_without_hope_say_why():
    data = torch.utils.data.TensorDataset(X, torch.arange(RECORDS) % 3)
    named = [(*pair, f"record {number}") for number, pair in enumerate(data)]
    model = nn.Linear(4, 3).double()
    plan = cw.PrivacyPlan(dataset_size=RECORDS, batch_size=6, steps=20, delta=1e-3, clipping=cw.flat(0.5), noise_multiplier=1.0)
    with cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan) as private:
        step = private.compile(lambda model, x, y, names: mean_loss(model, x, y), backend="eager")
        with pytest.warns(UserWarning, match="words among the arguments"):
            for _ in range(3):
                for batch in private.loader(named):
                    if private.ledger.spent < 20:
                        step(*batch)
    plan = cw.PrivacyPlan(
        dataset_size=RECORDS, batch_size=1, steps=20, delta=1e-3, clipping=cw.flat(0.5), noise_multiplier=1.0, sampler="fixed_size"
    )
    with pytest.warns(UserWarning, match="single example"):
        train(built(lambda: nn.Linear(4, 3)), X, steps=20, plan=plan)


def test_no_step_takes_more_rows_than_it_was_told():
    """A draw that does not fit into memory is no larger in the steps that verify the model."""
    seen = []

    def losses_of(model, x, y):
        seen.append(len(x))
        return mean_loss(model, x, y)

    _, step, private = train(built(lambda: nn.Linear(4, 3)), X, losses_of=losses_of, rows=5, steps=9)
    assert max(seen) == 5 and len(step.graphs.variants) == 1 and private.ledger.spent == 9


def test_one_row_at_a_time():
    assert_same_training(lambda: nn.Linear(4, 3), X, rows=1)

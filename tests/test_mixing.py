"""Mixing that leaves no gradient path, in everyday clothes: look-ups, square batches, inputs in odd containers. All of it must be refused."""

import collections
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from helpers import Net, examples

CLASSES = 3


def entropy(output, y, **options):
    return F.cross_entropy(output, y, reduction="none", **options)


def mixup(m, x, y):
    order = torch.randperm(len(x))
    output = m(0.7 * x + 0.3 * x[order])
    return 0.7 * entropy(output, y) + 0.3 * entropy(output, y[order])


def mixed_targets(m, x, y):
    output = m(x)
    return 0.7 * entropy(output, y) + 0.3 * entropy(output, y[torch.randperm(len(x))])


def targets_of_others(m, x, y):
    return entropy(m(x), y[torch.randperm(len(x))])


def everything_looked_up(m, x, y):
    order, other = torch.randperm(len(x)), torch.randperm(len(x))
    return entropy(m(0.7 * x[order] + 0.3 * x[other]), y[order])


def counted_weights(m, x, y):
    return entropy(m(x), y) * (1 / torch.bincount(y, minlength=CLASSES).clamp_min(1))[y]


def counted_weights_of_the_loss(m, x, y):
    return entropy(m(x), y, weight=(1 / torch.bincount(y, minlength=CLASSES).clamp_min(1)).double())


def class_sums(m, x, y):
    centres = torch.zeros(CLASSES, CLASSES).double().index_add(0, y, x[:, :CLASSES])
    return (m(x) - centres[y]).square().sum(1)


def detached_negatives(m, x, y):
    h = m(x)
    return F.relu(1 + h.square().sum(1) - (h - h.detach()[torch.randperm(len(h))]).square().sum(1))


def hardest_negatives(m, x, y):
    h = m(x)
    distance = torch.cdist(h.detach(), h.detach()) + 1e9 * torch.eye(len(h))
    return F.triplet_margin_loss(h, x[:, :CLASSES], h.detach()[distance.argmin(1)], reduction="none")


def weights_by_rank(m, x, y):
    losses = entropy(m(x), y)
    return losses * torch.linspace(0, 1, len(losses)).to(losses)[losses.detach().argsort().argsort()]


def mean_beside_a_harmless_look_up(m, x, y):
    h = m(x)
    return (h - h.detach().mean(0)).square().sum(1) + 0 * x[:, 0][torch.arange(len(x))]


MIXING = [
    mixup,
    mixed_targets,
    targets_of_others,
    everything_looked_up,
    counted_weights,
    counted_weights_of_the_loss,
    class_sums,
    detached_negatives,
]
MIXING += [hardest_negatives, weights_by_rank, mean_beside_a_harmless_look_up]  # fmt: skip


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def norms_alone(model, losses_of, *batch):
    """One example at a time."""
    found = []
    for place in range(len(batch[0])):
        loss = losses_of(model, *(part[place : place + 1] for part in batch)).sum()
        found.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]).norm())
    return torch.stack(found)


def norms(model, losses_of, *batch):
    with cw.capture(model) as tape:
        losses = losses_of(model, *batch)
    return cw.per_example_norms(tape, losses)


@pytest.mark.parametrize("losses_of", MIXING, ids=lambda function: function.__name__)
def test_a_look_up_does_not_hide_mixing(losses_of):
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(cw.MixedExamples):
            norms(small(), losses_of, examples(12, 5), torch.randint(0, CLASSES, (12,)))


@pytest.mark.parametrize("classes", [CLASSES, 12], ids=["fewer classes", "as many classes as examples"])
@pytest.mark.parametrize("way", ["looked up", "scaled before", "index_select", "of the loss"])
def test_tables_of_the_caller_are_no_examples(classes, way):
    """Also where they are as long as the batch."""
    weights = torch.linspace(0.5, 1.5, classes).double()

    def losses_of(m, x, y):
        if way == "of the loss":
            return entropy(m(x), y, weight=weights)
        found = (weights / weights.sum())[y] if way == "scaled before" else weights[y] if way == "looked up" else weights.index_select(0, y)
        return entropy(m(x), y) * found

    model = nn.Linear(5, classes).double()
    x, y = examples(12, 5), torch.arange(12) % classes
    expected = norms_alone(model, losses_of, x, y)
    torch.testing.assert_close(norms(model, losses_of, x, y), expected)


def centred(h):
    return h - h.mean(0, keepdim=True).detach()


@pytest.mark.parametrize("batch", [7, 8, 9])
def test_as_many_features_as_examples(batch):
    model = Net(lambda s, x: s.b(torch.tanh(centred(s.a(x)))), a=nn.Linear(8, 8), b=nn.Linear(8, CLASSES)).double()
    with pytest.raises(cw.MixedExamples):
        norms(model, lambda m, x: m(x).square().sum(1), examples(batch, 8))


def test_as_many_tokens_and_targets_as_examples():
    model = Net(lambda s, x: centred(s.a(x).mean(1)), a=nn.Embedding(20, CLASSES)).double()
    with pytest.raises(cw.MixedExamples):
        norms(model, lambda m, x: m(x).square().sum(1), torch.randint(0, 20, (6, 6)))
    with pytest.raises(cw.MixedExamples):
        norms(nn.Linear(5, 8).double(), lambda m, x, y: (m(x) - centred(y)).square().sum(1), examples(8, 5), examples(8, 8))


@pytest.mark.parametrize("outputs", [3, 6])
def test_a_square_mask_beside_the_examples_is_shared(outputs):
    mask = torch.ones(6, 6).tril().double()
    model = Net(lambda s, x, m: (m.softmax(-1) @ torch.tanh(s.a(x))).mean(1), a=nn.Linear(4, outputs)).double()
    losses_of = lambda model, x: model(x, mask).square().sum(1)
    x = examples(6, 6, 4)
    torch.testing.assert_close(norms(model, losses_of, x), norms_alone(model, losses_of, x))


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


CONTAINERS = {
    "tensor": (lambda x: x, lambda given: given),
    "object with slots": (Slots, lambda given: given.x),
    "array of numpy": (lambda x: x.numpy(), torch.from_numpy),
    "rows of numpy": (lambda x: list(x.numpy()), lambda given: torch.from_numpy(np.stack(given))),
    "lists of numbers": (lambda x: x.tolist(), lambda given: torch.tensor(given).double()),
    "words": (lambda x: [" ".join(map(str, row)) for row in x.tolist()], lambda given: torch.tensor([[float(n) for n in w.split()] for w in given]).double()),
    "numbers": (lambda x: x[:, 0].tolist(), lambda given: torch.tensor(given).double()[:, None].repeat(1, 5)),
    "an array that is read backwards": (lambda x: x.numpy()[:, ::-1], lambda given: torch.from_numpy(given.copy())),
    "an array of another byte order": (lambda x: x.numpy().astype(">f8"), lambda given: torch.from_numpy(given.astype("float64"))),
    "an array that nobody may write to": (lambda x: np.frombuffer(x.numpy().tobytes()).reshape(x.shape), lambda given: torch.tensor(given)),
    "deque": (lambda x: collections.deque([x]), lambda given: given[0]),
    "read-only dict": (lambda x: types.MappingProxyType({"x": x}), lambda given: given["x"]),
}  # fmt: skip


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("name", CONTAINERS)
def test_examples_in_containers(name, mixes):
    wrap, take = CONTAINERS[name]
    forward = lambda s, given: s.b(torch.tanh(centred(s.a(take(given))) if mixes else s.a(take(given))))
    model, x = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, CLASSES)).double(), examples(12, 5)
    losses_of = lambda m, x: m(wrap(x)).square().sum(1)
    if mixes:
        with pytest.raises(cw.MixedExamples):
            norms(model, losses_of, x)
    else:
        torch.testing.assert_close(norms(model, losses_of, x), norms_alone(model, losses_of, x))


def test_words_that_all_examples_share():
    """As many as there are examples by chance: names of classes, which stay when the batch has another size."""
    names = [f"class {number}" for number in range(7)]
    model = Net(
        lambda s, x, names: s.a(x) * torch.tensor([[float(len(name)) + i for i, name in enumerate(names)]]), a=nn.Linear(5, 7)
    ).double()
    losses_of = lambda m, x: m(x, names).square().sum(1)
    for batch in (6, 7, 8, 7):
        x = examples(batch, 5)
        torch.testing.assert_close(norms(model, losses_of, x), norms_alone(model, losses_of, x))


def test_words_beside_the_examples_do_not_hide_mixing():
    """A word for each example, of which the shortest decides."""
    model = Net(
        lambda s, x, words: s.a(x) * torch.tensor([float(min(map(len, words)))] * len(words)).double()[:, None], a=nn.Linear(5, 3)
    ).double()
    with pytest.raises(cw.MixedExamples):
        norms(model, lambda m, x, words: m(x, words).square().sum(1), examples(8, 5), ["a" * (number + 1) for number in range(8)])


def test_examples_that_nobody_can_exchange_are_refused():
    model = Net(lambda s, given: centred(s.a(given())), a=nn.Linear(5, 6)).double()
    with pytest.raises(cw.MixedExamples, match=r"no tensor.*Net|Net.*no tensor"):
        norms(model, lambda m, x: m(lambda: x).square().sum(1), examples(12, 5))


def test_a_module_without_inputs_is_nobodys():
    """A prompt that is learned."""
    prompt = Net(lambda s: torch.tanh(s.t), t=nn.Parameter(torch.randn(1, 5)))
    model = nn.ModuleList([prompt, nn.Linear(5, 3)]).double()
    losses_of = lambda m, x: m[1](x * m[0]()).square().sum(1)
    x = examples(6, 5)
    with cw.capture([prompt, model[1]]) as tape:
        losses = losses_of(model, x)
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms_alone(model, losses_of, x))


@pytest.mark.parametrize("lengths", [(3, 5, 2, 6), (4, 5, 2, 6), (4, 4, 2, 5)], ids=["none", "one as long as the batch", "two"])
def test_a_list_of_sequences(lengths):
    """Padded and masked inside the model."""

    def forward(s, given):
        x = nn.utils.rnn.pad_sequence(given, batch_first=True)
        mask = torch.arange(x.shape[1]) < torch.tensor([len(row) for row in given])[:, None]
        return (torch.tanh(s.a(x)) * mask[:, :, None]).sum(1)

    model = Net(forward, a=nn.Linear(4, 3)).double()
    rows = [examples(length, 4) for length in lengths]
    expected = torch.stack([norms(model, lambda m, row: m([row]).square().sum(1), row)[0] for row in rows])
    torch.testing.assert_close(norms(model, lambda m, given: m(given).square().sum(1), rows), expected)


RANDOM = {
    "numpy": lambda s, x: torch.from_numpy(np.random.rand(len(x), 1)),
    "numpy's own": lambda s, x: torch.from_numpy(s.numpy.random((len(x), 1))),
    "python": lambda s, x: torch.tensor([[__import__("random").random()] for _ in x]).double(),
    "a generator of its own": lambda s, x: torch.rand(len(x), 1, generator=s.dice).double(),
    "torch": lambda s, x: torch.rand(len(x), 1).double(),
}


@pytest.mark.parametrize("where", ["in the model", "in the block"])
@pytest.mark.parametrize("name", RANDOM)
def test_pictures_that_are_changed_by_chance_are_separate(name, where):
    for seed in range(6):
        model = Net(lambda s, x: s.a(x * (1 + RANDOM[name](s, x)) if where == "in the model" else x), a=nn.Linear(5, 3)).double()
        model.dice, model.numpy = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        losses_of = lambda m, x: m(x if where == "in the model" else x * (1 + RANDOM[name](m, x))).square().sum(1)
        assert norms(model, losses_of, examples(12, 5)).isfinite().all()


def handed_out_by_length(s, x, lengths):
    return s.out(torch.tanh(s.a(x))[lengths.argsort(descending=True)])


def sorted_and_back(s, x, lengths):
    order = lengths.argsort(descending=True)
    return s.out(torch.tanh(s.a(x))[order])[order.argsort()]


def the_longest_of_all(s, x, lengths):
    return sorted_and_back(s, x, lengths) * (lengths == lengths.max())[:, None]


@pytest.mark.parametrize("forward, mixes", [(handed_out_by_length, True), (sorted_and_back, False), (the_longest_of_all, True)])
def test_an_order_by_whole_numbers_does_not_hide_mixing(forward, mixes):
    """Lengths that were left as they are, as if they numbered rows of several, hid what goes by them: outputs in an order that targets do not have."""
    for _ in range(12):
        model = Net(forward, a=nn.Linear(3, 6), out=nn.Linear(6, CLASSES)).double()
        x, lengths = examples(8, 3), torch.randperm(19)[:8] + 1
        with cw.capture(model) as tape:
            losses = entropy(model(x, lengths), torch.randint(0, CLASSES, (8,)))
        if mixes:
            with pytest.raises(cw.MixedExamples):
                cw.per_example_norms(tape, losses)
        else:
            cw.per_example_norms(tape, losses)


def centred_by_column(q):
    t = q.detach().clone()
    for column in range(t.shape[1]):
        t[:, column].sub_(t[:, column].mean())
    return t


def written_through(view):
    def targets(q):
        t = torch.zeros_like(q)
        view(t).copy_(view(q.detach() - q.detach().mean(0)))
        return t

    return targets


def divided_in_place(q):
    t = q.detach().clone()
    part = t[:]
    part -= t.mean(0)
    return t


def by_rows(q):
    t, mean = torch.empty_like(q), q.detach().mean(0)
    for place, row in zip(t, q.detach()):
        place.copy_(row - mean)
    return t


WRITTEN = {
    "columns": centred_by_column,
    "flat": written_through(lambda t: t.view(-1)),
    "turned": written_through(lambda t: t.T),
    "data": written_through(lambda t: t.data),
    "a part": divided_in_place,
    "rows": by_rows,
    "out": lambda q: (lambda t: (torch.sub(q.detach(), q.detach().mean(0), out=t[:]), t)[1])(torch.zeros_like(q)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_through_a_view_belongs_to_the_losses(name):
    """The view is gone when the losses are there, and what lies under it looked like something from outside."""
    model = nn.Linear(3, CLASSES).double()
    with cw.capture(model) as tape:
        q = model(examples(7, 3))
        losses = (q - WRITTEN[name](q)).square().sum(1)
    with pytest.raises(cw.MixedExamples):
        cw.per_example_norms(tape, losses)


def test_what_is_written_row_by_row_is_not_mixed():
    def separate(q):
        t = torch.zeros_like(q)
        t.view(-1).copy_(q.detach().view(-1).square())
        t[:, 0].mul_(2)
        return t

    model = nn.Linear(3, CLASSES).double()
    with cw.capture(model) as tape:
        q = model(examples(7, 3))
        losses = (q - separate(q)).square().sum(1)
    cw.per_example_norms(tape, losses)

"""What a graph must not get wrong: one record's share of the sums, random numbers, and which state of the model it was made for."""

import collections
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.again import repeatable_kernels
from clipwise.attributes import Same
from clipwise.compiled.rows import part_of
from clipwise.compiled.surroundings import surroundings
from clipwise.tracing import told_to_be_compiled
from helpers import Net
from test_compiled import RECORDS, assert_same_training, built, mean_loss, plan_for, train

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining", "ignore:For backward hooks")
X = torch.randn(RECORDS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
VIEWS, BATCH, BOUND = 4, 12, 0.3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("rows", [BATCH, VIEWS * BATCH])
def test_views_of_a_record_side_by_side_stay_one_record(dropout, rows):
    """x: (B·K, F), K views of each record; y: (B,). Filled up, `view(len(y), -1)` would deal one record's views out to several losses, each clipped by itself."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 32, bias=False), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3, bias=False)
    model = nn.Sequential(*layers).double()  # without biases an input of zeros has a gradient of zero

    def losses_of(model, x, y):
        return F.cross_entropy(model(x).view(len(y), -1, 3).mean(1), y, reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = cw.PrivacyPlan(
        dataset_size=RECORDS, batch_size=BATCH, steps=30, delta=1e-4, clipping=cw.flat(BOUND), noise_multiplier=1e-9, sampler="fixed_size"
    )
    data = TensorDataset(5 * torch.randn(RECORDS, VIEWS, 4, dtype=torch.float64), torch.arange(RECORDS) % 3)
    with cw.PrivateTraining(model, optimizer, plan, noise=cw.reproducible(3)) as private, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this step is not compiled")
        step = private.compile(losses_of, backend="eager", rows=rows)
        while private.ledger.spent < 30:
            for x, y in private.loader(data):
                before = [weight.detach().clone() for weight in model.parameters()]
                alone = torch.zeros_like(x)
                alone[0] = x[0]
                step((x if private.ledger.spent < 12 else alone).flatten(0, 1), y)
                moved = [weight.detach() - earlier for weight, earlier in zip(model.parameters(), before)]
                if private.ledger.spent > 12:
                    released = BATCH * torch.cat([part.flatten() for part in moved]).norm()
                    assert float(released) <= BOUND * (1 + 1e-6)
                if private.ledger.spent == 30:
                    break


def test_a_graph_that_draws_numbers_is_compared_with_these_held_still():
    """Losses that depend on how many rows there are pass no longer where the model drops something."""

    def depends(model, x, y):
        return mean_loss(model, x, y) * (1 + len(x))

    build = lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3), nn.Dropout(0.1))
    with pytest.warns(UserWarning, match="not those of the tape|have not verified"):
        _, step, _ = train(built(build), X, losses_of=depends, steps=20)
    assert not step.graphs.variants
    _, step, _ = train(built(build), X)
    assert len(step.graphs.variants) == 1


def test_numbers_drawn_in_a_checkpointed_region_are_those_that_are_drawn_again():
    def region(net, x):
        return F.dropout(torch.tanh(net.a(x)), 0.5)

    def build():
        return Net(lambda s, x: s.b(checkpoint(region, s, x, use_reentrant=False)), a=nn.Linear(4, 8), b=nn.Linear(8, 3))

    with pytest.warns(UserWarning, match="random numbers beside activation checkpointing"):
        _, step, _ = train(built(build), X, steps=16)
    assert not step.graphs.variants


class Doubled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Scale:
    def __init__(self, value):
        self.value = value


def _build():
    def forward(net, x):
        return net.b(torch.tanh(net.a(x))) * net.scale * net.config["scale"] * net.many[0] * net.object.value

    net = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    net.scale, net.config, net.many, net.object = 1.0, {"scale": 1.0, "deep": [{"er": 1.0}]}, [1.0] * 100, Scale(1.0)
    net.handle = net.a.register_forward_hook(lambda module, args, output: 1.0 * output)
    return net


def _another_hook(net):
    net.handle.remove()
    net.handle = net.a.register_forward_hook(lambda module, args, output: 3.0 * output)


def _backward_hook(net):
    net.b.register_full_backward_hook(lambda module, found, given: tuple(None if g is None else 3 * g for g in found))


_everywhere = []


def _hook_everywhere(net):
    found = nn.modules.module.register_module_forward_hook(lambda m, args, out: 3 * out if type(m) is nn.Linear else None)
    _everywhere.append(found)


CHANGES = {
    "a number": lambda net: setattr(net, "scale", 3.0),
    "a number of numpy's": lambda net: setattr(net, "scale", np.float64(3.0)),
    "a number in a dict": lambda net: net.config.update(scale=3.0),
    "a number in a long list": lambda net: net.many.__setitem__(0, 3.0),
    "another object": lambda net: setattr(net, "object", Scale(3.0)),
    "the class of a module": lambda net: setattr(net.a, "__class__", Doubled),
    "another hook": _another_hook,
    "a backward hook": _backward_hook,
    "a hook of all modules": _hook_everywhere,
}


@pytest.fixture(autouse=True)
def no_hooks_left():
    yield
    while _everywhere:
        _everywhere.pop().remove()


@pytest.mark.parametrize("name", CHANGES)
def test_a_graph_is_for_one_state_of_the_model(name):
    """Each change moves the gradients of later steps; the step after it follows the eager loop already."""

    def after(change, model, seen):
        def look(optimizer):
            seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            if len(seen) == 9:
                change(model)

        return look

    trained = []
    for compiled in (False, True):
        model, seen = built(_build), []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="this step is not compiled")
            train(
                model,
                X,
                steps=14,
                compiled=compiled,
                after=after(CHANGES[name], model, seen),
                optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
            )
        while _everywhere:
            _everywhere.pop().remove()
        trained.append(seen)
    for expected, found in zip(*trained):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def eagerly_and_compiled(build, change):
    """The weights after fourteen steps, of which the ninth is followed by `change(model)`, by the eager loop and by graphs."""
    trained = []
    for compiled in (False, True):
        model, steps = built(build), []

        def after(optimizer, model=model, steps=steps):
            steps.append(optimizer)
            if len(steps) == 9:
                change(model)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="this step is not compiled")
            found, _, _ = train(model, X, steps=14, compiled=compiled, after=after, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
        trained.append(found)
    return trained


def test_weights_that_are_tied_to_others():
    """The same tensors in the same order, in other places."""

    def build():
        net = Net(lambda s, x: s.c(torch.tanh(s.b(torch.tanh(s.a(x))))), a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
        net.c.weight = net.a.weight
        return net

    def change(model):
        model.c.weight = model.b.weight

    expected, found = eagerly_and_compiled(build, change)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_an_object_that_is_gone_is_not_taken_for_the_next():
    model = nn.Linear(2, 2)
    model.object = Scale(1.0)
    before, address = surroundings([model]), id(model.object)
    assert before == surroundings([model])
    others = []
    for _ in range(1000):
        model.object = None
        model.object = Scale(2.0)
        if id(model.object) == address:
            break
        others.append(model.object)
    assert before != surroundings([model])
    assert Same(model) == Same(model) and Same(model) != Same(nn.Linear(2, 2)) and Same([1]) != [1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_batches_of_another_memory_format_that_are_cut_and_filled_up(backend):
    """Draws larger and smaller than the graph, of images whose channels come last."""
    images = torch.randn(RECORDS, 4, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).permute(0, 3, 1, 2)

    def losses_of(model, x, y):
        return mean_loss(model, x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), y)

    build = lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    data_of_channels_last = images.contiguous(memory_format=torch.channels_last)
    for x in (images, data_of_channels_last):
        plan = plan_for(14)
        expected, _, _ = train(built(build), x, compiled=False, steps=14, plan=plan)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="this step is not compiled")
            found, step, _ = train(built(build), x, steps=14, plan=plan, rows=10, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
        assert len(step.graphs.variants) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(20, 3, 5, 6),
        lambda: torch.randn(20, 5, 6, 3).permute(0, 3, 1, 2),
        lambda: torch.randn(3, 20, 5).transpose(0, 1),
        lambda: torch.randn(40, 6)[::2, ::2],
        lambda: torch.randn(6, 20).t(),
        lambda: torch.randn(1, 6).expand(20, 6),
        lambda: torch.randint(0, 9, (20,)),
    ],
)
def test_parts_have_one_layout_however_they_come_about(make):
    leaf = make()
    whole, cut, filled, one = (part_of([leaf[:stop]], [True], start, stop, 8)[0] for start, stop in ((0, 8), (8, 16), (16, 20), (19, 20)))
    assert whole.stride() == cut.stride() == filled.stride() == one.stride()
    assert torch.equal(whole, leaf[:8]) and torch.equal(cut, leaf[8:16])
    assert torch.equal(filled, leaf[[16, 17, 18, 19, 16, 16, 16, 16]]) and torch.equal(one, leaf[[19] * 8])


def test_functions_without_a_rule_are_differentiated_in_graphs_too():
    def build():
        return Net(lambda s, x: torch.lerp(s.a(x), s.p, 0.3), a=nn.Linear(4, 3), p=nn.Parameter(torch.randn(3)))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this step is not compiled")
        found, _, _ = train(built(build), X, fallback=True)
    expected, _, _ = train(built(build), X, compiled=False, fallback=True)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_an_lstm_with_projections():
    build = lambda: Net(
        lambda s, x: s.b(s.a(x.view(-1, 2, 2))[0][:, -1]), a=nn.LSTM(2, 5, proj_size=3, batch_first=True), b=nn.Linear(3, 3)
    )
    assert_same_training(build, X)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def test_batches_that_nobody_looks_into_are_named():
    model = nn.Linear(4, 3).double()
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(3), own_batches=True)
    step = private.compile(lambda model, pair: mean_loss(model, pair.x, pair.y), backend="eager")
    with pytest.warns(UserWarning, match="an argument is of type Pair"):
        for start in range(0, 36, 12):
            step(Pair(X[start : start + 12].clone(), torch.arange(12) % 3))
    with pytest.raises(TypeError, match="takes what the loader yields, in its order"):
        step(x=X[:12].clone())
    private.close()


def _drop_path(x, draw):
    return x * (draw(x) < 0.8).to(x) / 0.8


DRAWS = {
    "rand": lambda x: _drop_path(x, lambda x: torch.rand(len(x), 1, dtype=x.dtype)),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "randn": lambda x: x + 0.1 * torch.randn(x.shape, dtype=x.dtype),
    "normal": lambda x: x + 0.1 * torch.normal(torch.zeros_like(x), 1.0),
    "normal of a size": lambda x: x + 0.1 * torch.normal(0.0, 1.0, size=x.shape),
    "normal_": lambda x: x + 0.1 * torch.empty_like(x).normal_(),
    "uniform_": lambda x: _drop_path(x, lambda x: x.new_empty(len(x), 1).uniform_()),
    "bernoulli_": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.8),
    "randint": lambda x: x * (1 + torch.randint(0, 2, (len(x), 1))),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "gumbel_softmax": lambda x: x * F.gumbel_softmax(x, dim=-1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_models_that_draw_numbers_are_compiled(name):
    """Each of these can be held still, so that the graph is compared with the tape."""
    build = lambda: Net(lambda s, x: s.b(DRAWS[name](torch.tanh(s.a(x)))), a=nn.Linear(4, 6), b=nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        _, step, _ = train(built(build), X)
    assert len(step.graphs.variants) == 1


def test_settings_of_the_process_are_back_when_the_last_thread_has_left():
    """One comes in before the other, and leaves before it."""
    for block, is_on in (
        (told_to_be_compiled, torch.compiler.is_compiling),
        (repeatable_kernels, lambda: torch.backends.cudnn.deterministic),
    ):
        first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
        seen = []

        def first(block=block, events=(first_is_in, second_is_in, first_is_out)):
            with block():
                events[0].set()
                events[1].wait(5)
            events[2].set()

        def second(block=block, is_on=is_on, seen=seen, events=(first_is_in, second_is_in, first_is_out)):
            events[0].wait(5)
            with block():
                events[1].set()
                events[2].wait(5)
                seen.append(is_on())

        threads = [threading.Thread(target=one) for one in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] and not is_on()


@pytest.mark.parametrize("how", ["filled", "replaced"])
def test_the_first_state_of_an_lstm_with_projections_may_change(how):
    """Zero when the graph is made, something else later."""

    def forward(net, x):
        start = net.h0.expand(-1, len(x), -1).contiguous(), x.new_zeros(1, len(x), 5)
        return net.b(net.a(x.view(-1, 2, 2), start)[0][:, -1])

    def build():
        net = Net(forward, a=nn.LSTM(2, 5, proj_size=3, batch_first=True), b=nn.Linear(3, 3))
        net.register_buffer("h0", torch.zeros(1, 1, 3))
        return net

    def change(model):
        if how == "filled":
            model.h0.fill_(0.7)
        else:
            model.h0 = torch.full((1, 1, 3), 0.7, dtype=torch.float64)

    expected, found = eagerly_and_compiled(build, change)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def _count_deep(held):
    held["deep"]["calls"] += 1


HELD = {
    "a counter": (collections.Counter, lambda held: held.update(["calls"]), lambda held: held["calls"]),
    "a dict in a dict": (lambda: {"deep": {"calls": 0}}, _count_deep, lambda held: held["deep"]["calls"]),
    "a deque": (collections.deque, lambda held: held.append(1), len),
    "a set": (set, lambda held: held.add(len(held)), len),
    "a list in a tuple": (lambda: ([],), lambda held: held[0].append(1), lambda held: len(held[0])),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_model_counts_in_is_put_back_however_deep_it_lies(name):
    make, count, read = HELD[name]

    def forward(net, x):
        count(net.held)
        return net.a(x) * min(1.0, read(net.held) / 20)

    def build():
        net = Net(forward, a=nn.Linear(4, 3))
        net.held = make()
        return net

    eager, compiled = built(build), built(build)
    expected, _, _ = train(eager, X, compiled=False, steps=20)
    with pytest.warns(UserWarning, match="changes held of Net"):
        found, _, _ = train(compiled, X, steps=20)
    assert torch.equal(found, expected) and read(compiled.held) == read(eager.held) == 20


SET_AGAIN = {
    "a tuple": lambda net, x: setattr(net, "held", (x.shape[1], 2)),
    "a size": lambda net, x: setattr(net, "held", x.shape[1:]),
    "a list": lambda net, x: setattr(net, "held", [4, 8]),
    "a number of numpy's": lambda net, x: setattr(net, "held", np.int64(3)),
    "a device": lambda net, x: setattr(net, "held", [x.device, x.dtype]),
    "activations by name": lambda net, x: setattr(net, "held", {"x": x * 2}),
}


@pytest.mark.parametrize("name", SET_AGAIN)
def test_what_is_set_to_the_same_again_does_not_stand_in_the_way(name):
    def forward(net, x):
        SET_AGAIN[name](net, x)
        return net.b(torch.tanh(net.a(x)))

    assert_same_training(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X)


def test_a_tensor_that_is_read_and_replaced_is_not_baked_in():
    def forward(net, x):
        net.temperature = cw.constant(net.temperature * 0.8)
        return net.a(x) * net.temperature

    def build():
        net = Net(forward, a=nn.Linear(4, 3))
        net.temperature = cw.constant(torch.tensor([1.0], dtype=torch.float64))
        return net

    eager, compiled = built(build), built(build)
    expected, _, _ = train(eager, X, compiled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this step is not compiled")
        found, step, _ = train(compiled, X)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(compiled.temperature, eager.temperature)
    assert not step.graphs.variants


def test_checkpointed_regions_are_told_too():
    def region(net, x):
        h = net.a(x)
        return h if torch.compiler.is_compiling() else h * (1.0 if float(h.detach().sum()) < 1e9 else 2.0)

    assert_same_training(
        lambda: Net(lambda s, x: s.b(checkpoint(region, s, x, use_reentrant=False)), a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X
    )

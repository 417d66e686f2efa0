"""Noise and optimizer of an eager loop by one replay, out of the hook before step(). Graphs need a GPU (test_cuda.py); here a stand-in replays."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import clipwise as cw
from clipwise import noise, tracing
from clipwise.compiled import in_loop, update
from helpers import examples
from test_compiled import RECORDS, built, plan_for, train
from test_recorded import MLP, OPTIMIZERS, recordings, trained_eagerly  # noqa: F401  (a fixture that records here too)

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining", "ignore:Detected call of")

ALL = {
    **OPTIMIZERS,
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
}


@pytest.fixture(autouse=True)
def devices_for_all(monkeypatch):
    """Which torch's optimizers compute for a graph on: a CPU, too."""
    for name in ("adadelta", "adamax", "asgd", "radam", "rprop"):
        module = __import__(f"torch.optim.{name}", fromlist=["x"])
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"], raising=False)


@pytest.mark.parametrize("name", ALL)
def test_the_numbers_of_a_loop_without_recordings(name, recordings):  # noqa: F811
    x = examples(RECORDS, 4)
    expected = trained_eagerly(built(MLP), x, optimizer=ALL[name], steps=20)
    assert not recordings
    found, _, private = train(built(MLP), x, compiled=False, optimizer=ALL[name], steps=20)
    assert len(recordings) == 1
    tolerance = 1e-6 if name == "asgd" else 1e-9  # which keeps its rate in float32, computed by tensors in a graph and by Python elsewhere
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    assert private.spent().steps == 20


def test_learning_rates_bounds_and_state_that_change(recordings):  # noqa: F811
    """A schedule, a bound that follows the norms, and other tensors in the optimizer's state."""
    x, seen = examples(RECORDS, 4), []

    def after(optimizer):
        seen.append(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.9
        if len(seen) == 14:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    options = dict(optimizer=OPTIMIZERS["adam"], steps=24, after=after)
    adaptive = plan_for(24, clipping=cw.adaptive(0.3))
    expected = trained_eagerly(built(MLP), x, plan=adaptive, **options)
    seen.clear()
    found, _, private = train(built(MLP), x, compiled=False, plan=adaptive, **options)
    assert len(recordings) == 2 and private.clipping.sensitivity != 0.3
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())


def begun(model, optimizer, **options):
    """A training with a step of it that the test takes, after so many that its update is recorded."""
    private, x = cw.PrivateTraining(model, optimizer, plan_for(80), own_batches=True, **options), examples(12, 4)

    def go(step=True):
        private.loss(model(x.clone()).square().sum(1)).backward()
        if step:
            optimizer.step()

    for _ in range(10):
        go()
        optimizer.zero_grad()
    return private, go


def test_after_a_step_p_grad_is_what_was_released(recordings, monkeypatch):  # noqa: F811
    """The same as after a step that was made eagerly; a tensor of one's own, which later steps leave alone."""
    found = []
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(tracing, "DEVICES", devices)
        model = built(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private, go = begun(model, optimizer, noise=cw.reproducible(5))
        before = [p.detach().clone() for p in model.parameters()]
        go()
        mine = [p.grad for p in model.parameters()]
        kept = [grad.clone() for grad in mine]
        assert all(torch.allclose(b - 0.1 * g, p, atol=1e-12) for b, g, p in zip(before, mine, model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            go()
        assert all(map(torch.equal, mine, kept)) and all(p.grad is not g for p, g in zip(model.parameters(), mine))
        found.append(kept)
        private.close()
    assert len(recordings) == 1 and all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(*found))


def test_a_step_reads_nothing_of_the_one_before(recordings, monkeypatch):  # noqa: F811
    """What is released is written over the sums. A parameter that the losses no longer reach gets noise alone."""
    monkeypatch.setattr(noise, "_chunks", lambda parameters: ([place] for place in range(len(parameters))))
    model = nn.ModuleDict({"one": nn.Linear(4, 3, bias=False), "two": nn.Linear(4, 3, bias=False)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = cw.PrivacyPlan(
        dataset_size=1000, batch_size=12, steps=40, delta=1e-5, clipping=cw.flat(100.0), noise_multiplier=1e-9
    )  # all but no noise
    private = cw.PrivateTraining([model["one"], model["two"]], optimizer, plan, own_batches=True)
    for number in range(16):
        batch, before = examples(12, 4), [p.detach().clone() for p in model.parameters()]
        both = number % 2 == 0
        losses = model["one"](batch).sum(1) + (model["two"](batch).sum(1) if both else 0)
        private.loss(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        move = (batch.sum(0) / 12).expand(3, 4)
        for parameter, old, reached in zip(model.parameters(), before, (True, both)):
            assert torch.allclose(old - parameter, move * reached, atol=1e-6), number
    assert len(recordings) == 1
    private.close()


def test_microbatches_and_several_optimizers(recordings):  # noqa: F811
    x, found = examples(RECORDS, 4), []
    for recorded in (False, True):
        tracing.DEVICES = {"cpu"} if recorded else set()  # the fixture puts it back
        model = built(MLP)
        optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)]
        private = cw.PrivateTraining(model, optimizers, plan_for(20), noise=cw.reproducible(3), own_batches=True)
        for k in range(20):
            for part in x[12 * (k % 8) : 12 * (k % 8) + 12].clone().chunk(3):
                private.loss(model(part).square().sum(1)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        private.close()
    assert len(recordings) == 2 and float((found[1] - found[0]).norm()) <= 1e-9 * float(found[0].norm())


def test_refusals_are_those_of_every_step(recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    assert len(recordings) == 1
    spent, weights = private.ledger.spent, [p.detach().clone() for p in model.parameters()]
    with pytest.raises(cw.NothingClipped, match="nothing clipped"):
        optimizer.step()
    go(step=False)
    model[0].weight.grad.mul_(2)
    with pytest.raises(cw.ForeignGradient):
        optimizer.step()
    private.discard()
    optimizer.zero_grad()
    go(step=False)
    with pytest.raises(cw.NothingClipped, match="closure"):
        optimizer.step(lambda: 0.0)
    assert private.ledger.spent == spent and all(map(torch.equal, weights, model.parameters()))
    optimizer.step()
    with pytest.raises(cw.NothingClipped, match="nothing clipped"):
        optimizer.step()
    assert private.ledger.spent == spent + 1
    private.close()


def test_the_ledger_counts_first_and_a_step_that_failed_may_be_tried_again(recordings, monkeypatch):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    now, spent = private._in_loop[0]._update._now, []
    replay = now.replay

    def interrupted():
        spent.append(private.ledger.spent)
        raise RuntimeError("no device today")

    before = private.ledger.spent
    object.__setattr__(now, "replay", interrupted)
    go(step=False)
    with pytest.raises(RuntimeError, match="no device"):
        optimizer.step()
    assert spent == [before + 1]  # counted, also if nobody knows whether it was released
    object.__setattr__(now, "replay", replay)
    optimizer.step()
    assert private.ledger.spent == before + 2 and len(recordings) == 1
    private.close()


def test_noise_is_new_in_every_step_and_does_not_follow_the_global_seed(recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private, go = begun(model, optimizer)
    moves = []
    for _ in range(6):
        torch.manual_seed(0)
        before = model[0].weight.detach().clone()
        go()
        optimizer.zero_grad()
        moves.append(model[0].weight.detach() - before)
    assert all(float((a - b).norm()) > 1e-3 for i, a in enumerate(moves) for b in moves[:i])
    state = torch.get_rng_state()
    go()
    assert torch.equal(torch.get_rng_state(), state) and len(recordings) == 1
    private.close()


def test_frozen_parameters_stay(recordings):  # noqa: F811
    """Also with a gradient of somebody's left in p.grad. A layer that is frozen on the way is recorded anew without it."""
    model = built(MLP)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    bias = model[0].bias.detach().clone()
    model[0].bias.grad = torch.ones_like(bias)
    go()
    optimizer.zero_grad()
    model[2].requires_grad_(False)
    head = model[2].weight.detach().clone()
    for _ in range(3):
        go()
        optimizer.zero_grad()
    assert torch.equal(model[0].bias, bias) and torch.equal(model[2].weight, head) and len(recordings) == 2
    private.close()


class TwiceAsked(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("why", ["secure", "hook", "global hook", "regularizer", "subclass", "large", "no graph", "compiled", "patient"])
def test_what_is_made_eagerly_as_before(why, recordings, monkeypatch):  # noqa: F811
    model, heard, handle = built(MLP), [], None
    kind = TwiceAsked if why == "subclass" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.01)
    if why == "hook":
        optimizer.register_step_post_hook(lambda *_: heard.append(model[0].weight.grad is not None))
    if why == "global hook":
        handle = register_optimizer_step_pre_hook(lambda *_: heard.append(True))
    if why == "large":
        monkeypatch.setattr(in_loop, "room_for_update", lambda device: 100)
    if why == "no graph":

        def refused(*_):
            raise RuntimeError("no graph today")

        monkeypatch.setattr(update, "captured", refused)
    if why == "patient":
        monkeypatch.setattr(in_loop, "_PATIENCE", 11)
    private = cw.PrivateTraining(model, optimizer, plan_for(80), own_batches=True, noise="secure" if why == "secure" else "fast")
    if why == "regularizer":
        private.regularizer(lambda: 1e-3 * model[0].weight.square().sum())
    if why == "compiled":
        private.compile(lambda model, x: model(x).sum(1), backend="eager")
    before = model[0].weight.detach().clone()
    try:
        for _ in range(10):
            private.loss(model(examples(12, 4)).square().sum(1)).backward()
            optimizer.step()
            assert model[0].weight.grad is not None and not torch.equal(model[0].weight, before)
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
    finally:
        if handle is not None:
            handle.remove()
    assert not recordings and len(heard) == (10 if "hook" in why else 0) and all(heard)
    private.close()


def test_closed_trainings_hold_no_graphs(recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, _ = begun(model, optimizer)
    graph = weakref.ref(private._in_loop[0])
    private.close()
    assert graph() is None and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks

"""Every way to get it wrong has a message that says what, where and the repair; and nothing is released or counted."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from training_helpers import data, losses_of, small, small_plan, steps, training


@pytest.fixture
def ready():
    """A training with one draw at hand."""
    private, model, optimizer = training()
    batches = iter(private.loader(data()))
    x, y = next(batches)
    yield private, model, optimizer, x, y
    private.close()


def refused(private, kind, match, call):
    before = private.ledger.spent
    with pytest.raises(kind, match=match) as caught:
        call()
    assert "\n  " in str(caught.value)  # what, and the repair
    assert private.ledger.spent == before


def test_a_plain_backward_pass(ready):
    private, model, optimizer, x, y = ready
    losses_of(model, x, y).mean().backward()
    refused(private, cw.NothingClipped, "nothing clipped", optimizer.step)


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_loss_beside_the_private_one(ready, order):
    private, model, optimizer, x, y = ready

    def other():
        sum(p.square().sum() for p in model.parameters()).backward()

    if order == "before":
        other()
    private.loss(losses_of(model, x, y)).backward()
    if order == "after":
        other()
    refused(private, cw.ForeignGradient, "was not zero before" if order == "before" else "was changed by something other", optimizer.step)


def test_another_loss_between_two_parts_of_a_draw(ready):
    private, model, _optimizer, x, y = ready
    private.loss(losses_of(model, x[:2], y[:2])).backward()
    model[0].weight.square().sum().backward()
    loss = private.loss(losses_of(model, x[2:], y[2:]))
    refused(private, cw.ForeignGradient, "0.weight.grad was changed", loss.backward)


def test_a_gradient_on_a_parameter_the_losses_do_not_reach(ready):
    private, model, optimizer, x, y = ready
    model[0].weight.requires_grad_(False)
    private.loss(losses_of(model, x, y)).backward()
    model[0].weight.requires_grad_(True)
    model[0].weight.square().sum().backward()
    refused(private, cw.ForeignGradient, "0.weight.grad was not zero", optimizer.step)


def test_forgetting_zero_grad():
    private, model, optimizer = training()
    batches = iter(private.loader(data()))
    for _ in range(2):
        x, y = next(batches)
        private.loss(losses_of(model, x, y)).backward()
        if private.position == 0:
            optimizer.step()
    refused(private, cw.ForeignGradient, "Call optimizer.zero_grad", optimizer.step)


def test_zeroing_in_place_is_fine():
    private, model, optimizer = training()
    for x, y in private.loader(data()):
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert private.ledger.spent == 6


def test_zero_grad_before_step(ready):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    optimizer.zero_grad()
    refused(private, cw.ForeignGradient, "cleared between backward", optimizer.step)


@pytest.mark.parametrize("change", [
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    lambda model: [p.grad.mul_(0.5) for p in model.parameters()],
])  # fmt: skip
def test_gradients_changed_in_between(ready, change):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    change(model)
    refused(private, cw.ForeignGradient, "clip_grad_norm_ has no place here", optimizer.step)


def test_changes_that_cannot_be_seen_have_no_effect(ready):
    """Through .data no trace is left, nor by another tensor; but the release is made from the sums, not from p.grad."""
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    for parameter in model.parameters():
        parameter.grad.data.fill_(1e6)
    model[0].weight.grad = torch.full_like(model[0].weight, 1e6)
    optimizer.step()
    assert all(float(p.grad.abs().max()) < 10 for p in model.parameters())


def test_step_with_nothing_clipped(ready):
    private, _, optimizer, _, _ = ready
    refused(private, cw.NothingClipped, "nothing clipped", optimizer.step)


def test_step_after_a_loss_that_was_not_propagated(ready):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y))
    refused(private, cw.NothingClipped, "nothing clipped", optimizer.step)


def test_two_steps_for_one_draw(ready):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    refused(private, cw.NothingClipped, "nothing clipped", optimizer.step)


def test_a_closure(ready):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    refused(private, cw.NothingClipped, "closure", lambda: optimizer.step(lambda: 1.0))
    refused(private, cw.NothingClipped, "closure", lambda: optimizer.step(closure=lambda: 1.0))
    optimizer.step()  # nothing was lost
    assert private.ledger.spent == 1


def test_a_step_that_somebody_records_as_a_cuda_graph(ready, monkeypatch):
    """Its replays would release the same draw again, with the same noise, and count nothing."""
    private, model, optimizer, x, y = ready
    loss = private.loss(losses_of(model, x, y))
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_initialized", lambda: True)
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refused(private, cw.WrongDraw, "recorded as a CUDA graph", lambda: private.loss(losses_of(model, x, y)))
    loss.backward()
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_initialized", lambda: True)
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refused(private, cw.WrongDraw, "recorded as a CUDA graph", optimizer.step)
    optimizer.step()  # nothing was lost
    assert private.ledger.spent == 1


@pytest.mark.parametrize("factor", [10.0, 0.5, -1.0])
def test_a_scaled_loss(ready, factor):
    private, model, _, x, y = ready
    loss = factor * private.loss(losses_of(model, x, y))
    refused(private, cw.WrongScale, f"multiplied by {factor:g} before", loss.backward)


def test_a_loss_that_is_scaled_later_where_the_device_is_not_waited_for():
    """As on a GPU after the first steps: the scale is on its way to the host when the step is released, which does not depend on it."""
    private, model, optimizer = training(own_batches=True)
    x, y = torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 3, (10,))
    private._updates._waits = 4
    private.loss(losses_of(model, x, y)).backward()
    private._updates._scales.append(torch.tensor(10.0))
    optimizer.step()
    optimizer.zero_grad()
    private.loss(losses_of(model, x.clone(), y)).backward()
    refused(private, cw.WrongScale, "multiplied by 10 before", optimizer.step)
    optimizer.step()  # nothing was lost
    assert private.ledger.spent == 2
    private.close()


def test_an_undeclared_scaler(ready):
    private, model, _, x, y = ready
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(private.loss(losses_of(model, x, y)))
    refused(private, cw.WrongScale, "scaler=scaler", loss.backward)


def test_the_same_loss_twice(ready):
    private, model, _, x, y = ready
    loss = private.loss(losses_of(model, x, y))
    loss.backward(retain_graph=True)
    refused(private, cw.NothingClipped, "back-propagated twice", loss.backward)


def test_batches_from_elsewhere():
    private, model, _ = training()
    x, y = data().tensors
    refused(private, cw.WrongDraw, "belong to no draw of private.loader", lambda: private.loss(losses_of(model, x, y)))


def test_more_rows_than_the_draw(ready):
    private, model, _, x, y = ready
    losses = losses_of(model, torch.cat([x, x]), torch.cat([y, y]))
    refused(private, cw.WrongDraw, f"{2 * len(x)} losses for a draw of {len(x)} rows", lambda: private.loss(losses))


def test_only_a_part_of_the_draw(ready):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x[:-1], y[:-1])).backward()
    refused(private, cw.WrongDraw, f"after {len(x) - 1} of the {len(x)} rows", optimizer.step)
    private.loss(losses_of(model, x[-1:], y[-1:])).backward()
    optimizer.step()
    assert private.ledger.spent == 1


def even_draw():
    private, model, optimizer = training(plan=small_plan(sampler="fixed_size", epochs=3))
    x, y = next(iter(private.loader(data())))
    return private, model, optimizer, x, y


@pytest.mark.parametrize("again", [lambda x: x[:5], lambda x: x[4:9], lambda x: x[::2]])
def test_rows_that_go_through_twice(again):
    private, model, _, x, y = even_draw()
    private.loss(losses_of(model, x[:5], y[:5])).backward()
    losses = losses_of(model, again(x), again(y))
    refused(private, cw.WrongDraw, "count twice", lambda: private.loss(losses))


def test_interleaved_rows_are_new_rows():
    private, model, optimizer, x, y = even_draw()
    for start in (0, 1):
        private.loss(losses_of(model, x[start::2], y[start::2])).backward()
    optimizer.step()
    assert private.ledger.spent == 1


def test_memory_that_was_freed_is_not_taken_for_rows_seen():
    private, model, optimizer, x, y = even_draw()
    for start in range(0, 10, 2):
        private.loss(losses_of(model, x[start : start + 2].clone(), y[start : start + 2])).backward()
    optimizer.step()


@pytest.mark.parametrize("sampler", ["poisson", "shuffle", "fixed_size"])
def test_a_skipped_draw_is_noticed(sampler):
    """Also where all batches are equally long."""
    private, model, optimizer = training(plan=small_plan(sampler=sampler), seed=None)
    batches = iter(private.loader(data()))
    next(batches)
    x, y = next(batches)
    while private._draws._waiting[1].rows > private._draws._waiting[0].rows:
        private._draws.consume()
        x, y = next(batches)
    losses = losses_of(model, x, y)
    refused(private, cw.WrongDraw, "handed out after one that no step was taken for", lambda: private.loss(losses))
    private.discard(draw=True)
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()


@pytest.mark.parametrize("sampler", ["fixed_size", "shuffle", "poisson"])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_batch_for_several_steps(sampler, workers):
    """Draws that workers have made ahead have not arrived."""
    private, model, optimizer = training(plan=small_plan(sampler=sampler), seed=None)
    for x, y in private.loader(data(), num_workers=workers):
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        refused(private, cw.WrongDraw, "belong to no draw", lambda: private.loss(losses_of(model, x, y)))
        break


def test_the_last_batch_again_in_place_of_the_next():
    """A loop that fetches ahead has the next draw waiting; the rows tell."""
    private, model, optimizer = training(plan=small_plan(sampler="fixed_size"), seed=None)
    batches = iter(private.loader(data()))
    x, y = next(batches)
    ahead = next(batches)
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    refused(private, cw.WrongDraw, "count twice", lambda: private.loss(losses_of(model, x, y)))
    private.loss(losses_of(model, *ahead)).backward()
    optimizer.step()


@pytest.mark.parametrize("how", ["skip", "discard", "two loops"])
def test_no_record_comes_twice_in_a_shuffled_pass(how):
    """Whatever is left out counts as used: the pass goes on behind it."""
    private, model, optimizer = training(plan=small_plan(sampler="shuffle", epochs=2), seed=None)
    seen = []
    while private.position < 5:
        for number, (x, y) in enumerate(private.loader(data())):
            if number == 1 and how == "skip":  # handed out, and never used
                break
            if number == 1 and how == "discard":
                private.discard(draw=True)
                continue
            seen += [tuple(row) for row in x.tolist()]
            private.loss(losses_of(model, x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and how == "two loops":
                break
    assert len(set(seen)) == len(seen) and private.ledger.spent == private.position >= 5


def test_an_older_loop_may_not_go_on():
    private, _, _ = training()
    older = iter(private.loader(data()))
    next(older)
    next(iter(private.loader(data())))
    with pytest.raises(cw.WrongDraw, match="an older loop"):
        next(older)


def test_a_draw_of_which_a_part_was_released_is_used_up():
    model = small()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    private, _, _ = training(model, optimizers, seed=None)
    x, y = next(iter(private.loader(data())))
    private.loss(losses_of(model, x, y)).backward()
    optimizers[0].step()
    private.discard()
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert private.ledger.spent == private.position == 1
    refused(private, cw.WrongDraw, "belong to no draw", lambda: private.loss(losses_of(model, x, y)))


def test_a_loss_from_before_the_last_step():
    private, model, optimizer = training(own_batches=True)
    x, y = data().tensors
    first, second = (private.loss(losses_of(model, x[i : i + 9], y[i : i + 9])) for i in (0, 9))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    refused(private, cw.NothingClipped, "computed before the last step", second.backward)


def test_a_loader_beside_batches_of_ones_own():
    private, _, _ = training(own_batches=True)
    with pytest.raises(TypeError, match="the caller draws the batches"):
        private.loader(data())


def test_rows_that_go_through_a_submodule_twice():
    private, model, _, x, y = even_draw()

    def part(rows):
        return F.cross_entropy(model[2](torch.tanh(model[0](x[rows]))), y[rows], reduction="none")

    private.loss(part(slice(0, 5))).backward()
    losses = part(slice(0, 5))
    refused(private, cw.WrongDraw, "count twice", lambda: private.loss(losses))


def test_a_refused_backward_pass_can_be_repeated(ready):
    private, model, optimizer, x, y = ready
    loss = 10 * private.loss(losses_of(model, x, y))
    refused(private, cw.WrongScale, "multiplied by 10", loss.backward)
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    assert private.ledger.spent == 1


def test_an_optimizer_that_calls_its_parents_step():
    class Mine(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # makes torch wrap the parent's step as well
    model = small()
    optimizer = Mine(model.parameters(), lr=0.1)
    private, _, _ = training(model, optimizer)
    before = model[0].weight.detach().clone()
    assert sum(1 for _ in steps(private, model, optimizer)) == 6 and private.ledger.spent == 6
    assert not torch.equal(before, model[0].weight)
    refused(private, cw.NothingClipped, "nothing clipped", optimizer.step)


def test_clipping_by_hand_with_a_scaler_and_a_fused_optimizer():
    model = small(torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    private, _, _ = training(model, optimizer, scaler=scaler, own_batches=True)
    x, y = data(dtype=torch.float32).tensors
    scaler.scale(private.loss(losses_of(model, x, y))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    refused(private, cw.ForeignGradient, "was changed", lambda: scaler.step(optimizer))


def test_a_lazy_module():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(cw.UnhookedParameter, match=r"0\.weight has no shape yet"):
        training(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


class Mixing(nn.Module):
    """Without a way for gradients from one example to another: only running it again shows that."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.then = nn.Linear(5, 8), nn.Linear(8, 3), lambda: None

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.then()
        return self.last(hidden - hidden.detach().mean(0))


def test_a_forward_pass_that_was_interrupted_hides_nothing():
    model = Mixing().double()
    private, _, _ = training(model)
    x, y = next(iter(private.loader(data())))

    def interrupt():
        raise KeyboardInterrupt

    model.then = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.then = lambda: None
    with pytest.raises(cw.LossIndependent, match="broken off"):
        private.loss(losses_of(model, x, y))
    with pytest.raises(cw.MixedExamples):
        private.loss(losses_of(model, x, y))


def test_losses_inside_a_forward_pass_are_refused():
    model = Mixing().double()
    private, _, _ = training(model)
    x, y = next(iter(private.loader(data())))
    model.then = lambda: private.loss(F.cross_entropy(model.last(model.first(x)), y, reduction="none"))
    with pytest.raises(cw.LossIndependent, match="still going on"):
        model(x)


def test_a_training_that_is_gone_leaves_no_mode_on():
    import gc
    import weakref

    def work():
        private, model, optimizer = training(seed=None)
        for _ in steps(private, model, optimizer, limit=1):
            pass
        model(data().tensors[0])  # with gradients, and never used
        return weakref.ref(model)

    ref = work()
    gc.collect()
    assert torch._C._len_torch_function_stack() == 0 and ref() is None


def test_after_an_exception_a_draw_can_be_repeated_or_given_up():
    private, model, optimizer = training(seed=None)
    batches = iter(private.loader(data()))
    x, y = next(batches)
    private.loss(losses_of(model, x[:2], y[:2])).backward()
    private.discard()
    optimizer.zero_grad()
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    x, y = next(batches)
    private.discard(draw=True)
    x, y = next(batches)
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    assert private.ledger.spent == 2


def test_a_step_past_the_budget():
    private, model, optimizer = training(plan=small_plan(epochs=1))
    for _ in steps(private, model, optimizer):
        pass
    assert private.ledger.spent == private.plan.steps == 6
    x, y = data().tensors
    refused(private, cw.BudgetSpent, "all 6 steps", lambda: private.loss(losses_of(model, x, y)))
    own, model, optimizer = training(plan=small_plan(epochs=None, steps=1), own_batches=True)
    own.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    refused(own, cw.BudgetSpent, "all 1 steps", lambda: own.loss(losses_of(model, x, y)))


def test_losses_of_the_wrong_shape(ready):
    private, model, optimizer, x, y = ready
    refused(private, cw.LossShape, 'reduction="none"', lambda: private.loss(losses_of(model, x, y).mean()))
    refused(private, cw.LossShape, "squeeze", lambda: private.loss(losses_of(model, x, y)[:, None]))
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()


def test_losses_without_a_forward_pass(ready):
    private, model, _, x, y = ready
    losses = losses_of(model, x, y)
    private.loss(losses)
    refused(private, cw.LossIndependent, "no module of this training has run", lambda: private.loss(losses))
    with torch.no_grad():
        losses = losses_of(model, x, y)
    refused(private, cw.LossIndependent, "no module of this training has run", lambda: private.loss(losses))


def test_a_parameter_that_no_optimizer_updates():
    model = small()
    with pytest.raises(cw.UnhookedParameter, match=r"no optimizer of this training updates 2\.weight"):
        training(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    private, model, optimizer = training()
    x, y = next(iter(private.loader(data())))
    private.loss(losses_of(model, x, y)).backward()
    model.extra = nn.Parameter(torch.ones(2))
    refused(private, cw.UnhookedParameter, "updates extra", optimizer.step)
    optimizer.add_param_group({"params": [model.extra]})
    optimizer.step()
    assert model.extra.grad.abs().min() > 0


def test_a_parameter_that_belongs_to_no_module():
    model, stray = small(), nn.Parameter(torch.ones(2))
    with pytest.raises(cw.UnhookedParameter, match="belongs to none of the modules"):
        training(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))


def test_a_parameter_in_two_optimizers():
    model = small()
    two = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    with pytest.raises(cw.UnhookedParameter, match="two optimizers update"):
        training(model, two)


def test_a_criterion_that_was_forgotten(ready):
    private, model, _, x, y = ready
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    losses = losses_of(model, x, y) * scale
    refused(private, cw.UncoveredUse, "belongs to none of the captured modules", lambda: private.loss(losses))


def test_batch_norm_in_the_loss_of_the_user(ready):
    private, model, _, x, y = ready
    losses = F.cross_entropy(F.batch_norm(model(x), None, None, training=True), y, reduction="none")
    refused(private, cw.MixedExamples, "statistics of the whole batch", lambda: private.loss(losses))


def test_other_code_is_left_alone_while_a_block_is_open(ready):
    """A forward pass with gradients whose losses never come must not get in anybody's way."""
    _, model, _, x, _ = ready
    model(x)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(100):
        other(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_regularizer_that_sees_examples(ready):
    private, model, optimizer, x, y = ready
    private.regularizer(lambda: (model[0].weight @ x.T).square().sum())
    private.loss(losses_of(model, x, y)).backward()
    refused(private, cw.ForeignGradient, "parameters and constants alone", optimizer.step)


def test_a_regularizer_with_a_number_made_of_examples(ready):
    private, model, optimizer, x, y = ready
    mean, target = x.mean(), cw.constant(torch.tensor(0.5, dtype=torch.float64))
    private.regularizer(lambda: (model[0].weight - target).square().sum())
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    private.regularizer(lambda: (model[0].weight - mean).square().sum())
    optimizer.zero_grad()
    private.discard(draw=True)
    private._regularizers._penalties[0]()
    with pytest.raises(cw.ForeignGradient, match="parameters and constants alone"):
        private._regularizers.evaluate()


def test_a_model_belongs_to_one_training_at_a_time():
    first, model, optimizer = training()
    for _ in steps(first, model, optimizer, limit=2):
        pass
    with pytest.warns(UserWarning, match="the 2 steps it took are not counted"):
        cw.PrivateTraining(model, optimizer, small_plan()).close()
    x, y = data().tensors
    refused(first, cw.NothingClipped, "closed", lambda: first.loss(losses_of(model, x, y)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(noise="fats"), "noise must be"),
        (dict(method="ghost"), "method must be"),
        (dict(accumulation_steps=0), "whole number"),
        (dict(nois="fast"), "nois"),
    ],
)
def test_misspelt_options(options, message):
    model = small()
    with pytest.raises((ValueError, TypeError), match=message):
        cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), small_plan(), **options)


def test_a_pattern_of_the_clipping_that_fits_nothing():
    with pytest.raises(cw.BadClipping, match="encoder"):
        training(plan=small_plan(clipping=cw.per_group({"encoder.*": 1.0, "*": 1.0})))


def test_a_capture_beside_a_training():
    """Its calls are its own: they open no block, and leave none open."""
    private, model, optimizer = training()
    x, y = data().tensors
    with cw.capture(model) as tape:
        losses = losses_of(model, x, y)
    assert len(cw.per_example_norms(tape, losses)) == 60 and private._intake.block._tape is None
    assert sum(1 for _ in steps(private, model, optimizer)) == 6


def test_a_block_that_was_left_open_disturbs_no_other_training():
    """Its tape must not hold on to gradients that autograd wants to take over."""
    _, abandoned, _ = training()
    kept = abandoned(data().tensors[0])
    private, model, optimizer = training()
    assert sum(1 for _ in steps(private, model, optimizer)) == 6 and len(kept) == 60


def test_a_module_that_is_called_through_a_compiler():
    private, model, optimizer = training()
    compiled = torch.compile(model, backend="eager")
    x, y = next(iter(private.loader(data())))
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    refused(private, cw.UncoveredUse, "Hand the compiled module to PrivateTraining", lambda: losses_of(compiled, x, y))
    private.close()
    private, _, optimizer = training(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    assert sum(1 for _ in steps(private, compiled, optimizer)) == 6


def test_trainings_that_overlap_leave_the_compiler_as_it_was():
    """Each put back what it had found, the last one what the first had set."""
    import torch._dynamo.eval_frame as frames

    before = frames._stance.stance
    trainings = [training() for _ in range(2)]
    batches = [next(iter(private.loader(data()))) for private, _, _ in trainings]
    outputs = [model(x) for (_, model, _), (x, _) in zip(trainings, batches)]
    assert frames._stance.stance == "force_eager"
    for (private, _, _), output, (_, y) in zip(trainings, outputs, batches):
        private.loss(F.cross_entropy(output, y, reduction="none")).backward()
        private.close()
    assert frames._stance.stance == before


def test_a_weight_of_another_model_under_no_grad_is_nobodys_business():
    """A student that is handed its teacher's weight and reads it without gradients."""

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(5, 3)

        def forward(self, x, teachers):
            with torch.no_grad():
                soft = F.linear(x, teachers)
            return self.own(x) + soft

    student, teacher = Student(), nn.Linear(5, 3)
    with cw.capture(student) as tape:
        losses = student(torch.randn(4, 5), teacher.weight).square().sum(1)
    assert set(cw.clipped_gradients(tape, losses, cw.flat(1.0))) == {"own.weight", "own.bias"}


LEAVES = {
    "close": lambda private, model: private.close(),
    "an exception": lambda private, model: private.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None),
    "a new training": lambda private, model: cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=1.0), small_plan()),
    "discard": lambda private, model: private.discard(),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_was_clipped_and_not_released_does_not_stay_in_p_grad(ready, name):
    """An optimizer that nobody watches any more would release it without noise, and nobody would count it."""
    private, model, _optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    LEAVES[name](private, model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nor_of_a_training_that_is_gone():
    private, model, optimizer = training()
    x, y = next(iter(private.loader(data())))
    private.loss(losses_of(model, x, y)).backward()
    del private, optimizer
    gc.collect()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_that_nobody_told_of_does_not_step_on_what_has_no_noise_yet(ready):
    private, model, optimizer, x, y = ready
    private.loss(losses_of(model, x, y)).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    refused(private, cw.UnhookedParameter, "has no noise", other.step)
    assert all(map(torch.equal, before, model.parameters()))
    elsewhere = nn.Linear(2, 2)
    elsewhere(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(elsewhere.parameters(), lr=1.0).step()
    optimizer.step()
    other.step()  # on what was released


def test_the_hook_of_all_optimizers_goes_with_the_last_training():
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    (first, *_), (second, *_) = training(), training()
    first.close()
    assert len(hooks) == max(before, 1)
    second.close()
    assert len(hooks) <= before

"""What a step releases is (Σ clip(g_i) + noise)/B̄ of one new draw, whatever the loop around it looks like."""

import contextlib
import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.randomness import Reproducible
from training_helpers import clipped_sum, data, losses_of, released, small, small_plan, steps, training


def noise_of(model, plan, step, seed=7, number=0):
    """The noise that a reproducible step adds, drawn by hand."""
    sizes = [p.numel() for p in model.parameters()]
    drawn = Reproducible(seed).gaussians(sum(sizes), f"noise {number} 0", step, torch.device("cpu"))
    scale = plan.clipping.noise_of_sums(plan.noise_multiplier) * plan.clipping.sensitivity
    return [scale * part.view(p.shape) for part, p in zip(drawn.split(sizes), model.parameters())]


def assert_equal(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * max(1.0, float(b.norm())), (a, b)


@pytest.mark.parametrize("method", ["auto", "reweight", "multiloss", "nxbp"])
def test_a_step_releases_the_noised_clipped_sum_over_the_expected_size(method):
    private, model, optimizer = training(method=method)
    count = 0
    for step, (x, y) in enumerate(private.loader(data())):
        expected_sum = clipped_sum(model, x, y, 0.7)
        private.loss(losses_of(model, x, y)).backward()
        assert_equal([p.grad for p in model.parameters()], expected_sum)  # before the step: the sum itself
        optimizer.step()
        expected = [(total + noise) / 10 for total, noise in zip(expected_sum, noise_of(model, private.plan, step))]
        assert_equal(released(optimizer), expected)
        optimizer.zero_grad()
        count += 1
    assert count == 6 and private.ledger.spent == 6


def test_all_epochs_together_have_the_plans_steps():
    plan = small_plan(batch_size=7, epochs=5)
    private, model, optimizer = training(plan=plan)
    lengths = []
    for _ in range(plan.epochs):
        loader = private.loader(data())
        announced = len(loader)
        lengths.append(sum(1 for _ in steps(private, model, optimizer)))
        assert lengths[-1] == announced
    assert sum(lengths) == plan.steps == math.ceil(5 * 60 / 7) and max(lengths) - min(lengths) <= 1
    with pytest.warns(UserWarning, match="is spent"):
        assert list(private.loader(data())) == []


def run(loop, seed=7, **options):
    """Weights after one epoch of a loop."""
    private, model, optimizer = training(seed=seed, **options)
    loop(private, model, optimizer)
    return [p.detach().clone() for p in model.parameters()], private


def plain_loop(private, model, optimizer):
    for _ in steps(private, model, optimizer):
        pass


def test_microbatches_change_nothing():
    def loop(private, model, optimizer):
        for batch in private.loader(data()):
            for x, y in cw.microbatches(batch, 3):
                private.loss(losses_of(model, x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(run(loop)[0], run(plain_loop)[0])


def test_a_declared_division_of_the_loss_changes_nothing():
    def loop(private, model, optimizer):
        for batch in private.loader(data()):
            for x, y in cw.microbatches(batch, 4):
                (private.loss(losses_of(model, x, y)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(run(loop, accumulation_steps=3)[0], run(plain_loop)[0])


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_a_gradient_scaler_changes_nothing(fused, explicit, optimizer_class):
    def model_and_optimizer(fused):
        model = small(torch.float32)
        return dict(model=model, optimizer=optimizer_class(model.parameters(), lr=0.1, **({"fused": True} if fused else {})))

    def loop(scaler, private, model, optimizer):
        for x, y in private.loader(data(dtype=torch.float32)):
            loss = private.loss(losses_of(model, x, y))
            scaler.scale(loss).backward()
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaled, private = run(lambda *parts: loop(scaler, *parts), scaler=scaler, **model_and_optimizer(fused))
    plain, _ = run(lambda *parts: [None for _ in steps(*parts, data(dtype=torch.float32))], **model_and_optimizer(False))
    assert_equal(scaled, plain, 1e-5)
    assert private.ledger.spent == 6


def test_several_optimizers_and_groups():
    def two():
        model = small()
        a = torch.optim.SGD(model[0].parameters(), lr=0.1)
        b = torch.optim.SGD([{"params": [model[2].weight], "lr": 0.2}, {"params": [model[2].bias], "lr": 0.3}])
        return model, [a, b]

    model, optimizers = two()
    private, _, _ = training(model, optimizers)
    x, y = next(iter(private.loader(data())))
    expected = clipped_sum(model, x, y, 0.7)
    private.loss(losses_of(model, x, y)).backward()
    noise = []
    for number, optimizer in enumerate(optimizers):
        optimizer.step()
        own = nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
        noise += noise_of(own, private.plan, 0, number=number)
    assert private.ledger.spent == 1 and private.position == 1
    assert_equal([p.grad for p in model.parameters()], [(s + n) / 10 for s, n in zip(expected, noise)])
    with pytest.raises(cw.NothingClipped):
        optimizers[0].step()


def test_the_next_losses_wait_for_every_optimizer():
    model = small()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    private, _, _ = training(model, optimizers)
    batches = iter(private.loader(data()))
    x, y = next(batches)
    private.loss(losses_of(model, x, y)).backward()
    optimizers[0].step()
    x, y = next(batches)
    with pytest.raises(cw.NothingClipped, match="has not stepped"):
        private.loss(losses_of(model, x, y))


def test_a_parameter_without_gradient_gets_noise():
    model = small()
    model.unused = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    private, _, optimizer = training(model)
    x, y = next(iter(private.loader(data())))
    private.loss(F.cross_entropy(model[2](model[1](model[0](x))), y, reduction="none")).backward()
    optimizer.step()
    expected = noise_of(model, private.plan, 0)
    unused = next(i for i, p in enumerate(model.parameters()) if p is model.unused)
    assert_equal([model.unused.grad], [expected[unused] / 10])


def test_frozen_parameters_do_not_move():
    model = small()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    private, _, optimizer = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in steps(private, model, optimizer):
        assert model[0].weight.grad is None
    assert torch.equal(before, model[0].weight)


def test_sums_of_bf16_parameters_are_kept_in_float32():
    """1000 equal gradients of norm 1 and a little: in bf16 the sum would be off by several clipping bounds."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(0)
    plan = small_plan(dataset_size=1000, batch_size=1000, epochs=1, clipping=cw.flat(1.0), noise_multiplier=1e-3)
    private, _, optimizer = training(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, own_batches=True)
    for value in (1.0, 0.001953125):
        for _ in range(4):
            private.loss(model(torch.full((125, 1), value, dtype=torch.bfloat16)).squeeze(1).float()).backward()
    optimizer.step()
    expected = (500 * 1.0 + 500 * 0.001953125) / 1000
    assert model.weight.grad.dtype == torch.bfloat16
    assert float(private.plan.noise_multiplier) == 1e-3
    assert abs(float(model.weight.grad) - expected) <= 2**-9 + 1e-4


def test_adam_is_stock_adam_on_the_noised_gradient():
    private, model, _optimizer = training(optimizer=None, model=(model := small()))
    reference = copy.deepcopy(model)
    private.close()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    private, _, _ = training(model, adam)
    other = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for grads in steps(private, model, adam):
        for parameter, grad in zip(reference.parameters(), grads):
            parameter.grad = grad.clone()
        other.step()
    assert_equal(model.parameters(), reference.parameters())


def test_adam_without_the_noises_share_of_the_second_moment():
    """DP-AdamBC against its formula; with no noise to speak of it is Adam with the floor inside the root."""
    model, floor = small(), 1e-6
    optimizer = cw.DPAdamBC(model.parameters(), lr=1e-2, floor=floor)
    private, _, _ = training(model, optimizer)
    variance = (1.3 * 0.7 / 10) ** 2
    mean = [torch.zeros_like(p) for p in model.parameters()]
    square = [torch.zeros_like(p) for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    for t, grads in enumerate(steps(private, model, optimizer), 1):
        for w, m, v, g in zip(weights, mean, square, grads):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            corrected = (v / (1 - 0.999**t) - variance).clamp_min(floor)
            w.sub_(1e-2 * (m / (1 - 0.9**t)) / corrected.sqrt())
    assert_equal(model.parameters(), weights)
    with pytest.raises(RuntimeError, match="variance of the noise"):
        alone = cw.DPAdamBC([nn.Parameter(torch.ones(1))])
        alone.param_groups[0]["params"][0].grad = torch.ones(1)
        alone.step()


def test_the_adaptive_bound_follows_the_noised_count():
    clipping = cw.adaptive(0.7, quantile=0.4, learning_rate=0.3, count_noise=3.0)
    private, model, optimizer = training(plan=small_plan(clipping=clipping))
    bound = 0.7
    z = (1.3**-2 - 6.0**-2) ** -0.5
    for step, (x, y) in enumerate(private.loader(data())):
        expected = clipped_sum(model, x, y, bound)
        with cw.capture(model) as tape:
            losses = losses_of(model, x, y)
        norms = cw.per_example_norms(tape, losses)
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        sizes = [p.numel() for p in model.parameters()]
        noise = Reproducible(7).gaussians(sum(sizes), "noise 0 0", step, torch.device("cpu"))
        expected = [(s + z * bound * n.view(s.shape)) / 10 for s, n in zip(expected, noise.split(sizes))]
        assert_equal(released(optimizer), expected)
        count = float((norms <= bound).sum()) - len(x) / 2 + 3.0 * float(Reproducible(7).gaussians(1, "count", step, torch.device("cpu")))
        bound *= math.exp(-0.3 * (count / 10 + 0.5 - 0.4))
        assert private.clipping.sensitivity == pytest.approx(bound, rel=1e-6)
        optimizer.zero_grad()
    fresh, _, _ = training(plan=small_plan(clipping=clipping))
    fresh.load_state_dict(private.state_dict())
    assert fresh.clipping.sensitivity == private.clipping.sensitivity


def tiny_draws(**options):
    """A plan whose draws are mostly empty."""
    plan = small_plan(dataset_size=60, batch_size=1, steps=25, epochs=None)
    return training(plan=plan, **options)


@pytest.mark.parametrize("placeholder", [True, False])
def test_an_empty_draw_is_a_step_of_noise_alone(placeholder):
    private, model, optimizer = tiny_draws()
    sizes = []
    for step, (x, y) in enumerate(private.loader(data(), placeholder=placeholder)):
        size = private._draws.current.size
        sizes.append(size)
        assert len(x) == len(y) == (size or int(placeholder))
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        if size == 0:
            assert_equal(released(optimizer), [noise / 1 for noise in noise_of(model, private.plan, step)])
        optimizer.zero_grad()
    assert len(sizes) == 25 and sizes.count(0) >= 3


def test_a_placeholder_counts_for_nothing_even_if_it_is_not_a_number():
    dataset = data()
    dataset.tensors[0][0] = float("nan")
    private, model, optimizer = tiny_draws()
    for grads in steps(private, model, optimizer, dataset):
        assert all(grad.isfinite().all() for grad in grads)


def test_examples_that_are_no_numbers_are_counted():
    dataset = data()
    dataset.tensors[0][:] = float("nan")
    private, model, optimizer = training()
    x, y = next(iter(private.loader(dataset)))
    private.loss(losses_of(model, x, y)).backward()
    assert private.nonfinite == len(x)
    optimizer.step()
    assert_equal(released(optimizer), [noise / 10 for noise in noise_of(model, private.plan, 0)])


def test_a_penalty_on_the_weights_is_added_without_noise():
    private, model, optimizer = training()
    private.regularizer(lambda: 0.5 * sum(p.square().sum() for p in model.parameters()))
    x, y = next(iter(private.loader(data())))
    expected = clipped_sum(model, x, y, 0.7)
    weights = [p.detach().clone() for p in model.parameters()]
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()
    noise = noise_of(model, private.plan, 0)
    assert_equal(released(optimizer), [(s + n) / 10 + w for s, n, w in zip(expected, noise, weights)])


@pytest.mark.parametrize("placement", ["around everything", "around the model"])
def test_autocast_does_not_touch_the_sums(placement):
    model = small(torch.float32)
    private, _, _ = training(model, own_batches=True)
    x, y = (part[:30] for part in data(dtype=torch.float32).tensors)

    def sums(release):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = F.cross_entropy(model(x), y, reduction="none")
            if placement == "around everything":
                return release(losses)
        return release(losses)

    sums(private.loss).backward()
    found = [p.grad.clone() for p in model.parameters()]
    assert all(grad.dtype == torch.float32 for grad in found)
    assert not all(torch.equal(grad, grad.bfloat16().float()) for grad in found)
    with torch.autocast("cpu", dtype=torch.bfloat16), cw.capture(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    assert_equal(found, cw.clipped_gradients(tape, losses, cw.flat(0.7)).values(), 1e-6)


def test_a_criterion_with_parameters():
    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, logits, y):
            return F.cross_entropy(logits / self.temperature, y, reduction="none")

    model, criterion = small(), Criterion()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    private, _, _ = training([model, criterion], optimizer)
    for x, y in private.loader(data()):
        private.loss(criterion(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.ledger.spent == 6 and float(criterion.temperature) != 1.0


def test_own_batches():
    private, model, optimizer = training(own_batches=True)
    x, y = data().tensors
    for _ in range(3):
        private.loss(losses_of(model, x[:9], y[:9])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.ledger.spent == 3 and private.ledger.facts["batches"] == "caller"
    private.loss(losses_of(model, x[:0], y[:0])).backward()
    optimizer.step()
    assert_equal(released(optimizer), [noise / 10 for noise in noise_of(model, private.plan, 3)])


def test_hooks_below_the_model_are_off_while_it_runs():
    """Torch takes a longer way through modules with hooks."""
    model, seen = small(), []
    inner = next(m for m in model.modules() if isinstance(m, nn.Linear))
    training(model)
    before = {m: list(m._forward_pre_hooks.values()) for m in model.modules()}
    assert len(before[inner]) == 1
    own = inner.register_forward_hook(lambda *_: seen.append(len(inner._forward_pre_hooks)))
    x, _ = data().tensors
    model(x)
    inner(x)
    own.remove()
    with pytest.raises(RuntimeError, match="shape"):
        model(x[:, :1])
    assert seen == [0, 1]
    assert before == {m: list(m._forward_pre_hooks.values()) for m in model.modules()}


def test_hooks_below_the_model_come_back_after_an_interrupt():
    model = small()
    inner = next(m for m in model.modules() if isinstance(m, nn.Linear))
    private, _, optimizer = training(model)
    x, y = next(iter(private.loader(data())))

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = inner.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    hook.remove()
    with pytest.raises(cw.LossIndependent, match="broken off"):  # nobody could say what this forward pass was part of
        private.loss(losses_of(model, x, y))
    assert len(inner._forward_pre_hooks) == 1
    private.loss(losses_of(model, x, y)).backward()
    optimizer.step()


def test_nothing_is_left_on_the_model_or_optimizer():
    model = small()
    keys, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    private, _, optimizer = training(model)
    assert list(model.state_dict()) == keys and [type(m) for m in model.modules()] == kinds
    for _ in steps(private, model, optimizer, limit=2):
        pass
    private.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_always_called for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert all(set(vars(p)) == set() for p in model.parameters())
    x, y = data().tensors
    losses_of(model, x, y).mean().backward()
    optimizer.step()  # an ordinary optimizer again


def test_copies_and_pickles_take_nothing_along():
    private, model, _ = training()
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    x, y = data().tensors
    for other in (twin, thawed):
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
    assert private._intake.block.close() is not None  # the model's own calls were watched, the copies' not
    losses_of(twin, x, y)
    assert private._intake.block.close() is None


def test_evaluation_between_steps_is_harmless():
    def loop(gradients, private, model, optimizer):
        x, _y = data().tensors
        for batch in private.loader(data()):
            with contextlib.nullcontext() if gradients else torch.no_grad():
                correct = 0
                for part in x.split(20):
                    correct += int((model(part).argmax(1) == 0).sum())
            private.loss(losses_of(model, *batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    for gradients in (True, False):
        assert_equal(run(lambda *parts: loop(gradients, *parts))[0], run(plain_loop)[0])


def test_evaluation_with_gradients_keeps_nothing_alive():
    import gc
    import weakref

    private, model, _ = training()
    x, _ = data().tensors
    alive = []
    for _ in range(40):
        output = model(x)
        output.mul_(1.0)
        alive.append(weakref.ref(output))
        float(output.argmax(1).float().mean())
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 3
    assert len(private._intake.block._tape.root_calls) <= 3 and len(private._intake.block._tape.program) <= 200


def test_one_loss_from_two_calls_of_the_model():
    def pair_losses(model, x):
        h = model(x)
        h.mul_(2.0)
        return (h - model(-x)).square().sum(1)

    private, model, _ = training()
    x, _y = next(iter(private.loader(data())))
    private.loss(pair_losses(model, x)).backward()
    found = [p.grad.clone() for p in model.parameters()]
    private.close()
    with cw.capture(model) as tape:
        losses = pair_losses(model, x)
    assert_equal(found, cw.clipped_gradients(tape, losses, cw.flat(0.7)).values())


def test_modes_entered_before_and_left_before_the_loss():
    from torch.overrides import TorchFunctionMode

    class Nothing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    private, model, optimizer = training()
    for x, y in private.loader(data()):
        with Nothing(), torch.device("cpu"):
            output = model(x)
        with torch.device("cpu"):
            losses = F.cross_entropy(output, y, reduction="none")
            private.loss(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch._C._len_torch_function_stack() == 0


def test_submodules_called_directly():
    private, model, optimizer = training()
    for x, y in private.loader(data()):
        private.loss(F.cross_entropy(model[2](torch.tanh(model[0](x))), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert private.ledger.spent == 6


def test_mixing_in_the_loss_outside_the_model_is_found():
    """No gradient path: targets of other rows leak into a loss. The tape watches until the losses are handed over."""
    private, model, _ = training(own_batches=True)
    x, _ = data().tensors
    with pytest.raises(cw.MixedExamples):
        targets = torch.randn(60, dtype=torch.float64)
        private.loss((model(x).sum(1, keepdim=True) - targets).square().mean(1))


def test_learning_rate_schedulers():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, _, _ = training(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in steps(private, model, optimizer):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    def loop(private, model, optimizer):
        for x, y in private.loader(data()):
            losses = F.cross_entropy(model[2](checkpoint(lambda h: model[1](model[0](h)), x, use_reentrant=False)), y, reduction="none")
            private.loss(losses).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(run(loop)[0], run(plain_loop)[0])


def test_reproducible_noise_is_said_to_void_privacy():
    with pytest.warns(UserWarning, match="not private"):
        cw.reproducible(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(seed=None)[0].close()


def test_a_step_whose_noise_failed_may_be_tried_again(monkeypatch):
    """No memory for the noise, say: nothing was released, and the sums are still there."""
    from clipwise import updates

    honest, failing = updates.noised, [True]

    def noised(*args, **options):
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError("once")
        return honest(*args, **options)

    monkeypatch.setattr(updates, "noised", noised)
    private, model, optimizer = training()
    x, y = next(iter(private.loader(data())))
    private.loss(losses_of(model, x, y)).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert private.position == private.ledger.spent == 1 and not any(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_without_parameters_is_nobodys_business():
    """It takes no hooks. One with parameters is refused by name, where they are used."""
    model = nn.Sequential(nn.Linear(5, 8), torch.jit.script(nn.ReLU()), nn.Linear(8, 3)).double()
    private, _, optimizer = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert sum(1 for _ in steps(private, model, optimizer)) == 6
    private.close()
    model = nn.Sequential(torch.jit.script(nn.Linear(5, 8)), nn.Linear(8, 3)).double()
    private, _, optimizer = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(cw.UnseenUse, match=r"0\.weight is used where the tape cannot see it"):
        next(steps(private, model, optimizer))
    private.close()


def test_a_refused_training_does_not_watch_the_next_one():
    """Its tape would stay on as long as somebody holds the training, an exception in a notebook say."""
    from clipwise.modes import stacked

    model = nn.Embedding(20, 3, max_norm=1.0)
    private, _, _ = training(model)
    tokens = torch.utils.data.TensorDataset(torch.randint(0, 20, (60,)), torch.arange(60) % 3)
    before = len(list(stacked()))
    for x, _ in private.loader(tokens):
        with pytest.raises(cw.UncoveredUse):
            model(x)
        break
    assert len(list(stacked())) == before


def test_a_model_that_returns_nothing_is_watched_all_the_same():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            self.losses = self.layer(x).square().sum(1)

    model = Silent().double()
    private, _, optimizer = training(model)
    for x, _ in private.loader(data()):
        try:
            raise KeyError("something else that went wrong before")
        except KeyError:
            pass
        model(x)
        private.loss(model.losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        break
    assert private.ledger.spent == 1

"""The tape in ordinary code: what it survives, what it leaves behind (nothing), what it refuses by name."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import clipwise as cw
from clipwise.declared import is_declared_constant
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import ALL_METHODS, Net, assert_exact, clipped, examples

P = nn.Parameter


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def assert_right(found, model, x, bound=0.5):
    for name, value in clip_and_add(loop_gradients(model, (x,)), bound)[0].items():
        torch.testing.assert_close(found[name], value)


# --- the two lines


@pytest.mark.parametrize("method", ["auto", *ALL_METHODS])
def test_backward_adds_the_clipped_sum_to_grad(method):
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    loss = cw.clipped_loss(tape, losses, cw.flat(0.5), method=method)
    assert loss.dim() == 0 and loss.requires_grad
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_right(grads, model, x)
    before = {name: grad.clone() for name, grad in grads.items()}
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    (2.0 * cw.clipped_loss(tape, losses, cw.flat(0.5), method=method)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * before[name])


def test_the_value_is_the_reweighted_loss():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    norms = cw.per_example_norms(tape, losses)
    value = cw.clipped_loss(tape, losses, cw.flat(0.5))
    torch.testing.assert_close(value.detach(), ((0.5 / norms).clamp(max=1) * losses.detach()).sum())


def test_norms_by_parameter():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    by_parameter = cw.per_example_norms(tape, losses, by="parameter")
    assert list(by_parameter) == [name for name, _ in model.named_parameters()]
    for name, grad in loop_gradients(model, (x,)).items():
        torch.testing.assert_close(by_parameter[name], grad.flatten(1).norm(dim=1))
    total = torch.stack(list(by_parameter.values())).square().sum(0).sqrt()
    torch.testing.assert_close(cw.per_example_norms(tape, losses), total)


def test_losses_may_be_computed_and_used_inside_the_block():
    model, x = small(), examples(5, 4)
    found = []
    with cw.capture(model) as tape:
        for _ in range(2):
            losses = squared_output(model(x))
            found.append(cw.clipped_gradients(tape, losses, cw.flat(0.5)))
    for gradients in found:
        assert_right(gradients, model, x)


# --- what models do


def _in_place(s, x):
    h = s.a(x)
    h += 1
    h = F.relu(h, inplace=True)
    g = s.b(h)
    g.tanh_()
    return g


MODELS = {
    "in-place operations": (_in_place, (4,)),
    "views after a tap": (lambda s, x: s.b(s.a(x).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)), (4,)),
    "tuple output": (lambda s, x: (s.a(x), s.b(s.a(x)))[1], (4,)),
    "residual in place": (lambda s, x: s.a(x).add_(x) + s.b(x), (4,)),
    "chunked output": (lambda s, x: torch.cat([p.tanh() * (i + 1) for i, p in enumerate(s.a(x).chunk(2, 1))], 1) + s.b(x), (4,)),
    "detached branch": (lambda s, x: s.b(s.a(x).detach()), (4,)),
    "no_grad inside": (lambda s, x: s.b(x) * _without_grad(s, x), (4,)),
    "unused layer": (lambda s, x: s.b(x), (4,)),
    "constant from the weight": (lambda s, x: s.b(x) * s.a.weight.detach().norm() + s.a(x), (4,)),
    "scalar from the weight": (lambda s, x: s.b(x) * float(s.a.weight.norm().item()), (4,)),
    "normalised by the weight": (lambda s, x: s.b(x) / s.b.weight.norm(), (4,)),
    "numbers made inside": (lambda s, x: s.a(x) + torch.linspace(0, 1, 4).to(x), (4,)),
    "gather": (lambda s, x: s.a(x).gather(1, x.argsort(1)), (4,)),
    "double use of an input": (lambda s, x: s.a(x) * s.a(x) + s.b(x), (4,)),
    "complex arithmetic between": (lambda s, x: torch.fft.rfft(s.a(x)).abs() @ s.b.weight[:3], (4,)),
    "dtype and shape questions": (lambda s, x: s.a(x).to(x.dtype).view(x.shape[0], -1)[:, : x.size(1)] + s.b(x), (4,)),
}


def _without_grad(s, x):
    with torch.no_grad():
        return s.a(x)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    forward, shape = MODELS[name]
    assert_exact(Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), examples(5, *shape), methods=ALL_METHODS)


def test_keyword_inputs_and_dict_outputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, *, features, scale=1.0):
            return {"logits": self.a(features) * scale, "extra": [features]}

    model, x = Model().double(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(features=x, scale=2.0)["logits"])
    expected = Net(lambda s, x: s.m(features=x, scale=2.0)["logits"], m=model)
    found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
    for name, value in clip_and_add(loop_gradients(expected, (x,)), 0.5)[0].items():
        torch.testing.assert_close(found[name.removeprefix("m.")], value)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_non_reentrant_checkpointing(method):
    def forward(s, x):
        h = checkpoint(lambda h: torch.tanh(F.linear(s.drop(s.a(h)), s.w)), x, use_reentrant=False)
        return s.b(checkpoint(s.c, h, use_reentrant=False))

    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3), c=nn.LayerNorm(4), w=P(torch.randn(4, 4)), drop=nn.Dropout(0.0))
    assert_exact(model, examples(5, 2, 4), methods=[method])


def test_checkpointing_with_dropout():
    """The same draws with and without checkpointing, so the same norms."""
    parts = dict(a=nn.Linear(4, 4), b=nn.Linear(4, 3), drop=nn.Dropout(0.5))
    found = []
    for region in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        model = Net(lambda s, x, region=region: s.b(region(nn.Sequential(s.a, s.drop), x)), **parts).double()
        torch.manual_seed(0)
        with cw.capture(model) as tape:
            losses = squared_output(model(torch.ones(6, 4, dtype=torch.float64)))
        found.append(cw.per_example_norms(tape, losses))
    torch.testing.assert_close(*found)


def test_checkpointed_derived_weights():
    model = Net(
        lambda s, x: checkpoint(lambda h: F.linear(h, F.normalize(s.w, dim=1)).tanh(), s.a(x), use_reentrant=False),
        a=nn.Linear(4, 4),
        w=P(torch.randn(3, 4)),
    )
    assert_exact(model, examples(5, 4))


def test_reentrant_checkpointing_is_refused():
    model = Net(
        lambda s, x: s.b(checkpoint(lambda h: torch.tanh(s.a(h)), s.c(x), use_reentrant=True)),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 3),
        c=nn.Linear(4, 4),
    )
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.randn(5, 4)))
    with pytest.raises(cw.UncoveredUse, match="use_reentrant=False"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_sub_modules_called_directly():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model[2](model[1](model[0](x))))
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x)


def test_functions_on_parameters_without_any_module_call():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(F.linear(torch.tanh(F.linear(x, model[0].weight, model[0].bias)), model[2].weight, model[2].bias))
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x)


def test_mixing_outside_any_module_is_refused():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        h = F.linear(x - x.mean(0), model[0].weight)
        losses = squared_output(h)
    with pytest.raises(cw.MixedExamples):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_model_and_criterion_with_parameters():
    model, x = small(), examples(5, 4)
    criterion = Net(lambda s, output: squared_output(output / s.temperature.exp()), temperature=P(torch.tensor(0.3, dtype=torch.float64)))
    together = Net(lambda s, x: s.c(s.m(x)), m=model, c=criterion)
    expected, _ = clip_and_add(loop_gradients(together, (x,), loss=lambda losses: losses), 0.5)
    with cw.capture([model, criterion]) as tape:
        losses = criterion(model(x))
    found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
    torch.testing.assert_close(found["1.temperature"], expected["c.temperature"])
    torch.testing.assert_close(found["0.0.weight"], expected["m.0.weight"])


def test_parameters_frozen_and_unfrozen_between_steps():
    model, x = small(), examples(5, 4)
    for frozen in ([], [0], [0, 2], [2], []):
        for place in (0, 2):
            model[place].requires_grad_(place not in frozen)
        if frozen == [0, 2]:
            continue
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
        assert set(found) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert_right(found, model, x)


def test_an_input_that_requires_grad():
    model, x = small(), examples(5, 4).requires_grad_()
    with cw.capture(model) as tape:
        losses = squared_output(model(x * 1.0))
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x.detach())


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3)).double()
    x = examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x)


# --- nothing leaks, nothing stays


def test_stray_forwards_do_not_leak_into_the_step():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        squared_output(model(examples(3, 4)))  # never used
        with torch.no_grad():
            model(examples(9, 4))  # an evaluation
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 7, dtype=torch.float64))  # a failed try
        losses = squared_output(model(x))
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x)


def test_no_trace_is_left():
    model, x = small(), examples(5, 4)
    keys, attributes = list(model.state_dict()), {name: set(vars(module)) for name, module in model.named_modules()}
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()
    assert list(model.state_dict()) == keys
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not vars(parameter)
    assert torch._C._len_torch_function_stack() == 0


def test_no_trace_is_left_after_an_exception():
    model = small()
    with pytest.raises(ZeroDivisionError), cw.capture(model):
        model(examples(5, 4))
        raise ZeroDivisionError
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0


def test_pickling_and_copying_afterwards():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    cw.clipped_loss(tape, losses, cw.flat(0.5)).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, found = clipped(twin, [x], 0.5)
        assert_right(found, model, x)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def test_everything_is_freed():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    cw.clipped_loss(tape, losses, cw.flat(0.5)).backward()
    alive = weakref.ref(tape)
    del tape, losses
    gc.collect()
    assert alive() is None


class _FailsOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("CUDA out of memory.")


@pytest.mark.parametrize("method", ["bookkeep", "reweight"])
def test_a_backward_pass_that_fails_lets_go_of_everything(method):
    """Of two ways back, one has not been gone when the other fails: autograd would keep it for the next backward pass, and all that lies on it."""
    seen = []

    def forward(s, x):
        h = s.a(x).exp()  # which keeps its result
        seen.append(weakref.ref(h))
        return s.b(h.sin() + _FailsOnTheWayBack.apply(h) + h.cos())

    with pytest.raises(RuntimeError, match="out of memory"):
        clipped(Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)).double(), [examples(5, 4)], 0.5, method=method)
    gc.collect()
    assert seen[0]() is None


def test_an_error_of_the_backward_pass_stays_what_it_is_under_inference_mode():
    model = Net(lambda s, x: s.b(_FailsOnTheWayBack.apply(s.a(x)).sin()), a=nn.Linear(4, 4), b=nn.Linear(4, 3)).double()
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(5, 4)))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="out of memory"):
        cw.per_example_norms(tape, losses)


def test_the_forward_result_is_unchanged():
    model, x = small(), examples(5, 4)
    plain = model(x)
    with cw.capture(model):
        watched = model(x)
    assert torch.equal(plain, watched)


# --- several losses


def test_several_forwards_before_one_backward():
    model, x, z = small(), examples(5, 4), examples(3, 4)
    with cw.capture(model) as tape:
        first, second = squared_output(model(x)), squared_output(model(z))
    total = cw.clipped_loss(tape, first, cw.flat(0.5)) + cw.clipped_loss(tape, second, cw.flat(0.5))
    total.backward()
    a, b = (clip_and_add(loop_gradients(model, (batch,)), 0.5)[0] for batch in (x, z))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, a[name] + b[name])


def test_losses_of_two_forwards_joined():
    """The first half of the losses comes from one call, the second from another."""
    model, x = small(), examples(6, 4)
    with cw.capture(model) as tape:
        losses = torch.cat([squared_output(model(x[:2])), squared_output(model(x[2:]))])
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x)


def test_consumed_losses_are_refused():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    cw.per_example_norms(tape, losses)
    cw.clipped_loss(tape, losses, cw.flat(1.0))
    for again in (lambda: cw.clipped_loss(tape, losses, cw.flat(1.0)), lambda: cw.per_example_norms(tape, losses)):
        with pytest.raises(cw.ConsumedTape, match="Run the model again"):
            again()


def test_a_graph_that_was_freed_elsewhere_is_refused():
    model, x = small(), examples(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    losses.sum().backward()
    with pytest.raises(cw.ConsumedTape):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


# --- compiled and scripted


@pytest.mark.parametrize("what", ["whole model", "one layer", "a function"])
def test_compiled_regions_run_eagerly_and_exactly(what):
    model, x = small(), examples(5, 4)
    run = model
    if what == "whole model":
        run = torch.compile(model, backend="eager")
    elif what == "one layer":
        run = nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    else:
        activation = torch.compile(torch.tanh, backend="eager")
        run = lambda x: model[2](activation(model[0](x)))
    with cw.capture(model) as tape:
        losses = squared_output(run(x))
    assert_right(cw.clipped_gradients(tape, losses, cw.flat(0.5)), model, x)


def test_a_scripted_region_is_refused_by_name():
    model = Net(lambda s, x: s.b(s.a(x)), a=torch.jit.script(nn.Linear(4, 4)), b=nn.Linear(4, 3))
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.randn(5, 4)))
    with pytest.raises(cw.UnseenUse, match=r"a\.(weight|bias) is used where the tape cannot see it"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_a_scripted_model_is_refused():
    with pytest.raises(cw.UncoveredUse, match="TorchScript"), cw.capture(torch.jit.script(nn.Linear(4, 3))):
        pass


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_foreign_autograd_function_is_refused_by_name(scale):
    """Also where its gradient happens to be zero: the graph decides, not the numbers."""
    model = Net(lambda s, x: s.b(x) + scale * Double.apply(x, s.w), b=nn.Linear(4, 3), w=P(torch.randn(4, 3)))
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.randn(5, 4)))
    with pytest.raises(cw.UnseenUse, match="w is used where the tape cannot see it, by the autograd node DoubleBackward"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_a_foreign_autograd_function_is_named_where_it_is_the_only_use():
    model = Net(lambda s, x: Double.apply(x, s.w), w=P(torch.randn(4, 3)))
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.randn(5, 4)))
    with pytest.raises(cw.UnseenUse, match="DoubleBackward"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_a_foreign_autograd_function_without_weights_is_fine():
    model = Net(lambda s, x: Exp.apply(s.a(x)), a=nn.Linear(4, 4))
    assert_exact(model, examples(5, 4), methods=["bookkeep", "reweight", "nxbp"])


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def test_a_use_outside_the_block_is_refused():
    model, x = small(), examples(5, 4)
    h = model[0](x)
    with cw.capture(model) as tape:
        losses = squared_output(model[2](torch.tanh(h)))
    with pytest.raises(cw.UnseenUse, match=r"0\.(weight|bias)"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


# --- nothing waits for the garbage collector


class Everything(nn.Module):
    """Tied, derived, checkpointed, convolved: whatever could hold on to a graph."""

    def __init__(self):
        super().__init__()
        self.table, self.token = nn.Embedding(20, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, ids):
        h = checkpoint(self.layer, self.table(ids) + self.token, use_reentrant=False)
        return F.linear(self.normed(self.mix(h.mT).mT), self.table.weight)


@pytest.mark.parametrize("use", [*ALL_METHODS, "norms", "refused", "unused"])
def test_a_step_is_freed_at_once(use):
    """A cycle of references would keep the graph, and gigabytes with it, until Python happens to collect garbage."""
    model = Everything()

    def step():
        ids = torch.randint(0, 20, (16, 5))
        with cw.capture(model) as tape:
            losses = F.cross_entropy(model(ids).mT, ids, reduction="none").mean(1)
        if use == "norms":
            cw.per_example_norms(tape, losses)
        elif use == "refused":
            with pytest.raises(cw.LossShape):
                cw.clipped_loss(tape, losses.sum(), cw.flat(1.0))
        elif use != "unused":
            cw.clipped_loss(tape, losses, cw.flat(1.0), method=use).backward()
            model.zero_grad()

    def living():
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    step()
    gc.collect()
    gc.disable()
    try:
        before = living()
        for _ in range(5):
            step()
        assert living() <= before
    finally:
        gc.enable()


def test_only_what_a_module_made_stays_constant():
    """Constants that a module made and let go leave their ids to tensors of the user, which are nobody's constants afterwards."""

    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            for length in range(40):
                torch.arange(length + 2)
            return self.a(x)

    model = Maker()
    for _ in range(20):
        with cw.capture(model):
            model(torch.randn(5, 3))
            mine = [torch.arange(5) for _ in range(60)]
        assert not any(map(is_declared_constant, mine))


def test_what_other_streams_leave_is_waited_for(monkeypatch):
    """Stand-ins for streams: functions of two of them hand over, the caller works on a third, and on another device. From the second stream of a device
    on, a hand-over may read and let go what another stream works with: it comes after all that was started, and before all that will be."""
    from clipwise.streams import Streams

    class Stream:
        def __init__(self, device):
            self.device, self.waited_for = device, []

        def wait_stream(self, other):
            self.waited_for.append(other)

    class OnGpu:
        is_cuda = True

        def __init__(self, device):
            self.device = torch.device("cuda", device)

    happened = []
    side, other_side, here, there = (Stream(torch.device("cuda", device)) for device in (0, 0, 0, 1))
    current = {0: here, 1: there}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device.index])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append(f"wait for {device}"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: id(current[index]), raising=False)
    streams = Streams()
    receive = streams.noting(lambda record, grad, kept: happened.append(record))
    receive("on the host", torch.zeros(2), ())
    receive("first", OnGpu(0), ())
    receive("on another device", OnGpu(1), ())
    assert happened == ["on the host", "first", "on another device"], "one stream each: nothing is waited for"
    for stream in (side, here, other_side, side):
        happened.clear()
        current[0] = stream
        receive("next", OnGpu(0), ())
        assert happened == ["wait for cuda:0", "next", "wait for cuda:0"]
    happened.clear()
    receive("on another device", OnGpu(1), ())
    assert happened == ["on another device"]
    current[0] = here
    streams.join()
    assert set(here.waited_for) == {side, other_side} and len(here.waited_for) == 2
    assert not there.waited_for and not side.waited_for


@pytest.mark.parametrize("trained", [False, True], ids=["captured", "trained"])
def test_what_lies_between_model_and_losses_is_let_go_before_the_backward_pass(trained):
    """Logits of a language model are as large as all else; only a step that is verified needs them again."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = cw.PrivacyPlan(dataset_size=60, batch_size=9, steps=30, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=0.5)
    private = cw.PrivateTraining(model, optimizer, plan, own_batches=True) if trained else None
    alive = []

    def losses_of(x, seen):
        output = model(x)
        wide = output.double()
        seen += [weakref.ref(output), weakref.ref(wide)]
        output.grad_fn.register_prehook(lambda grads: alive.append([ref() is not None for ref in seen]) and None)
        return F.cross_entropy(wide, torch.arange(9) % 4, reduction="none")

    for _ in range(7):
        seen = []
        x = torch.randn(9, 6)
        if private is not None:
            private.loss(losses_of(x, seen)).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with cw.capture(model) as tape:
                losses = losses_of(x, seen)
            cw.clipped_loss(tape, losses, cw.flat(0.3)).backward()
    assert alive[-1] == [False, False] and [True, True] in alive
    if private is not None:
        private.close()


@pytest.mark.parametrize(
    "calls",
    [
        (lambda x: x.mean(-1), lambda x: x.mean(-2)),
        (lambda x: x.mean((-1,)), lambda x: x.mean((-2,))),
        (lambda x: x * -1.0, lambda x: x * -2.0),
        (lambda x: x.clamp(min=1), lambda x: x.clamp(max=1)),
        (lambda x: x[..., -1], lambda x: x[..., -2]),
        (lambda x: x.sum(None, True), lambda x: x.sum(1)),
        (lambda x: torch.std(x, True), lambda x: torch.std(x, 1)),
        (lambda x: x[:1], lambda x: x[::1]),
        (lambda x: x[:, None, 0], lambda x: x[None, :, 0]),
        (lambda x: x[..., 0], lambda x: x[0]),
        (lambda x: x[[1, 0], 2], lambda x: x[[1, 0, 2]]),
        (lambda x: x[True, 0], lambda x: x[1, 0]),
    ],
)
def test_the_trail_tells_calls_apart(calls):
    """hash(-1) is hash(-2), hash(True) is hash(1)."""
    model, x = nn.Linear(6, 4), torch.randn(5, 6)
    trails = set()
    for call in calls:
        with cw.capture(model) as tape:
            call(model(x))
        trails.add(tape.trail)
    assert len(trails) == 2


def test_an_axis_that_changes_to_that_of_the_examples_is_noticed_at_once():
    model = Net(lambda s, x: s.b(s.a(x) - s.a(x).mean(s.axis, keepdim=True)), a=nn.Linear(12, 8), b=nn.Linear(8, 3), axis=-1).double()

    def step():
        x = examples(9, 12)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(0.3))

    for _ in range(4):
        step()
    model.axis = -2
    with pytest.raises(cw.MixedExamples):
        step()


@pytest.mark.parametrize(
    "calls",
    [
        (lambda h: (h * h).sum(1).view(-1, 1), lambda h: (h * h).sum(None, True).view(-1, 1)),
        (lambda h: torch.std(h, 1).view(-1, 1), lambda h: torch.std(h, True).view(-1, 1)),
        (lambda h: h[::1], lambda h: h[:1]),
        (lambda h: torch.zeros(6, dtype=h.dtype) + 0 * h.mean(0), lambda h: h.mean(0)),
    ],
)
def test_a_call_that_looks_at_all_examples_from_now_on_is_noticed_at_once(calls):
    """Its function and its numbers are those of a call that keeps them apart."""
    model = Net(lambda s, x: s.b(s.a(x) / (1 + calls[s.late](s.a(x)))), a=nn.Linear(5, 6), b=nn.Linear(6, 3), late=False).double()

    def step():
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(9, 5)))
        cw.clipped_gradients(tape, losses, cw.flat(0.3))

    for _ in range(9):
        step()
    model.late = True
    with pytest.raises(cw.MixedExamples):
        step()


@pytest.mark.parametrize("where", ["tensor", "module"])
def test_hooks_that_change_gradients_are_looked_at_in_every_batch(where):
    """One that clips by the norm of the whole batch does nothing, until a record is large enough."""

    def clipped_by_all(grad):
        return grad * min(1.0, 1e3 / (float(grad.norm()) + 1e-12))

    def forward(s, x):
        h = s.a(x)
        if where == "tensor":
            h.register_hook(clipped_by_all)
        return s.b(h)

    model = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3)).double()
    if where == "module":
        model.b.register_full_backward_hook(lambda module, given, _: tuple(clipped_by_all(grad) for grad in given))

    for _ in range(17):
        clipped(model, [examples(8, 5)], 0.3)
    x = examples(8, 5)
    x[3] *= 1e6
    with pytest.raises(cw.Refusal):
        clipped(model, [x], 0.3)


ASLEEP = {
    "mean in place of what is missing": lambda s, h, x: torch.where(x.isnan().any(1, keepdim=True), h.mean(0), h),
    "largest of all": lambda s, h, x: torch.maximum(h, h.max(0).values - 2000),
    "mean of all numbers": lambda s, h, x: torch.maximum(h, h.mean() - 20000),
    "along the batch": lambda s, h, x: torch.maximum(h, h.t().cummax(1).values.t() - 2000),
    "gate": lambda s, h, x: h + s.gate * h.mean(0),
    "order": lambda s, h, x: h + h[s.order],
    **{
        f"the axis stays: {name}": lambda s, h, x, join=join: torch.where(x.isnan().any(1, keepdim=True), 1e3 * join(h), h)
        for name, join in {
            "softmax": lambda h: (h / 100).softmax(0),
            "log_softmax": lambda h: h.t().log_softmax(-1).t(),
            "layer_norm": lambda h: F.layer_norm(h.t(), (len(h),)).t(),
            "pooling": lambda h: F.avg_pool1d(h.t()[None], 3, 1, 1)[0].t(),
            "a product from the left": lambda h: torch.ones(len(h), len(h), dtype=h.dtype) @ h / len(h),
            "linear": lambda h: F.linear(torch.ones(len(h), len(h), dtype=h.dtype), h.t()),
            "Fourier": lambda h: torch.fft.fft(h, dim=0).real,
            "convolution": lambda h: F.conv1d(h.t()[:, None], torch.ones(1, 1, 3, dtype=h.dtype), padding=1)[:, 0].t(),
        }.items()
    },
    **{
        f"what is joined sleeps: {name}": lambda s, h, x, join=join: h + join(h, x.isnan().any(1, keepdim=True))
        for name, join in {
            "sum": lambda h, flag: torch.where(flag, h, 0.0).sum(0),
            "filled": lambda h, flag: h.masked_fill(~flag, 0.0).mean(0, keepdim=True),
            "threshold": lambda h, flag: F.relu(h - 2000).mean(0),
            "product": lambda h, flag: (h * flag).sum(0),
            "Fourier": lambda h, flag: torch.fft.fft(torch.where(flag, h, 0.0), dim=0).real,
            "a gate that is nearly closed": lambda h, flag: F.silu((h - 2000) / 4).mean(0),
            "a gate behind": lambda h, flag: torch.sigmoid((h.amax(1, keepdim=True) - 2000) / 4) * h.mean(0),
            "later": lambda h, flag: torch.where(flag, h, 0.0).tanh().view(-1, 2, 3).sum((0, 1)).repeat(2),
        }.items()
    },
    "turned around": lambda s, h, x: h + torch.where(x.isnan().any(1, keepdim=True), h.t().flip(1).t(), h),
    "one of two": lambda s, h, x: h - 5 * (h.mean(0) if s.late else torch.zeros_like(h.mean(0))),
}


@pytest.mark.parametrize("name", ASLEEP)
def test_what_sleeps_while_the_model_is_verified_is_noticed_when_it_wakes(name):
    def forward(s, x):
        return s.b(ASLEEP[name](s, s.a(x.nan_to_num(0.0)), x))

    model = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3), late=False)
    model.register_buffer("gate", torch.zeros(6))
    model.register_buffer("order", torch.arange(8))
    model.double()

    def step(x):
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(0.3))

    for _ in range(17):
        step(examples(8, 5))
    model.gate.fill_(1), model.order.copy_(torch.arange(8).roll(1))
    model.late = True
    x = examples(8, 5)
    x[3] *= 1e7
    x[4, 2] = float("nan")
    with pytest.raises(cw.MixedExamples):
        step(x)


def test_what_is_not_a_number_is_the_same_in_every_step():
    """Python tells two float("nan") apart: each step would have been another way through the model, and verified."""
    from clipwise.trail import told_apart

    assert hash(told_apart(float("nan"))) == hash(told_apart(float("nan")))
    assert len({hash(told_apart(value)) for value in (-1, -2, 1.5, float("nan"))}) == 4

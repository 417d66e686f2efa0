"""Each refusal says what, where and the repair; none depends on a record's value."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.testing import squared_output
from helpers import ALL_METHODS, Net, examples

P = nn.Parameter


def losses_of(model, x, loss=squared_output):
    with cw.capture(model) as tape:
        losses = loss(model(x))
    return tape, losses


@pytest.mark.parametrize(
    ("loss", "repair"),
    [
        (lambda out: out.square().mean(), 'reduction="none"'),
        (lambda out: out.square().mean(1, keepdim=True), r"losses\.squeeze\(1\)"),
        (lambda out: out.square(), r"flatten\(1\)\.mean\(1\)"),
        (lambda out: out.square().mean(1).long(), "one entry an example"),
        (lambda out: 3.0, "one entry an example"),
    ],
)
@pytest.mark.parametrize("verb", [lambda t, x: cw.clipped_loss(t, x, cw.flat(1.0)), cw.per_example_norms])
def test_losses_that_are_no_vector(loss, repair, verb):
    tape, losses = losses_of(nn.Linear(4, 3), torch.randn(5, 4), loss)
    with pytest.raises(cw.LossShape, match=repair):
        verb(tape, losses)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.detach().square().sum(1),
        lambda out: torch.ones(5, requires_grad=True) * 2,
        lambda out: torch.ones(5),
    ],
)
def test_a_loss_that_does_not_depend_on_the_model(loss):
    tape, losses = losses_of(nn.Linear(4, 3), torch.randn(5, 4), loss)
    with pytest.raises(cw.LossIndependent):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_a_loss_of_another_model():
    with cw.capture(nn.Linear(4, 3)) as tape:
        pass
    other = nn.Linear(4, 3)
    losses = squared_output(other(torch.randn(5, 4)))
    with pytest.raises(cw.LossIndependent):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_a_loss_under_no_grad():
    model = nn.Linear(4, 3)
    with cw.capture(model) as tape, torch.no_grad():
        losses = squared_output(model(torch.randn(5, 4)))
    with pytest.raises(cw.LossIndependent, match=r"no_grad"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_an_uncovered_use_is_named():
    class GatedLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = P(torch.randn(3, 4))

        def forward(self, x):
            return torch.kron(x, self.gate)

    model = Net(lambda s, x: s.encoder(x), encoder=nn.Sequential(GatedLinear()))
    with pytest.raises(cw.UncoveredUse) as refused, cw.capture(model):
        model(torch.randn(5, 4))
    message = str(refused.value)
    assert message.startswith("encoder.0.gate is used by torch.kron, which has no rule (in encoder.0, a GatedLinear).")
    assert "@clipwise.rule(torch.kron)" in message and "freeze" in message and "fallback=True" in message
    assert type(refused.value).__module__ == "clipwise"


def test_articles():
    from clipwise.marks import with_article

    assert [with_article(name) for name in ("Linear", "Embedding", "LSTM", "GRU", "Net")] == [
        "a Linear",
        "an Embedding",
        "an LSTM",
        "a GRU",
        "a Net",
    ]


def test_a_parameter_of_nobody():
    stranger = P(torch.randn(3))
    model = nn.Linear(4, 3)
    with pytest.raises(cw.UncoveredUse, match=r"capture\(\[model, criterion\]\)"), cw.capture(model):
        model(torch.randn(5, 4)) * stranger
    with cw.capture(model), torch.no_grad():
        model(torch.randn(5, 4)) * stranger


def test_example_data_written_into_a_weight_derived_tensor():
    def forward(s, x):
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        out[:, 0] = s.w
        out[:, 1:] = x
        return out

    with pytest.raises(cw.UncoveredUse, match=r"torch\.cat"), cw.capture(model := Net(forward, w=P(torch.randn(1)))):
        model(torch.randn(5, 2))


# --- state


class Counting(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()))
        self._update = update

    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            self._update(self, h)
        return h


WRITES = {
    "in place": lambda s, h: s.seen.add_(h.mean(0)),
    "copy_": lambda s, h: s.seen.copy_(h.mean(0)),
    "through a view": lambda s, h: s.seen[:1].mul_(h.sum()),
    "through data": lambda s, h: s.seen.data.lerp_(h.mean(0), 0.1),
    "by index": lambda s, h: s.seen.__setitem__(0, h.sum()),
    "by out=": lambda s, h: torch.mean(h, 0, out=s.seen),
    "into a weight": lambda s, h: s.a.bias.add_(h.mean(0)),
    "assigned": lambda s, h: setattr(s, "seen", 0.9 * s.seen + 0.1 * h.mean(0)),
    "assigned a scalar": lambda s, h: setattr(s, "steps", s.steps + h.mean()),
}


@pytest.mark.parametrize("name", WRITES)
def test_example_data_written_into_state_is_refused(name):
    model = Counting(WRITES[name])
    with pytest.raises(cw.StateWrite) as refused:
        tape, losses = losses_of(model, torch.randn(5, 4))
        cw.clipped_loss(tape, losses, cw.flat(1.0))
    assert any(state in str(refused.value) for state in ("seen", "steps", "a.bias"))


HARMLESS = {
    "a counter": lambda s, h: s.steps.add_(1),
    "a counter, assigned": lambda s, h: setattr(s, "steps", s.steps + 1),
    "a function of the weights": lambda s, h: s.seen.copy_(s.a.weight.norm(dim=1)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_state_without_example_data_is_fine(name):
    tape, losses = losses_of(Counting(HARMLESS[name]), torch.randn(5, 4))
    assert cw.per_example_norms(tape, losses).shape == (5,)


def test_verifying_leaves_the_state_as_it_was():
    model = Counting(HARMLESS["a counter"])
    for step in range(1, 4):
        tape, losses = losses_of(model, torch.randn(5, 4))
        cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()
        assert float(model.steps) == step


# --- wrong rules


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_wrong_rule_is_caught_on_first_use(registry, method):
    @cw.rule(torch.cdist, replace=True)
    def wrong(call):
        return {call.args[1]: cw.Outer(call.output_grad, call.args[0])}

    model = Net(lambda s, x: torch.cdist(x, s.w), w=P(torch.randn(3, 4)))
    tape, losses = losses_of(model, torch.randn(5, 4))
    with pytest.raises(cw.WrongRule, match="the factors of w do not add up to autograd's own gradient"):
        cw.clipped_loss(tape, losses, cw.flat(1.0), method=method)


@pytest.mark.parametrize("answer", [{}, None, "a tensor"])
def test_a_rule_that_owes_a_factor_is_caught(registry, answer):
    @cw.rule(torch.cdist, replace=True)
    def incomplete(call):
        return {call.args[1]: call.args[1]} if answer == "a tensor" else answer

    model = Net(lambda s, x: torch.cdist(x, s.w), w=P(torch.randn(3, 4)))
    tape, losses = losses_of(model, torch.randn(5, 4))
    with pytest.raises(cw.WrongRule, match=r"torch\.cdist owes w a factor of shape \(3, 4\) with 5 rows, and returned none"):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


# --- arguments


def test_unknown_words_are_refused():
    tape, losses = losses_of(nn.Linear(4, 3), torch.randn(5, 4))
    with pytest.raises(ValueError, match="'bookkeep'"):
        cw.clipped_loss(tape, losses, cw.flat(1.0), method="nonprivate")
    with pytest.raises(TypeError, match=r"flat\(C\)"):
        cw.clipped_loss(tape, losses, 1.0)
    with pytest.raises(ValueError, match="parameter"):
        cw.per_example_norms(tape, losses, by="layer")
    for nonsense in (torch.randn(3), lambda x: x, [], ["model"]):
        with pytest.raises(TypeError, match="module"), cw.capture(nonsense):
            pass
    for verb in (lambda: cw.clipped_loss(None, losses, cw.flat(1.0)), lambda: cw.per_example_norms(losses, losses)):
        with pytest.raises(TypeError, match="as tape"):
            verb()
    cw.clipped_loss(tape, losses, cw.flat(1.0))  # nothing was lost


def test_refusals_do_not_depend_on_values():
    """The same model and shapes, values that are zero, huge or not finite: never an exception."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    for value in (0.0, 1e30, -1e30, float("nan"), float("inf"), 1e-45):
        for rows in (slice(0, 1), slice(0, 3), slice(0, 5)):
            x = torch.randn(5, 4)
            x[rows] = value
            fresh = nn.Sequential(*model)
            for method in ALL_METHODS:
                tape, losses = losses_of(fresh, x, lambda out: F.cross_entropy(out, torch.zeros(5, dtype=torch.long), reduction="none"))
                loss = cw.clipped_loss(tape, losses, cw.flat(1.0), method=method)
                assert loss.isfinite()


def test_examples_helper_spreads_norms():
    x = examples(6, 4)
    assert x[-1].norm() > x[0].norm()


class Stateful(nn.Module):
    """Carries its last state over to the next batch, as truncated back-propagation through time does."""

    def __init__(self, where):
        super().__init__()
        self.cell, self.where = nn.LSTM(3, 4, batch_first=True), where
        self.state, self.kept = None, {}

    def forward(self, x):
        state = self.state if self.where == "attribute" else self.kept.get("state")
        out, state = self.cell(x, state)
        state = tuple(part.detach() for part in state)
        if self.where == "attribute":
            self.state = state
        else:
            self.kept["state"] = state
        return out


@pytest.mark.parametrize("where", ["attribute", "dictionary"])
def test_data_of_an_earlier_batch_is_not_used_again(where):
    """It would let a record into the gradients of later steps, unclipped and unaccounted."""
    model = Stateful(where)
    losses_of(model, torch.randn(5, 2, 3))
    with pytest.raises(cw.StateWrite, match="earlier batch"):
        losses_of(model, torch.randn(5, 2, 3))


def test_what_is_only_kept_for_looking_at_does_no_harm():
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.seen = nn.Linear(3, 2), None

        def forward(self, x):
            self.seen = self.a(x)
            return self.seen.square()

    model = Shown()
    for _ in range(3):
        tape, losses = losses_of(model, torch.randn(5, 3))
        cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()


def test_the_id_of_what_was_freed_is_not_taken_for_it():
    """A module lets go of what it kept from the last batch; the next tensor may get the same id."""

    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.seen = nn.Linear(3, 3), None

        def forward(self, x):
            self.seen = None
            several = [torch.tanh(self.a(x) + 1.0) for _ in range(30)]
            self.seen = several[-1]
            return sum(several)

    model = Shown()
    for _ in range(20):
        tape, losses = losses_of(model, torch.randn(5, 3))
        cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()


class _OwnCheckpoint(torch.autograd.Function):
    """Computes a region again in the backward pass and back-propagates it there, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx, region, x):
        ctx.region = region
        ctx.save_for_backward(x)
        with torch.no_grad():
            return region(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.region(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class _HidesALayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.c(_OwnCheckpoint.apply(lambda h: torch.tanh(self.b(h)), self.a(x)))[:, 0]


@pytest.mark.parametrize("batch", [1, 2, 6])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_function_that_back_propagates_by_itself(method, batch):
    """Its gradients would lie in p.grad unclipped."""
    model = _HidesALayer()
    with cw.capture(model) as tape:
        losses = model(torch.randn(batch, 4)).square()
    with pytest.raises(cw.Refusal):
        cw.clipped_loss(tape, losses, cw.flat(1e-3), method=method).backward()
    assert model.b.weight.grad is None


def test_a_module_in_the_place_of_another_is_verified_anew():
    class Head(nn.Module):
        def __init__(self, mixing):
            super().__init__()
            self.layer, self.mixing = nn.Linear(5, 1), mixing

        def forward(self, h):
            return self.layer(self.mixing @ h)[:, 0]

    model = nn.Sequential(nn.Linear(4, 5), Head(torch.eye(6)))
    for _ in range(20):
        with cw.capture(model) as tape:
            losses = model(torch.randn(6, 4)).square()
        cw.clipped_gradients(tape, losses, cw.flat(1.0))
    model[1] = Head(torch.ones(6, 6) / 6)
    with cw.capture(model) as tape:
        losses = model(torch.randn(6, 4)).square()
    with pytest.raises(cw.Refusal):
        cw.clipped_gradients(tape, losses, cw.flat(1.0))


def test_a_gradient_in_the_losses_is_refused_by_its_name():
    model, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double(), examples(6, 2).requires_grad_()
    with cw.capture(model) as tape:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        losses = slope.square().sum(1)
    with pytest.raises(cw.UncoveredUse, match="create_graph=True"):
        cw.per_example_norms(tape, losses)


def test_nested_tensors_are_refused_by_their_name():
    rows = [torch.randn(count, 4).double() for count in (2, 3, 4, 2)]
    with pytest.raises(cw.UncoveredUse, match="nested tensor"), cw.capture(model := nn.Linear(4, 3).double()):
        model(torch.nested.nested_tensor(rows, layout=torch.jagged))

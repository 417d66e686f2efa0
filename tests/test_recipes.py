"""What a tap keeps of a call is remembered from step to step: found again where nothing has changed, and nowhere else."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import recipes, tapping
from clipwise.experience import experience_of
from clipwise.registry import REWRITES, RULES
from clipwise.tape import Tape
from clipwise.testing import clip_and_add, loop_gradients
from helpers import Net, clipped, examples, squared_output


def exact(model, *inputs, bound=1.0):
    """A step of this very model, held against a float64 loop."""
    expected, expected_norms = clip_and_add(loop_gradients(model, inputs, squared_output), bound)
    norms, sums = clipped(model, inputs, bound)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-9, atol=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(sums.get(name, torch.zeros_like(value)), value, rtol=1e-9, atol=1e-12)


@pytest.fixture
def worked_out(monkeypatch):
    """How many calls had to be looked at since the last time somebody asked."""
    seen = []

    def noting(use, rule, marks):
        seen.append(use)
        return recorded_call(use, rule, marks)

    recorded_call = recipes.recorded_call
    monkeypatch.setattr(tapping, "recorded_call", noting)

    def count():
        found, seen[:] = len(seen), []
        return found

    return count


def network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4), nn.LayerNorm(4)
    ).double()


def test_the_second_step_works_nothing_out(worked_out):
    model, x = network(), examples(5, 2, 3, 3)
    exact(model, x)
    assert worked_out() > 0
    for _ in range(4):
        exact(model, x)
    assert worked_out() == 0


def test_another_batch_needs_no_other_recipe(worked_out):
    model = network()
    exact(model, examples(5, 2, 3, 3))
    worked_out()
    exact(model, examples(3, 2, 3, 3))
    assert worked_out() == 0


def test_layers_of_one_kind_have_recipes_of_their_own(worked_out):
    def normalized():
        return [nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.BatchNorm1d(4).eval(), nn.LayerNorm(3), nn.RMSNorm(3)]

    model, x = nn.Sequential(*normalized(), *normalized()).double(), examples(5, 4, 3)
    exact(model, x)
    assert worked_out() == 10
    exact(model, x)
    assert worked_out() == 0


def test_gpt2s_products_have_recipes(worked_out):
    model = Net(
        lambda s, x: torch.addmm(s.c, x, s.w).tanh() @ s.w, c=nn.Parameter(torch.randn(4)), w=nn.Parameter(torch.randn(4, 4))
    ).double()
    exact(model, examples(5, 4))
    assert worked_out() == 2
    exact(model, examples(5, 4))
    assert worked_out() == 0


def test_recipes_are_as_many_as_weights():
    model = Net(
        lambda s, x: (s.w @ x.mT).mT + torch.einsum("bi,oi->bo", x, s.w) + F.linear(x, s.w), w=nn.Parameter(torch.randn(4, 4))
    ).double()
    for _ in range(5):
        exact(model, examples(5, 4))
    assert len(experience_of([model]).recipes._made) <= 3


def test_a_tape_keeps_to_its_own_parameters():
    """Another one may begin meanwhile, on another thread say."""
    model, other = nn.Linear(4, 3).double(), nn.Linear(3, 3).double()
    exact(model, examples(5, 4))
    first, second = Tape([model]), Tape([model, other])
    assert first.recipes is not second.recipes


def _replace_weight(model):
    model[4].weight = nn.Parameter(torch.randn(4, 27, dtype=torch.float64))


def _freeze_weight(model):
    model[4].weight.requires_grad_(False)


def _tie(model):
    model[5].bias = model[4].bias


def _swap_layers(model):
    model[4] = nn.Linear(27, 4, bias=False).double()


def _other_eps(model):
    model[5].eps = 0.5


def _strides(model):
    model[0].stride, model[0].padding = (2, 2), (3, 3)
    model[4] = nn.Linear(48, 4).double()


CHANGES = [_replace_weight, _freeze_weight, _tie, _swap_layers, _other_eps, _strides]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_has_changed_is_worked_out_anew(change, worked_out):
    model, x = network(), examples(5, 2, 3, 3)
    for _ in range(3):
        exact(model, x)
    worked_out()
    change(model)
    exact(model, x)
    assert worked_out() > 0
    exact(model, x)


def test_a_weight_that_is_thawed_again():
    model, x = network(), examples(5, 2, 3, 3)
    for trains in (False, True, False, True):
        model[4].bias.requires_grad_(trains)
        model[5].weight.requires_grad_(not trains)
        exact(model, x)
        exact(model, x)


def test_a_weight_whose_numbers_get_another_shape():
    model = Net(lambda s, x: F.linear(x, s.w), w=nn.Parameter(torch.randn(3, 4).double()))
    for _ in range(2):
        exact(model, examples(5, 4))
    model.w.data = torch.randn(4).double()
    exact(model, examples(5, 4))


def test_inputs_with_more_axes():
    model = Net(lambda s, x: s.a(x).tanh(), a=nn.Linear(4, 3)).double()
    for shape in ((4,), (4,), (6, 4), (6, 4), (2, 6, 4), (4,)):
        exact(model, examples(5, *shape))


def test_a_constant_where_an_example_was():
    table = nn.Parameter(torch.randn(1, 4).double(), requires_grad=False)
    model = Net(
        lambda s, x: F.linear(s.table if s.fixed else x, s.w) * x.sum(1, keepdim=True),
        table=table,
        w=nn.Parameter(torch.randn(3, 4).double()),
    )
    for fixed in (False, False, True, True, False):
        model.fixed = fixed
        exact(model, examples(5, 4))


def test_a_number_that_is_equal_but_of_another_type_is_no_matter():
    model = Net(
        lambda s, x: torch.addmm(s.c, x, s.w, beta=s.beta), c=nn.Parameter(torch.randn(4)), w=nn.Parameter(torch.randn(4, 4)), beta=1
    ).double()
    for beta in (1, True, 1.0, 2, 2.0, 0.5):
        model.beta = beta
        exact(model, examples(5, 4))


def test_the_same_arguments_by_other_names():
    """In one order, whatever they are called."""
    model = Net(lambda s, x: s.call(s, x), a=nn.Parameter(torch.randn(4)), b=nn.Parameter(torch.randn(4)), shape=(4,)).double()
    calls = [
        lambda s, x: F.layer_norm(x, s.shape, bias=s.a, weight=s.b),
        lambda s, x: torch.layer_norm(x, s.shape, s.a, s.b),
        lambda s, x: F.layer_norm(x, s.shape, weight=s.a, bias=s.b),
        lambda s, x: F.layer_norm(x, s.shape, s.a, s.b),
        lambda s, x: torch.layer_norm(x, s.shape, bias=s.a, weight=s.b),
    ]
    for call in (*calls, *calls[::-1], *calls):
        model.call = call
        exact(model, examples(5, 4))


def test_a_rule_that_is_replaced_is_asked(monkeypatch):
    model, x = Net(lambda s, x: F.linear(x, s.w), w=nn.Parameter(torch.randn(3, 4).double())), examples(5, 4)
    for _ in range(2):
        exact(model, x)
    asked = []
    monkeypatch.setitem(RULES, F.linear, RULES[F.linear])

    @cw.rule(F.linear, replace=True)
    def linear(call):
        asked.append(call)
        return {call.args[1]: cw.Outer(call.output_grad, call.args[0])}

    exact(model, x)
    assert asked


def test_a_rewrite_that_is_registered_later_is_taken(monkeypatch):
    model, x = Net(lambda s, x: F.linear(x, s.w), w=nn.Parameter(torch.randn(3, 4).double())), examples(5, 4)
    for _ in range(2):
        exact(model, x)
    asked = []
    monkeypatch.setitem(REWRITES, F.linear, lambda x, w, b=None: asked.append(w) or x @ w.mT)
    exact(model, x)
    assert asked


def test_no_tap_without_gradients():
    model, x = network(), examples(5, 2, 3, 3)
    for _ in range(2):
        exact(model, x)
    with cw.capture(model) as tape, torch.no_grad():
        model(x)
    assert not tape.taps


def test_complex_arithmetic_is_refused_where_real_numbers_were_before():
    model = Net(lambda s, x: F.linear(x, s.w).abs(), w=nn.Parameter(torch.randn(3, 4).double()))
    for _ in range(2):
        exact(model, examples(5, 4))
    model.w.data = model.w.data.to(torch.complex128)
    with pytest.raises(cw.UncoveredUse, match="complex arithmetic"):
        clipped(model, [examples(5, 4).to(torch.complex128)], 1.0)


def test_parameters_that_are_gone_are_let_go():
    model, x = network(), examples(5, 2, 3, 3)
    for _ in range(2):
        exact(model, x)
    before = weakref.ref(model[4].weight)
    _replace_weight(model)
    exact(model, x)
    assert before() is None


def test_what_is_checked_is_looked_at_as_always():
    model, x = network(), examples(5, 2, 3, 3)
    for _ in range(2):
        exact(model, x)
    assert cw.check(model, x).ok

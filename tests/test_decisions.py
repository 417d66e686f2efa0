"""Decisions that outlive a step: the same graph again, within the same memory, on the device they were made for."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import clipwise as cw
from clipwise import planner
from clipwise.compiled.state import State
from clipwise.compiled.trace import trace
from clipwise.decisions import Deciding, Decisions
from clipwise.experience import experience_of
from clipwise.factors import FactorSum, Outer
from clipwise.inventory import all_modules, named_modules
from clipwise.planner import MemoryBudget
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import Net, examples


def traced(model, x):
    leaves, structure = pytree.tree_flatten((x,))
    mask = torch.ones(len(x), dtype=torch.bool)
    return trace(model, State.of([model]), lambda model, x: squared_output(model(x)), leaves, structure, mask, cw.flat(1.0))


def total_of(batch, terms=20, device="cpu"):
    return FactorSum([Outer(examples(batch, terms, 6).to(device), examples(batch, terms, 5).to(device))])


@pytest.mark.parametrize("budget", [30_000, 70_000, 120_000, 10**9])
@pytest.mark.parametrize("kind", ["parts", "pulled back"])
def test_a_second_trace_gives_the_same_graph_whatever_the_budget(kind, budget, monkeypatch):
    """What is kept is taken from the budget whether that was decided now or before."""
    monkeypatch.setattr(planner, "_CPU_BUDGET", budget)
    torch.manual_seed(0)

    def forward(self, x):
        q, k = self.w.chunk(2) if kind == "parts" else (self.w[:16] * self.w[16:].norm(), self.w[16:])
        return torch.tanh(F.linear(torch.tanh(self.a(F.linear(x, q))), k))

    model, x = Net(forward, a=nn.Linear(16, 16), w=nn.Parameter(torch.randn(32, 16) / 5)), torch.randn(32, 20, 16)
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(1.0))
    first, *others = (traced(model, x) for _ in range(3))
    assert all(first.is_same_as(other) for other in others)


def test_a_second_trace_puts_parameters_in_the_same_order():
    """Stand-ins for them lie elsewhere in every trace: what is pulled back through other weights must not go by that."""
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(8, 6)
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(1.0))
    traces = []
    others = []
    for _ in range(4):
        others.append([torch.zeros(1) for _ in range(17)])  # so that addresses differ
        traces.append(traced(model, x))
    assert all(traces[0].is_same_as(other) for other in traces[1:])


@pytest.mark.parametrize(("megabytes", "way"), [("0", "tiles"), ("0.01", "tiles"), ("0.02", "keep"), ("100", "keep")])
def test_how_much_may_be_kept_can_be_said(megabytes, way, monkeypatch):
    """CLIPWISE_KEEP_MB. Four gradients of 32 × 32 numbers in float32 take 16 kB. What is taken for a moment is not concerned."""
    monkeypatch.setattr(planner, "_SET", planner.bytes_to_keep(megabytes))
    total = FactorSum([Outer(torch.randn(4, 100, 32), torch.randn(4, 100, 32))])
    budget = MemoryBudget.on(torch.device("cpu"))
    assert Deciding(Decisions(), budget, is_known=True).way("weight", total)[0] == way
    assert budget.has_for_a_moment(2**29)


@pytest.mark.parametrize("said", ["abc", "nan", "inf", "1 GB", "-5"])
def test_what_may_be_kept_is_a_number(said):
    assert planner.bytes_to_keep(None) is planner.bytes_to_keep("") is None
    with pytest.raises(ValueError, match="CLIPWISE_KEEP_MB must be a number of megabytes"):
        planner.bytes_to_keep(said)


def test_what_was_decided_is_taken_from_the_budget_again():
    decisions, total = Decisions(), total_of(16)
    size = 16 * 30 * 8
    for _ in range(2):
        deciding = Deciding(decisions, MemoryBudget(size + 100), is_known=True)
        assert deciding.way("weight", total)[0] == "keep"
        assert not deciding.budget.has(101) and deciding.budget.has(100)
    assert not deciding.is_new
    assert not Deciding(decisions, MemoryBudget(0), is_known=False).way("weight", total)[0].startswith("keep")  # of this step alone


def test_a_decision_is_for_a_device_and_about_so_many_examples():
    decisions = Decisions()
    deciding = Deciding(decisions, MemoryBudget(10**9), is_known=True)
    counts = []
    for total in (total_of(64), total_of(57), total_of(127), total_of(64, device="meta")):
        deciding.way("weight", total)
        counts.append(len(decisions.found))
    assert counts == [1, 1, 2, 3]
    torch.use_deterministic_algorithms(True)
    try:
        deciding.way("weight", total_of(64))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(decisions.found) == 4


def test_ways_are_decided_anew_after_a_verification():
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), examples(8, 7, 6)
    known = []
    expected, _ = clip_and_add(loop_gradients(model, [x]), 0.3)
    for _ in range(9):
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found = cw.clipped_gradients(tape, losses, cw.flat(0.3))
        known.append(bool(experience_of([model]).ways.found))
        for name, total in found.items():
            torch.testing.assert_close(total, expected[name])
    assert known == [False, False, True, False, True, True, True, False, True]


def test_the_modules_of_a_model_are_walked_anew_where_they_changed():
    class Equal(nn.Tanh):
        def __eq__(self, other):
            return True

        __hash__ = nn.Module.__hash__

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Equal()))
    assert named_modules(model) == list(model.named_modules()) and len(all_modules([model, model[1]])) == 4
    model[1][0] = Equal()
    assert named_modules(model)[-1][1] is model[1][0]
    model.append(nn.Tanh())
    model[0], model[2] = model[2], model[0]
    assert [id(module) for _, module in named_modules(model)] == [id(module) for module in model.modules()]
    del model[1]
    assert [path for path, _ in named_modules(model)] == [path for path, _ in model.named_modules()]


def test_a_model_whose_modules_know_it_is_freed():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output, root=model: None)
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.randn(4, 2)))
    cw.clipped_gradients(tape, losses, cw.flat(1.0))
    gone = weakref.ref(model)
    del model, tape, losses
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("is_known", [True, False])
def test_terms_are_let_go_while_the_backward_pass_goes_on(is_known, monkeypatch):
    """Where the written-out gradient stays, output gradients and inputs do not wait for the end of the pass."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).double()
    seen, alive = [], []
    made = Outer.__init__

    def watched(self, left, right, *args, **kwargs):
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(left))
        made(self, left, right, *args, **kwargs)

    for step in range(3 if is_known else 1):
        if step == (2 if is_known else 0):
            monkeypatch.setattr(Outer, "__init__", watched)
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(8, 7, 6)))
        cw.clipped_gradients(tape, losses, cw.flat(0.3))
    if is_known:
        assert len(alive) == 5 and max(alive) <= 1
    else:
        assert max(alive) >= 4  # a step that verifies looks at all of them together

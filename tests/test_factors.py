"""One conformance suite for every kind of factor, and the sums and inner products between kinds."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import clipwise as cw
from clipwise import planner
from clipwise.factors import (
    Convolution,
    Dense,
    Diagonal,
    FactorSum,
    Geometry,
    Outer,
    Placed,
    Rows,
    Squares,
    finish,
    inner,
    known,
    products_of_columns,
    row_squares_together,
    sum_of,
    together,
)
from clipwise.factors import convolution as convolution_module
from clipwise.factors import outer as outer_module
from clipwise.factors import sums as sums_module
from clipwise.factors import ways as ways_module
from clipwise.factors.pieces import Pieces
from clipwise.factors.placed import Region, Storage, are_disjoint
from clipwise.gradients import ExampleGradients
from clipwise.layout import EvenGrouping, Layout, Table, TableGrouping
from clipwise.numerics import squared_norms
from clipwise.planner import MemoryBudget, Terms, choose_way, may_keep

B = 4


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


def view_of_a_matrix():
    whole = torch.empty(6, 5)
    return Placed(Outer(random(B, 3, 2), random(B, 3, 5)), Region.of(whole[1:3], whole), Storage.of(whole))


KINDS = {
    "outer": lambda: Outer(random(B, 3, 6), random(B, 3, 5)),
    "outer, one term": lambda: Outer(random(B, 6), random(B, 5)),
    "outer, several axes": lambda: Outer(random(B, 2, 3, 6), random(B, 2, 3, 5)),
    "outer, blocks": lambda: Outer(random(B, 2, 4, 3), random(B, 2, 4, 5), torch.Size((6, 5)), groups=True),
    "rows": lambda: Rows(torch.randint(0, 6, (B, 7)), random(B, 7, 5), torch.Size((6, 5))),
    "dense": lambda: Dense(random(B, 6, 5)),
    "dense, summed": lambda: Dense.summed(random(B, 3, 6, 5), (6, 5)),
    "convolution": lambda: Convolution.of_rows(random(B, 6, 4), random(B, 5, 4), torch.Size((6, 5, 1)), Geometry((1,), (0,), (1,))),
    "transposed convolution": lambda: Convolution.of_rows(
        random(B, 3, 9), random(B, 4, 4), torch.Size((4, 3, 3)), Geometry((2,), (0,), (1,), transposed=True)
    ),
    "diagonal": lambda: Diagonal(random(B, 5), (0,)),
    "placed": view_of_a_matrix,
}


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_sum_examples_and_mass(kind):
    factor = KINDS[kind]()
    written, weights = factor.dense(), torch.rand(B, dtype=torch.float64)
    assert written.shape == (B, *factor.shape)
    torch.testing.assert_close(factor.weighted_sum(weights), torch.einsum("b,b...->...", weights, written))
    torch.testing.assert_close(factor.examples(1, 3).dense(), written[1:3])
    torch.testing.assert_close(factor.examples(1, 3).weighted_sum(weights[1:3]), torch.einsum("b,b...->...", weights[1:3], written[1:3]))
    assert (factor.mass() >= written.flatten(1).norm(dim=1) * (1 - 1e-12)).all()
    assert factor.batch == B and factor.numel == written[0].numel() and factor.elements > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["keep", "tiles", "gram"])
def test_every_way_gives_the_norm(kind, way, monkeypatch):
    factor = KINDS[kind]()
    monkeypatch.setattr(ways_module, "choose_way", lambda **_: way)
    monkeypatch.setitem(planner._AT_ONCE, "cpu", 40)  # several chunks
    total = sum_of([factor])
    expected = factor.dense().flatten(1).square().sum(1)
    torch.testing.assert_close(total.squared_norms(MemoryBudget()), expected, rtol=1e-10, atol=0)
    total.forget_terms()
    weights = torch.rand(B, dtype=torch.float64)
    torch.testing.assert_close(total.weighted_sum(weights), torch.einsum("b,b...->...", weights, factor.dense()))


@pytest.mark.parametrize("kind", ["outer", "convolution"])
def test_what_is_kept_in_pieces_stays_there(kind, monkeypatch):
    """Whatever is asked of it again, norms of all or gradients of some: in one piece it would lie twice."""
    factor = KINDS[kind]()
    monkeypatch.setitem(planner._AT_ONCE, "cpu", 2 * factor.numel)
    monkeypatch.setattr(ways_module, "choose_way", lambda **_: "keep")
    monkeypatch.setattr(Pieces, "grad", property(lambda _: pytest.fail("put together")))
    total, written = sum_of([factor]), factor.dense()
    for _ in range(2):
        torch.testing.assert_close(total.squared_norms(MemoryBudget()), written.flatten(1).square().sum(1))
        total.forget_terms()
    for way in ("tiles", "written"):
        torch.testing.assert_close(total.measured_by(way).now(), written.flatten(1).square().sum(1), rtol=1e-6, atol=0)
    (kept,) = total.factors
    assert isinstance(kept, Pieces) and [len(piece) for piece in kept.tensors] == [2] * (B // 2) + [1] * (B % 2)
    assert total.row_matrices() is None and total.written is None
    torch.testing.assert_close(total.dense(1, 4), written[1:4])
    torch.testing.assert_close(total.dense(2, 4), written[2:4])
    torch.testing.assert_close(kept.examples(1, 4).dense(), written[1:4])
    torch.testing.assert_close(total.mass(), written.flatten(1).norm(dim=1))


@pytest.mark.parametrize("batch", [3, 64])
def test_a_graph_holds_a_few_pieces_of_any_batch(batch, monkeypatch):
    monkeypatch.setitem(planner._AT_ONCE, "cpu", 1)
    assert planner.examples_at_once(batch, 10, torch.device("cpu")) == 1
    monkeypatch.setattr(planner, "is_tracing", lambda: True)
    assert -(-batch // planner.examples_at_once(batch, 10, torch.device("cpu"))) <= 8
    assert planner.examples_at_once(batch, 2**24, torch.device("cpu")) == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "diagonal"])
@pytest.mark.parametrize("order", ["block", "strided"])
def test_merging_rows_of_an_example(kind, order):
    factor = KINDS[kind]()
    owners = EvenGrouping(B, 2, order).owners()
    expected = torch.zeros(2, *factor.shape, dtype=torch.float64).index_add_(0, owners, factor.dense())
    merged = factor.merge(EvenGrouping(B, 2, order))
    torch.testing.assert_close(merged.dense(), expected)
    assert (merged.mass() >= expected.flatten(1).norm(dim=1) * (1 - 1e-12)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_merging_by_a_table(kind):
    factor = KINDS[kind]()
    table = torch.tensor([2, -1, 0, 2])
    expected = torch.zeros(3, *factor.shape, dtype=torch.float64).index_add_(0, table[[0, 2, 3]], factor.dense()[[0, 2, 3]])
    torch.testing.assert_close(factor.merge(TableGrouping(table, 3)).dense(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_of_weight_zero_adds_nothing_even_if_it_is_not_finite(kind):
    factor = KINDS[kind]()
    finite = factor.examples(0, B - 1).weighted_sum(torch.ones(B - 1))
    for name in ("left", "right", "rows", "grad", "input"):
        for target in (factor, getattr(factor, "inner", None)):
            tensor = getattr(target, name, None)
            if tensor is not None:
                tensor[-1] = float("inf")
    weights = torch.ones(B)
    weights[-1] = 0
    torch.testing.assert_close(factor.weighted_sum(weights), finite)


@pytest.mark.parametrize(("p", "d"), [(70, 5), (6, 40)])
def test_in_a_graph_the_wider_side_is_weighed_a_few_columns_at_a_time(p, d, monkeypatch):
    """A graph keeps the memory of a copy of the whole."""
    factor, weights = Outer(random(B, 3, p), random(B, 3, d)), torch.rand(B, dtype=torch.float64)
    weights[-1] = 0
    expected = factor.examples(0, B - 1).weighted_sum(weights[:-1])
    factor.left[-1], factor.right[-1] = math.nan, math.inf
    widths = []
    for name in ("scale_stored", "drop_rows"):
        whole = getattr(outer_module, name)
        monkeypatch.setattr(
            outer_module, name, lambda side, *args, whole=whole, **more: widths.append(side.shape[-1]) or whole(side, *args, **more)
        )
    monkeypatch.setattr(outer_module, "is_tracing", lambda: True)
    monkeypatch.setattr(outer_module, "_AT_A_TIME", B * 3 * 17 * 8)
    monkeypatch.setattr(outer_module, "_ALIGNED", 8)
    torch.testing.assert_close(factor.weighted_sum(weights), expected)
    assert max(widths) == 16 and len(widths) == 1 + -(-max(p, d) // 16)


SAME_SHAPE = ["outer", "outer, one term", "outer, several axes", "outer, blocks", "rows", "dense", "placed"]


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations_with_replacement(SAME_SHAPE, 2)))
def test_inner_products_and_sums_of_two_kinds(a, b, monkeypatch):
    first, second = KINDS[a](), KINDS[b]()
    torch.testing.assert_close(inner(first, second), (first.dense() * second.dense()).flatten(1).sum(1))
    expected = first.dense() + second.dense()
    for way in ("keep", "tiles", "gram"):
        monkeypatch.setattr(ways_module, "choose_way", lambda way=way, **_: way)
        total = FactorSum([first, second])
        torch.testing.assert_close(total.squared_norms(MemoryBudget()), expected.flatten(1).square().sum(1), rtol=1e-9, atol=0)
        torch.testing.assert_close(total.weighted_sum(torch.ones(B)), expected.sum(0))


def test_convolutions_of_one_kernel_add_up():
    first, second = KINDS["convolution"](), KINDS["convolution"]()
    total = FactorSum([first, second])
    expected = first.dense() + second.dense()
    torch.testing.assert_close(total.dense(), expected)
    torch.testing.assert_close(total.squared_norms(MemoryBudget(0)), expected.flatten(1).square().sum(1))


def test_disjoint_parts_of_a_weight_need_no_whole_gradient():
    whole = torch.empty(6, 5)
    parts = [
        Placed(Outer(random(B, 2, len(view)), random(B, 2, 5)), Region.of(view, whole), Storage.of(whole))
        for view in (whole[:2], whole[2:], whole[:2])
    ]
    total = sum_of(parts)
    assert type(total).__name__ == "PartSum"
    expected = sum(part.dense() for part in parts)
    torch.testing.assert_close(total.squared_norms(MemoryBudget()), expected.flatten(1).square().sum(1))
    torch.testing.assert_close(total.dense(1, 3), expected[1:3])
    torch.testing.assert_close(total.weighted_sum(torch.ones(B)), expected.sum(0))


def test_overlapping_parts_are_written_out():
    whole = torch.empty(6, 5)
    regions = {Region.of(view, whole) for view in (whole[:3], whole[2:])}
    assert not are_disjoint(frozenset(regions), Storage.of(whole))
    assert are_disjoint(frozenset([Region.of(whole.t(), whole)]), Storage.of(whole))
    assert not are_disjoint(frozenset([Region.of(whole[:1].expand(3, 5), whole)]), Storage.of(whole))


# --- never under-estimated


def released_norm(total, batch):
    """What really leaves, one example at a time."""
    return torch.stack([total.weighted_sum(torch.eye(batch)[i]).double().norm() for i in range(batch)])


@pytest.mark.parametrize("way", ["tiles", "gram", "keep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cancelling_terms_cannot_hide(way, dtype, monkeypatch):
    """Time steps that cancel in truth leave a rounding error as large as they were; the norm must cover it."""
    monkeypatch.setattr(ways_module, "choose_way", lambda **_: way)
    left, right = torch.randn(B, 64, 16), torch.randn(B, 64, 16)
    left, right = torch.cat([left, -left], 1) * 1e3, torch.cat([right, right * (1 + 1e-7)], 1)
    total = FactorSum([Outer(left.to(dtype), right.to(dtype))])
    assert (total.squared_norms(MemoryBudget()).sqrt() * (1 + 1e-6) >= released_norm(total, B)).all()


@given(scale=st.sampled_from([1e-30, 1e-15, 1.0, 1e15, 1e30]), length=st.sampled_from([1, 5, 1024, 30000, 2**15]))
def test_norms_neither_overflow_nor_vanish(scale, length):
    rows = torch.randn(3, length) * scale
    torch.testing.assert_close(squared_norms(rows), rows.double().square().sum(1), rtol=1e-6, atol=0)


def test_norms_of_rows_that_are_not_finite_are_not_finite():
    rows = torch.ones(4, 5)
    rows[1, 2], rows[2, 0], rows[3, 4] = float("nan"), float("inf"), -float("inf")
    assert squared_norms(rows).isfinite().tolist() == [True, False, False, False]


# --- layouts and the cost rule


def test_groupings_agree_with_their_owners():
    rows = torch.arange(6.0)
    for order in ("block", "strided"):
        even = Layout((0,), order).grouping(6, 3)
        table = Table((0,), even.owners()).grouping(6, 3)
        assert torch.equal(even(rows).sort(1).values, table(rows).sort(1).values)


def test_the_cost_rule():
    assert choose_way(may_keep=True, dense_flops=1000, gram_flops=10) == "keep"
    assert choose_way(may_keep=False, dense_flops=1000, gram_flops=10) == "gram"
    assert choose_way(may_keep=False, dense_flops=1000, gram_flops=None) == "tiles"
    assert choose_way(may_keep=False, dense_flops=1000, gram_flops=999) == "tiles"


def test_gradients_are_kept_where_they_fit_the_budget():
    size = dict(batch=8, numel=100, held=100, element_size=4)
    assert may_keep(**size, budget=MemoryBudget())
    assert not may_keep(**size, budget=MemoryBudget(0))
    assert not may_keep(**size | dict(held=1), budget=MemoryBudget())
    budget = MemoryBudget(B * 20 * 8)
    ways = [FactorSum([Outer(random(B, 3, 4), random(B, 3, 5))]).measure(budget) and budget.has(1) for _ in range(2)]
    assert ways == [False, False]  # the first took all of it
    totals = [FactorSum([Outer(random(B, 30, 4), random(B, 30, 5))]) for _ in range(2)]
    budget = MemoryBudget(B * 20 * 8)
    for total in totals:
        total.measure(budget)
    assert [total.way for total in totals] == ["keep", "tiles"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel, padding, groups", [((3, 2), (1, 2), 2), ((1, 1), (0, 0), 1), ((5, 5), (3, 1), 1)], ids=str)
@pytest.mark.parametrize("stride, dilation", [((1, 1), (1, 2)), ((2, 1), (1, 1)), ((3, 2), (2, 1))], ids=str)
def test_windows_that_are_copied_are_those_of_the_view(stride, dilation, kernel, padding, groups, transposed, monkeypatch):
    """A graph copies them; a view by strides is the reference."""
    if transposed and any(p > (k - 1) * d for p, k, d in zip(padding, kernel, dilation)):
        padding = (0, 0)
    module = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 6, kernel, stride, padding, groups=groups, dilation=dilation)
    x = torch.randn(3, 4, 11, 12)
    geometry = Geometry(stride, padding, dilation, groups, transposed, (0, 0) if transposed else ())
    factor = Convolution.of_rows(torch.randn_like(module(x)), x, module.weight.shape, geometry)
    viewed = factor.as_outer().right.clone()
    monkeypatch.setattr(convolution_module, "is_tracing_in_one", lambda: True)
    assert torch.equal(factor.as_outer().right, viewed)


def test_gradients_may_stay_where_they_take_no_more_than_what_is_let_go_for_them(monkeypatch):
    """Other ways hold on to their terms; a step that is at its peak has room for what is smaller than these, and for what is there for a moment."""
    allocated = [1200]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    size = dict(batch=1, numel=100, held=50, element_size=4)
    of = lambda count: torch.zeros(count, dtype=torch.uint8)
    gradient = lambda count: Terms([of(count)], [])
    at_peak = lambda: MemoryBudget(10**6, most=1000)
    assert not may_keep(**size, budget=at_peak())
    assert may_keep(**size, budget=at_peak(), lets_go=gradient(400)) and may_keep(**size, budget=at_peak(), lets_go=gradient(375))
    assert not may_keep(**size, budget=at_peak(), lets_go=gradient(374))
    assert not may_keep(**size, budget=at_peak(), lets_go=Terms([of(200)], [of(200)]))  # the input may be another's, too …
    allocated[0] = 900
    assert may_keep(**size, budget=at_peak(), lets_go=Terms([of(200)], [of(200)]))  # … which matters where little is left
    assert may_keep(**size, budget=at_peak(), lets_go=gradient(300))  # 100 more than that, and 100 are left
    assert not may_keep(**size, budget=MemoryBudget(99, most=1000), lets_go=gradient(300))  # there is no such memory
    shared, full = of(200), at_peak()
    full.spend(400, lets_go=Terms([of(200)], [shared]))
    assert full._spent == 0  # what takes another's place is no expense …
    full.spend(400, lets_go=Terms([of(200)], [shared]))
    assert full._spent == 200  # … once
    several = of(10).expand(40, 10)
    assert not may_keep(**size, budget=at_peak(), lets_go=Terms([several], []))  # ten bytes, shown forty times
    with FakeTensorMode():  # as programs are traced: there is memory to tell apart, without numbers in it
        traced, side = at_peak(), of(200)
        assert may_keep(**size, budget=traced, lets_go=Terms([of(200)], [side]))
        traced.spend(400, lets_go=Terms([of(200)], [side])), traced.spend(400, lets_go=Terms([side], []))
        assert traced._spent == 400
    whole = MemoryBudget(10**6)
    whole.spend(400, lets_go=gradient(400))
    assert whole._spent == 400  # where the terms stay, for a second backward pass
    allocated[0] = 1200
    assert not at_peak().has(40) and at_peak().has_for_a_moment(40) and not at_peak().has_for_a_moment(41)
    assert not MemoryBudget(39, most=1000).has_for_a_moment(40) and not MemoryBudget(39).has_for_a_moment(40)


@pytest.mark.parametrize("left", [(4, 3, 2), (3, 2)])
def test_outer_refuses_sides_that_do_not_match(left):
    with pytest.raises(ValueError, match="agree in all axes"):
        Outer(torch.randn(left), torch.randn(4, 2, 2))


def test_norms_of_many_matrices_together():
    """As measured one by one; a matrix that comes twice is measured once; a row that is not finite spoils its own example alone."""
    grad = torch.randn(B, 3)
    matrices = [grad, torch.randn(B, 2, 4), grad.view(B, 1, 3), torch.randn(B, 5)]
    found = row_squares_together(matrices).on_host()
    assert found.dtype == torch.float64 and found.shape == (B, 4)
    for column, matrix in zip(found.unbind(1), matrices):
        torch.testing.assert_close(column, matrix.double().flatten(1).square().sum(1), rtol=1e-12, atol=0)
    assert torch.equal(found[:, 0], found[:, 2])
    matrices[1] = matrices[1].clone()
    matrices[1][1, 0, 0] = torch.inf
    again = row_squares_together(matrices).on_host()
    assert not again[1].isfinite().all()
    assert torch.equal(again[[0, *range(2, B)]], found[[0, *range(2, B)]])
    assert row_squares_together([grad, grad.double()]) is None  # two precisions
    assert row_squares_together([torch.zeros(2, 2**16)]) is None  # not worth copying
    assert torch.isfinite(row_squares_together([torch.full((B, 3), 3e38), grad]).on_host()).all()


def test_products_of_columns():
    columns = random(3, 5)  # two products of two, one column alone
    expected = [2 * columns[:, 0] * columns[:, 3], 3 * columns[:, 1] * columns[:, 4], 4 * columns[:, 2]]
    for found, wanted in zip(products_of_columns(columns.clone(), [2.0, 3.0, 4.0]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


def test_memory_that_was_given_back_is_not_taken_for_what_is_let_go_next():
    """Python objects and torch's storages get the addresses of earlier ones at once."""
    budget = MemoryBudget(10**6, most=1000)
    for _ in range(100):
        budget.spend(400, lets_go=Terms([torch.zeros(400, dtype=torch.uint8)], []))
    assert budget._spent == 0


def test_norms_with_and_without_a_drift_are_finished_together():
    value, mass = torch.randn(5).double(), torch.rand(5).double()
    measured = [
        Squares(value, 2.0),
        Squares(value, 3.0, mass, 0.25),
        known(value.abs()),
        Squares(value.abs(), 1.0, mass, 4.0, is_square=True),
        Squares(2 * value, 3.0, 2 * mass, 0.25),
        Squares(value, 1.0, mass, 0.0, 0.5),
        Squares(value, 5.0, mass, 0.5),  # as the second, with other numbers
        Squares(2 * value, 1.0, mass, 0.0, 0.25),
    ]
    rounded = 3 * value**2 + mass**2 / 4
    expected = [2 * value**2, rounded, value.abs(), value.abs() + 4 * mass**2, 4 * rounded, (value.abs() + mass / 2) ** 2]
    expected += [5 * value**2 + mass**2 / 2, (2 * value.abs() + mass / 4) ** 2]
    for found, wanted, alone in zip(finish(measured), expected, measured, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-14) and torch.allclose(alone.now(), wanted, rtol=1e-14)


def test_what_was_computed_without_numbers_is_not_kept_for_those_with():
    def measured(make):
        return finish([Squares(make(3), 1.5 + layer) for layer in range(2)])

    with FakeTensorMode():
        measured(torch.ones)
    assert [float(one.sum()) for one in measured(lambda count: torch.ones(count).double())] == [4.5, 7.5]


def test_norms_of_one_form_take_as_many_operations_as_one():
    """Their numbers may be of their own: of a deep network each layer's are."""
    counts = []
    for layers in (2, 9):
        measured = [Squares(random(4), 1.5 + layer, random(4).abs(), 0.1 * (layer + 1), 0.01) for layer in range(layers)]
        with torch.profiler.profile() as profile:
            finish(measured)
        counts.append(
            sum(event.count for event in profile.key_averages() if event.key in ("aten::mul", "aten::pow", "aten::add", "aten::sqrt"))
        )
    assert counts[0] == counts[1]


def test_products_beyond_all_bounds_are_not_finite_rather_than_zero(monkeypatch):
    """−∞ under a sum of products is no rounding error."""
    monkeypatch.setattr(sums_module, "inner", lambda a, b: torch.tensor([-math.inf, math.inf, math.nan, -1e-9, 4.0]).double())
    total = FactorSum([Outer(torch.ones(5, 2, 3), torch.ones(5, 2, 3))])
    found = total.measured_by("gram").now()
    assert found.isfinite().tolist() == [False, False, False, True, True] and found[4] >= 4


def test_gradients_of_two_precisions_are_weighed_in_the_wider(monkeypatch):
    """A product in float32 and a gradient in float64 of one weight, written out."""
    model = nn.Linear(3, 5, bias=False)
    with cw.capture(model) as tape:
        model(torch.randn(4, 2, 3))
    gradients = ExampleGradients(tape, 4, torch.device("cpu"))
    left, right, dense = torch.randn(4, 2, 5), torch.randn(4, 2, 3), torch.randn(4, 5, 3).double()
    gradients.add_factor(model.weight, Outer(left, right))
    gradients.add_factor(model.weight, Dense(dense))
    gradients.finish()
    assert list(gradients.squares_on_host()) == ["weight"] and gradients.ways() == {"weight": "keep"}
    weights = torch.rand(4).double()
    found = gradients.weighted_sums({"weight": weights}, clean=True)["weight"]
    exact = torch.einsum("b,bij->ij", weights, dense + torch.einsum("btp,btd->bpd", left.double(), right.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_norms_are_finished_on_the_host_whatever_the_default_device():
    grad = torch.randn(B, 3)
    with torch.device("meta"):
        [found] = finish([Squares(grad.double().norm(dim=1), mass=torch.ones_like(grad[:, 0].double()), mass_factor=0.25)])
    torch.testing.assert_close(found, grad.double().square().sum(1) + 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_many_matrices_are_stacked_where_a_matrix_of_zeros_and_ones_would_be_large(dtype, monkeypatch):
    """One example, many parameters: adding up by a product would need their number squared. Lengths come in any order."""
    monkeypatch.setattr("clipwise.factors.together._indicator", None)
    monkeypatch.setitem(together._WORTH_STACKING, "cpu", 2**20)
    matrices = [torch.randn(3, length).to(dtype) for length in (2000, 7, 2000, 300, 7) * 8]
    matrices.append(matrices[0])
    matrices[1][2] = torch.nan
    found = row_squares_together(matrices).on_host()
    for column, matrix in zip(found.unbind(1), matrices, strict=True):
        torch.testing.assert_close(column, matrix.double().square().sum(1), rtol=1e-6, atol=0, equal_nan=True)

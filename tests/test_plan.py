"""A plan is complete, consistent and the same after it was written down."""

import dataclasses
import json
import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipwise as cw
from clipwise.budget import rounded_up

FIELDS = dict(dataset_size=60_000, batch_size=256, epochs=60, delta=1e-5, clipping=cw.flat(1.0), noise_multiplier=1.1)


def plan(**changes):
    return cw.PrivacyPlan(**(FIELDS | changes))


def test_steps_are_rounded_once_for_the_whole_run():
    assert plan().steps == 14_063  # 60 · ceil(60000/256) = 14 100 would overrun
    assert plan(epochs=0.5).steps == math.ceil(0.5 * 60_000 / 256)
    assert plan(epochs=None, steps=100).epochs == 1
    assert plan(epochs=None, steps=14_063).epochs == 60


def test_a_plan_is_frozen_and_has_only_keywords():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().delta = 1.0
    with pytest.raises(TypeError):
        cw.PrivacyPlan(60_000, 256)
    with pytest.raises(TypeError, match="nois_multiplier"):
        plan(nois_multiplier=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dataset_size=0), "dataset_size must be a whole number"),
        (dict(dataset_size=1e4), "dataset_size must be a whole number"),
        (dict(batch_size=True), "batch_size must be a whole number"),
        (dict(batch_size=70_000), "larger than dataset_size"),
        (dict(delta=0), "delta must be between 0 and 1"),
        (dict(delta=1.0), "delta must be between 0 and 1"),
        (dict(noise_multiplier=0.0), "noise_multiplier must be a positive"),
        (dict(noise_multiplier=float("nan")), "noise_multiplier must be a positive"),
        (dict(clipping=1.0), "clipping must be a clipping"),
        (dict(epochs=None), "neither epochs nor steps"),
        (dict(steps=100), "60 epochs are 14063 steps, not 100"),
        (dict(epochs=-1), "epochs must be"),
        (dict(sampler="bernoulli"), "no accounting for the sampler 'bernoulli'"),
        (dict(sampler="shuffle", relation="add_or_remove_one"), "not accounted for under"),
        (dict(sampler="fixed_size", accountant="pld"), "pld does not cover fixed_size"),
        (dict(relation="replace_one", accountant="rdp"), "rdp does not cover poisson sampling under replace_one"),
        (dict(accountant="gdp"), "no accountant 'gdp'"),
        (dict(max_batch_size=400), "means nothing to poisson"),
        (dict(sampler="truncated_poisson", max_batch_size=100), "below batch_size"),
        (dict(unit=""), "unit must say"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(cw.BadPlan, match=message):
        plan(**changes)


def test_a_delta_that_allows_to_publish_records_is_noticed():
    with pytest.warns(UserWarning, match="not below 1/N"):
        plan(delta=1e-3)


CLIPPINGS = st.one_of(
    st.floats(0.1, 10).map(cw.flat),
    st.floats(0.1, 10).map(cw.per_layer),
    st.floats(0.1, 10).map(cw.automatic),
    st.builds(lambda a, b: cw.per_group({"encoder.*": a, "*": b}), st.floats(0.1, 10), st.floats(0.1, 10)),
    st.builds(lambda c, q: cw.adaptive(c, quantile=q), st.floats(0.1, 10), st.floats(0.1, 0.9)),
)


@given(
    clipping=CLIPPINGS,
    sampler=st.sampled_from(["poisson", "truncated_poisson", "shuffle", "fixed_size"]),
    length=st.sampled_from([{"epochs": 3}, {"epochs": 0.7}, {"steps": 17}, {"steps": 500}]),
)
def test_written_down_and_read_again(clipping, sampler, length, tmp_path_factory):
    before = cw.PrivacyPlan(**{k: v for k, v in FIELDS.items() if k != "epochs"} | dict(clipping=clipping, sampler=sampler) | length)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    before.save(path)
    assert cw.PrivacyPlan.load(path) == before
    assert cw.PrivacyPlan.from_dict(json.loads(json.dumps(before.to_dict()))) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(batchsize=3), "no field 'batchsize'.\n  Did you mean 'batch_size'?"),
        (lambda v: v.pop("delta"), "lacks delta"),
        (lambda v: v["clipping"].update(bond=2.0), "no field 'bond'"),
        (lambda v: v["clipping"].update(kind="flatt"), "must name its kind"),
        (lambda v: v["clipping"].pop("bound"), "is incomplete"),
        (lambda v: v["clipping"].update(bound=-1.0), "must be a positive"),
        (lambda v: v.update(clipping=1.0), "must name its kind"),
        (lambda v: v.update(steps=3), "60 epochs are"),
    ],
)
def test_a_misspelt_file_is_refused(change, message, tmp_path):
    values = plan().to_dict()
    change(values)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(cw.Refusal, match=message):
        cw.PrivacyPlan.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"plan"'])
def test_what_is_no_plan_is_refused(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(cw.BadPlan):
        cw.PrivacyPlan.load(path)


def test_a_clipping_of_ones_own_cannot_be_written_down():
    class Mine(type(cw.flat(1.0))):
        pass

    with pytest.raises(cw.BadPlan, match="cannot be written down"):
        plan(clipping=Mine(1.0)).to_dict()


def test_the_papers_sigma_is_on_the_mean():
    found = cw.PrivacyPlan.from_paper(sigma=0.05, batch_size=128, dataset_size=60_000, epochs=20, delta=1e-5)
    assert found.noise_multiplier == pytest.approx(6.4) and found.clipping == cw.flat(1.0)
    assert found.budget().epsilon == pytest.approx(0.10, abs=2e-3)
    other = cw.PrivacyPlan.from_paper(sigma=0.05, batch_size=128, clipping=cw.flat(2.0), dataset_size=60_000, epochs=20, delta=1e-5)
    assert other.noise_multiplier == pytest.approx(3.2)


def test_a_count_that_costs_more_than_everything_is_refused():
    with pytest.raises(cw.BadClipping, match="alone costs more"):
        plan(clipping=cw.adaptive(count_noise=0.5))
    clipping = cw.adaptive(count_noise=5.0)
    z = clipping.noise_of_sums(1.1)
    assert z == pytest.approx((1.1**-2 - 10.0**-2) ** -0.5)
    default = cw.adaptive()
    assert default.noise_of_sums(1.1) == pytest.approx(1.1 / math.sqrt(0.99))
    with pytest.raises(cw.BadClipping, match="quantile"):
        cw.adaptive(quantile=1.5)


@given(st.floats(1e-6, 1e9))
def test_printed_numbers_are_never_too_small(value):
    assert value <= float(rounded_up(value)) * (1 + 1e-12) and float(rounded_up(value)) <= value * 1.0011


def test_a_budget_says_what_it_rests_on():
    text = str(plan(sampler="shuffle").budget())
    for word in ("ε = 54.05", "δ = 1e-05", "PLD", "shuffle without amplification", "contributes nothing", "14100 steps"):
        assert word in text


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan()

"""Batches drawn as the plan says, through everything DataLoader can do; and batches cut into parts."""

import functools
import operator
import time
from collections import namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import clipwise as cw
from training_helpers import data, small_plan, training


class Numbers(Dataset):
    """Records that know their number."""

    def __init__(self, size=60):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"number": torch.tensor(i), "x": torch.full((3,), float(i)), "name": f"record {i}"}


@pytest.mark.parametrize("options", [dict(), dict(num_workers=2), dict(num_workers=2, persistent_workers=True, prefetch_factor=3)])
def test_the_records_that_were_drawn_arrive(options):
    private, _, _ = training()
    loader = private.loader(Numbers(), **options)
    sampler = private._draws._sampler
    for step, batch in enumerate(loader):
        drawn = sampler.draw(step)  # reproducible: the same again
        assert batch["number"].tolist() == drawn and batch["name"] == [f"record {i}" for i in drawn]
        assert private._draws.current.size == len(drawn)
        private._draws.consume()
    assert step == 5


def test_custom_collate():
    private, _, _ = training()
    for batch in private.loader(Numbers(), collate_fn=lambda items: [item["name"] for item in items]):
        assert all(name.startswith("record") for name in batch)


def test_hugging_face_data_sets():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [[float(i), 1.0] for i in range(60)], "y": list(range(60))}).with_format("torch")
    private, _, _ = training(plan=small_plan(batch_size=1, epochs=None, steps=40))
    seen = []
    for _ in range(2):
        for placeholder in (True, False):
            for batch in private.loader(dataset, placeholder=placeholder):
                draw = private._draws.current
                assert len(batch["x"]) == len(batch["y"]) == draw.rows and torch.equal(
                    batch["x"][:, 0], batch["y"].double().to(batch["x"].dtype)
                )
                seen.append(draw.size)
                private._draws.consume()
    assert 0 in seen


def test_zero_rows_on_request():
    private, _, _ = training(plan=small_plan(batch_size=1, epochs=None, steps=40))
    sizes = []
    for batch in private.loader(Numbers(), placeholder=False):
        sizes.append(private._draws.current.size)
        assert batch["x"].shape == (sizes[-1], 3) and len(batch["name"]) == sizes[-1]
        private._draws.consume()
    assert 0 in sizes


def test_an_iteration_that_was_broken_off_leaves_nothing_behind():
    private, _, _ = training()
    for _batch in private.loader(Numbers(), num_workers=2):
        break
    assert len(private.loader(Numbers())) == 6  # no step was taken
    list(zip(range(2), private.loader(Numbers())))
    assert private._draws.current is not None


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Numbers(59), {}, cw.BadPlan, "59 records, the plan says 60"),
        (Numbers(), dict(batch_size=4), TypeError, "takes no batch_size"),
        (Numbers(), dict(shuffle=True), TypeError, "takes no shuffle"),
        (Numbers(), dict(drop_last=True), TypeError, "takes no drop_last"),
        (Numbers(), dict(sampler=None), TypeError, "takes no sampler"),
        (Numbers(), dict(in_order=False), TypeError, "in_order"),
        (Numbers(), dict(num_worker=2), TypeError, "num_worker"),
        (iter([1]), {}, TypeError, "map-style"),
    ],
)
def test_options_that_are_the_plans_business(dataset, options, error, message):
    private, _, _ = training()
    with pytest.raises(error, match=message):
        private.loader(dataset, **options)


def test_streams_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

        def __len__(self):
            return 60

    private, _, _ = training()
    with pytest.raises(TypeError, match="map-style"):
        private.loader(Stream())


@pytest.mark.parametrize("sampler", ["poisson", "truncated_poisson", "shuffle", "fixed_size"])
def test_a_thousand_million_records(sampler):
    """Counted, not timed: no tensor as long as the data set is ever made."""
    plan = small_plan(dataset_size=10**9, batch_size=1000, steps=5, epochs=None, delta=1e-10, sampler=sampler)
    private, _, _ = training(plan=plan)
    start = time.process_time()
    for step in range(3):
        drawn = private._draws._sampler.draw(step)
        assert len(set(drawn)) == len(drawn) and 800 < len(drawn) < 1300 and max(drawn) < 10**9
    assert time.process_time() - start < 5  # an order of 10⁹ numbers would take minutes and 8 GB


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("batch", [
    (torch.arange(7), torch.arange(14).view(7, 2)),
    [torch.arange(7), torch.arange(14).view(7, 2)],
    Pair(torch.arange(7), torch.arange(14).view(7, 2)),
    {"x": torch.arange(7), "deep": {"y": (torch.arange(7), [str(i) for i in range(7)])}},
    torch.arange(7),
])  # fmt: skip
def test_microbatches_of_anything(batch):
    parts = list(cw.microbatches(batch, 3))
    assert len(parts) == 3 and all(type(part) is type(batch) for part in parts)

    def leaves(value):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        if isinstance(value, list) and value and isinstance(value[0], str):
            return [value]
        return [leaf for item in value for leaf in leaves(item)]

    for whole, *cut in zip(leaves(batch), *map(leaves, parts)):
        if isinstance(whole, list):
            assert functools.reduce(operator.iadd, cut, []) == whole
        else:
            assert torch.equal(torch.cat(cut), whole) and [len(c) for c in cut] == [3, 3, 1]


def test_microbatches_in_detail():
    shared = torch.ones(4, 4)
    parts = list(cw.microbatches({"x": torch.arange(6), "mask": shared, "scale": 2.0}, 4))
    assert [p["mask"] is shared and p["scale"] == 2.0 for p in parts] == [True, True]
    two = [torch.arange(2), torch.arange(2)]  # as long as the list that holds them
    assert [len(p) for p in cw.microbatches(two, 1)] == [2, 2]
    [empty] = cw.microbatches((torch.zeros(0, 3), torch.zeros(0)), 4)
    assert empty[0].shape == (0, 3)
    assert list(cw.microbatches(["a", "b", "c"], 2)) == [["a", "b"], ["c"]]
    with pytest.raises(ValueError, match="whole number"):
        next(cw.microbatches(two, 0))
    with pytest.raises(TypeError, match="tensor or a list"):
        next(cw.microbatches(3, 2))
    with pytest.raises(TypeError, match="packed sequence"):
        next(cw.microbatches((torch.zeros(2), pack_sequence([torch.zeros(2), torch.zeros(1)])), 1))


def test_a_batch_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(10).view(5, 2), "labels": torch.arange(5)})
    parts = list(cw.microbatches(batch, 2))
    assert [type(p) for p in parts] == [transformers.BatchEncoding] * 3 and parts[2]["labels"].tolist() == [4]
    assert parts[0]["input_ids"].shape == (2, 2) and batch["labels"].shape == (5,)


def test_tensor_data_sets_of_the_wrong_size():
    private, _, _ = training()
    with pytest.raises(cw.BadPlan):
        private.loader(TensorDataset(torch.zeros(61)))
    assert len(private.loader(data())) == 6

"""Copies of modules: what copy.deepcopy makes, whoever wrote the module."""

import copy
import random
from collections import OrderedDict

import pytest
import torch
from torch import nn

from clipwise.again import isolated, random_fingerprint
from clipwise.duplicate import duplicate
from helpers import Net


class Keeps(nn.Module):
    """All sorts of attributes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.tied = self.inner[0]
        self.numbers, self.words, self.pair = [1, 2.5, [3]], {"a": {"b": 1}, 3: ("x", [1])}, (1, 2)
        self.seen, self.frozen, self.nothing = {1, "two"}, frozenset({3}), None
        self.table, self.same_table = torch.arange(4.0), None
        self.same_table = self.table
        self.owner = [self]  # a cycle
        self.generator, self.dice = torch.Generator().manual_seed(3), random.Random(4)
        self.function, self.kind = torch.tanh, nn.Linear
        self.ordered = OrderedDict(a=[1])
        self.by_pair = {(1, 2): [3]}
        self.counted = 0

    def forward(self, x):
        self.counted += 1
        self.numbers.append(self.counted)
        return self.inner(x)


class OwnWay(nn.Linear):
    copies = 0

    def __deepcopy__(self, memo):
        OwnWay.copies += 1
        made = OwnWay(self.in_features, self.out_features)
        memo[id(self)] = made
        return made


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.extra = [1]


class Restored(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.ones(2)), 0

    def __setstate__(self, state):
        super().__setstate__(state)
        self.times += 1


class Shortened(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.cache = nn.Parameter(torch.ones(2)), [1, 2]

    def __getstate__(self):
        return {**self.__dict__, "cache": []}


MODULES = {
    "attributes": Keeps,
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True),
    "lists": lambda: Net(lambda s, x: x, a=nn.ModuleList([nn.Conv2d(2, 3, 3, padding=1)]), b=nn.ModuleDict({"x": nn.LayerNorm(4)}), p=nn.ParameterList([torch.ones(2)])),
    "own way": lambda: nn.Sequential(OwnWay(3, 2), nn.Linear(2, 2)),
    "slots": lambda: nn.Sequential(Slotted(), nn.Linear(2, 2)),
    "restored": Restored,
    "shortened": Shortened,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "scripted": lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3)),
}  # fmt: skip


def told(value, seen):
    """What two copies must have in common: types, numbers, and which objects are the same one."""
    if isinstance(value, int | float | str | bool | type(None) | type) or (callable(value) and not isinstance(value, nn.Module)):
        return type(value), repr(value) if not callable(value) else None
    if id(value) in seen:
        return "seen", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # held: no other may get its id
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.requires_grad, value.tolist()
    if isinstance(value, torch.Generator):
        return "generator", value.get_state().tolist()
    if isinstance(value, random.Random):
        return "dice", value.getstate()
    if isinstance(value, dict):
        return type(value), [(repr(key), told(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [told(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    slots = {name: getattr(value, name) for each in type(value).__mro__ for name in vars(each).get("__slots__", ()) if hasattr(value, name)}
    return type(value), told(slots, seen), told(getattr(value, "__dict__", {}), seen)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("share", [False, True], ids=["all its own", "parameters shared"])
@pytest.mark.parametrize("name", MODULES)
def test_a_copy_is_what_deepcopy_makes(name, share):
    module = MODULES[name]()
    shared = {id(parameter): parameter for parameter in module.parameters()} if share else {}
    expected, found = copy.deepcopy(module, dict(shared)), duplicate(module, dict(shared))
    if name == "own way":  # which draws new weights
        assert OwnWay.copies == 2 * (1 + share)
        OwnWay.copies = 2 if not share else 0
        assert [type(one) for one in found.modules()] == [type(one) for one in expected.modules()]
        return
    assert told(found, {}) == told(expected, {})
    assert {id(p) for p in found.parameters()}.isdisjoint({id(p) for p in module.parameters()}) != share or name == "scripted"


def test_nothing_that_changes_is_shared():
    module = Keeps()
    before = told(module, {})
    twin = isolated(module)
    twin(torch.randn(5, 3))
    twin.words["a"]["b"], twin.words[3][1][0] = 2, 9
    twin.table.zero_(), twin.seen.add(5), twin.ordered["a"].append(2), twin.by_pair[1, 2].append(4)
    twin.inner[0].register_forward_hook(lambda *_: None), twin.inner[1]._non_persistent_buffers_set.add("x")
    twin.dice.random(), torch.rand(1, generator=twin.generator)
    assert told(module, {}) == before
    assert twin.tied is twin.inner[0] and twin.same_table is twin.table and twin.owner[0] is twin
    assert twin.counted == 1 and twin.inner[1].num_batches_tracked == 1 and twin.inner[0].weight is module.inner[0].weight


def test_a_copy_of_a_module_that_was_compiled_in_place_runs_itself():
    """Not the code that was compiled of the module it was copied from."""
    module = Keeps()
    module.inner.compile(backend="eager")
    module.compile(backend="eager")
    before = told({**vars(module), "_compiled_call_impl": None}, {})
    twin = isolated(module)
    assert twin._compiled_call_impl is None and twin.inner._compiled_call_impl is None
    twin(torch.randn(5, 3))
    assert told({**vars(module), "_compiled_call_impl": None}, {}) == before and twin.counted == 1


def test_draws_of_generators_that_a_module_holds_are_noticed():
    module = Keeps()
    before = random_fingerprint([module])
    assert random_fingerprint([isolated(module)]) == before
    module.dice.random()
    after = random_fingerprint([module])
    torch.rand(1, generator=module.generator)
    assert len({before, after, random_fingerprint([module])}) == 3

"""A walk through torch.nn: every module is exact, parameter-free, a loss, or refused with its reason."""

import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.testing import squared_output
from helpers import Net, assert_exact, row_norms
from torch_nn import BASE, REFUSED, TABLE

WALKED = [name for name, entry in TABLE.items() if entry.build is not None and entry.status != REFUSED and hasattr(nn, name)]
if torch.cuda.is_available():
    WALKED.remove("DataParallel")  # it would spread the batch over the devices


def test_the_table_is_complete():
    modules = {name for name in dir(nn) if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), nn.Module)}
    assert modules - set(TABLE) == set(), "new in torch.nn: say what becomes of it"


def network(entry):
    inputs = entry.inputs()
    scale = nn.Parameter(torch.rand(inputs[0].shape[1:] or (1,), dtype=torch.float64) + 0.5)
    layer = entry.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer.double() if not any(nn.parameter.is_lazy(p) for p in layer.parameters()) else None

    def forward(s, x, *rest):
        return entry.call(s.layer, x * s.scale, *rest)

    model = Net(forward, layer=layer, scale=scale)
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        entry.call(layer, inputs[0].float())
        model.double()
    return model, inputs


@pytest.mark.parametrize("name", [name for name in WALKED if not TABLE[name].random])
@pytest.mark.filterwarnings("ignore")
def test_exact(name):
    model, inputs = network(TABLE[name])
    assert_exact(model, *inputs)


@pytest.mark.parametrize("name", [name for name in WALKED if TABLE[name].random])
def test_random_layers(name):
    """The draws of one run, by one backward pass a loss."""
    model, inputs = network(TABLE[name])
    with cw.capture(model) as tape:
        losses = squared_output(model(*inputs))
    norms = cw.per_example_norms(tape, losses)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    torch.testing.assert_close(norms, row_norms(rows))


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.status == REFUSED])
def test_refused_with_a_reason(name):
    entry = TABLE[name]
    layer = entry.build()
    with pytest.raises(cw.Refusal, match=entry.refusal), cw.capture(layer):
        entry.call(layer, entry.inputs()[0].float())


@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith("Lazy") and TABLE[name].status != REFUSED])
@pytest.mark.filterwarnings("ignore")
def test_lazy_modules_initialised_under_the_tape(name):
    entry = TABLE[name]
    layer = entry.build()
    x = entry.inputs()[0].float()
    with cw.capture(layer) as tape:
        losses = squared_output(layer(x))
    norms = cw.per_example_norms(tape, losses)
    rows = [torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for loss in squared_output(layer(x))]
    torch.testing.assert_close(norms, row_norms(rows), rtol=1e-4, atol=1e-6)


def test_containers_of_parameters():
    model = Net(
        lambda s, x: sum(x @ w for w in s.many) + x @ s.named["a"] * s.named["b"],
        many=nn.ParameterList([torch.randn(3, 2), torch.randn(3, 2)]),
        named=nn.ParameterDict({"a": torch.randn(3, 2), "b": torch.randn(2)}),
    )
    assert_exact(model, torch.randn(5, 3))


def test_the_walk_has_no_empty_entries():
    assert all(entry.build is not None or entry.status == BASE for entry in TABLE.values())


def test_the_support_page_is_what_the_tables_say():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    written = (Path(__file__).parents[1] / "docs" / "support.md").read_text()
    assert (
        written
        == subprocess.run([sys.executable, Path(__file__).parent / "torch_nn.py"], capture_output=True, text=True, check=True).stdout
    )

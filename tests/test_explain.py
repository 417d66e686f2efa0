"""private.explain(): what a step does for each parameter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.explain import WAYS, Explained, table
from helpers import Net, examples


def training(model, **options):
    plan = cw.PrivacyPlan(dataset_size=1000, batch_size=7, steps=50, delta=1e-5, clipping=cw.flat(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.PrivateTraining(model, optimizer, plan, own_batches=True, **options), optimizer


def test_every_parameter_has_a_line(capsys):
    model = Net(
        lambda s, x: s.b(torch.tanh(s.a(s.c(x.transpose(1, 2)).transpose(1, 2))).mean(1)) * s.scale,
        c=nn.Conv1d(4, 5, 3),
        a=nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
        b=nn.Linear(6, 3),
        scale=nn.Parameter(torch.ones(3)),
    ).double()
    private, optimizer = training(model)
    private.explain()
    assert "No step has been taken yet" in capsys.readouterr().out
    for _ in range(3):
        x = examples(6, 9, 4)
        private.loss(F.cross_entropy(model(x), torch.arange(6) % 3, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
    private.explain()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "batches of about 7 examples" and lines[1].split()[0] == "parameter"
    last = next(place for place, line in enumerate(lines) if line.startswith("together:"))
    by_name = {line.split()[0]: line for line in lines[2:last]}
    assert set(by_name) == {name for name, _ in model.named_parameters()}
    assert "conv1d" in by_name["c.weight"] and "7 windows of 5 × 4 × 3" in by_name["c.weight"] and " keep " in by_name["c.weight"]
    assert "1 × (3 ⊗ 6)" in by_name["b.weight"] and "product" in by_name["b.weight"]
    assert "pulled back" in by_name["a.parametrizations.weight.original1"] and "entry by entry" in by_name["scale"]
    kept = 7 * 5 * 4 * 3 * 8 / 2**20  # of a batch as the plan expects it: how many were drawn is nobody's business
    assert f"{kept:.3g}" in by_name["c.weight"]
    shown = [float(line.split()[-1]) for name, line in by_name.items() if name in ("c.weight", "c.bias", "b.bias", "a.bias", "scale")]
    assert float(lines[last].split(" MB kept")[0].split()[-1]) == pytest.approx(sum(shown), rel=0.02)
    meanings = [line.split(":")[0] for line in lines[last + 1 :]]
    assert meanings == ["written", "product", "keep", "pulled back"]  # of what occurs, and nothing else
    private.close()


def test_the_table():
    rows = [
        Explained("w", ("torch.conv2d",), "9 windows of 2 × 2", "keep by groups", 0.0015, 3 * 2**17),
        Explained("b", (), "2", "written", None, 0),
    ]
    assert table(rows, 8).splitlines() == [
        "batches of about 8 examples",
        "parameter  used by       an example's gradient  way              ms  kept MB",
        "w          torch.conv2d  9 windows of 2 × 2     keep by groups  1.5        3",
        "b                        2                      written",
        "together: 1.5 ms for the 1 of 2 that were timed, 3 MB kept",
        f"written: {WAYS['written']}",
        f"keep: {WAYS['keep']}",
    ]
    assert "together: not timed one by one, 0 MB kept" in table(rows[1:], 8)


def test_every_way_has_a_meaning():
    """Those of the ways that a planner may take, however their kernels and tiles are called."""
    rows = [
        Explained("w", (), "", way, None, 0)
        for way in ("tiles by windows", "keep by kernel of 64", "gram kernel of 32", "kernel of 16", "gram", "rows")
    ]
    text = table(rows, 1).splitlines()
    assert [line.split(":")[0] for line in text[-6:]] == ["rows", "keep", "tiles", "gram", "kernel", "gram kernel"]


@pytest.mark.parametrize(("method", "said"), [("nxbp", "one example after the other"), ("multiloss", "MB kept")])
def test_other_methods(method, said, capsys):
    model = nn.Linear(4, 3)
    private, optimizer = training(model, method=method)
    private.loss(F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3, reduction="none")).backward()
    optimizer.step()
    private.explain()
    shown = capsys.readouterr().out
    assert said in shown and "No step" not in shown and ", 0 MB kept" not in shown
    private.close()

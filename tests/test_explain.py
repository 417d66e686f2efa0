"""private.explain(): what a step does for each parameter."""

import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.explain import Explained, table
from helpers import Net, examples


def training(model):
    plan = cw.PrivacyPlan(dataset_size=1000, batch_size=7, steps=50, delta=1e-5, clipping=cw.flat(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.PrivateTraining(model, optimizer, plan, own_batches=True), optimizer


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
    by_name = {line.split()[0]: line for line in lines[2:-1]}
    assert set(by_name) == {name for name, _ in model.named_parameters()}
    assert "conv1d" in by_name["c.weight"] and "7 windows of 5 × 4 × 3" in by_name["c.weight"] and " keep " in by_name["c.weight"]
    assert "1 × (3 ⊗ 6)" in by_name["b.weight"] and "product" in by_name["b.weight"]
    assert "pulled back" in by_name["a.parametrizations.weight.original1"] and "entry by entry" in by_name["scale"]
    kept = 7 * 5 * 4 * 3 * 8 / 2**20  # of a batch as the plan expects it: how many were drawn is nobody's business
    assert f"{kept:.3g}" in by_name["c.weight"] and lines[-1].startswith("together:") and f"{kept:.3g} MB kept" in lines[-1]
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
        "together: 1.5 ms, 3 MB kept",
    ]

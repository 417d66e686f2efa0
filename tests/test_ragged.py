"""Examples without a fixed number of rows: graphs, experts, tokens without padding. Owners are measured, or declared."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.testing import squared_output
from helpers import ALL_METHODS, Net, row_norms


def graphs(sizes):
    """Nodes, edges (a ring in every graph, numbered through), and the graph of each node."""
    nodes = torch.randn(sum(sizes), 3, dtype=torch.float64)
    edges, start = [], 0
    for size in sizes:
        ring = torch.arange(size)
        edges.append(start + torch.stack([ring, ring.roll(1)]))
        start += size
    return nodes, torch.cat(edges, 1), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def message_passing(s, nodes, edges, graph, count):
    for layer in s.layers:
        messages = torch.tanh(layer(nodes))[edges[0]]
        nodes = torch.zeros_like(messages[:1]).expand(len(nodes), -1).clone().index_add(0, edges[1], messages)
    return s.out(nodes.new_zeros(count, nodes.shape[1]).index_add(0, graph, nodes))


def assert_right(model, losses_of):
    """Norms and clipped sums against one backward pass a loss, by every method, over several steps."""
    for method in (*ALL_METHODS, *ALL_METHODS):
        losses = losses_of()
        parameters = dict(model.named_parameters())
        rows = [torch.autograd.grad(loss, list(parameters.values()), retain_graph=True) for loss in losses]
        norms = row_norms(rows)
        bound = float(norms.median())
        with cw.capture(model) as tape:
            losses = losses_of()
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
        found = cw.clipped_gradients(tape, losses, cw.flat(bound), method=method)
        weights = (bound / norms).clamp(max=1)
        for name, column in zip(parameters, zip(*rows)):
            torch.testing.assert_close(found[name], torch.einsum("b,b...->...", weights, torch.stack(column)))


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("sizes", [[3, 5, 4, 6], [2, 2, 2], [4, 3, 4, 1, 5, 2]])
def test_graphs(sizes, declared):
    model = Net(message_passing, layers=nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]), out=nn.Linear(4, 2)).double()
    nodes, edges, graph = graphs(sizes)
    given = cw.owners(nodes, graph) if declared else nodes
    assert_right(model, lambda: squared_output(model(given, edges, graph, len(sizes))))


@pytest.mark.parametrize("declared", ["nothing", "owners", "everything"])
@pytest.mark.parametrize("batch", [4, 8, 12])
def test_graphs_with_as_many_edges_each(declared, batch):
    """Three edges a graph look like three rows an example; they number nodes, and may not change hands."""
    model = Net(message_passing, layers=nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]), out=nn.Linear(4, 2)).double()
    for _ in range(3):
        sizes = torch.randint(2, 5, (batch,))
        nodes, graph = torch.randn(int(sizes.sum()), 3, dtype=torch.float64), torch.arange(batch).repeat_interleave(sizes)
        edges = torch.cat([start + torch.randint(0, int(size), (2, 3)) for size, start in zip(sizes, sizes.cumsum(0) - sizes)], 1)
        if declared != "nothing":
            cw.owners(nodes, graph)
        if declared == "everything":
            cw.constant(edges)
            cw.constant(graph)
        rows = [
            torch.autograd.grad(loss, list(model.parameters()))
            for loss in [squared_output(model(nodes, edges, graph, batch))[i] for i in range(batch)]
        ]
        with cw.capture(model) as tape:
            losses = squared_output(model(nodes, edges, graph, batch))
        norms = row_norms(rows)
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


def test_graphs_that_exchange_messages_are_refused():
    model = Net(message_passing, layers=nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)]), out=nn.Linear(4, 2)).double()
    nodes, edges, graph = graphs([3, 4, 5])
    edges = torch.cat([edges, torch.tensor([[0], [4]])], 1)  # from the first graph into the second
    with cw.capture(model) as tape:
        losses = squared_output(model(nodes, edges, graph, 3))
    with pytest.raises(cw.MixedExamples):
        cw.per_example_norms(tape, losses)


class Experts(nn.Module):
    """Top-1 routing: each expert gets the tokens that chose it, however many."""

    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, width)) for _ in range(count))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        gate = self.router(tokens).softmax(-1)
        chosen = gate.argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(tokens[rows]) * gate[rows, number, None])
        return out.view_as(x) + x


def test_mixture_of_experts():
    model = Experts(3, 3).double()
    for _ in range(2):
        x = torch.randn(5, 4, 3, dtype=torch.float64)
        assert_right(model, lambda: squared_output(model(x)))


def test_an_expert_that_nobody_chose_and_one_that_all_chose():
    model = Experts(3, 3).double()
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(torch.tensor([0.0, 5.0, 0.0]))
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    found = cw.clipped_gradients(tape, losses, cw.flat(1e9))
    own = torch.autograd.grad(squared_output(model(x)).sum(), list(model.parameters()), allow_unused=True)
    for (name, parameter), grad in zip(model.named_parameters(), own):
        torch.testing.assert_close(found.get(name, torch.zeros_like(parameter)), torch.zeros_like(parameter) if grad is None else grad)


def test_routing_with_a_capacity_mixes_examples():
    """Whether a token finds room depends on the tokens before it."""

    def forward(s, x):
        tokens = x.flatten(0, 1)
        first = (tokens[:, 0] > 0).long()
        room = F.one_hot(first, 2).cumsum(0).gather(1, first[:, None]) <= 3
        return (s.a(tokens) * room).view(len(x), -1)

    model = Net(forward, a=nn.Linear(3, 2)).double()
    with pytest.raises(cw.MixedExamples):
        for _ in range(4):
            with cw.capture(model) as tape:
                losses = squared_output(model(torch.randn(6, 4, 3, dtype=torch.float64)))
            cw.per_example_norms(tape, losses)


def test_experts_chosen_by_a_tensor_without_axes():
    """for e in chosen.unique(): a part of the weight for all rows that chose it."""

    def forward(s, x):
        tokens = x.flatten(0, 1)
        chosen = (tokens[:, 0] > 0).long()
        out = torch.zeros(len(tokens), 2, dtype=x.dtype)
        for number in chosen.unique():
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, F.linear(tokens[rows], s.w[number]))
        return out.view(len(x), -1)

    model = Net(forward, w=nn.Parameter(torch.randn(2, 2, 3))).double()
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    assert_right(model, lambda: squared_output(model(x)))


def test_pieces_of_declared_owners():
    model = Net(
        lambda s, x, lengths: torch.stack([s.a(part).tanh().sum(0) for part in x.split(lengths.tolist())]), a=nn.Linear(3, 2)
    ).double()
    for lengths in ([2, 2, 2, 2], [3, 1, 2, 2], [1, 4, 2, 1]):
        x, owner = torch.randn(8, 3, dtype=torch.float64), torch.arange(4).repeat_interleave(torch.tensor(lengths))
        assert_right(model, lambda: squared_output(model(cw.owners(x, owner), torch.tensor(lengths))))


def test_records_of_users_by_declared_owners():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    records, user = torch.randn(9, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 2, 0, 0, 3, 1, 2])
    cw.owners(records, user)
    assert_right(model, lambda: torch.zeros(4, dtype=torch.float64).index_add(0, user, model(records).square().sum(1)))


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (torch.tensor([0, 1]), "one for each of the 3 rows"),
        (torch.tensor([0.0, 1.0, 2.0]), "integers"),
        (torch.zeros(3, 1, dtype=torch.long), "vector"),
    ],
)
def test_owners_must_fit(owner, message):
    with pytest.raises(ValueError, match=message):
        cw.owners(torch.randn(3, 2), owner)


def test_owners_must_exist():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    cw.owners(x, torch.tensor([0, 1, 2, 7, 1]))
    with cw.capture(model) as tape:
        losses = torch.stack([part.square().sum() for part in model(x).split([2, 2, 1])])
    with pytest.raises(ValueError, match="example 7"):
        cw.per_example_norms(tape, losses)

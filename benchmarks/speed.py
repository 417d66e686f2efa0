"""Private steps over ordinary ones, eager and as graphs: forward pass to updated weights, Adam, in turns in one run.

    python benchmarks/speed.py [--cases "mlp B128" …] [--steps 40] [--ways ordinary "private, traced" …]

ordinary                an ordinary eager step
ordinary, graph         the same recorded as a CUDA graph (Adam with capturable=True)
private                 PrivateTraining's eager loop: clipping, checks, ledger, noise
private, traced         private.compile(backend="eager"): the graph as it was traced, on a GPU replayed
private, compiled       private.compile(): by Inductor, on a GPU replayed
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from private_step import ORDINARY, Step, Way, measure, measure_cases, plain_way, private_training, private_way
from wall_clock import CASES, DEVICE, Case, losses_of

WARM_UP = 12  # a graph is there after six
AT_ONCE = 5  # steps between two looks at the clock


def recorded(model: nn.Module, case: Case) -> Step | None:
    """An ordinary step as a CUDA graph: what graphs alone are worth."""
    if DEVICE != "cuda":
        return None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, capturable=True)
    x, y = (tensor.to(DEVICE) for tensor in case.batch())

    def step() -> None:
        losses_of(model, x, y, case.bf16).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(new_x: Tensor, new_y: Tensor, keep: Any = (model, optimizer)) -> None:  # the graph reads their memory
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()

    return replay


def compiled_way(backend: str) -> Way:
    def make(model: nn.Module, case: Case) -> Step:
        private, _ = private_training(model, case)
        rows = private.plan.batch_size  # batches here have one size
        return private.compile(lambda model, x, y: losses_of(model, x, y, case.bf16), rows=rows, backend=backend)

    return make


WAYS: dict[str, Way] = {
    ORDINARY: plain_way("non-private"),
    "ordinary, graph": recorded,
    "private": private_way(),
    "private, traced": compiled_way("eager"),
    "private, compiled": compiled_way("inductor"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    ways = {name: WAYS[name] for name in dict.fromkeys([ORDINARY, *options.ways])}
    measure_cases("speed", options.cases, lambda case: measure(case, ways, options.steps, WARM_UP, AT_ONCE))


if __name__ == "__main__":
    main()

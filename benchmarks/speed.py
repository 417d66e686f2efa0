"""Private steps over ordinary ones, eager and as graphs: forward pass to updated weights, Adam, in turns in one run.

    python benchmarks/speed.py [--cases mlp cnn …] [--steps 40] [--ways ordinary private …] [--out results.json]

ordinary                an ordinary eager step
ordinary, graph         the same recorded as a CUDA graph (Adam with capturable=True)
private                 PrivateTraining's eager loop: clipping, checks, ledger, noise
private, traced         private.compile(backend="eager"): the graph as it was traced, on a GPU replayed
private, compiled       private.compile(): by Inductor, on a GPU replayed
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.machine import machine
from report import write_results
from wall_clock import CASES, DEVICE, Case, losses_of

Step = Callable[[Tensor, Tensor], Any]
WARM_UP = 12  # a graph is there after six


def ordinary(model: nn.Module, case: Case) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step(x: Tensor, y: Tensor) -> None:
        losses_of(model, x, y, case.bf16).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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


def private(model: nn.Module, case: Case, backend: str | None) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    size = len(case.batch()[1])
    plan = cw.PrivacyPlan(
        dataset_size=10**6, batch_size=size, steps=10**6, delta=1e-7, clipping=cw.flat(1.0), noise_multiplier=1.0, sampler="fixed_size"
    )
    training = cw.PrivateTraining(model, optimizer, plan, own_batches=True, ledger=tempfile.mkdtemp() + "/ledger")
    if backend is not None:
        return training.compile(lambda model, x, y: losses_of(model, x, y, case.bf16), rows=size, backend=backend)

    def step(x: Tensor, y: Tensor) -> None:
        training.loss(losses_of(model, x, y, case.bf16)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[[nn.Module, Case], Step | None]] = {
    "ordinary": ordinary,
    "ordinary, graph": recorded,
    "private": lambda model, case: private(model, case, None),
    "private, traced": lambda model, case: private(model, case, "eager"),
    "private, compiled": lambda model, case: private(model, case, "inductor"),
}


def measure(case: Case, ways: list[str], steps: int) -> dict[str, dict[str, float]]:
    first = case.build().to(DEVICE)
    made = {name: WAYS[name](copy.deepcopy(first), case) for name in ways}
    runs = {name: step for name, step in made.items() if step is not None}
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int] = {}
    for _ in range(WARM_UP + steps):
        x, y = (tensor.to(DEVICE) for tensor in case.batch())  # new memory: no row goes through twice
        for name, step in runs.items():
            given = (x.clone(), y.clone())
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step(*given)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated()
            times[name].append(1e3 * (time.perf_counter() - start))
    found: dict[str, dict[str, float]] = {}
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    for name, median in medians.items():
        found[name] = {"milliseconds": round(median, 3), "times_ordinary": round(median / medians["ordinary"], 3)}
        if "ordinary, graph" in medians and name != "ordinary":
            found[name]["times_ordinary_graph"] = round(median / medians["ordinary, graph"], 3)
        if name in peaks:
            found[name]["peak_bytes"] = peaks[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write JSON here, not to benchmarks/results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="an earlier PrivateTraining")
    results: dict[str, Any] = {}
    for name in options.cases:
        start = time.perf_counter()
        results[name] = measure(CASES[name], options.ways, options.steps)
        print(f"{name}  ({time.perf_counter() - start:.0f} s)", flush=True)
        for way, values in results[name].items():
            over_graph = f"{values['times_ordinary_graph']:8.2f} × graph" if "times_ordinary_graph" in values else ""
            print(f"  {way:20s} {values['milliseconds']:9.3f} ms  {values['times_ordinary']:6.2f} × ordinary  {over_graph}", flush=True)
        gc.collect()
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    else:
        write_results("speed", results)


if __name__ == "__main__":
    main()

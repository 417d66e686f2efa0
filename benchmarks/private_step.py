"""A whole private step (clipping, noise, checks, ledger, Adam) over an ordinary one and over clipping alone; same run, in turns.

    python benchmarks/private_step.py [--cases "mlp B128" …] [--steps 30] [--noise fast secure]

Each way has its own copy of the model. Memory is what a step adds at its peak, plus one model with its optimizer.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.machine import machine
from report import write_results
from wall_clock import CASES, DEVICE, WARM_UP, Case, losses_of, step


def private_way(model: nn.Module, case: Case, noise: str) -> Callable[[Tensor, Tensor], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    plan = cw.PrivacyPlan(
        dataset_size=10**6, batch_size=128, steps=10**6, delta=1e-7, clipping=cw.flat(1.0), noise_multiplier=1.0, sampler="poisson"
    )
    ledger = tempfile.mkdtemp() + "/ledger"
    private = cw.PrivateTraining(model, optimizer, plan, own_batches=True, noise=noise, ledger=ledger)

    def run(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        private.loss(losses_of(model, x, y, case.bf16)).backward()
        optimizer.step()

    return run


def plain_way(model: nn.Module, case: Case, method: str) -> Callable[[Tensor, Tensor], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    return lambda x, y: step(model, optimizer, method, x, y, case.bf16)


def measure(case: Case, steps: int, noises: list[str]) -> dict[str, dict[str, float]]:
    first = case.build().to(DEVICE)
    size = sum(p.numel() * p.element_size() for p in first.parameters())
    ways: dict[str, Callable[[Tensor, Tensor], None]] = {"ordinary": plain_way(first, case, "non-private")}
    ways["clipped"] = plain_way(copy.deepcopy(first), case, "bookkeep")
    for noise in noises:
        ways[f"private, {noise} noise"] = private_way(copy.deepcopy(first), case, noise)
    x, y = (tensor.to(DEVICE) for tensor in case.batch())
    times: dict[str, list[float]] = {name: [] for name in ways}
    added = dict.fromkeys(ways, 0)
    for _ in range(WARM_UP + steps):
        for name, run in ways.items():
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            run(x, y)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                added[name] = torch.cuda.max_memory_allocated() - before
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    states = 4 * size  # weights, gradients, Adam's two moments
    found: dict[str, dict[str, float]] = {}
    for name in ways:
        found[name] = {"milliseconds": round(medians[name], 3), "times_ordinary": round(medians[name] / medians["ordinary"], 3)}
        if DEVICE == "cuda":
            found[name]["memory_times_ordinary"] = round((added[name] + states) / (added["ordinary"] + states), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--noise", nargs="+", default=["fast"])
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(f"{'case':26s} {'way':22s} {'ms a step':>10s} {'x ordinary':>11s} {'memory':>7s}")
    for name in options.cases:
        if CASES[name].large and DEVICE == "cpu":
            continue
        try:
            results["cases"][name] = measure(CASES[name], options.steps, options.noise)
        except ImportError as missing:
            print(f"{name:26s} left out: {missing}")
            continue
        for way, row in results["cases"][name].items():
            print(f"{name:26s} {way:22s} {row['milliseconds']:10.2f} {row['times_ordinary']:11.2f} "
                  f"{row.get('memory_times_ordinary', float('nan')):7.2f}", flush=True)  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
    write_results("private_step", results)


if __name__ == "__main__":
    main()

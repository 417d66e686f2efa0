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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from cases import CASES, DEVICE, Case, losses_of
from clipwise.machine import machine
from report import write_results

Step = Callable[[Tensor, Tensor], Any]
Way = Callable[[nn.Module, Case], Step | None]  # None: not to be had on this machine

WARM_UP = 3  # steps that are left out: clipwise verifies the model on them


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, method: str, x: Tensor, y: Tensor, bf16: bool) -> None:
    optimizer.zero_grad()
    if method == "non-private":
        losses_of(model, x, y, bf16).sum().backward()
    else:
        with cw.capture(model) as tape:
            losses = losses_of(model, x, y, bf16)
        cw.clipped_loss(tape, losses, cw.flat(1.0), method=method).backward()
    optimizer.step()


def private_training(model: nn.Module, case: Case, noise: str = "fast") -> tuple[cw.PrivateTraining, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    plan = cw.PrivacyPlan(
        dataset_size=10**6, batch_size=len(case.batch()[1]), steps=10**6, delta=1e-7, clipping=cw.flat(1.0), noise_multiplier=1.0
    )
    return cw.PrivateTraining(model, optimizer, plan, own_batches=True, noise=noise, ledger=tempfile.mkdtemp() + "/ledger"), optimizer


def private_way(noise: str = "fast") -> Way:
    def make(model: nn.Module, case: Case) -> Step:
        private, optimizer = private_training(model, case, noise)

        def run(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            private.loss(losses_of(model, x, y, case.bf16)).backward()
            optimizer.step()

        return run

    return make


def plain_way(method: str) -> Way:
    def make(model: nn.Module, case: Case) -> Step:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
        return lambda x, y: _step(model, optimizer, method, x, y, case.bf16)

    return make


ORDINARY = "ordinary"


def measure(case: Case, ways: dict[str, Way], steps: int, warm_up: int = WARM_UP, at_once: int = 1) -> dict[str, dict[str, float]]:
    """{way: {milliseconds, times_ordinary, memory_times_ordinary}}; ORDINARY is one of the ways.

    The clock is read after `at_once` steps: a training loop does not wait for the device after each of them.
    """
    first = case.build().to(DEVICE)
    size = sum(p.numel() * p.element_size() for p in first.parameters())
    made = {name: make(first if name == ORDINARY else copy.deepcopy(first), case) for name, make in ways.items()}
    runs = {name: run for name, run in made.items() if run is not None}
    x, y = (tensor.to(DEVICE) for tensor in case.batch())
    times: dict[str, list[float]] = {name: [] for name in runs}
    added = dict.fromkeys(runs, 0)
    for count in [1] * warm_up + [at_once] * (steps // at_once):
        for name, run in runs.items():
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            for _ in range(count):
                run(x, y)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                added[name] = torch.cuda.max_memory_allocated() - before
            times[name].append(1e3 * (time.perf_counter() - start) / count)
    medians = {name: statistics.median(values[warm_up:]) for name, values in times.items()}
    states = 4 * size  # weights, gradients, Adam's two moments
    found: dict[str, dict[str, float]] = {}
    for name in runs:
        found[name] = {"milliseconds": round(medians[name], 3), "times_ordinary": round(medians[name] / medians[ORDINARY], 3)}
        if DEVICE == "cuda":
            found[name]["memory_times_ordinary"] = round((added[name] + states) / (added[ORDINARY] + states), 3)
    return found


def measure_cases(
    title: str, names: list[str], measured: Callable[[Case], dict[str, dict[str, float]]]
) -> tuple[Path, dict[str, dict[str, dict[str, float]]]]:  # fmt: skip
    """Measure, print and write; where, and what. Cases that this machine cannot run are left out, and named."""
    torch.backends.cuda.matmul.allow_tf32 = True
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(f"{'case':26s} {'way':22s} {'ms a step':>10s} {'x ordinary':>11s} {'memory':>7s}")
    for name in names:
        if CASES[name].large and DEVICE == "cpu":
            continue
        try:
            results["cases"][name] = measured(CASES[name])
        except ImportError as missing:
            print(f"{name:26s} left out: {missing}")
            continue
        for way, row in results["cases"][name].items():
            print(f"{name:26s} {way:22s} {row['milliseconds']:10.2f} {row['times_ordinary']:11.2f} "
                  f"{row.get('memory_times_ordinary', float('nan')):7.2f}", flush=True)  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
    return write_results(title, results), results["cases"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--noise", nargs="+", default=["fast"])
    options = parser.parse_args()
    ways = {ORDINARY: plain_way("non-private"), "clipped": plain_way("bookkeep")}
    ways |= {f"private, {noise} noise": private_way(noise) for noise in options.noise}
    measure_cases("private_step", options.cases, lambda case: measure(case, ways, options.steps))


if __name__ == "__main__":
    main()

"""A whole private step (clipping, noise, checks, ledger, Adam) over an ordinary one and over clipping alone; same run, in turns.

    python benchmarks/private_step.py [--cases "mlp B128" …] [--steps 30] [--noise fast secure]

Each way has its own copy of the model. Memory is what a way holds at the peak of a step: model, optimizer, activations, graphs.
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
from clipwise.compiled.recording import begin_with_libraries, recording_stream
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


def measure(
    case: Case, ways: dict[str, Way], steps: int, warm_up: int = WARM_UP, at_once: int = 1, settle: int = 0, *, apart: bool = False
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """{way: {milliseconds, times_ordinary, looks, megabytes, memory_times_ordinary}}; ORDINARY is one of the ways.

    Each way is made and warmed up by itself; what it then has at the peak of a step is its memory. Times are taken in turns, which begin with
    `settle` steps that do not count: a training finds its tensors where it left them, unless another one took its memory meanwhile. `apart`: one
    way after the other, as a training has its process for itself. The clock is read after `at_once` steps: a training loop does not wait for the
    device after each of them.
    """
    first = case.build()
    x, y = (tensor.to(DEVICE) for tensor in case.batch())
    _let_libraries_take_room(ways[ORDINARY](copy.deepcopy(first).to(DEVICE), case), x, y)
    runs: dict[str, Step] = {}
    bytes_of: dict[str, int] = {}
    idle_in: dict[str, int] = {}  # of these, what only graphs may use
    times: dict[str, list[float]] = {}
    for name, make in ways.items():
        before = _held()
        run = make(copy.deepcopy(first).to(DEVICE), case)
        if run is not None:
            for _ in range(warm_up):
                run(x, y)
            times[name] = [_timed(run, x, y, at_once, settle) for _ in range(steps // at_once)] if apart else []
            allocated, idle = _peak_of(lambda: run(x, y))
            bytes_of[name], idle_in[name] = allocated + idle - before, idle
            if not apart:
                runs[name] = run
        del run
        gc.collect()
    for _ in range(steps // at_once):
        for name, run in runs.items():
            times[name].append(_timed(run, x, y, at_once, settle))
    medians = {name: statistics.median(values) for name, values in times.items()}
    found: dict[str, dict[str, Any]] = {}
    for name in times:
        found[name] = {"milliseconds": round(medians[name], 3), "times_ordinary": round(medians[name] / medians[ORDINARY], 3)}
        found[name]["looks"] = [round(value, 3) for value in times[name]]
        if DEVICE == "cuda":
            found[name]["megabytes"] = round(bytes_of[name] / 2**20, 1)
            found[name]["megabytes_for_graphs"] = round(idle_in[name] / 2**20, 1)
            found[name]["memory_times_ordinary"] = round(bytes_of[name] / bytes_of[ORDINARY], 3)
    return found


def _timed(run: Step, x: Tensor, y: Tensor, steps: int, settle: int) -> float:
    """Milliseconds a step, of so many after others that do not count."""
    for _ in range(settle):
        run(x, y)
    _synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run(x, y)
    _synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _let_libraries_take_room(run: Step | None, x: Tensor, y: Tensor) -> None:
    """cuBLAS keeps 32 MB for each stream, once: nobody is charged with that."""
    if DEVICE == "cuda" and run is not None:
        run(x, y)
        with torch.cuda.stream(recording_stream(x.device)):
            begin_with_libraries(x.device)
        torch.cuda.synchronize()


def _held() -> int:
    """Bytes that are allocated now, with all that graphs have set aside for themselves; what nobody uses any more is given back first, and
    peaks begin anew: a training goes by what it has held itself."""
    if DEVICE == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() + _idle_in_graphs()


def _peak_of(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that are allocated at the peak of a step, and those that graphs have set aside besides. (What graphs of before had, anybody may have.)"""
    if DEVICE == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return most, _idle_in_graphs()


def _idle_in_graphs() -> int:
    """Bytes in the pools of graphs that are not allocated: nobody else can have them."""
    pools = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)


def measure_cases(
    title: str, names: list[str], measured: Callable[[Case], dict[str, dict[str, Any]]]
) -> tuple[Path, dict[str, dict[str, dict[str, Any]]]]:  # fmt: skip
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
                  f"{row.get('memory_times_ordinary', '-'):>7}", flush=True)  # fmt: skip
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

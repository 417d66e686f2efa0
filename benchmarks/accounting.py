"""What the guarantee costs besides arithmetic: seconds to calibrate, microseconds to draw, to make noise and to count a step.

python benchmarks/accounting.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import clipwise as cw
from clipwise.accounting import require_dp_accounting
from clipwise.ledger import Ledger
from clipwise.machine import machine
from clipwise.randomness import Fast, Secure
from clipwise.sampling import Sampler
from report import write_results

ROWS: dict[str, dict[str, Any]] = {
    "poisson": {},
    "poisson, replace one": {"relation": "replace_one"},
    "truncated poisson, default cap": {"sampler": "truncated_poisson"},
    "truncated poisson, cap 320": {"sampler": "truncated_poisson", "max_batch_size": 320},
    "truncated poisson, cap 288": {"sampler": "truncated_poisson", "max_batch_size": 288},
    "truncated poisson, cap 256": {"sampler": "truncated_poisson", "max_batch_size": 256},
    "fixed size": {"sampler": "fixed_size"},
    "shuffle": {"sampler": "shuffle"},
}


def calibrations() -> dict[str, dict[str, float]]:
    """Sixty epochs of 60 000 records, 256 a step, ε = 3, δ = 10⁻⁵."""
    require_dp_accounting()
    found = {}
    for name, fields in ROWS.items():
        start = time.perf_counter()
        plan = cw.PrivacyPlan.calibrate(
            epsilon=3.0, delta=1e-5, dataset_size=60_000, batch_size=256, epochs=60, clipping=cw.flat(1.0), **fields
        )
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        budget = plan.budget()
        found[name] = {
            "calibrate_seconds": round(seconds, 2), "budget_seconds": round(time.perf_counter() - start, 2),
            "noise_multiplier": plan.noise_multiplier, "epsilon": round(budget.epsilon, 4),
        }  # fmt: skip
        print(f"  {name:32s} {seconds:6.2f} s to calibrate, z = {plan.noise_multiplier:.4f}, ε = {budget.epsilon:.4f}", flush=True)
    return found


def microseconds(work: Callable[[int], Any], repeats: int) -> float:
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        work(number)
        times.append(1e6 * (time.perf_counter() - start))
    return round(statistics.median(times), 1)


def plan_of(size: int, sampler: str) -> cw.PrivacyPlan:
    return cw.PrivacyPlan(
        dataset_size=size, batch_size=512, steps=10**6, delta=1e-12, clipping=cw.flat(1.0), noise_multiplier=1.0, sampler=sampler
    )


def main() -> None:
    results: dict[str, Any] = {"machine": machine()}
    print("calibration:")
    results["calibration"] = calibrations()
    results["microseconds"] = small = {}
    ledger = Ledger(plan_of(10**6, "poisson"), tempfile.mkdtemp() + "/ledger")
    small["count a step in a ledger file"] = microseconds(lambda number: ledger.raise_to(number), 5000)
    for size in (10**6, 10**9):
        for sampler in ("poisson", "truncated_poisson", "shuffle", "fixed_size"):
            source = Sampler(plan_of(size, sampler), Fast())
            small[f"draw 512 of {size:.0e} by {sampler}"] = microseconds(source.draw, 200)
    for noise in (Fast(), Secure()):
        seconds = microseconds(lambda step: noise.gaussians(10**7, "noise", step, torch.device("cpu")), 3) / 1e6
        results[f"seconds for 1e7 Gaussians, {noise.name}"] = round(seconds, 2)
        print(f"  10⁷ Gaussians, {noise.name}: {seconds:.2f} s")
    for name, value in small.items():
        print(f"  {name:48s} {value:10.1f} µs")
    code = "import sys, clipwise; print([m for m in ('scipy', 'dp_accounting') if m in sys.modules])"
    results["imported with clipwise"] = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    write_results("accounting", results)


if __name__ == "__main__":
    main()

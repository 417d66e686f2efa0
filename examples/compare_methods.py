"""Train the paper's MLP and CNN on real images by every method of clipping, and compare accuracy and speed.

    python examples/compare_methods.py [--seconds 18] [--batch-size 64] [--models mlp cnn]

Each method starts from the same weights and sees the same batches, so it learns the same; only the time differs. The methods
take turns, step by step, so that whatever else the machine does slows all of them. A method that has used up its seconds
stops early. Every example's gradient is clipped, but no noise is added: this compares ways to clip, it protects nobody yet.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from clipwise.data import Examples, fashion_mnist
from clipwise.experiments.contenders import ABOUT, CLIPPED_SUMS, CLIPPING, NONPRIVATE, losses_of
from clipwise.models import cnn, mlp

MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}
METHODS = {method: what for method, what in ABOUT.items() if method == NONPRIVATE or method in CLIPPED_SUMS}


@dataclass
class Runner:
    """A model in training by one method."""

    method: str
    model: nn.Module
    batch_size: int  # the constant that sums are divided by; never the size of the batch at hand
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.clipped_sums = CLIPPED_SUMS[self.method]() if self.method != NONPRIVATE else None

    def step(self, x: Tensor, y: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.fill_gradients(x, y)
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)

    def fill_gradients(self, x: Tensor, y: Tensor) -> None:
        """p.grad = Σ clip(g_i) / B; without the clip for the ordinary step."""
        if self.clipped_sums is None:
            (losses_of(self.model, x, y).sum() / self.batch_size).backward()
            return
        sums = self.clipped_sums(self.model, x, y)
        for name, parameter in self.model.named_parameters():
            parameter.grad = sums[name] / self.batch_size

    @property
    def median(self) -> float:
        """Seconds a step. The first is left out: clipwise verifies the model on it."""
        return statistics.median(self.times[1:] or self.times)


@dataclass(frozen=True)
class Outcome:
    method: str
    steps: int
    accuracy: float
    seconds_an_epoch: float


def batches(data: Examples, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in a fixed random order."""
    for rows in torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0)).split(size):
        yield data.inputs[rows], data.labels[rows]


def accuracy(model: nn.Module, data: Examples) -> float:
    with torch.no_grad():
        return float((model(data.inputs).argmax(1) == data.labels).float().mean())


def progress(label: str, done: int, total: int, note: str) -> None:
    """A bar that redraws itself within the terminal's width, and stays silent in a log."""
    if not sys.stderr.isatty():
        return
    columns = shutil.get_terminal_size().columns - 1
    text = f" {done}/{total} {note}"
    width = max(5, min(30, columns - len(label) - len(text) - 3))
    filled = width * done // total
    sys.stderr.write("\r" + f"{label} [{'=' * filled}{' ' * (width - filled)}]{text}"[:columns].ljust(columns))
    sys.stderr.flush()


def compare(name: str, train_set: Examples, test_set: Examples, size: int, seconds: float) -> list[Outcome]:
    """One epoch by every method in turns, or as many steps as fit into `seconds` for each."""
    runners = []
    for method in METHODS:
        torch.manual_seed(0)
        runners.append(Runner(method, MODELS[name](), size))
    total = -(-len(train_set.labels) // size)
    for step, (x, y) in enumerate(batches(train_set, size), 1):
        for runner in runners:
            if sum(runner.times) <= seconds:
                runner.step(x, y)
                progress(name, step, total, f"{runner.method}: {1e3 * runner.times[-1]:.0f} ms a step")
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
    return [Outcome(r.method, len(r.times), accuracy(r.model, test_set), r.median * total) for r in runners]


def show(name: str, outcomes: list[Outcome], steps: int, seconds: float) -> None:
    by_method = {outcome.method: outcome.seconds_an_epoch for outcome in outcomes}
    print(f"\n{name}: {steps} steps an epoch")
    print(f"  {'method':12s} {'test accuracy':>22s} {'seconds/epoch':>14s} {'x non-private':>14s} {'speed-up':>9s}")
    for o in outcomes:
        learnt = f"{100 * o.accuracy:.1f} % after {o.steps:3d} steps"
        slower, faster = o.seconds_an_epoch / by_method[NONPRIVATE], by_method["nxBP"] / o.seconds_an_epoch
        print(f"  {o.method:12s} {learnt:>22s} {o.seconds_an_epoch:14.2f} {slower:14.1f} {faster:9.1f}")
    stopped = [o.method for o in outcomes if o.steps < steps]
    if stopped:
        print(f"  out of time after {seconds:g} s: {', '.join(stopped)}.")
    print(f"  seconds/epoch: the median step times {steps}. speed-up: over nxBP.")


def main(arguments: list[str] | None = None) -> dict[str, list[Outcome]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=18.0, help="the most time to spend on one method (default 18)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples a step (default 64)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which networks to train")
    options = parser.parse_args(arguments)
    train_set, test_set = fashion_mnist(train=True), fashion_mnist(train=False)
    print(f"Fashion-MNIST: {len(train_set.labels)} training and {len(test_set.labels)} test images. "
          f"torch {torch.__version__}, {torch.get_num_threads()} threads.")  # fmt: skip
    print(f"Every example's gradient is clipped to norm {CLIPPING.sensitivity:g}. No noise is added: nothing here is\nprivate yet.\n")
    for method, what in METHODS.items():
        print(f"  {method:12s} {what}")
    results = {}
    for name in options.models:
        results[name] = compare(name, train_set, test_set, options.batch_size, options.seconds)
        show(name, results[name], -(-len(train_set.labels) // options.batch_size), options.seconds)
    return results


if __name__ == "__main__":
    main()

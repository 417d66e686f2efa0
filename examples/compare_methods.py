"""Train the paper's MLP and CNN on real images by every method of clipping, and compare accuracy and speed.

    python examples/compare_methods.py [--seconds 18] [--batch-size 64] [--models mlp cnn]

Each method starts from the same weights and sees the same batches, so it learns the same; only the time differs. Every
example's gradient is clipped, but no noise is added: this compares ways to clip, it protects nobody yet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw
from clipwise.data import Images, fashion_mnist
from clipwise.methods import nxbp_alone
from clipwise.models import cnn, mlp

MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}
METHODS = ["non-private", "nxBP", "multiLoss", "ReweightGP", "bookkeep"]
CLIPPING = cw.flat(1.0)


@dataclass(frozen=True)
class Outcome:
    method: str
    steps: int
    accuracy: float
    seconds_an_epoch: float


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss an example."""
    return F.cross_entropy(model(x), y, reduction="none")


def gradient_step(model: nn.Module, method: str, x: Tensor, y: Tensor) -> None:
    """Fill p.grad with the mean of the (clipped) gradients of the batch."""
    if method == "non-private":
        losses_of(model, x, y).mean().backward()
        return
    if method == "nxBP":
        sums = nxbp_alone(model, lambda x, y: losses_of(model, x, y), [x, y], CLIPPING).sums
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / len(x)
        return
    name = {"multiLoss": "multiloss", "ReweightGP": "reweight", "bookkeep": "bookkeep"}[method]
    with cw.capture(model) as tape:
        losses = losses_of(model, x, y)
    (cw.clipped_loss(tape, losses, CLIPPING, method=name) / len(x)).backward()


def batches(data: Images, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in a fixed random order."""
    for rows in torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0)).split(size):
        yield data.pixels[rows], data.labels[rows]


def accuracy(model: nn.Module, data: Images) -> float:
    with torch.no_grad():
        return float((model(data.pixels).argmax(1) == data.labels).float().mean())


def progress(label: str, done: int, total: int, note: str = "") -> None:
    """A bar that redraws itself on a terminal and stays silent in a log."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        sys.stderr.write(f"\r{label:24s} [{'=' * filled}{' ' * (30 - filled)}] {done:4d}/{total} {note:24s}")
        sys.stderr.flush()


def train(
    build: Callable[[], nn.Module], name: str, method: str, train_set: Images, test_set: Images, size: int, seconds: float
) -> Outcome:
    """One epoch, or as many steps as fit into `seconds`. The first step is not timed: clipwise verifies the model on it."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = -(-len(train_set.labels) // size)
    times: list[float] = []
    begun = time.perf_counter()
    for step, (x, y) in enumerate(batches(train_set, size), 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        gradient_step(model, method, x, y)
        optimizer.step()
        times.append(time.perf_counter() - start)
        progress(f"{name}, {method}", step, total, f"{1e3 * times[-1]:.0f} ms a step")
        if time.perf_counter() - begun > seconds:
            break
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 100 + "\r")
    return Outcome(method, len(times), accuracy(model, test_set), statistics.median(times[1:] or times) * total)


def show(name: str, outcomes: list[Outcome], steps: int) -> None:
    seconds = {outcome.method: outcome.seconds_an_epoch for outcome in outcomes}
    print(f"\n{name}: {steps} steps an epoch")
    print(f"  {'method':12s} {'test accuracy':>22s} {'seconds an epoch':>17s} {'x non-private':>14s} {'speed-up over nxBP':>19s}")
    for o in outcomes:
        learnt = f"{100 * o.accuracy:.1f} % after {o.steps:3d} steps"
        print(f"  {o.method:12s} {learnt:>22s} {o.seconds_an_epoch:17.2f} {o.seconds_an_epoch / seconds['non-private']:14.1f} "
              f"{seconds['nxBP'] / o.seconds_an_epoch:19.1f}")  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, list[Outcome]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=18.0, help="the most time to spend on one method (default 18)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples a step (default 64)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which networks to train")
    options = parser.parse_args(arguments)
    train_set, test_set = fashion_mnist(train=True), fashion_mnist(train=False)
    print(f"Fashion-MNIST, {len(train_set.labels)} training and {len(test_set.labels)} test images; torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    print(f"Every example's gradient is clipped to norm {CLIPPING.sensitivity:g}; no noise is added, so nothing here is private yet.")
    results = {}
    for name in options.models:
        results[name] = [train(MODELS[name], name, m, train_set, test_set, options.batch_size, options.seconds) for m in METHODS]
        show(name, results[name], -(-len(train_set.labels) // options.batch_size))
    return results


if __name__ == "__main__":
    main()

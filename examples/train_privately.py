"""Train the paper's CNN on real images with differential privacy, and write the privacy report.

    python examples/train_privately.py [--epsilon 3] [--epochs 8] [--images 10000] [--out private-run]

The training images are the private data set; the accuracy is measured on held-out images that are declared public. Stop it with
Ctrl-C and start it again: it goes on from the last epoch, and every step that was released stays counted.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.budget import rounded_up
from clipwise.data import Examples, fashion_mnist
from clipwise.models import cnn
from clipwise.runs.bar import Bar
from clipwise.runs.curve import Point


def measure(private: cw.PrivateTraining, model: nn.Module, public: Examples) -> Point:
    """What is spent, and what the model is worth on images that need no protection."""
    with torch.no_grad():
        scores = model(public.inputs)  # (N, classes)
    accuracy = (scores.argmax(1) == public.labels).float().mean()
    return Point(private.position, private.spent().epsilon, float(accuracy), float(F.cross_entropy(scores, public.labels)))


def train(epsilon: float, epochs: int, batch_size: int, images: int, folder: Path, bar: Bar) -> tuple[cw.Budget, float]:
    private_set, public_set = fashion_mnist(train=True), fashion_mnist(train=False)
    dataset = TensorDataset(private_set.inputs[:images], private_set.labels[:images])
    plan = cw.PrivacyPlan.calibrate(
        epsilon=epsilon, delta=1e-5, dataset_size=len(dataset), batch_size=batch_size, epochs=epochs, clipping=cw.flat(1.0)
    )
    bar.print(f"{len(dataset)} private images, {plan.steps} steps, noise multiplier {plan.noise_multiplier:.3f}")
    bar.print(f"promised before the first step: {plan.budget()}\n")

    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    torch.manual_seed(0)
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with cw.PrivateTraining(model, optimizer, plan, ledger=folder / "ledger") as private:
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            private.load_state_dict(state["private"])
            bar.print(f"going on after {private.position} steps")
        point = None
        while len(loader := private.loader(dataset)) > 0:
            for x, y in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")  # (B,): one loss an image
                private.loss(losses).backward()
                optimizer.step()
                optimizer.zero_grad()
                bar.show(private.position, plan.steps, point)
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "private": private.state_dict()}
            torch.save(parts, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            point = measure(private, model, public_set)
            bar.print(
                f"  step {point.step:4d}: ε = {rounded_up(point.epsilon)}, public accuracy {100 * point.accuracy:.1f} %, loss {point.loss:.3f}"
            )
        report = private.report()
        bar.print(f"\n{report.statement()}\n")
        for path in report.save(folder):
            print(path)
        return private.spent(), (point or measure(private, model, public_set)).accuracy


def main(arguments: list[str] | None = None) -> tuple[cw.Budget, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0, help="what the training may spend (default 3)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the private images (default 8)")
    parser.add_argument("--batch-size", type=int, default=256, help="images a step draws on average (default 256)")
    parser.add_argument("--images", type=int, default=10_000, help="how many private images there are (default 10000: all)")
    parser.add_argument("--out", type=Path, default=Path("private-run"), help="folder for ledger, checkpoint and report")
    options = parser.parse_args(arguments)
    with Bar() as bar:
        return train(options.epsilon, options.epochs, options.batch_size, options.images, options.out, bar)


if __name__ == "__main__":
    main()

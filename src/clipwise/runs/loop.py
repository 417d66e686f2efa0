"""The loop of a training: epochs of private steps, and after each what the network is worth on public examples. Ctrl-C stops it cleanly."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..batches import microbatches
from ..budget import rounded_up
from ..data import DataSet, Examples
from ..training import PrivateTraining
from .curve import Curve, Point
from .job import TrainJob

Show = Callable[[int, int, Point | None], None]  # step, steps, what was last measured
Say = Callable[[str], None]


@dataclass
class Loop:
    """Trains until the plan is spent, or somebody presses Ctrl-C. `save` is called after every epoch."""

    job: TrainJob
    data: DataSet
    model: nn.Module
    optimizer: torch.optim.Optimizer
    private: PrivateTraining
    device: torch.device
    curve: Curve
    save: Callable[[], None]
    show: Show
    say: Say
    private_accuracy: bool

    def __post_init__(self) -> None:
        self._compiled = self.private.compile(self._losses, rows=self.job.microbatch) if self.job.compile else None

    def run(self) -> bool:
        """Whether the plan was followed to its end. The curve then ends with what the network is worth, also if no step was left."""
        torch.backends.cuda.matmul.allow_tf32 = self.job.precision == "tf32"
        dataset = Rows(self.data.train)
        measured = self._measured_before()
        if measured is None or self.private.ledger.spent < self.private.plan.steps:
            private = "PRIVATE training accuracy" if self.private_accuracy else ""
            self.say(_row("step", "ε so far", "public accuracy", "public loss", "seconds", private))
        with _interruptible() as interrupted:
            while len(loader := self.private.loader(dataset, collate_fn=_as_it_is, num_workers=self.job.workers)) and not interrupted:
                start = time.monotonic()
                self._epoch(loader, measured, interrupted)
                measured = self._measure(start)
        if measured is None:
            self._measure(time.monotonic())
        return not interrupted

    def _epoch(self, loader: DataLoader[Any], measured: Point | None, interrupted: list[bool]) -> None:
        self.model.train()
        for batch in loader:
            if self._compiled is not None:
                self._compiled(*batch)
            else:
                self._step(batch)
            self.show(self.private.position, self.private.plan.steps, measured)
            if interrupted:
                break

    def _step(self, batch: Any) -> None:
        for x, y in microbatches(batch, self.job.microbatch or max(1, len(batch[0]))):
            self.private.loss(self._losses(self.model, x.to(self.device), y.to(self.device))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _losses(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.job.precision == "bf16"):
            output = model(x)
        return F.cross_entropy(output.float(), y, reduction="none")

    def _measured_before(self) -> Point | None:
        """The last point of a training that goes on, with ε of all that is counted: after a crash that is more than the curve knows of."""
        return self.curve.points[-1]._replace(epsilon=self.private.spent().epsilon) if self.curve.points else None

    def _measure(self, start: float) -> Point:
        """A point of the curve, a checkpoint, a line."""
        accuracy, loss = evaluate(self.model, self.data.test, self.device)
        point = Point(self.private.position, self.private.spent().epsilon, accuracy, loss)
        self.curve.points.append(point)
        self.save()
        private = f"{100 * evaluate(self.model, self.data.train, self.device)[0]:.2f} %" if self.private_accuracy else ""
        step, seconds = f"{point.step}/{self.private.plan.steps}", f"{time.monotonic() - start:.1f}"
        self.say(_row(step, rounded_up(point.epsilon), f"{100 * accuracy:.2f} %", f"{loss:.4f}", seconds, private))
        return point


def _row(step: str, epsilon: str, accuracy: str, loss: str, seconds: str, private: str) -> str:
    """Of a table that fits into sixty columns, but for private accuracy."""
    return f"{step:>9s}  {epsilon:>8s}  {accuracy:>15s}  {loss:>11s}  {seconds:>7s}  {private:>25s}".rstrip()


def evaluate(model: nn.Module, examples: Examples, device: torch.device, size: int = 1000) -> tuple[float, float]:
    """Accuracy and mean loss, so many examples at a time."""
    was_training = model.training
    model.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for x, y in zip(examples.inputs.split(size), examples.labels.to(device).split(size)):
            output = model(x.to(device)).float()
            right += int((output.argmax(1) == y).sum())
            loss += float(F.cross_entropy(output, y, reduction="sum"))
    model.train(was_training)
    return right / len(examples.labels), loss / len(examples.labels)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Examples in memory, taken out a whole batch at a time."""

    def __init__(self, examples: Examples):
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples.labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self._examples.inputs[number], self._examples.labels[number]

    def __getitems__(self, numbers: list[int]) -> Examples:
        return Examples(self._examples.inputs[numbers], self._examples.labels[numbers])


def _as_it_is(batch: Examples) -> Examples:
    return batch


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Ctrl-C asks to stop after the step at hand (the list is then no longer empty); a second one stops at once."""
    flag: list[bool] = []

    def ask(number: int, frame: Any) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.append(True)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not in the main thread
        yield flag
        return
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)

"""Runs a training: plan, network, loop, checkpoint, curve, report. Stops cleanly, and goes on where it stopped."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..adam import DPAdamBC
from ..batches import microbatches
from ..budget import Budget
from ..clipping import flat
from ..data import DataSet, Examples, load
from ..errors import BadLedger
from ..files import write_whole
from ..models.zoo import build
from ..plan import PrivacyPlan
from ..training import PrivateTraining
from .curve import Curve
from .job import TrainJob


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


Show = Callable[[int, int, str], None]  # step, steps, note
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    budget: Budget
    accuracy: float  # on held-out examples that were declared public
    finished: bool
    written: list[Path]


def make_plan(job: TrainJob, count: int) -> PrivacyPlan:
    return PrivacyPlan.calibrate(
        epsilon=job.epsilon, delta=job.delta, dataset_size=count, batch_size=min(job.batch_size, count), epochs=job.epochs, clipping=flat(job.clip),
        sampler=job.sampler,
    )  # fmt: skip


def make_optimizer(job: TrainJob, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if job.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=job.lr, momentum=job.momentum)
    return DPAdamBC(parameters, lr=job.lr) if job.optimizer == "adam-bc" else torch.optim.Adam(parameters, lr=job.lr)


def run(
    job: TrainJob, out: Path, *, resume: bool = False, show: Show = lambda *_: None, say: Say = print, private_accuracy: bool = False
) -> Outcome:
    """Train and write checkpoint.pt, ledger, plan.json, config.json, curve.csv, curve.png and the privacy report into `out`."""
    _prepare(out, resume)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if job.device == "auto" else job.device)
    data = load(job.data, job.data_folder, glove=job.glove)
    plan = PrivacyPlan.load(out / "plan.json") if resume else make_plan(job, len(data.train.labels))
    say(f"data    {data.title}: {len(data.train.labels)} private examples, {len(data.test.labels)} held out and declared public")
    say(f"plan    {plan.budget()}; noise multiplier {plan.noise_multiplier:.4g}")
    torch.manual_seed(job.seed)
    model = build(job.model, data).to(device)
    optimizer = make_optimizer(job, model)
    if not resume:  # both before the ledger: from its first moment on there is something to resume
        write_whole(out / "config.json", job.to_json())
        plan.save(out / "plan.json")
    with PrivateTraining(model, optimizer, plan, method=job.method, noise=job.noise, ledger=out / "ledger") as private:
        curve = Curve(out)
        if resume:
            say(_restore(out, model, optimizer, private, curve))
        finished = _epochs(job, data, model, optimizer, private, device, curve, show, say, private_accuracy)
        report = private.report()
        written = [*report.save(out), *curve.save(plan)]
        return Outcome(report.budget, curve.last_accuracy, finished, written)


def _epochs(
    job: TrainJob, data: DataSet, model: nn.Module, optimizer: Any, private: PrivateTraining, device: torch.device, curve: Curve, show: Show,
    say: Say, private_accuracy: bool,
) -> bool:  # fmt: skip
    """Until the plan is spent, or somebody presses Ctrl-C. What the network is worth then is in the curve, also if no step was left."""
    dataset = Rows(data.train)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=job.precision == "bf16")
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    with _interruptible() as interrupted:
        while (left := len(loader := private.loader(dataset, collate_fn=_as_it_is, num_workers=job.workers))) or not curve.rows:
            start = time.monotonic()
            model.train()
            for batch in loader if left else ():
                for x, y in microbatches(batch, job.microbatch or max(1, len(batch[0]))):
                    with autocast:
                        output = model(x.to(device))
                    private.loss(F.cross_entropy(output.float(), y.to(device), reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
                show(private.position, private.plan.steps, f"epoch {len(curve) + 1}")
                if interrupted:
                    break
            accuracy = accuracy_of(model, data.test, device)
            spent = private.spent()
            curve.add(private.position, spent.epsilon, accuracy)
            _save(curve.folder, model, optimizer, private, curve)
            note = f", PRIVATE training accuracy {100 * accuracy_of(model, data.train, device):.1f} %" if private_accuracy else ""
            say(f"step {private.position:6d} of {private.plan.steps}  ε = {spent.rounded_up():6s}  accuracy {100 * accuracy:.2f} % (public){note}"
                f"  {time.monotonic() - start:.1f} s")  # fmt: skip
            if interrupted:
                break
    return not interrupted


def accuracy_of(model: nn.Module, examples: Examples, device: torch.device, size: int = 1000) -> float:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x.to(device)).argmax(1) == y.to(device)).sum())
            for x, y in zip(examples.inputs.split(size), examples.labels.split(size))
        )
    model.train(was_training)
    return right / len(examples.labels)


def _prepare(out: Path, resume: bool) -> None:
    if resume and not ((out / "config.json").exists() and (out / "plan.json").exists()):
        raise BadLedger(
            f"there is nothing to resume in {out}: config.json and plan.json are not both there.", "Leave out --resume to begin."
        )
    if not resume and (out / "ledger").exists():
        raise BadLedger(
            f"{out} holds a training already.",
            "Go on with --resume, or choose another --out: a second training on the same data adds to what is spent.",
        )
    out.mkdir(parents=True, exist_ok=True)


def _save(out: Path, model: nn.Module, optimizer: Any, private: PrivateTraining, curve: Curve) -> None:
    buffer = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "private": private.state_dict(), "curve": curve.rows}, buffer
    )
    write_whole(out / "checkpoint.pt", buffer.getvalue())


def _restore(out: Path, model: nn.Module, optimizer: Any, private: PrivateTraining, curve: Curve) -> str:
    """Go on from the checkpoint, or from the first weights where none was written. The ledger keeps every step it counted. Returns what was done."""
    if not (out / "checkpoint.pt").exists():
        return f"no checkpoint was written: begins with new weights; {private.ledger.spent} steps are counted"
    state: dict[str, Any] = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    private.load_state_dict(state["private"])
    curve.rows = [tuple(row) for row in state["curve"]]
    return f"resumed after {private.position} steps; {private.ledger.spent} are counted"


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

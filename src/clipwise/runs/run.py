"""Runs a training: data, plan, network, loop, checkpoint, curve, report. Goes on where it stopped."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..adam import DPAdamBC
from ..budget import Budget
from ..clipping import flat
from ..data import load
from ..errors import BadLedger
from ..files import write_whole
from ..machine import chosen_device
from ..models.zoo import build
from ..plan import PrivacyPlan
from ..training import PrivateTraining
from .curve import Curve, Point
from .job import TrainJob
from .loop import Loop, Say, Show


@dataclass(frozen=True)
class Outcome:
    budget: Budget
    accuracy: float  # on held-out examples that were declared public, as the loss
    loss: float
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
    device = chosen_device(job.device)
    data = load(job.data, job.data_folder, size=job.image_size, glove=job.glove, limit=job.limit)
    plan = PrivacyPlan.load(out / "plan.json") if resume else make_plan(job, len(data.train.labels))
    say(f"data    {data.title}")
    say(f"        {len(data.train.labels)} private examples, {len(data.test.labels)} held out and declared public")
    say(f"plan    {plan.budget()}")
    say(f"        noise multiplier {plan.noise_multiplier:.4g}")
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
        save = partial(_save, out, model, optimizer, private, curve)
        finished = Loop(job, data, model, optimizer, private, device, curve, save, show, say, private_accuracy).run()
        report = private.report()
        written = [*report.save(out), *curve.save(plan)]
        return Outcome(report.budget, curve.points[-1].accuracy, curve.points[-1].loss, finished, written)


def _prepare(out: Path, resume: bool) -> None:
    if resume and not ((out / "config.json").exists() and (out / "plan.json").exists()):
        raise BadLedger(
            f"there is nothing to resume in {out}: config.json and plan.json are not both there.", "Leave out --resume to begin."
        )
    if not resume and any((out / name).exists() for name in ("ledger", "plan.json")):  # the plan is the last to be written before it
        raise BadLedger(
            f"{out} holds a training already.",
            "Go on with --resume, or choose another --out: a second training on the same data adds to what is spent.",
        )
    out.mkdir(parents=True, exist_ok=True)


def _save(out: Path, model: nn.Module, optimizer: Any, private: PrivateTraining, curve: Curve) -> None:
    buffer = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "private": private.state_dict(),
            "curve": [tuple(point) for point in curve.points],
        },
        buffer,
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
    curve.points = [Point(*values) for values in state["curve"]]
    return f"resumed after {private.position} steps; {private.ledger.spent} are counted"

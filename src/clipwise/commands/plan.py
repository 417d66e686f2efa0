"""clipwise calibrate, spent, report: from an ε to a plan, from a ledger to a statement."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..accounting import ACCOUNTANTS
from ..budget import compose
from ..clipping import flat
from ..errors import BadLedger, BadPlan
from ..ledger import read
from ..mechanism import RELATIONS
from ..plan import PrivacyPlan
from ..report import PrivacyReport
from .base import add_command

_CALIBRATE = """\
Find the noise that meets an ε; or, given the noise, the number of steps or the batch size.

examples:
  clipwise calibrate --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-size 512 --epochs 10
  clipwise calibrate --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-size 512 --noise-multiplier 1.1     # how many steps?
  clipwise calibrate --epsilon 3 --delta 1e-5 --dataset-size 60000 --epochs 10 --noise-multiplier 1.1         # which batch size?
  clipwise calibrate --epsilon 8 --delta 1e-6 --dataset-size 1000000 --batch-size 4096 --epochs 3 --out plan.json
"""
_SPENT = """\
What a training has spent, from its ledger; or what a plan would spend.

examples:
  clipwise spent run/ledger
  clipwise spent plan.json --steps 1000
  clipwise spent first/ledger second/ledger        # together, on the same data
"""
_REPORT = """\
The privacy statement of a training: Markdown on the screen, or Markdown, JSON and a plot in a folder.

examples:
  clipwise report run/ledger
  clipwise report run/ledger --out run/report
"""


def add_to(commands: Any) -> None:
    calibrate = add_command(commands, "calibrate", "find noise, steps or batch size for an ε", _CALIBRATE, _calibrate)
    number = calibrate.add_argument
    number("--epsilon", type=float, required=True, help="ε that the whole training may spend")
    number("--delta", type=float, required=True, help="δ, well below one over the size of the data set")
    number("--dataset-size", type=int, required=True, help="how many records there are")
    number("--batch-size", type=int, help="how many records a step draws on average")
    number("--epochs", type=float, help="passes over the data")
    number("--steps", type=int, help="optimizer steps, in place of epochs")
    number("--noise-multiplier", type=float, help="noise in units of the clipping's sensitivity, where that is given")
    number("--clip", type=float, default=1.0, help="clipping bound written into the plan; ε does not depend on it (default 1)")
    number("--sampler", choices=list(RELATIONS), default="poisson", help="how batches are drawn (default poisson)")
    number("--max-batch-size", type=int, help="cap of truncated_poisson (default B + 8√B)")
    number("--relation", choices=sorted({name for names in RELATIONS.values() for name in names}), help="neighbouring relation")
    number("--accountant", choices=ACCOUNTANTS, default="auto", help="default auto: the smaller of RDP and PLD")
    number("--unit", default="example", help="what is protected: example, user, … (default example)")
    number("--out", type=Path, help="write the plan to this JSON file")
    spent = add_command(commands, "spent", "what a ledger or plan has spent", _SPENT, _spent)
    spent.add_argument("files", nargs="+", type=Path, metavar="FILE", help="ledgers, or plans as JSON; several are added up")
    spent.add_argument("--steps", type=int, help="for a single plan: after so many steps")
    report = add_command(commands, "report", "the privacy statement of a training", _REPORT, _report)
    report.add_argument("ledger", type=Path, help="the training's ledger")
    report.add_argument("--out", type=Path, help="folder for the Markdown, JSON and PNG files")


def _calibrate(options: Any) -> None:
    epochs = options.epochs
    if epochs is not None and math.isfinite(epochs) and epochs == int(epochs):
        epochs = int(epochs)
    plan = PrivacyPlan.calibrate(
        epsilon=options.epsilon, delta=options.delta, dataset_size=options.dataset_size, batch_size=options.batch_size, epochs=epochs,
        steps=options.steps, noise_multiplier=options.noise_multiplier, clipping=flat(options.clip), sampler=options.sampler,
        max_batch_size=options.max_batch_size, relation=options.relation, accountant=options.accountant, unit=options.unit,
    )  # fmt: skip
    budget = plan.budget()
    if options.out:
        plan.save(options.out)
    if options.json:
        print(json.dumps({"plan": plan.to_dict(), "budget": asdict(budget)}, indent=2, ensure_ascii=False))
        return
    print(f"noise multiplier  {plan.noise_multiplier:g}")
    print(f"batch size        {plan.batch_size} of {plan.dataset_size} on average, {plan.sampler.replace('_', ' ')}"
          + (f", at most {plan.max_batch_size}" if plan.max_batch_size else ""))  # fmt: skip
    print(f"steps             {plan.steps} ({plan.epochs:g} epochs)")
    print(f"budget            {budget}")
    if options.out:
        print(f"plan written to   {options.out}")


def _plan_and_steps(path: Path) -> tuple[PrivacyPlan, int | None, dict[str, Any]]:
    """A ledger's plan, count and facts, or a plan without a count."""
    try:
        record = read(path)
    except BadLedger as not_a_ledger:
        try:
            return PrivacyPlan.load(path), None, {}
        except BadPlan as not_a_plan:
            raise (not_a_ledger if path.suffix != ".json" else not_a_plan) from None
        except FileNotFoundError:
            raise not_a_ledger from None
    return record.plan, record.spent, record.facts


def _spent(options: Any) -> None:
    found = [_plan_and_steps(path) for path in options.files]
    if options.steps is not None and (len(found) > 1 or found[0][1] is not None):
        raise ValueError("--steps goes with a single plan: a ledger knows its own count")
    if len(found) == 1:
        plan, steps, _ = found[0]
        budget = plan.budget(steps if steps is not None else options.steps)
    else:
        budget = compose([(plan, plan.steps if steps is None else steps) for plan, steps, _ in found])
    void = any(facts.get("noise") == "reproducible" for _, _, facts in found)
    on_their_word = any(facts.get("batches") == "caller" for _, _, facts in found)
    if options.json:
        print(json.dumps({**asdict(budget), "void": void, "callers_word": on_their_word}, ensure_ascii=False))
        return
    print(f"VOID, the noise was reproducible and protects nobody: {budget}" if void else budget)
    if on_their_word:
        print("the caller drew the batches and gives their word for the sampling")


def _report(options: Any) -> None:
    report = PrivacyReport.from_ledger(options.ledger)
    if options.out:
        written = report.save(options.out)
        if options.json:
            print(json.dumps({"written": [str(path) for path in written], "epsilon": report.budget.epsilon}))
        else:
            print(report.statement())
            for path in written:
                print(f"  {path}")
            if len(written) < 3:
                print('  (no plot: pip install "clipwise[plot]")')
    else:
        print(report.json() if options.json else report.markdown(), end="")

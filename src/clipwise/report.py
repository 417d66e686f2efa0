"""The privacy statement of a training: what was released, under which guarantee, and what that guarantee does not cover."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .accounting import curve
from .budget import Budget, rounded_up
from .facts import versions
from .files import write_whole
from .ledger import Record, read
from .mechanism import IN_WORDS
from .plan import PrivacyPlan
from .plan_file import clipping_as_dict

_SAMPLERS = {
    "poisson": "Poisson: every {unit} by itself with probability {rate:.4g} at each step",
    "truncated_poisson": "Poisson with probability {rate:.4g}, cut at random to at most {cap} {unit}s",
    "shuffle": "shuffled and partitioned into batches of {batch}; accounted for WITHOUT amplification by sampling",
    "fixed_size": "{batch} {unit}s at each step, without replacement",
}
_NOT_COVERED = [
    "other trainings on the same data, the search for hyper-parameters among them: add them up with clipwise.compose",
    "losses, accuracies, gradient norms or clip rates on private data that were shown or logged, and decisions taken on them (early stopping)",
    "that an exception occurred, and at which step",
    "how the data were chosen, cleaned or normalised before training, if that looked at them",
    "several records of one {unit}, unless the unit of privacy includes them",
    "how long computations took",
]
_FLOATS = 'attacks on floating-point noise (Mironov 2012): noise="fast" draws it from a generator that was not made to withstand them'


@dataclass(frozen=True)
class PrivacyReport:
    """A statement that can be filed: as Markdown, JSON and a plot of ε over steps."""

    plan: PrivacyPlan
    spent: int
    facts: dict[str, Any]

    @classmethod
    def from_ledger(cls, path: str | Path) -> PrivacyReport:
        record: Record = read(path)
        return cls(record.plan, record.spent, record.facts)

    @cached_property
    def budget(self) -> Budget:
        """What was spent."""
        return self.plan.budget(self.spent)

    @cached_property
    def planned(self) -> Budget:
        return self.plan.budget()

    @property
    def is_void(self) -> bool:
        """Reproducible noise protects nobody."""
        return self.facts.get("noise") == "reproducible"

    def not_covered(self) -> list[str]:
        listed = [text.format(unit=self.plan.unit) for text in _NOT_COVERED]
        if self.facts.get("noise") != "secure":
            listed.append(_FLOATS)
        if self.facts.get("batches") == "caller":
            listed.append("that batches were drawn as stated: the caller drew them and gives their word for it")
        return listed

    def to_dict(self) -> dict[str, Any]:
        return {
            "void": self.is_void,
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "statement": self.statement(),
            "budget": asdict(self.budget),
            "planned": asdict(self.planned),
            "plan": self.plan.to_dict(),
            "released": self._released(),
            "not_covered": self.not_covered(),
            "training": self.facts,
            "report_versions": versions(),
        }

    def json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def statement(self) -> str:
        """One sentence."""
        if self.is_void:
            return "No privacy is guaranteed: the noise was reproducible, which is meant for tests."
        b = self.budget
        return (
            f"The {b.steps} training steps released so far are (ε, δ)-differentially private with ε = {rounded_up(b.epsilon)} and δ = {b.delta:g}, "
            f"where neighbouring data sets differ by {IN_WORDS[b.relation].format(unit=self.plan.unit)}."
        )

    def _released(self) -> str:
        counted = self.plan.clipping.noise_of_sums(1.0) != 1.0
        more = ", and a noised count of examples below the clipping bound" if counted else ""
        return (
            f"after each step a gradient (Σ clip(gᵢ) + noise) / {self.plan.batch_size}{more}; hence every model, checkpoint and prediction "
            "made from these gradients alone"
        )

    def markdown(self) -> str:
        plan, facts = self.plan, self.facts
        clipping = clipping_as_dict(plan.clipping)
        drawn = _SAMPLERS[plan.sampler].format(
            unit=plan.unit, rate=plan.batch_size / plan.dataset_size, batch=plan.batch_size, cap=plan.max_batch_size
        )
        by = "the caller, who gives their word for it" if facts.get("batches") == "caller" else "clipwise"
        rows = [
            ("Unit of privacy", f"one {plan.unit}"),
            ("Neighbouring data sets", f"{IN_WORDS[plan.relation].format(unit=plan.unit)} (`{plan.relation}`)"),
            ("ε so far", f"{rounded_up(self.budget.epsilon)} after {self.spent} of {plan.steps} steps"),
            ("ε of the whole plan", rounded_up(self.planned.epsilon)),
            ("δ", f"{plan.delta:g}"),
            ("Accountant", self.budget.accountant),
            ("Batches", f"{drawn}; drawn by {by}"),
            ("Data set", f"{plan.dataset_size} {plan.unit}s, {plan.batch_size} a step on average"),
            ("Clipping", f"{clipping.pop('kind')}({', '.join(f'{name}={value}' for name, value in clipping.items())}), sensitivity {plan.clipping.sensitivity:g}"),
            ("Noise", f"Gaussian, noise multiplier {plan.noise_multiplier:g}, source: {facts.get('noise', 'unknown')}"),
            ("Released", self._released()),
            ("Training", f"{', '.join(facts.get('optimizers', []))}; {facts.get('parameters', '?')} parameters; begun {facts.get('started', '?')}"),
            ("Versions", ", ".join(f"{name} {number}" for name, number in facts.get("versions", versions()).items())),
        ]  # fmt: skip
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        excluded = "\n".join(f"- {text}" for text in self.not_covered())
        return f"# Privacy report\n\n**{self.statement()}**\n\n| | |\n|---|---|\n{table}\n\n## Not covered\n\n{excluded}\n"

    def plot(self, path: str | Path) -> None:
        """ε over steps as a PNG."""
        from .plots import plot_epsilon

        points = curve([(self.plan.mechanism, self.plan.steps)], self.plan.delta, self.plan.accountant)
        plot_epsilon(path, points, self.spent, self.budget, self.plan)

    def save(self, folder: str | Path) -> list[Path]:
        """privacy_report.md, .json and, where matplotlib is installed, .png. Returns what was written."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "privacy_report.md", folder / "privacy_report.json"]
        write_whole(written[0], self.markdown())
        write_whole(written[1], self.json())
        try:
            self.plot(folder / "privacy_report.png")
        except ImportError:
            return written
        return [*written, folder / "privacy_report.png"]

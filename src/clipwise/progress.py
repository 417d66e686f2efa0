"""How far a training is, and how much of its plan is spent. The two differ where results were lost, and where batches were skipped."""

from __future__ import annotations

from typing import Any

from .draws import Draw
from .errors import BadLedger, BudgetSpent
from .facts import weakest
from .ledger import Ledger, check_same_plan
from .plan import PrivacyPlan


class Progress:
    """`position`: steps this model has seen. The ledger counts releases, and may know of more, whose results were lost.

    A step of a `repeatable` (reproducible) training that is taken again releases the same numbers: nothing new is spent. Of a shuffled pass,
    batches that were handed out and not used count as well, so that no record comes twice in a pass that is counted once.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger, *, repeatable: bool):
        self.plan = plan
        self.ledger = ledger
        self.position = 0
        self._repeatable = repeatable
        if ledger.spent:
            self._align_with_a_pass()

    @property
    def left(self) -> int:
        """Steps that the plan still allows."""
        return self.plan.steps - (self.position if self._repeatable else self.ledger.spent)

    def check_budget(self) -> None:
        if self.left <= 0:
            raise BudgetSpent(
                f"all {self.plan.steps} steps of the plan are spent.",
                "Stop here. A longer training needs a plan for it, made before it begins.",
            )

    def count(self, draw: Draw | None) -> None:
        """The step for this draw is about to be released."""
        after = self._after(draw)
        if self._repeatable:
            self.ledger.raise_to(max(self.ledger.spent, after))
        else:
            self.ledger.raise_to(self.ledger.spent + (after - self.position if self.plan.sampler == "shuffle" else 1))

    def advance(self, draw: Draw | None) -> None:
        """The step for this draw was taken."""
        self.position = self._after(draw)

    def move_past(self, draw: Draw) -> None:
        """A draw was handed out and no step was taken for it. Within a shuffled pass its records must not come again."""
        if self.plan.sampler == "shuffle" and draw.step >= self.position:
            self.ledger.raise_to(self.ledger.spent + draw.step + 1 - self.position)
            self.position = draw.step + 1

    def _after(self, draw: Draw | None) -> int:
        return (draw.step if draw is not None else self.position) + 1

    def state(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "spent": self.ledger.spent, "position": self.position, "facts": self.ledger.facts}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what is no state, or the state of another plan."""
        try:
            plan = PrivacyPlan.from_dict(state["plan"])
            _ = int(state["spent"]), int(state["position"]), float(state["bound"])
        except (KeyError, TypeError) as error:
            raise BadLedger(f"this is no state of a PrivateTraining ({error}).", "Save private.state_dict().") from None
        check_same_plan(plan, self.plan, "the checkpoint")

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there. Every step that was ever released stays counted, also those the state does not know of."""
        self.position = int(state["position"])
        if state["spent"]:
            self.ledger.note(weakest(state.get("facts", {}), self.ledger.facts))
        self.ledger.raise_to(max(int(state["spent"]), self.ledger.spent))
        self._align_with_a_pass()

    def _align_with_a_pass(self) -> None:
        """A shuffled pass whose order is lost begins anew, so the interrupted one counts whole."""
        if self.plan.sampler == "shuffle" and not self._repeatable:
            length = self.plan.mechanism.steps_in_a_pass
            self.ledger.raise_to(-(-self.ledger.spent // length) * length)
            self.position = -(-self.position // length) * length

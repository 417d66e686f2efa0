"""PrivateTraining ties model, loader, losses, optimizer and ledger together: one new draw, one step, one draw of noise, one count."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import facts
from .adaptive import Adaptive
from .block import Block
from .budget import Budget
from .clipping import Clipping
from .collect import check_losses
from .deferred import check_deferred
from .errors import BadLedger, BudgetSpent, LossIndependent, NothingClipped
from .footprints import check_new_rows, footprints
from .handout import handed_out
from .ledger import Ledger, check_same_plan
from .loader import CallersDraws, Draws, private_loader
from .marks import EXAMPLE
from .methods import Clipped
from .pending import Handed, Pending
from .plan import PrivacyPlan
from .randomness import Randomness, named
from .regularizers import Regularizers
from .release import check_method, clip
from .sampling import Sampler
from .structure import every_tensor
from .tape import Tape, as_modules
from .updates import Updates

_trainings: weakref.WeakKeyDictionary[nn.Module, weakref.ref[PrivateTraining]] = weakref.WeakKeyDictionary()


def _supersede(modules: Sequence[nn.Module]) -> None:
    """A module belongs to one training at a time; a notebook's cell that is run again closes what it made before."""
    for module in (m for root in modules for m in root.modules()):
        earlier = _trainings[module]() if module in _trainings else None
        if earlier is not None and not earlier._closed:
            earlier.close()
            if earlier.ledger.spent:
                warnings.warn(
                    f"an earlier PrivateTraining of this model was closed; the {earlier.ledger.spent} steps it took are not counted in the new one "
                    "(clipwise.compose adds them up)",
                    stacklevel=3,
                )


class PrivateTraining:
    """A training that spends what its plan says, and refuses what it cannot account for.

        private = PrivateTraining(model, optimizer, plan)
        for x, y in private.loader(train):
            losses = F.cross_entropy(model(x), y, reduction="none")   # (B,): one loss an example
            private.loss(losses).backward()
            optimizer.step(); optimizer.zero_grad()
        print(private.spent())

    Guarantee: every optimizer step releases (Σ_{i∈draw} clip(g_i) + N(0, (z·S)²I)) / B̄ for one new draw of its own loader, and
    nothing else; the ledger counts it beforehand.

    model               a module, or several: [model, criterion]
    optimizer           any of torch.optim's, or several; together they hold every trainable parameter
    method              "auto", "bookkeep", "reweight", "multiloss", "nxbp": the same numbers
    noise               "fast", "secure", or reproducible(seed) for tests
    own_batches         the caller draws batches, exactly as the plan's sampler says; the report calls that the caller's word
    scaler              the GradScaler that scales the loss, if one does
    accumulation_steps  k, where the loss of each of k microbatches is divided by k before backward(); the release is the same
    ledger              a file that counts released steps ahead of them, and that a later run goes on with
    fallback            functions without a rule are differentiated example by example instead of being refused
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], plan: PrivacyPlan, *,
        method: str = "auto", noise: str | Randomness = "fast", own_batches: bool = False, scaler: Any = None, accumulation_steps: int = 1,
        ledger: str | Path | None = None, fallback: bool = False,
    ):  # fmt: skip
        if not isinstance(plan, PrivacyPlan):
            raise TypeError(f"the third argument is a PrivacyPlan, got {type(plan).__name__}")
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise NotImplementedError("several processes are not supported yet: each would add noise of its own")
        check_method(method)
        self.plan = plan
        self.method = method
        self.own_batches = own_batches
        self.position = 0  # steps this model has seen; the ledger may know of more, whose results were lost
        self.clipping: Clipping = plan.clipping
        self._modules = as_modules(model, "PrivateTraining")
        self._randomness = named(noise)
        _supersede(self._modules)
        self._regularizers = Regularizers(self._modules)
        self._updates = Updates(self._modules, optimizer, plan, self._randomness, scaler, accumulation_steps, self._before_step)
        plan.clipping.groups(self._updates.names())  # a pattern that fits nothing is refused at once
        how = facts.of_training(plan, self._randomness.name, own_batches, method, self._updates.optimizers, self._updates.parameters())
        self.ledger = Ledger(plan, ledger, how)
        self._draws = Draws(plan, Sampler(plan, self._randomness), lambda: self.position, lambda: plan.steps - self._counted())
        self._held_against = CallersDraws() if own_batches else self._draws
        self._pending = Pending()
        self._block = Block(self._modules, fallback=fallback)
        self._closed = False
        _trainings.update(dict.fromkeys((m for root in self._modules for m in root.modules()), weakref.ref(self)))
        if self.ledger.spent:
            self._align_with_a_pass()

    def loader(self, dataset: Any, *, placeholder: bool = True, **options: Any) -> DataLoader[Any]:
        """A DataLoader over one epoch of draws; options as DataLoader's (workers, pinning, collate_fn …).

        An empty draw arrives as one placeholder row that counts for nothing, since most models raise on zero rows;
        placeholder=False hands out zero rows.
        """
        return private_loader(self._draws, dataset, placeholder, options)

    def loss(self, losses: Tensor) -> Tensor:
        """A scalar whose backward pass hands in Σ clip(g_i) of these losses, (B,), one entry an example. May be called for each part of a draw.

        Its value is Σ ν_i·ℓ_i, ν_i what each example was scaled by: private data, good for nothing but backward().
        """
        if self._closed:
            raise NothingClipped("this training is closed.", "Make a new PrivateTraining; what this one spent stays spent.")
        tape = self._block.close()
        if tape is None:
            raise LossIndependent(
                "no module of this training has run with gradients since the last private.loss.",
                "Compute new losses from model(x) for every call; not under torch.no_grad(), and not from a copy of the model.",
            )
        self._check_budget()
        check_losses(tape, losses)
        check_deferred(tape, losses)
        if self._pending.stepped:
            raise NothingClipped(
                "another optimizer of this training has not stepped for the last draw.",
                "Call step() of every optimizer once for each draw.",
            )
        self._held_against.check_room(self._pending.entries, len(losses))
        inputs = [t for root in tape.root_calls for t in every_tensor([root.call.args, root.call.kwargs]) if tape.marks.kind(t) == EXAMPLE]
        rows = footprints(inputs, len(losses))
        check_new_rows(rows, self._pending.rows)
        counts = not self._held_against.is_placeholder
        with self._block.asleep():
            clipped = clip(tape, losses, self.clipping, self.method) if counts else self._nothing(tape, losses)
        parameters = tape.marks.trainable()
        with tape.pause():
            value = clipped.value(losses)
            handed = Handed(len(losses), [parameters[name] for name in clipped.sums], clipped, rows, counts)
        return handed_out(value, clipped.sums, parameters, lambda grad, added: self._receive(handed, grad, added))

    def _nothing(self, tape: Tape, losses: Tensor) -> Clipped:
        """The placeholder of an empty draw: weight zero."""
        tape.consume(losses)
        zero = torch.zeros_like(losses.detach())
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in tape.marks.trainable().items()}
        return Clipped(sums, zero, torch.zeros_like(losses, dtype=torch.bool))

    def _receive(self, handed: Handed, grad: Tensor, added: list[Tensor]) -> None:
        """The private loss is being back-propagated."""
        if handed.done:
            raise NothingClipped("the private loss was back-propagated twice.", "Call backward() once for each private.loss.")
        self._held_against.check_room(self._pending.entries, handed.entries)
        check_new_rows(handed.rows, self._pending.rows)
        self._updates.about_to_add(handed.parameters, added, grad)
        self._pending.add(handed)

    def _before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """The hook of optimizer.step(): everything is checked, then counted, then released."""
        pending = self._pending
        if number in pending.stepped or not pending.handed:
            raise NothingClipped(
                "step() with nothing clipped: no private loss was back-propagated since the last step.",
                "private.loss(losses).backward() comes before optimizer.step(); an empty draw is a step too.",
            )
        if not pending.stepped:
            self._check_budget()
            self._held_against.check_complete(pending.entries)
            self._updates.check()
            self._regularizers.evaluate()
            self.ledger.count(self.position + 1 if self._randomness.name == "reproducible" else None)
        self._updates.release(number, optimizer, pending.sums, self._regularizers.gradients, self.clipping.sensitivity, self.position)
        pending.stepped.add(number)
        if len(pending.stepped) == len(self._updates.optimizers):
            self._finish_step()

    def _check_budget(self) -> None:
        if self._counted() >= self.plan.steps:
            raise BudgetSpent(
                f"all {self.plan.steps} steps of the plan are spent.",
                "Stop here. A longer training needs a plan for it, made before it begins.",
            )

    def _counted(self) -> int:
        """Steps that count against the plan. A reproducible step that is repeated releases the same numbers again: nothing new."""
        return self.position if self._randomness.name == "reproducible" else self.ledger.spent

    def _finish_step(self) -> None:
        if isinstance(self.plan.clipping, Adaptive):
            self.clipping = self._updates.moved_bound(self.plan.clipping, self.clipping.sensitivity, self._pending, self.position)
        self._held_against.consume()
        self.position += 1
        self._pending = Pending()
        self._updates.forget()

    def regularizer(self, penalty: Callable[[], Tensor]) -> None:
        """Add the gradient of a penalty on the weights alone to every step: private.regularizer(lambda: 1e-4 * model.w.square().sum()).

        It sees no examples, so it costs nothing and gets no noise; one that does is refused at the step.
        """
        self._regularizers.add(penalty)

    def discard(self, *, draw: bool = False) -> None:
        """Forget the losses since the last step, after an exception say; with draw=True also the draw they were for. Clear p.grad yourself."""
        self._block.close()
        self._pending = Pending()
        self._updates.forget()
        if draw:
            self._held_against.consume()

    @property
    def nonfinite(self) -> int:
        """Examples since the last step whose gradient was NaN or Inf and counted for nothing. Private data: do not show or log it."""
        return sum(int((~handed.clipped.finite).sum()) for handed in self._pending.handed if handed.counts)

    def spent(self) -> Budget:
        """What has been released so far, also by earlier runs on the same ledger."""
        return self.plan.budget(self.ledger.spent)

    def state_dict(self) -> dict[str, Any]:
        """Plan, count and clipping bound: what a resumed run needs. Never the state of a generator, which would predict noise to come."""
        return {
            "plan": self.plan.to_dict(), "spent": self.ledger.spent, "position": self.position, "bound": self.clipping.sensitivity,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Every step that was ever released stays counted, also those the checkpoint does not know of."""
        try:
            plan, spent, position, bound = PrivacyPlan.from_dict(state["plan"]), int(state["spent"]), int(state["position"]), state["bound"]
        except (KeyError, TypeError) as error:
            raise BadLedger(f"this is no state of a PrivateTraining ({error}).", "Save private.state_dict().") from None
        check_same_plan(plan, self.plan, "the checkpoint")
        self.discard(draw=True)
        self.position = position
        self.ledger.raise_to(max(spent, self.ledger.spent))
        if isinstance(self.plan.clipping, Adaptive):
            self.clipping = self.plan.clipping.at(float(bound))
        self._align_with_a_pass()

    def _align_with_a_pass(self) -> None:
        """A shuffled pass whose order is lost begins anew, so the interrupted one counts whole."""
        if self.plan.sampler == "shuffle" and self._randomness.name != "reproducible":
            length = self.plan.mechanism.steps_in_a_pass
            self.ledger.raise_to(-(-self.ledger.spent // length) * length)
            self.position = -(-self.position // length) * length

    def report(self) -> Any:
        """The privacy statement of this training: report.markdown(), .json(), .plot(path), .save(folder)."""
        from .report import PrivacyReport

        return PrivacyReport(self.plan, self.ledger.spent, self.ledger.facts)

    def close(self) -> None:
        """Take all hooks off the model and the optimizers; nothing is left on them."""
        self._closed = True
        self._block.remove()
        self._updates.remove()
        self.ledger.close()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

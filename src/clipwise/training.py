"""PrivateTraining ties model, loader, losses, optimizer and ledger together: one new draw, one step, one draw of noise, one count."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import facts
from .adaptive import Adaptive
from .budget import Budget
from .clipping import Clipping
from .draws import CallersDraws, Draws
from .errors import NothingClipped, not_copied
from .experience import experience_of
from .explain import table
from .intake import Intake
from .inventory import as_modules
from .ledger import Ledger
from .loader import private_loader
from .ownership import left_behind, supersede, take_over
from .plan import PrivacyPlan
from .progress import Progress
from .randomness import Randomness, named
from .regularizers import Regularizers
from .release import can_be_compiled, check_method
from .sampling import Sampler
from .tracing import can_be_recorded
from .updates import Release, Updates

if TYPE_CHECKING:
    from .compiled import CompiledStep
    from .compiled.in_loop import UpdateInLoop


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
        self.clipping: Clipping = plan.clipping
        self.model = model
        self._modules = as_modules(model, "PrivateTraining")
        self._randomness = named(noise)
        supersede(self._modules)
        self._regularizers = Regularizers(self._modules)
        self._updates = Updates(self._modules, optimizer, plan, self._randomness, scaler, accumulation_steps, self._before_step)
        plan.clipping.groups(list(self._updates.by_name()))  # a pattern that fits nothing is refused at once
        how = facts.of_training(plan, self._randomness.name, own_batches, method, self._updates.optimizers, self._updates.parameters())
        self._progress = Progress(plan, Ledger(plan, ledger, how), repeatable=self._randomness.name == "reproducible")
        self._draws = Draws(Sampler(plan, self._randomness), self._progress)
        held_against = CallersDraws() if own_batches else self._draws
        self._intake = Intake(self._modules, held_against, self._progress, self._updates, fallback=fallback)
        self._in_loop: dict[int, UpdateInLoop] = {}  # of each optimizer whose steps may be replayed
        self._replays_loops = True
        self.is_closed = False
        weakref.finalize(self, left_behind, self._intake.block, self._intake.unreleased, self.ledger)
        take_over(self._modules, self, self._intake)

    @property
    def position(self) -> int:
        """Steps this model has seen."""
        return self._progress.position

    @property
    def ledger(self) -> Ledger:
        """What was released, counted ahead."""
        return self._progress.ledger

    def loader(self, dataset: Any, *, placeholder: bool = True, **options: Any) -> DataLoader[Any]:
        """A DataLoader over one epoch of draws; options as DataLoader's (workers, pinning, collate_fn …).

        An empty draw arrives as one placeholder row that counts for nothing, since most models raise on zero rows;
        placeholder=False hands out zero rows.
        """
        if self.own_batches:
            raise TypeError("with own_batches=True the caller draws the batches: leave it out to use private.loader")
        return private_loader(self._draws, dataset, placeholder, options)

    def loss(self, losses: Tensor) -> Tensor:
        """A scalar whose backward pass hands in Σ clip(g_i) of these losses, (B,), one entry an example. May be called for each part of a draw.

        Its value is Σ ν_i·ℓ_i, ν_i what each example was scaled by: private data, good for nothing but backward().
        """
        self.check_open()
        return self._intake.loss(losses, self.clipping, self.method)

    def compile(self, losses_of: Callable[..., Tensor], *, rows: int | None = None, backend: str = "inductor") -> CompiledStep:
        """The whole step as one call, its arithmetic as one compiled graph: the numbers of the eager loop, up to the order of sums.

            step = private.compile(lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"))
            for x, y in private.loader(train): step(x, y)

        losses_of  a function of the model and what step() is given; what else it depends on is taken as it is when it is traced
        rows       batches are filled up to so many rows, which count for nothing; a larger draw takes several rounds
        backend    "inductor", or "eager": the graph as it was traced
        """
        from .compiled import CompiledStep

        self.check_open()
        if not can_be_compiled(self.method):
            raise ValueError(f'a compiled step clips by method "bookkeep", this training by {self.method!r}')
        if self._updates.has_scaler:
            raise ValueError("a compiled step takes no GradScaler: train in bf16, which needs none, or by the eager loop")
        self._forget_replays()  # compiled steps have their own
        return CompiledStep(self, self._intake, self._updates, losses_of, rows=rows, backend=backend)

    def check_open(self) -> None:
        """Refuse if this training is closed."""
        if self.is_closed:
            raise NothingClipped("this training is closed.", "Make a new PrivateTraining; what this one spent stays spent.")

    def _before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """The hook of optimizer.step()."""
        if not self._is_due(number):
            return
        self._intake.block.close()  # what ran since the last loss has nothing to do with this step, and weights move now
        sums, penalties = self._intake.pending.sums, self._regularizers.gradients
        with torch._C.DisableTorchFunction():  # nor has somebody's tape
            replay = self._replay_of(number)
            if replay is not None:
                self._release(number, replay, moves_weights=True)
            else:
                self._release(number, lambda *told: self._updates.release(number, optimizer, sums, penalties, *told), moves_weights=False)

    def _replay_of(self, number: int) -> Release | None:
        """Noise and step of an optimizer by one replay, where there is one: of small models on a GPU."""
        if not self._replays_loops or not can_be_recorded(self._updates.device_of(number)):
            return None
        from .compiled.in_loop import UpdateInLoop  # which builds on this package

        if number not in self._in_loop:
            self._in_loop[number] = UpdateInLoop(number, self._updates)
        return self._in_loop[number].ready(self._intake.pending.sums, has_penalties=self.has_regularizers)

    def take_step(self, number: int, replay: Release, trainable: Sequence[Tensor]) -> None:
        """A step that a replay makes as a whole, of a model with these trainable parameters."""
        if self._is_due(number, trainable):
            self._release(number, replay, moves_weights=True)

    def _is_due(self, number: int, trainable: Sequence[Tensor] | None = None) -> bool:
        """Everything is checked before it is counted. False: the step is under way already, and asks once more."""
        pending, draws = self._intake.pending, self._intake.draws
        if (number in pending.stepped or not pending.handed) and self._updates.is_still_under_way(number):
            return False
        if number in pending.stepped or not pending.handed:
            raise NothingClipped(
                "step() with nothing clipped: no private loss was back-propagated since the last step.",
                "private.loss(losses).backward() comes before optimizer.step(); an empty draw is a step too.",
            )
        if not pending.stepped:
            self._progress.check_budget()
            draws.check_complete(pending.entries)
            self._updates.check(trainable)
            self._regularizers.evaluate()
        return True

    def _release(self, number: int, release: Release, *, moves_weights: bool) -> None:
        """It is counted, then released. Of one that `moves_weights` nobody knows what it has done where it is interrupted: it is not tried again."""
        if not self._intake.pending.stepped:
            self._progress.count(self._intake.draws.current)
        try:
            release(self.clipping.sensitivity, self.position)
        except BaseException:
            if moves_weights:
                self._updates.take_gradients_away(number)  # sums without noise, of which nobody will know any more
                self._is_taken(number)
            raise
        self._is_taken(number)

    def _is_taken(self, number: int) -> None:
        """One optimizer has made its step."""
        stepped = self._intake.pending.stepped
        stepped.add(number)
        if len(stepped) == len(self._updates.optimizers):
            self._finish_step()

    def _finish_step(self) -> None:
        if isinstance(self.plan.clipping, Adaptive):
            self.clipping = self._updates.moved_bound(self.plan.clipping, self.clipping.sensitivity, self._intake.pending, self.position)
        self._progress.advance(self._intake.finish_step())
        self._updates.forget()

    def regularizer(self, penalty: Callable[[], Tensor]) -> None:
        """Add the gradient of a penalty on the weights alone to every step: private.regularizer(lambda: 1e-4 * model.w.square().sum()).

        It sees no examples, so it costs nothing and gets no noise; one that does is refused at the step.
        """
        self._regularizers.add(penalty)

    @property
    def has_regularizers(self) -> bool:
        return not self._regularizers.is_empty

    __deepcopy__ = not_copied

    def discard(self, *, draw: bool = False) -> None:
        """Forget the losses since the last step, after an exception say, and clear what they left in p.grad; with draw=True also the draw they were for."""
        self._intake.block.close()
        self._intake.take_back(again=not draw)
        if self._intake.pending.stepped:  # a part of it was released
            self._finish_step()
            return
        self._intake.forget()
        self._updates.forget()
        if draw and (given_up := self._intake.draws.consume()) is not None:
            self._progress.move_past(given_up)

    @property
    def nonfinite(self) -> int:
        """Examples since the last step whose gradient was NaN or Inf and counted for nothing. Private data: do not show or log it."""
        return self._intake.nonfinite

    def spent(self) -> Budget:
        """What has been released so far, also by earlier runs on the same ledger."""
        return self.plan.budget(self.ledger.spent)

    def state_dict(self) -> dict[str, Any]:
        """Plan, count and clipping bound: what a resumed run needs. Never the state of a generator, which would predict noise to come."""
        return {**self._progress.state(), "bound": self.clipping.sensitivity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Every step that was ever released stays counted, also those the checkpoint does not know of."""
        self._progress.check_state(state)
        self.discard(draw=True)
        self._progress.load(state)
        if isinstance(self.plan.clipping, Adaptive):
            self.clipping = self.plan.clipping.at(float(state["bound"]))

    def explain(self) -> None:
        """Print how the norms of each parameter's gradients are evaluated, and what that takes: call, shape, way, time, memory."""
        print(table(experience_of(self._modules).explained, self.plan.batch_size, self.method))

    def report(self) -> Any:
        """The privacy statement of this training: report.markdown(), .json(), .plot(path), .save(folder)."""
        from .report import PrivacyReport

        return PrivacyReport(self.plan, self.ledger.spent, self.ledger.facts)

    def close(self) -> None:
        """Take all hooks off the model and the optimizers; nothing is left on them, nor in p.grad what was clipped and not released."""
        self.is_closed = True
        self._intake.close()
        self._updates.remove()
        self.ledger.close()
        self._forget_replays()
        experience_of(self._modules).tails = None  # recordings hold memory of the device

    def _forget_replays(self) -> None:
        """Optimizers are left as torch has them."""
        self._replays_loops = False
        self._in_loop.clear()
        for number, optimizer in enumerate(self._updates.optimizers):
            if can_be_recorded(self._updates.device_of(number)):
                from .compiled.optimizers import steps_to_host

                steps_to_host(optimizer)

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

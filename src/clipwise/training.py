"""PrivateTraining ties model, loader, losses, optimizer and ledger together: one new draw, one step, one draw of noise, one count."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from . import facts
from .adaptive import Adaptive
from .block import Block
from .budget import Budget
from .clipping import Clipping
from .collect import check_losses
from .deferred import check_deferred
from .draws import CallersDraws, Draws
from .errors import LossIndependent, NothingClipped
from .footprints import Footprint, check_new_rows, footprints, is_plain
from .handout import handed_out
from .ledger import Ledger
from .loader import private_loader
from .marks import EXAMPLE
from .methods import Clipped
from .pending import Handed, Pending
from .plan import PrivacyPlan
from .program import leading_to
from .progress import Progress
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


_RECENT_ROWS = 64  # inputs of earlier steps that are remembered


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
        self._modules = as_modules(model, "PrivateTraining")
        self._randomness = named(noise)
        _supersede(self._modules)
        self._regularizers = Regularizers(self._modules)
        self._updates = Updates(self._modules, optimizer, plan, self._randomness, scaler, accumulation_steps, self._before_step)
        plan.clipping.groups(self._updates.names())  # a pattern that fits nothing is refused at once
        how = facts.of_training(plan, self._randomness.name, own_batches, method, self._updates.optimizers, self._updates.parameters())
        self._progress = Progress(plan, Ledger(plan, ledger, how), repeatable=self._randomness.name == "reproducible")
        self._draws = Draws(Sampler(plan, self._randomness), self._progress)
        self._held_against = CallersDraws() if own_batches else self._draws
        self._pending = Pending()
        self._recent: list[Footprint] = []  # rows of the last steps
        self._block = Block(self._modules, fallback=fallback)
        self._closed = False
        weakref.finalize(self, self._block.remove)  # a training that is gone leaves no mode on, and its ledger to others
        weakref.finalize(self, self.ledger.close)
        _trainings.update(dict.fromkeys((m for root in self._modules for m in root.modules()), weakref.ref(self)))

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
        if self._closed:
            raise NothingClipped("this training is closed.", "Make a new PrivateTraining; what this one spent stays spent.")
        inputs, tape = self._block.inputs, self._block.close()
        if tape is None:
            raise LossIndependent(
                "no module of this training has run with gradients since the last private.loss.",
                "Compute new losses from model(x) for every call: of the module itself, not by one of its methods, a copy or a compiled "
                "version of it; not under torch.no_grad().",
            )
        self._progress.check_budget()
        check_losses(tape, losses)
        check_deferred(tape, losses)
        if self._pending.stepped:
            raise NothingClipped(
                "another optimizer of this training has not stepped for the last draw.",
                "Call step() of every optimizer once for each draw.",
            )
        self._held_against.check_room(self._pending.entries, len(losses))
        rows = self._rows(tape, losses, inputs)
        counts = not self._held_against.is_placeholder
        with self._block.asleep():
            clipped = clip(tape, losses, self.clipping, self.method) if counts else self._nothing(tape, losses)
        parameters = tape.marks.trainable()
        with tape.pause():
            value = clipped.value(losses)
            handed = Handed(len(losses), [parameters[name] for name in clipped.sums], clipped, rows, counts, self.position)
        return handed_out(value, clipped.sums, parameters, lambda grad, added: self._receive(handed, grad, added))

    def _rows(self, tape: Tape, losses: Tensor, inputs: list[Footprint]) -> list[Footprint]:
        """Where the rows behind these losses lie in memory; refused if they went through before, or are not those of the draw."""
        calls = leading_to(list(tape.program), [losses])
        tensors = [t for call in calls for t in every_tensor([call.args, call.kwargs])]
        draw = self._held_against.current
        examples = [
            t for root in tape.root_calls for t in every_tensor([root.call.args, root.call.kwargs]) if tape.marks.kind(t) == EXAMPLE
        ]
        rows = footprints(examples, len(losses)) + [footprint for footprint in inputs if len(footprint.starts) == len(losses)]
        if draw is not None:
            self._held_against.check_memory({StorageWeakRef(t.untyped_storage()) for t in tensors if is_plain(t)})
            rows += footprints(tensors, len(losses), draw.storages)
        check_new_rows(rows, [*self._pending.rows, *self._recent])
        return rows

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
        if handed.position != self.position:
            raise NothingClipped(
                "this private loss was computed before the last step.",
                "Call backward() before step(): its gradient was clipped for that step.",
            )
        self._held_against.check_room(self._pending.entries, handed.entries)
        check_new_rows(handed.rows, [*self._pending.rows, *self._recent])
        self._updates.about_to_add(handed.parameters, added, grad)
        self._pending.add(handed)

    def _before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """The hook of optimizer.step(): everything is checked, then counted, then released."""
        pending = self._pending
        if (number in pending.stepped or not pending.handed) and self._updates.is_still_under_way(number):
            return
        if number in pending.stepped or not pending.handed:
            raise NothingClipped(
                "step() with nothing clipped: no private loss was back-propagated since the last step.",
                "private.loss(losses).backward() comes before optimizer.step(); an empty draw is a step too.",
            )
        if not pending.stepped:
            self._progress.check_budget()
            self._held_against.check_complete(pending.entries)
            self._updates.check()
            self._regularizers.evaluate()
            self._progress.count(self._held_against.current)
        self._updates.release(number, optimizer, pending.sums, self._regularizers.gradients, self.clipping.sensitivity, self.position)
        pending.stepped.add(number)
        if len(pending.stepped) == len(self._updates.optimizers):
            self._finish_step()

    def _finish_step(self) -> None:
        if isinstance(self.plan.clipping, Adaptive):
            self.clipping = self._updates.moved_bound(self.plan.clipping, self.clipping.sensitivity, self._pending, self.position)
        draw = self._held_against.consume()
        self._progress.advance(draw)
        if draw is not None:
            self._recent = [*self._recent, *self._pending.rows][-_RECENT_ROWS:]
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
        if self._pending.stepped:  # a part of it was released
            self._finish_step()
            return
        self._pending = Pending()
        self._updates.forget()
        given_up = self._held_against.consume() if draw else None
        if given_up is not None:
            self._progress.move_past(given_up)

    @property
    def nonfinite(self) -> int:
        """Examples since the last step whose gradient was NaN or Inf and counted for nothing. Private data: do not show or log it."""
        return sum(int((~handed.clipped.finite).sum()) for handed in self._pending.handed if handed.counts)

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

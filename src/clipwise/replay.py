"""Does the loss of one example change when other examples' inputs and targets are exchanged, or leave?

Inside the block, before and after the model and between captured modules, lies the user's own arithmetic. Mixing there may
leave no gradient path: targets of shape (B,) against outputs of shape (B, 1), weights from batch statistics, a detached
mean, a division by a count. The tape has noted the torch calls and the calls of captured modules; they are run again with
other examples exchanged, and once with some of them gone, and the remaining losses must not move. Weights that take part
outside the modules must keep their gradient too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .again import isolated, random_fingerprint, random_states_kept, same_draws
from .agreement import BLUR, BLURRED_RUNS, WITH_OTHER_SHAPES, allowed, blur, close
from .errors import MixedExamples
from .exchange import Exchange, shaken
from .machine import is_out_of_memory
from .marks import EXAMPLE, TRACKED
from .program import ProgramCall, leading_to, loose_ends, memory_of, shared_and_written
from .reading import Reading
from .rerun import TRIALS
from .still import Still
from .structure import every_tensor, map_tensors
from .tape import Tape

_WEIGHTED_BY_CLASS = {F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.binary_cross_entropy_with_logits}
_LOOK_UPS = {torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select}


def check_losses_alone(tape: Tape, losses: Tensor, reading: Reading) -> None:
    """Refuse if exchanging some examples, or taking them away, changes the losses of the rest."""
    with tape.pause(), tape.eagerly(), random_states_kept():
        replay = _Replay(tape, losses)
        if replay.targets and replay.is_mixed(reading):
            raise MixedExamples(
                "the loss of one example changes with the inputs or targets of other examples (among the calls that lead to the losses: "
                f"{replay.names()}).",
                "Compare shapes: targets of shape (B,) against outputs of shape (B, 1) give a (B, B) matrix. Statistics over the batch "
                "(means, counts, ranks) do not belong into a loss per example; declare shared tensors with clipwise.constant(x).",
            )


@dataclass(frozen=True)
class _Outcome:
    """The targets of a run, and what it did to the random generators."""

    targets: list[Tensor]
    drew_numbers: bool
    generators: int


class _Replay:
    """The calls of the block, run again with other inputs."""

    reading: Reading  # of the run at hand

    def __init__(self, tape: Tape, losses: Tensor):
        self.marks = tape.marks
        self.share_parameters = not tape.writes_parameters
        self.parameters = list(tape.marks.trainable().values())
        self.targets = [losses]
        shared = shared_and_written(tape.program)
        program = [call for call in tape.program if not (call.from_nothing and self._is_input(call.result, shared))]
        self.calls = leading_to(program, self.targets)
        if not self.calls:  # the last step to the losses was not a torch call: look at what went into it
            ends = [end for end in loose_ends(program) if end.is_floating_point() and end.dim() and len(end) == len(losses)]
            self.targets = ends
            self.calls = leading_to(program, ends)
        self.made = {id(tensor) for call in self.calls for tensor in every_tensor(call.result)}
        self.shared = self._shared()
        self.inputs = self._inputs()
        self.last_used = self._last_used()

    def _last_used(self) -> dict[int, list[int]]:
        """Place of a call → tensors that no later call takes in, and that need not be kept any longer."""
        last = {}
        for place, call in enumerate(self.calls):
            for tensor in every_tensor([call.args, call.kwargs, call.result]):
                last[id(tensor)] = place
        targets = {id(target) for target in self.targets}
        done: dict[int, list[int]] = {}
        for key, place in last.items():
            if key not in targets:
                done.setdefault(place, []).append(key)
        return done

    def _is_input(self, result: Any, shared: set[int]) -> bool:
        """What was made inside the block, from nothing, and stands for example data all the same; unless that is written into it by another name."""
        tensors = every_tensor(result)
        return any(self.marks.kind(tensor) == EXAMPLE for tensor in tensors) and shared.isdisjoint(map(memory_of, tensors))

    def choices(self, reading: Reading) -> list[Reading]:
        """Ways to read what comes from outside; the one that held for the modules first."""
        choices = reading.choices(self.inputs)
        held_elsewhere = reading.swapped or reading.squares_shared or reading.indices_fixed
        return [reading, *(choice for choice in choices if choice is not reading)] if held_elsewhere else choices

    def _inputs(self) -> list[Tensor]:
        """What comes from outside."""
        found = [tensor for call in self.calls for tensor in every_tensor([call.args, call.kwargs])]
        return [tensor for tensor in found if id(tensor) not in self.made and id(tensor) not in self.shared]

    def names(self) -> str:
        return ", ".join(dict.fromkeys(call.name for call in self.calls))

    def _shared(self) -> set[int]:
        """Tensors from outside with an entry a class rather than an example: class weights, and tables that are looked up by what the examples say. Only those
        that do nothing else: a table made of the batch itself, or of what goes through a module, is no table of classes.
        """
        tables: set[int] = set()
        others = {id(target) for target in self.targets}
        for call in reversed(self.calls):
            looked_up = self._looked_up(call)
            is_table = not isinstance(call.func, nn.Module) and all(
                id(result) in tables and id(result) not in others for result in every_tensor(call.result)
            )
            for tensor in every_tensor([call.args, call.kwargs]):
                (tables if is_table or id(tensor) in looked_up else others).add(id(tensor))
        return tables - others - self.made

    def _looked_up(self, call: ProgramCall) -> set[int]:
        """Arguments that are tables."""
        if call.func in _WEIGHTED_BY_CLASS:
            found = [call.kwargs.get("weight"), call.kwargs.get("pos_weight"), *call.args[2:3]]
            return {id(tensor) for tensor in found if isinstance(tensor, Tensor)}
        if call.func in _LOOK_UPS and call.args:
            table, *index = call.args
            by_examples = [value for value in index if isinstance(value, Tensor) and self.marks.kind(value) == EXAMPLE]
            if isinstance(table, Tensor) and not table.requires_grad and by_examples:
                return {id(table)}
        return set()

    def is_mixed(self, reading: Reading) -> bool:
        """Whether some reading of the inputs shows that examples mix, and none that they do not."""
        verdicts = [self.passes(choice) for choice in self.choices(reading)]
        return False in verdicts and True not in verdicts

    def passes(self, reading: Reading) -> bool | None:
        """Whether the kept losses are the same in every run, the inputs read this way; None where nothing is exchanged that way."""
        self.reading = reading
        if not any(reading.has_rows(tensor) for tensor in self.inputs):
            return None
        plain = self._try(None)
        if plain is None:  # a call that cannot be run twice says nothing
            return True
        if reading.squares_shared and not self._follows_order(plain):
            return False
        for strange in (False, True):
            for trial, exchange in enumerate(Exchange.draw(reading, strange, TRIALS, range(reading.batch), reading)):
                after = self._try(exchange)
                if after is None or after.generators != plain.generators:
                    break  # rows that no record has need not be accepted; and draws that depend on the data show nothing
                if not self._same(plain.targets, after.targets, sorted(exchange.kept)):
                    return False
                if trial == 0 and not self._same_gradient(exchange):
                    return False
        return self._same_without_others(plain)

    def _follows_order(self, plain: _Outcome) -> bool:
        """Whether losses come in another order where the examples do, while what is taken for shared stays. What belongs to examples would not fit."""
        order = self.reading.other_order()
        before = self._try(None, still=True) if plain.drew_numbers else plain
        after = self._try(lambda value: self.reading.in_order(value, order), still=plain.drew_numbers)
        if before is None or after is None or after.drew_numbers:
            return before is None or after is not None
        return all(close(a.detach()[order.to(a.device)], b.detach(), WITH_OTHER_SHAPES) for a, b in zip(before.targets, after.targets))

    def _same(self, before: list[Tensor], after: list[Tensor], kept: list[int], tolerance: float | None = None) -> bool:
        """Whether the kept losses agree: as far as rounding goes, and where they do not, as far as a rounding of the inputs moves them."""

        def agree(runs: list[list[Tensor]]) -> bool:
            for place, (a, b) in enumerate(zip(before, after)):
                x, y = a.detach()[kept], b.detach() if tolerance else b.detach()[kept]
                if x.shape != y.shape:
                    return tolerance is not None
                noise = blur(x, [run[place].detach()[kept] for run in runs])
                if not close(x, y, tolerance or allowed(a), noise):
                    return False
            return True

        return agree([]) or agree([run.targets for run in self._blurred()])

    def _blurred(self, *, with_gradient: bool = False) -> list[_Outcome]:
        """Runs on inputs that differ by a rounding."""
        coarse = {device: dtype for call in self.calls for device, dtype in call.autocast_dtypes.items()}
        runs = [self._try(shaken(coarse), with_gradient=with_gradient) for _ in range(BLURRED_RUNS)]
        return [run for run in runs if run is not None]

    def _same_gradient(self, exchange: Exchange) -> bool:
        """Of a combination of the kept losses, with respect to weights used outside the modules."""
        found = []
        for substitute in (None, exchange):
            gradient = self._gradient(self._try(substitute, with_gradient=True), exchange)
            if gradient is None:
                return True
            found.append(gradient)

        def agree(runs: list[list[Tensor | None]]) -> bool:
            for place, (a, b) in enumerate(zip(*found)):
                if a is not None and b is not None:
                    difference, size = float((a.double() - b.double()).norm()), float(a.double().norm())
                    noise = max((float((a.double() - run[place].double()).norm()) for run in runs if run[place] is not None), default=0.0)  # type: ignore[union-attr]
                    if difference > max(allowed(a), *(allowed(t) for t in self.targets)) * size + BLUR * noise:
                        return False
            return True

        if agree([]):
            return True
        others = [self._gradient(run, exchange) for run in self._blurred(with_gradient=True)]
        return agree([gradient for gradient in others if gradient is not None])

    def _gradient(self, run: _Outcome | None, exchange: Exchange) -> list[Tensor | None] | None:
        outputs = [output for output in run.targets if output.requires_grad] if run is not None else []
        if not outputs:
            return None
        with torch.enable_grad():
            kept = [output[sorted(exchange.kept)] for output in outputs]
        probes = [torch.linspace(0.5, 1.5, k.numel(), device=k.device).view(k.shape).to(k.dtype) for k in kept]
        return list(torch.autograd.grad(kept, self.parameters, probes, allow_unused=True, retain_graph=True))

    def _same_without_others(self, plain: _Outcome) -> bool:
        """A count over the batch shows when examples leave. Calls with sizes written into them cannot be run that way, and say nothing."""
        if self.reading.indices_fixed or any(
            id(tensor) in self.reading.fixed for call in self.calls for tensor in every_tensor([call.args, call.kwargs])
        ):
            return True
        kept = sorted(random.Random().sample(range(self.reading.batch), max(1, self.reading.batch // 4)))
        before = self._try(None, still=True) if plain.drew_numbers else plain
        part = self._try(lambda value: self.reading.select(value, kept), still=plain.drew_numbers)
        return before is None or part is None or part.drew_numbers or self._same(before.targets, part.targets, kept, WITH_OTHER_SHAPES)

    def _try(self, substitute: Any, *, still: bool = False, with_gradient: bool = False) -> _Outcome | None:
        """The targets with other inputs; None if the calls do not accept them."""
        same_draws()
        modules = {id(call.func): call.func for call in self.calls if isinstance(call.func, nn.Module)}
        before = random_fingerprint(modules.values())
        copies = {key: isolated(module, share_parameters=self.share_parameters) for key, module in modules.items()}
        try:
            targets = self._run(substitute, copies, still=still, with_gradient=with_gradient)
        except Exception as error:
            if is_out_of_memory(error):  # which says nothing about the calls
                raise
            return None
        after = random_fingerprint(copies.values())
        return _Outcome(targets, after != before, after)

    def _run(self, substitute: Any, copies: dict[int, nn.Module], *, still: bool = False, with_gradient: bool = False) -> list[Tensor]:
        """The targets, with every tensor that comes from outside these calls put through `substitute`."""
        made: dict[int, Any] = {}

        def fill(value: Any) -> Any:
            if not isinstance(value, Tensor):
                outside = not any(id(item) in made or id(item) in self.shared for item in value if isinstance(item, Tensor))
                return substitute(value) if substitute is not None and outside and self.reading.is_list_of_examples(value) else value
            if id(value) not in made:
                made[id(value)] = self._outside(value, substitute)
            return made[id(value)]

        with Still(everything=still), torch.set_grad_enabled(with_gradient):
            for place, call in enumerate(self.calls):
                args, kwargs = map_tensors((call.args, call.kwargs), fill)
                with call.autocast():
                    if isinstance(call.func, nn.Module):
                        with torch.no_grad():
                            result = copies[id(call.func)](*args, **kwargs)
                    else:
                        result = call.func(*args, **kwargs)
                changed = args[0] if result is None and args else result
                for old, new in zip(every_tensor(call.result), every_tensor(changed)):
                    made[id(old)] = new
                for done in self.last_used.get(place, ()):
                    made.pop(done, None)
        return [made[id(target)] for target in self.targets]

    def _outside(self, tensor: Tensor, substitute: Any) -> Tensor:
        kind = self.marks.kind(tensor)
        if kind == TRACKED:
            return tensor
        if kind != EXAMPLE or id(tensor) in self.shared or substitute is None:
            return tensor.detach().clone()
        return substitute(tensor)

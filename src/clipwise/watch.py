"""The mode that sees every torch function of the forward pass and puts taps where weights meet examples."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .derived import needs_autograd
from .errors import Refusal, UncoveredUse
from .functions import TRAITS, Trait, full_name, is_open, opened, trait_of, written_by
from .guards import GUARDS
from .marks import CONSTANT, EXAMPLE, TRACKED
from .moving import KINDS
from .precision import as_autocast_rounds
from .program import ProgramCall, is_autocast_on
from .recipes import each_weight_once, recorded_call
from .registry import INSIDE, REWRITES, RULES, SPREADS, Rule, Use
from .rules.fallback import differentiate_each_example
from .rules.spread import spread_rule
from .structure import holds_numbers_only, tensors_in
from .taps import Deposit, Record, Tap, applied, has_saving_hooks
from .trail import SMALL, as_number, told_apart

if TYPE_CHECKING:
    from .tape import Tape


class Watch(TorchFunctionMode):
    """Sorts each torch call by what it is handed: nothing of ours, weights alone, or weights together with example data."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        self._said: list[Any] = []  # what the trail took in of the last call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trait = TRAITS.get(func) or trait_of(func)
        if kwargs is None:
            kwargs = {}
        tape = self.tape
        if trait.ignored or tape.paused:
            return func(*args, **kwargs)
        if trait.runs_backward:
            with self:
                return opened(func)(*args, **kwargs)
        if not tape.compiler_silenced and "torch._dynamo" in sys.modules:
            tape.silence_compiler()
        if func in RULES:
            tapped = self._tapped_again(func, trait, args, kwargs)
            if tapped is not None:
                return tapped
        tracked: list[Tensor] = []
        said: list[Any] = [tape.trail, trait.name]
        example = self._look_through(args, tracked, said, trait.takes_sizes)
        if kwargs:
            said.extend(kwargs)
            example = self._look_through(kwargs.values(), tracked, said, trait.takes_sizes) or example
        tape.trail, self._said = hash(tuple(said)), said
        guard = GUARDS.get(func)
        if guard is not None and not (tape.marks.lenient and not tape.depth and not tape.marks.is_ours(args, kwargs)):
            try:
                guard(Use(func, args, kwargs, tracked), tape.marks)
            except Refusal as refusal:
                return self._refused(refusal, [], func, args, kwargs)
        if not tracked:
            if example:
                return self._on_examples(func, trait, args, kwargs)
            result = func(*args, **kwargs)
            if not trait.payload:
                varies = trait.random or any(map(tape.marks.varies, tensors_in(args)))
                tape.marks.mark_constant(result, random=varies, by_module=tape.depth > 0)
            self.note(func, trait, args, kwargs, result, from_nothing=True)
            return result
        if not example:
            return self._on_weights(func, trait, args, kwargs, tracked)
        try:
            return self._on_both(func, trait, args, kwargs, tracked)
        except Refusal as refusal:
            return self._refused(refusal, tracked, func, args, kwargs)

    def _tapped_again(self, func: Any, trait: Trait, args: Any, kwargs: Any) -> Tensor | None:
        """The output of a call like one in a step before, behind a tap, by its recipe; None where there is none, or where something may be refused."""
        tape, marks = self.tape, self.tape.marks
        if tape.refusals is not None or marks.has_stale or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        recipe = tape.recipes.find(func, values, kwargs, marks)
        if recipe is None:
            return None
        tape.trail = hash((tape.trail, *recipe.said))
        upstream = [node for place in recipe.others if (node := values[place].grad_fn) is not None]
        if recipe.rule.is_product and is_autocast_on():
            called = as_autocast_rounds(Use(func, args, kwargs, recipe.recorded.tracked), marks, recipe.others)
            output, values = func(*called.args, **called.kwargs), called.values
        else:
            output = func(*args, **kwargs)
        if not isinstance(output, Tensor):
            raise self.refusal(Use(func, args, kwargs, recipe.recorded.tracked), one_tensor=False)
        if not output.requires_grad:
            return output
        if output.is_complex():
            raise self._complex(Use(func, args, kwargs, recipe.recorded.tracked))
        if tape.uses is not None:
            self._note_use(recipe.recorded, recipe.rule)
        output = self._behind_tap(
            output, recipe.recorded, recipe.rule, recipe.row_axes, recipe.labels, recipe.parameters,
            tuple([values[place] for place in recipe.read]), upstream,
        )  # fmt: skip
        if not tape.depth:
            self.note(func, trait, args, kwargs, output)
        return output

    def _refused(self, refusal: Refusal, tracked: list[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """Where refusals are only listed (`check`), the call runs as it would without a tape."""
        if self.tape.refusals is None:
            raise refusal
        self.tape.refusals.append((self.tape.marks.names_of(tracked), refusal))
        return func(*args, **kwargs)

    def _look_through(self, values: Any, tracked: list[Tensor], said: list[Any], takes_sizes: bool) -> bool:
        """Collect the weights among `values`, and numbers and words, but no sizes, in `said`; whether there is example data too."""
        example = False
        marks, tape = self.tape.marks, self.tape
        for value in values:
            if isinstance(value, Tensor):
                if marks.has_stale:
                    marks.refuse_stale(value)
                elif type(value) is Tensor and value.requires_grad and id(value) not in marks.noted and id(value) not in marks.state:
                    example = True  # it carries gradient and nobody marked it, like most tensors that a model computes with
                    continue
                kind = marks.kind(value)
                if kind == EXAMPLE and tape.depth and marks.is_foreign(value):
                    marks.mark_constant(value)  # a table of indices that a module has cached outside itself
                elif kind == EXAMPLE:
                    example = True
                elif kind == TRACKED:
                    tracked.append(value)
                elif not is_lazy(value) and value.dim() == 0:
                    said.append(marks.version_of(value))
            elif isinstance(value, int):
                if not takes_sizes or value in SMALL:
                    said.append(told_apart(value))
            elif isinstance(value, float | str):
                said.append(told_apart(value))
            elif type(value) is tuple and not takes_sizes and holds_numbers_only(value) and -1 not in value:
                said.append(value)
            elif isinstance(value, list | tuple):
                example = self._look_through(value, tracked, said, takes_sizes) or example
            elif isinstance(value, slice):
                self._look_through((value.start, value.stop, value.step), tracked, said, False)
            elif value is not None and hasattr(value, "__index__"):  # an integer of numpy's
                said.append(told_apart(as_number(value)))
        return example

    def _on_examples(self, func: Any, trait: Trait, args: Any, kwargs: Any) -> Any:
        tape = self.tape
        marks = tape.marks
        if trait.writes or "out" in kwargs:
            for tensor in tensors_in(written_by(trait, args, kwargs)):
                marks.took_example_data(tensor, func)
        result = func(*args, **kwargs)
        if trait.borrows and marks.kind(args[0]) == CONSTANT:
            marks.mark_constant(result)
        elif trait.blank and not any(marks.varies(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)):
            marks.mark_constant(result, random=trait.random)
        else:
            if KINDS.get(trait.name) != "plain" and not tape.is_looking_back:
                tape.moves.note(trait.name, args, kwargs, marks)
            if type(result) is not Tensor or not result.requires_grad:
                marks.mark_example(result)
        if not tape.depth:
            self.note(func, trait, args, kwargs, result)
        return result

    def note(self, func: Any, trait: Trait, args: Any, kwargs: Any, result: Any, *, from_nothing: bool = False) -> None:
        """Outside the captured modules every call is part of the way to the losses."""
        tape = self.tape
        if not tape.depth:
            written = written_by(trait, args, kwargs)
            tape.program.append(ProgramCall(func, args, kwargs, result if written is None else written, from_nothing))
            if len(tape.program) > tape.room:
                tape.tidy()

    def _on_weights(self, func: Any, trait: Trait, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        result = func(*args, **kwargs)
        marks = self.tape.marks
        if trait.writes:
            target = written_by(trait, args, kwargs)
            marks.changed_in_place(target, tracked)
            self.tape.writes_parameters = self.tape.writes_parameters or marks.name_of_storage(target) is not None
        else:
            marks.mark_derived(result, func, args, kwargs, tracked)
        return result

    def _on_both(self, func: Any, trait: Trait, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        if trait.blank or (trait.borrows and not any(args[0] is weight for weight in tracked)):
            return self._on_examples(func, trait, args, kwargs)
        if trait.borrows:
            return self._on_weights(func, trait, args, kwargs, tracked)
        if not torch.is_grad_enabled():
            return self._on_examples(func, trait, args, kwargs)
        if func in REWRITES:
            with self:
                result = REWRITES[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        use, tape_marks = Use(func, args, kwargs, tracked), self.tape.marks
        if torch._C._are_functorch_transforms_active():
            raise self._not_covered(use, "is used inside a torch.func transform (vmap, grad …)")
        if func in INSIDE:
            with self:
                return INSIDE[func](self, use)
        if func in SPREADS:
            spread_out = SPREADS[func](use, self.tap_weight)
            if spread_out is not None:
                return self._on_examples(func, trait, *spread_out)
        if trait.writes and use.tracks(written_by(trait, args, kwargs)):
            raise UncoveredUse(
                f"{tape_marks.describe(tracked)} was written into a tensor that {full_name(func)} now changes with example data"
                f"{tape_marks.where(tracked)}.",
                "Put the pieces together without writing in place (torch.cat, torch.where), or freeze the parameter.",
            )
        if func in RULES:
            return self._tap_output(use, RULES[func])
        if is_open(func):
            with self:
                return opened(func)(*args, **kwargs)
        if self.tape.fallback and not trait.writes:
            return differentiate_each_example(self, use)
        result = func(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_in(result)):
            return result
        raise self.refusal(use, one_tensor=isinstance(result, Tensor))

    def refusal(self, use: Use, *, one_tensor: bool) -> UncoveredUse:
        """No rule for this call. Rules, and the fallback, speak of functions that return one tensor."""
        marks, function = self.tape.marks, full_name(use.func)
        names = marks.describe(use.tracked)
        what = f"{names} {'are' if ', ' in names else 'is'} used by {function}, which has no rule{marks.where(use.tracked)}."
        if not one_tensor:
            return UncoveredUse(
                what, f"It returns several tensors: write it with simpler calls, @clipwise.rewrite({function}), or freeze it."
            )
        return UncoveredUse(
            what,
            f"Register one with @clipwise.rule({function}), freeze the parameter, or pass fallback=True to differentiate that call "
            "example by example (slower).",
        )

    def _not_covered(self, use: Use, how: str) -> UncoveredUse:
        marks = self.tape.marks
        return UncoveredUse(
            f"{marks.describe(use.tracked)} {how}, at {full_name(use.func)}{marks.where(use.tracked)}.",
            "That is not covered: write it with real numbers and whole batches, or freeze the parameter.",
        )

    def tap_weight(self, weight: Tensor, shape: torch.Size | None = None) -> Tensor:
        """`weight`, expanded to `shape`, behind a tap of its own; from here on it counts as example data."""
        expanded = weight if shape is None or shape == weight.shape else weight.expand(shape)
        use = Use(torch.Tensor.expand, (weight,), {}, [weight])
        output = self.insert_tap(expanded, use, spread_rule, upstream=[])
        self.note(torch.Tensor.expand, trait_of(torch.Tensor.expand), (weight, expanded.shape), {}, output)
        return output

    def _tap_output(self, use: Use, rule: Rule) -> Any:
        marks = self.tape.marks
        if len(set(map(id, use.tracked))) < len(use.tracked):
            use = each_weight_once(use, marks)
        upstream = use.upstream()
        called = as_autocast_rounds(use, marks) if rule.is_product else use
        output = use.func(*called.args, **called.kwargs)
        if not isinstance(output, Tensor):
            raise self.refusal(use, one_tensor=False)
        if not output.requires_grad:
            return output
        self.tape.recipes.add(called, rule, self._said[1:], output.dim(), marks)
        output = self.insert_tap(output, called, rule, upstream)
        if not self.tape.depth:
            self.note(use.func, trait_of(use.func), use.args, use.kwargs, output)
        return output

    def insert_tap(
        self, output: Tensor, use: Use, rule: Rule, upstream: list[Any], *, local: Tensor | None = None, deposit: Deposit | None = None
    ) -> Tensor:  # fmt: skip
        """`output` behind a tap that remembers the call.

        `local` is the output to differentiate, where no rule does. With a `deposit`, that is where the rule's tensors come from.
        """
        tape, marks = self.tape, self.tape.marks
        if output.is_complex() or any(weight.is_complex() for weight in use.tracked):
            raise self._complex(use)
        recorded, kept = recorded_call(use, rule, marks)
        labels, parameters = [marks.labels.get(id(weight)) for weight in use.tracked], marks.keys_of(use.tracked)
        needs_graph = local is not None or any(needs_autograd(weight, marks) for weight in use.tracked)
        tape.needs_graph = tape.needs_graph or needs_graph
        if tape.uses is not None:
            self._note_use(use, rule)
        row_axes = rule.row_axes(use, output.dim())
        return self._behind_tap(output, recorded, rule, row_axes, labels, parameters, kept if deposit is None else deposit, upstream, local)

    def _complex(self, use: Use) -> UncoveredUse:
        return self._not_covered(use, "takes part in complex arithmetic")

    def _note_use(self, use: Use, rule: Rule) -> None:
        assert self.tape.uses is not None
        for name in self.tape.marks.names_of(use.tracked):
            self.tape.uses.setdefault(name, []).append("entry by entry" if rule is spread_rule else trait_of(use.func).name)

    def _behind_tap(
        self, output: Tensor, recorded: Use, rule: Rule, row_axes: tuple[int, ...], labels: list[Any], parameters: list[int],
        kept: tuple[Tensor, ...] | Deposit, upstream: list[Any], local: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        tape = self.tape
        for parameter in parameters:
            tape.taps_of[parameter] += 1
        key = tape.trail = hash((tape.trail, output.dim(), *labels))
        tape.computes_again = tape.computes_again or has_saving_hooks()
        hands_over = None if isinstance(kept, Deposit) else hash(tuple([(tensor.shape, tensor.dtype) for tensor in (output, *kept)]))
        record = Record(recorded, rule, row_axes, key, tape.switch, upstream, local, hands_over)
        tape.created[key] = output.shape
        tape.taps.append(weakref.ref(record))
        tape.reaching += output.nbytes
        tapped: Tensor = applied(Tap, output, tape.anchor, record, kept)
        return tapped

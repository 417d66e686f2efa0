"""The mode that sees every torch function of the forward pass and puts taps where weights meet examples."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .errors import Refusal, UncoveredUse
from .functions import OVERWRITES, TAKES_MEMORY, TRAITS, Trait, full_name, is_open, opened, trait_of, written_by
from .guards import GUARDS
from .kept import carried
from .kinds import KINDS
from .lanes import MISSED, lane_of, passed
from .marks import CONSTANT, EXAMPLE, TRACKED
from .program import ProgramCall
from .registry import INSIDE, REWRITES, RULES, SPREADS, Rule, Use
from .rules.fallback import differentiate_each_example
from .rules.spread import spread_rule
from .structure import tensors_in
from .tapping import insert_tap, no_rule, not_covered, tapped, tapped_again
from .taps import Deposit
from .trail import CLOSE, OPEN, SMALL, are_axes, as_number, further, like, told_apart

if TYPE_CHECKING:
    from .tape import Tape


_TOOLS = ("torch.autograd.", "torch.utils.")  # whose hooks look on


class Watch(TorchFunctionMode):
    """Sorts each torch call by what it is handed: nothing of ours, weights alone, or weights together with example data."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape
        self._said: list[Any] = []  # what the trail took in of the last call
        self._dated: list[Tensor] = []  # arguments of it that were computed from examples, without gradients …
        self._touched = False  # … and whether others were

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trait = TRAITS.get(func) or trait_of(func)
        if kwargs is None:
            kwargs = {}
        tape = self.tape
        if trait.ignored or tape.paused:
            return func(*args, **kwargs)
        if trait.runs_backward:
            tape.marks.differentiates = tape.marks.differentiates or bool(kwargs.get("create_graph"))
            with self:
                return opened(func)(*args, **kwargs)
        if not tape.compiler_silenced and "torch._dynamo" in sys.modules:
            tape.silence_compiler()
        rule = RULES.get(func)
        if rule is not None:
            found = tapped_again(tape, func, rule, args, kwargs)
            if found is not None:
                return self._noted(func, trait, args, kwargs, found)
        if tape.depth and (lane := lane_of(func, trait)):
            result = passed(tape, func, trait, lane, args, kwargs)
            if result is not MISSED:
                return result
        if func is torch.Tensor.register_hook and str(getattr((*args, *kwargs.values())[-1], "__module__", "")).startswith(_TOOLS):
            return func(*args, **kwargs)
        tracked: list[Tensor] = []
        said: list[Any] = [trait.name]
        self._dated, self._touched = [], False
        example = self._look_through(args, tracked, said, trait.takes_sizes)
        if kwargs:
            said.extend(kwargs)
            example = self._look_through(kwargs.values(), tracked, said, trait.takes_sizes) or example
        tape.trail, self._said = further(tape.trail, said), said
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
                given = list(tensors_in(args))
                varies = trait.random or any(map(tape.marks.varies, given))
                tape.marks.mark_constant(result, random=varies, by_module=tape.depth > 0, from_nothing=not given)
            self.note(func, trait, args, kwargs, result, from_nothing=True)
            return result
        if not example:
            return self._on_weights(func, trait, args, kwargs, tracked)
        try:
            return self._on_both(func, trait, args, kwargs, tracked)
        except Refusal as refusal:
            return self._refused(refusal, tracked, func, args, kwargs)

    def _refused(self, refusal: Refusal, tracked: list[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """Where refusals are only listed (`check`), the call runs as it would without a tape."""
        if self.tape.refusals is None:
            raise refusal
        self.tape.refusals.append((self.tape.marks.names_of(tracked), refusal))
        return func(*args, **kwargs)

    def _look_through(self, values: Any, tracked: list[Tensor], said: list[Any], takes_sizes: bool) -> bool:
        """Collect the weights among `values`, and what is no tensor, but no sizes, in `said`; whether there is example data too."""
        example = False
        marks, tape = self.tape.marks, self.tape
        for value in values:
            if isinstance(value, Tensor):
                if marks.has_stale:
                    marks.refuse_stale(value)
                elif type(value) is Tensor and value.requires_grad and id(value) not in marks.noted and id(value) not in marks.state:
                    said.append(like(value))
                    self._touched = self._touched or value.grad_fn is not None
                    example = True  # it carries gradient and nobody marked it, like most tensors that a model computes with
                    continue
                if not is_lazy(value):
                    said.append(like(value))
                if marks.made is not None:
                    self._touched = self._touched or id(value) in marks.given
                    if id(value) in marks.made.ids:
                        self._dated.append(value)
                kind = marks.kind(value)
                if kind == EXAMPLE and tape.depth and marks.is_foreign(value):
                    marks.mark_constant(value)  # a table of indices that a module has cached outside itself
                elif kind == EXAMPLE:
                    example = True
                elif kind == TRACKED:
                    tracked.append(value)
                elif not is_lazy(value) and (value.dim() == 0 or not value.is_floating_point()):
                    said.append(marks.version_of(value))
            elif isinstance(value, int):
                if not takes_sizes or value in SMALL:
                    said.append(told_apart(value))
            elif isinstance(value, float | str):
                said.append(told_apart(value))
            elif value is None:
                said.append(None)
            elif type(value) is tuple and not takes_sizes and are_axes(value):
                said.append(value)
            elif isinstance(value, list | tuple):
                said.append(OPEN)
                example = self._look_through(value, tracked, said, takes_sizes) or example
                said.append(CLOSE)
            elif isinstance(value, slice):
                said.append(slice)
                self._look_through((value.start, value.stop, value.step), tracked, said, False)
            elif hasattr(value, "__index__"):  # an integer of numpy's
                said.append(told_apart(as_number(value)))
            else:
                said.append(type(value))
        return example

    def _on_examples(self, func: Any, trait: Trait, args: Any, kwargs: Any) -> Any:
        tape = self.tape
        marks = tape.marks
        written = written_by(trait, args, kwargs) if trait.writes or "out" in kwargs else None
        if written is not None:
            for tensor in tensors_in(written):
                marks.took_example_data(tensor, func)
        made, overwrites = marks.made, trait.name in OVERWRITES or (written is not None and not trait.writes)
        age = None
        if made is not None and (self._dated or self._touched):
            age = made.age_of(self._dated, self._touched, written if overwrites else None)
        if made is not None and age is None and overwrites:
            age = made.now
        result = func(*args, **kwargs)
        is_carried = False
        is_new = type(result) is not Tensor or not result.requires_grad
        if made is not None and age is not None and (is_new or age is not made.now or written is not None):
            is_carried = made.date(args, result, written, age, overwrites=overwrites)
            if is_carried and tape.depth:
                raise carried(f"in {full_name(func)}")
        if trait.writes and trait.name in TAKES_MEMORY:
            marks.look_at(args[0])
        if trait.borrows and marks.kind(args[0]) == CONSTANT:
            marks.mark_constant(result)
        elif trait.blank and not any(marks.varies(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)):
            marks.mark_constant(result, random=trait.random)
        else:
            if KINDS.get(trait.name) != "plain" and not tape.is_looking_back:
                tape.moves.note(trait.name, args, kwargs, marks, result)
            if is_new:
                marks.mark_example(result)
        if not tape.depth:
            self.note(func, trait, args, kwargs, result, is_carried=is_carried)
        return result

    def note(
        self, func: Any, trait: Trait, args: Any, kwargs: Any, result: Any, *, from_nothing: bool = False, is_carried: bool = False
    ) -> None:  # fmt: skip
        """Outside the captured modules every call is part of the way to the losses."""
        tape = self.tape
        if not tape.depth:
            written = written_by(trait, args, kwargs)
            wrote = written is not None
            tape.program.append(ProgramCall(func, args, kwargs, written if wrote else result, from_nothing, wrote, is_carried))
            if len(tape.program) > tape.room:
                tape.tidy()

    def _noted(self, func: Any, trait: Trait, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """The output of a call that has a tap."""
        if not self.tape.depth and output.requires_grad:
            self.note(func, trait, args, kwargs, output)
        return output

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
        made = self.tape.marks.made
        if self._dated and made is not None and torch.is_grad_enabled() and made.age_of(self._dated, False) is not made.now:
            raise carried(f"in {full_name(func)}")
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
            raise not_covered(use, tape_marks, "is used inside a torch.func transform (vmap, grad …)")
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
            return self._noted(func, trait, args, kwargs, tapped(self.tape, use, RULES[func], self._said))
        if is_open(func):
            with self:
                return opened(func)(*args, **kwargs)
        if self.tape.fallback and not trait.writes:
            return differentiate_each_example(self, use)
        result = func(*args, **kwargs)
        if not any(tensor.requires_grad for tensor in tensors_in(result)):
            return result
        raise no_rule(use, tape_marks, one_tensor=isinstance(result, Tensor))

    def refusal(self, use: Use, *, one_tensor: bool) -> UncoveredUse:
        """For functions that run another way under the tape."""
        return no_rule(use, self.tape.marks, one_tensor=one_tensor)

    def insert_tap(
        self, output: Tensor, use: Use, rule: Rule, upstream: list[Any], *, local: Tensor | None = None, deposit: Deposit | None = None
    ) -> Tensor:  # fmt: skip
        """For functions that run another way under the tape, and have taps of their own."""
        return insert_tap(self.tape, output, use, rule, upstream, local=local, deposit=deposit)

    def tap_weight(self, weight: Tensor, shape: torch.Size | None = None) -> Tensor:
        """`weight`, expanded to `shape`, behind a tap of its own; from here on it counts as example data."""
        expanded = weight if shape is None or shape == weight.shape else weight.expand(shape)
        use = Use(torch.Tensor.expand, (weight,), {}, [weight])
        output = insert_tap(self.tape, expanded, use, spread_rule, upstream=[])
        self.note(torch.Tensor.expand, trait_of(torch.Tensor.expand), (weight, expanded.shape), {}, output)
        return output

"""The tape: watches a model while it runs and remembers, inside the autograd graph, every call that uses a parameter."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .coverage import reentrant_checkpoint
from .errors import ConsumedTape, Refusal, UnseenUse
from .experience import experience_of
from .inventory import as_modules
from .kept import remember_examples
from .marks import EXAMPLE, Marks
from .modes import lowest
from .moving import Moves
from .program import ROOM, ProgramCall, RootCall, drop_dead, module_call
from .streams import Receive, Streams, on_this_thread
from .structure import every_tensor, row_numbers
from .switches import without_compiler
from .taps import Record, Switch
from .watch import Watch


class Pause:
    """A tape that looks away, and no gradients, inside a block. Entered many times a step, so it is a class and not a generator."""

    __slots__ = ("_grad_was_enabled", "_tape", "_was_paused")

    def __init__(self, tape: Tape):
        self._tape = tape

    def __enter__(self) -> None:
        self._was_paused, self._tape.paused = self._tape.paused, True
        self._grad_was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._grad_was_enabled)
        self._tape.paused = self._was_paused


class Tape:
    """Watches the calls of one or several modules. Made by `capture`; handed to `per_example_norms` and `clipped_loss`.

    Nothing is stored on modules or parameters; taps live in the autograd graph, so a forward pass whose losses are never
    used (an evaluation, a retry after an exception) leaves nothing behind.
    """

    def __init__(self, modules: Sequence[nn.Module], *, fallback: bool = False):
        self.modules = list(modules)
        self.marks = Marks(self.modules)
        self.fallback = fallback
        self.experience = experience_of(self.modules)
        self.recipes = self.experience.recipes_for(self.marks.labels)
        self.anchor = torch.zeros((), requires_grad=True)
        self.switch = Switch()
        self.trail = 0  # hash of the calls seen so far
        self.created: dict[int, torch.Size] = {}  # keys of the taps made so far, and the shapes there
        self.taps: list[weakref.ref[Record]] = []  # these
        self.reaching = 0  # bytes of the gradients that will reach them
        self.tapped: list[list[int]] = []  # the parameters behind each of them
        self.writes_parameters = False  # the forward pass changes parameters
        self.moves = Moves()  # rows that may have been moved as the data says
        self.needs_graph = False  # some weight is pulled back through autograd
        self.computes_again = False  # some call lies in a checkpointed region: the backward pass makes it anew
        self.paused = False
        self.is_looking_back = False  # in a backward pass: what moves rows was noted in the forward pass
        self.compiler_silenced = False
        self.hidden_dtypes: set[torch.dtype] = set()  # precisions inside fused kernels, which no tap shows
        self.fixed: dict[int, Tensor] = {}  # where bags begin, lengths of sequences: they number rows and are no rows themselves
        self.uses: dict[str, list[str]] | None = None  # for `check`: parameter → functions that use it
        self.refusals: list[tuple[list[str], Refusal]] | None = None  # for `check`: what would be refused, with the parameters
        self.root_calls: list[RootCall] = []
        self.program: list[ProgramCall] = []  # what happened outside the captured modules
        self.room = math.inf  # so many calls are noted before those that nobody needs are looked for
        self.is_abandoned = False
        self.depth = 0  # captured modules that are running
        self.finite: Tensor | None = None  # (B,), beside the weights: whose gradient was finite, in the last losses; private data
        self._entered = 0
        self._stack = contextlib.ExitStack()
        self._collected: tuple[weakref.ref[Tensor], Any] | None = None
        self._heard: dict[int, list[Record]] = {}  # taps behind losses, by their id
        self._spent: dict[int, Record] = {}  # taps whose gradient was handed out
        self._consumed: dict[int, weakref.ref[Tensor]] = {}

    @contextlib.contextmanager
    def watching(self, *, low: bool = False) -> Iterator[None]:
        """The tape is on inside this block, on this thread and on the threads autograd starts from it.

        `low` puts it under other modes, which may then come and go without regard to this block.
        """
        self._entered += 1
        outermost, was_paused = self._entered == 1, self.paused
        self.paused = False
        try:
            if outermost:
                if "torch._dynamo" in sys.modules:
                    self.silence_compiler()
                with lowest(Watch(self)) if low else Watch(self):
                    yield
            else:
                yield
        finally:
            self._entered -= 1
            self.paused = was_paused
            if outermost:
                self._stack.close()
                self.compiler_silenced = False

    @contextlib.contextmanager
    def looking_back(self) -> Iterator[None]:
        """The tape is on during a backward pass: checkpointed regions are computed again and must meet the same taps."""
        before, self.is_looking_back = self.is_looking_back, True
        try:
            with self.watching():
                yield
        finally:
            self.is_looking_back = before

    def silence_compiler(self) -> None:
        """Regions wrapped in torch.compile run eagerly while the tape is on: it can see eager calls only."""
        self.compiler_silenced = True
        self._stack.enter_context(without_compiler)

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        """Compiled regions run eagerly inside this block."""
        with without_compiler if "torch._dynamo" in sys.modules else contextlib.nullcontext():
            yield

    def pause(self) -> Pause:
        """Our own arithmetic is none of the tape's business, nor of autograd's."""
        return Pause(self)

    def backward(
        self,
        losses: Tensor,
        weights: Tensor,
        receive: Receive | None,
        *,
        inputs: Sequence[Tensor] = (),
        retain_graph: bool,
        known: bool = False,
    ) -> list[Tensor | None]:
        """One backward pass of Σ weights[i]·losses[i], with the taps handing over to `receive`; gradients of `inputs`, if any.

        The tape is on meanwhile, to see what is computed again, unless the way is `known` and nothing in it is.
        """
        before = {} if known else {name: _stamp(parameter.grad) for name, parameter in self.marks.trainable().items()}
        streams = Streams()
        self.switch.receive = receive if receive is None or not losses.is_cuda else streams.noting(receive)
        targets = [self.anchor, *inputs] if receive is not None or not inputs else list(inputs)
        try:
            with on_this_thread(), self.pause() if known and not self.computes_again else self.looking_back():
                found = torch.autograd.grad(losses, targets, weights, retain_graph=retain_graph, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise reentrant_checkpoint() from error
            if "second time" in str(error):
                raise ConsumedTape("the graph behind these losses was already used and freed.", _RUN_AGAIN) from error
            raise
        finally:
            self.switch.receive = None
        streams.join()
        self._check_untouched(before)
        return list(found[len(targets) - len(inputs) :])

    def _check_untouched(self, before: dict[str, tuple[int, int] | None]) -> None:
        """autograd.grad leaves p.grad alone: what changed it back-propagates by itself, past every tap."""
        for name, parameter in self.marks.trainable().items() if before else ():
            if _stamp(parameter.grad) != before[name]:
                if before[name] is None:
                    parameter.grad = None
                raise UnseenUse(
                    f"a function of the model back-propagates by itself into {name}{self.marks.where([parameter])}, where nothing clips it.",
                    "Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False) in its place, or freeze the parameter; then clear p.grad.",
                )

    @property
    def nonfinite(self) -> Tensor | None:
        """(B,): whose gradient was not finite, in the last losses. Private data."""
        return None if self.finite is None else ~self.finite

    def remember(self, losses: Tensor, collected: Any) -> None:
        self._collected = (weakref.ref(losses), collected)

    def recall(self, losses: Tensor) -> Any:
        """What was collected for these very losses, if it still is."""
        if self._collected is not None and self._collected[0]() is losses:
            return self._collected[1]
        return None

    def check_unspent(self, losses: Tensor, records: list[Record]) -> None:
        """Refuse if the graph behind the losses was already turned into a gradient, under whatever name; else note who was heard."""
        if any(id(record) in self._spent for record in records):
            raise ConsumedTape("the graph behind these losses was already turned into a gradient.", _RUN_AGAIN)
        self._heard[id(losses)] = records

    def consume(self, losses: Tensor) -> None:
        """These losses have become a gradient; nothing more can be made of them."""
        self._collected = None
        self._spent.update({id(record): record for record in self._heard.pop(id(losses), [])})
        self.forget_calls()
        self.fixed.clear()
        key = id(losses)
        self._consumed[key] = weakref.ref(losses, lambda _: self._consumed.pop(key, None))

    def forget_calls(self) -> None:
        """What was called by whom is of no further interest; nor are the tensors that this holds."""
        self.root_calls.clear()
        self.program.clear()

    def check_unused(self, losses: Tensor) -> None:
        consumed = self._consumed.get(id(losses))
        if consumed is not None and consumed() is losses:
            raise ConsumedTape("these losses were already turned into a gradient.", _RUN_AGAIN)

    def tidy(self) -> None:
        """Forget calls that nobody needs any more. Where none is left, the block was abandoned: the tape looks away from now on."""
        drop_dead(self)
        self.room = ROOM + 2 * len(self.program)
        if not self.program and not self.root_calls and not self.depth:
            self.paused = self.is_abandoned = True

    def finish(self) -> None:
        """The block is over: what was kept in modules belongs to it."""
        self.marks.remember_constants()
        remember_examples(self.modules, lambda tensor: self.marks.kind(tensor) == EXAMPLE)


def _stamp(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), grad._version)


_RUN_AGAIN = "Run the model again inside capture() and use the new losses; per_example_norms may come before clipped_loss, not after."


@contextlib.contextmanager
def capture(model: nn.Module | Sequence[nn.Module], *, fallback: bool = False) -> Iterator[Tape]:
    """Watch `model` (or several modules: a model and a criterion with parameters) while the block runs.

    Everything that computes the losses from the parameters belongs into the block. `fallback=True` lets functions without
    a rule be differentiated example by example instead of being refused.

        with clipwise.capture(model) as tape:
            losses = F.cross_entropy(model(x), y, reduction="none")
        clipwise.clipped_loss(tape, losses, clipwise.flat(1.0)).backward()
    """
    modules = as_modules(model, "capture")
    tape = Tape(modules, fallback=fallback)
    hooks = [hook for module in modules for hook in root_hooks(module, lambda: tape)]
    try:
        with tape.watching():
            yield tape
    finally:
        for hook in hooks:
            hook.remove()
        tape.finish()


def root_hooks(module: nn.Module, running: Callable[[], Tape | None], wrap: Callable[[Any], Any] = lambda hook: hook) -> list[Any]:
    """Note on the running tape what a captured module is called with, what it returns, and which nodes that hangs on."""
    entered: list[tuple[Any, Any]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        tape = running()
        if tape is not None and not tape.paused:
            if not tape.depth:
                entered.clear()  # torch forgets to call hooks of modules that raise where they are told to be compiled
            tape.depth += 1
            entered.append((args, kwargs))
            with torch._C.DisableTorchFunction(), tape.pause():  # the tape would be asked about every attribute
                tape.marks.enters(every_tensor([args, kwargs]))
                tape.fixed.update({id(tensor): tensor for tensor in row_numbers([args, kwargs])})

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tape = running()
        if tape is None or tape.paused or not entered:
            return
        tape.depth -= 1
        args, kwargs = entered.pop()
        if output is not None and not tape.depth:  # None: the call raised
            with torch._C.DisableTorchFunction(), tape.pause():
                call = module_call(tape.marks, module, args, kwargs, output)
                nodes = [tensor.grad_fn for tensor in every_tensor(output)]
            tape.program.append(call)
            if torch.is_grad_enabled():
                tape.root_calls.append(RootCall(call, nodes))

    return [
        module.register_forward_pre_hook(wrap(before), with_kwargs=True),
        module.register_forward_hook(wrap(after), with_kwargs=True, always_call=True),
    ]
